"""From documents to a knowledge base: split, look up, encode what is missing, store, commit.

Work goes in batches of documents. Of each, the KV is made durable first, then the vectors, and the
catalog is committed last, so a run that is killed leaves whole documents, and the KV it had already
stored is found, not encoded again, when the same documents are added once more. Documents are read
and split ahead of the encoder, put and committed behind it, each within bounds: memory does not
grow with the number of documents.
"""

import collections
import concurrent.futures
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

from tqdm import tqdm

from jaxrag.kv.store import ChunkWriter, PutResult
from jaxrag.library.documents import BadDocument, Intake
from jaxrag.library.knowledge_base.prepare import Prepared, Preparer
from jaxrag.library.knowledge_base.reports import AddReport
from jaxrag.library.knowledge_base.vectors import ChunkVectors
from jaxrag.library.knowledge_base.writers import KeyWriter
from jaxrag.library.retrieve.base import searched_text
from jaxrag.models.text.progress import progress_bar
from jaxrag.reuse.encode import ChunkInContext, Encoded
from jaxrag.reuse.encode.packed import ROW_TOKENS

BATCH_TOKENS = 1 << 16  # of one catalog commit
UNKNOWN_EXAMPLES = 5  # words that a report shows
_COUNTED = (
    "documents", "replaced", "unchanged", "chunks", "tokens", "encoded", "encoded_tokens",
    "on_demand", "unknown_tokens", "unsealed", "kv_bytes",
)  # fmt: skip

_Future = concurrent.futures.Future
EncodeWhen = Literal["now", "on demand"]


class PieceRunner(Protocol):
    """Runs a piece of encoding when others let it."""

    def __call__[Result](self, encode_piece: Callable[[], Result], /) -> Result:
        """Run it and return what it returns; raises what it raises."""


