"""What a change of a knowledge base reports."""

import dataclasses

from jaxrag.library.documents.document import BadDocument


@dataclasses.dataclass(frozen=True)
class RefreshReport:
    """What became of the KV of all chunks that is encoded behind their neighbours.

    A chunk counts once for every such encoder: ``chunks == encoded + reused + unchanged``; only
    ``searched`` counts it once.
    """

    chunks: int
    searched: int  # whose neighbours were looked for again
    encoded: int  # their neighbours are new or others, and the KV was computed
    reused: int  # so are theirs, and the KV was stored already, or the same as another's
    unchanged: int
    encoded_tokens: int
    context_tokens: int  # that stood in front of these
    seconds: float
    kv_bytes: int = 0  # of the KV that was computed, as it is stored

    @property
    def chunks_per_minute(self) -> float:
        """Encoded chunks per minute of the whole run."""
        return 60 * self.encoded / self.seconds


@dataclasses.dataclass(frozen=True)
class AddPlan:
    """What ``add``, or ``sync``, would do; counts as of ``AddReport``."""

    documents: int = 0
    replaced: int = 0
    unchanged: int = 0
    chunks: int = 0
    encoded: int = 0  # chunks without KV, by variants that see no neighbours
    behind: int | None = None  # at most so many would be, by variants that see them
    leaving: tuple[str, ...] = ()  # ids of documents that would be replaced or removed
    skipped: tuple[BadDocument, ...] = ()
    kv_tokens: int = 0  # of chunks that lack KV, by every variant; new ones alone by those of
    # ``behind``
    kv_bytes: int = 0  # of their KV as it would be stored, without indexes
    room: int | None = None  # bytes that are free where it would be; None: no local folder


@dataclasses.dataclass(frozen=True)
class AddReport:
    """What became of the documents that were given.

    A chunk counts once for every encoder that sees no other chunks, so ``encoded + reused +
    on_demand == chunks * len(encoders)`` of these. ``seconds`` are without those of ``neighbours``.
    """

    documents: int  # in the knowledge base now, of those given
    replaced: int  # of these: stood there with another content or file
    unchanged: int  # of these: stood there as they are
    chunks: int
    tokens: int  # of these chunks, the template's markers included
    encoded: int  # chunks whose KV was computed
    reused: int  # chunks whose KV was stored already, or the same as another's
    encoded_tokens: int
    skipped: tuple[BadDocument, ...]
    seconds: float
    unknown_tokens: int = 0  # of ``tokens``, those that the vocabulary has only "unknown" for
    unknown_words: tuple[str, ...] = ()  # a few of what they stand for
    neighbours: RefreshReport | None = None  # the variants that see neighbours, of all documents
    unsealed: int = 0  # of ``encoded``, chunks that were stored, but not sealed with the secret
    removed: tuple[str, ...] = ()  # ids of documents of which the files had nothing any more
    gone: tuple[str, ...] = ()  # ids of those that a ``sync`` would remove, or one with ``empty``
    passed: int = 0  # files of folders that hold no text by their nature, such as pictures
    kept: int = 0  # documents of files that are there and could not be read whole
    on_demand: int = 0  # chunks without KV, which is encoded when it is needed first
    kv_bytes: int = 0  # of the KV that was computed, as it is stored, without indexes
    left_out: tuple[str, ...] = ()  # of documents, by their readers: a line for each kind

    @property
    def tokens_per_second(self) -> float:
        """Encoded tokens per second of the whole run."""
        return self.encoded_tokens / self.seconds

    @property
    def chunks_per_second(self) -> float:
        """Encoded chunks per second of the whole run."""
        return self.encoded / self.seconds