@dataclasses.dataclass
class Ingest:
    """One run of documents into a knowledge base.

    It encodes batch after batch while the puts and commits of earlier ones go on.

    Attributes:
      preparer: splits documents into chunks and names their KV.
      vectors: where the vectors of the chunks' texts are kept; None where they have none.
      run_piece: runs a piece of encoding, about a row of the model, when others let it; None: all
        pieces are one, run at once.
      encode: KV that the store lacks is encoded by this, or by who needs it first.
    """

    preparer: Preparer
    vectors: ChunkVectors | None = None
    run_piece: PieceRunner | None = None
    encode: EncodeWhen = "now"

    def __post_init__(self) -> None:
        self._encoding = self.preparer.encoding
        self._count: collections.Counter[str] = collections.Counter()
        self._unknown_words: dict[str, None] = {}
        self._unsettled: dict[str, _Future[PutResult]] = {}  # puts that may not be durable yet
        self._committing: _Future[None] | None = None  # the batch before

    def add_documents(self, intake: Intake, progress: bool) -> AddReport:
        """Add documents, held a batch at a time; ``progress`` shows how far it is, on stderr.

        Single bad documents are skipped and reported.
        """
        start = time.perf_counter()
        count, encoders = self._count, self.preparer.encoders
        skipped: list[BadDocument] = []
        with (
            KeyWriter.at_work(self.preparer.catalog.path.parent) as key_writer,
            progress_bar(None, "cut", "chunk", shown=progress) as bar,
            self._encoding.store.writer() as writer,
            concurrent.futures.ThreadPoolExecutor(1, "jaxrag-commit") as committer,
        ):
            for batch in self._batches(intake, skipped):
                if not count["documents"] and self.encode == "now":
                    self._encoding.keep_prefix()
                self._count_batch(batch)
                bar.set_description("encode", refresh=False)
                if not bar.disable and (fraction := intake.fraction()):  # else its end is unknown
                    chunks = count["chunks"] * (intake.characters / fraction) / count["characters"]
                    bar.total = round(chunks) * len(encoders)
                puts: list[_Future[PutResult]] = []
                found: dict[str, dict[str, ChunkInContext]] = {}
                for encoder in encoders:
                    more, found[encoder] = self._encode(encoder, batch, key_writer, writer, bar)
                    puts += more
                if count["there"]:
                    bar.set_postfix_str(f"KV of {count['there']} was there", refresh=False)
                if self._committing is not None:
                    self._committing.result()
                self._committing = committer.submit(self._commit_durable, batch, puts, found)
            if self._committing is not None:
                self._committing.result()
            if bar.total is not None:
                bar.total = bar.n
        counted: dict[str, Any] = {field: count[field] for field in _COUNTED}
        return AddReport(
            **counted,
            reused=count["chunks"] * len(encoders) - count["encoded"] - count["on_demand"],
            skipped=tuple(skipped),
            seconds=time.perf_counter() - start,
            unknown_words=tuple(self._unknown_words),
            passed=intake.passed,
            left_out=tuple(intake.left_out),
        )

    def _batches(self, intake: Intake, skipped: list[BadDocument]) -> Iterator[list[Prepared]]:
        """Prepared documents in batches of about BATCH_TOKENS; refused ones go to ``skipped``."""
        batch: list[Prepared] = []
        num_tokens = 0
        for document in self.preparer.prepare_ahead(intake):
            if isinstance(document, BadDocument):
                skipped.append(document)
                continue
            batch.append(document)
            num_tokens += document.num_tokens
            if num_tokens >= BATCH_TOKENS:
                yield batch
                batch, num_tokens = [], 0
        if batch:
            yield batch

    def _count_batch(self, batch: Sequence[Prepared]) -> None:
        """Count documents, and what the tokenizer does not know of them.

        Only chunks that hold some of that are read again.
        """
        count, tokenizer = self._count, self.preparer.tokenizer
        for prepared in batch:
            count["characters"] += len(prepared.entry.document.text)
            count["documents"] += 1
            count["unchanged"] += prepared.unchanged
            count["replaced"] += prepared.replaces
            count["chunks"] += len(prepared.token_ids)
            count["tokens"] += prepared.num_tokens
            for chunk in prepared.entry.chunks if tokenizer.unk_id is not None else ():
                unknown = int((chunk.ids == tokenizer.unk_id).sum())
                count["unknown_tokens"] += unknown
                if unknown and len(self._unknown_words) < UNKNOWN_EXAMPLES:
                    words = tokenizer.unknown_words(chunk.text)
                    room = UNKNOWN_EXAMPLES - len(self._unknown_words)
                    self._unknown_words |= dict.fromkeys(words[:room])

    def _encode(
        self,
        encoder: str,
        batch: Iterable[Prepared],
        key_writer: KeyWriter,
        writer: ChunkWriter,
        bar: "tqdm[Any]",
    ) -> tuple[list[_Future[PutResult]], dict[str, ChunkInContext]]:
        """Put the KV of the batch's chunks that the store lacks under one encoder.

        Returns the puts to wait for, and the chunks to be committed that the store had already.
        """
        chunks_by_key: dict[str, ChunkInContext] = {}
        committed: set[str] = set()
        total = 0
        for prepared in batch:
            total += len(prepared.token_ids)
            keys = prepared.entry.keys[encoder]
            chunks_by_key.update(zip(keys, map(ChunkInContext, prepared.token_ids), strict=True))
            committed.update(keys if prepared.commit else ())
        key_writer.needs(chunks_by_key)
        self._unsettled = {key: put for key, put in self._unsettled.items() if not put.done()}
        puts = [self._unsettled[key] for key in chunks_by_key if key in self._unsettled]
        settled = {key: chunk for key, chunk in chunks_by_key.items() if key not in self._unsettled}
        missing, unsealed = self._encoding.looked_up(encoder, settled)
        self._count["there"] += len(settled) - len(missing)
        if self.encode == "on demand":
            self._count["on_demand"] += len(missing)
            bar.update(total)
            return puts, {}
        self._count["unsealed"] += unsealed
        bar.update(total - len(missing))
        layout = self._encoding.store.layout
        for made in self._encoded(encoder, missing):
            put = writer.submit(**made.for_store())
            puts.append(put)
            self._unsettled[made.key] = put
            self._count["encoded"] += 1
            self._count["encoded_tokens"] += len(made.chunk.ids)
            self._count["kv_bytes"] += layout.stored_nbytes(len(made.chunk.ids))
            bar.update()
        committed -= missing.keys()
        return puts, {key: chunk for key, chunk in settled.items() if key in committed}

    def _encoded(self, encoder: str, missing: dict[str, ChunkInContext]) -> Iterator[Encoded]:
        """Encode chunks: as one run, or in pieces of about a row, each when others let it."""
        if self.run_piece is None:
            yield from self._encoding.encode(encoder, missing)
            return
        for piece in _pieces(missing):

            def encode_piece(piece: dict[str, ChunkInContext] = piece) -> list[Encoded]:
                return list(self._encoding.encode(encoder, piece))

            yield from self.run_piece(encode_piece)

    def _commit_durable(
        self,
        batch: Sequence[Prepared],
        puts: Iterable[_Future[PutResult]],
        found: dict[str, dict[str, ChunkInContext]],
    ) -> None:
        """Commit a batch once its KV is durable (in the committer's thread).

        A chunk that no document held when it was found may have been swept before the commit made
        it live, by a collection that did not see this writer, so those are looked up again.
        """
        for put in puts:
            put.result()
        self.commit([prepared for prepared in batch if prepared.commit])
        for encoder, chunks in found.items():
            self._encoding.encode_missing(encoder, chunks)

    def commit(self, batch: Sequence[Prepared]) -> None:
        """Make documents findable whose KV is durable: vectors first, then the catalog."""
        catalog = self.preparer.catalog
        catalog.put_keys(
            (prepared.entry.document.id, prepared.entry.digest, prepared.entry.keys)
            for prepared in batch
            if prepared.unchanged
        )
        entries = [prepared.entry for prepared in batch if not prepared.unchanged]
        if not entries:
            return
        free = iter(catalog.reserve(sum(len(entry.chunks) for entry in entries)))
        entries = [
            dataclasses.replace(entry, chunk_ids=list(itertools.islice(free, len(entry.chunks))))
            for entry in entries
        ]
        if self.vectors is not None:
            chunk_ids = [chunk_id for entry in entries for chunk_id in entry.chunk_ids]
            texts = [
                searched_text(entry.document.title, chunk.text)
                for entry in entries
                for chunk in entry.chunks
            ]
            self.vectors.add(chunk_ids, texts)
        left = catalog.put(entries)
        if self.vectors is not None:
            self.vectors.remove(left)
            catalog.settle(left)


def _pieces(chunks_by_key: dict[str, ChunkInContext]) -> Iterator[dict[str, ChunkInContext]]:
    """The chunks in pieces of at most ROW_TOKENS, or one chunk."""
    piece: dict[str, ChunkInContext] = {}
    size = 0
    for key, chunk in chunks_by_key.items():
        if piece and size + len(chunk.ids) > ROW_TOKENS:
            yield piece
            piece, size = {}, 0
        piece[key] = chunk
        size += len(chunk.ids)
    if piece:
        yield piece
