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


class Turn(Protocol):
    """Runs a piece of encoding when others let it."""

    def __call__[Result](self, job: Callable[[], Result], /) -> Result:
        """Run the job and return what it returns; raises what it raises."""


@dataclasses.dataclass(frozen=True)
class Ingest:
    """How documents come into one knowledge base.

    Attributes:
      preparer: splits documents into chunks and names their KV.
      vectors: where the vectors of the chunks' texts are kept; None where they have none.
      turn: runs a piece of encoding, about a row of the model, when others let it; None: at once.
      encode: KV that the store lacks is encoded by this, or by who needs it first.
    """

    preparer: Preparer
    vectors: ChunkVectors | None = None
    turn: Turn | None = None
    encode: EncodeWhen = "now"

    def run(self, intake: Intake, progress: bool) -> AddReport:
        """Add documents, held a batch at a time; ``progress`` shows how far it is, on stderr.

        Single bad documents are skipped and reported.
        """
        start = time.perf_counter()
        preparer = self.preparer
        skipped: list[BadDocument] = []
        with (
            KeyWriter.at_work(preparer.catalog.path.parent) as at_work,
            progress_bar(None, "cut", "chunk", shown=progress) as bar,
            preparer.encoding.store.writer() as writer,
            concurrent.futures.ThreadPoolExecutor(1, "jaxrag-commit") as committer,
        ):
            pipeline = _Pipeline(self, at_work, writer, committer, bar)
            for batch in self._batches(intake, skipped):
                if not pipeline.count["documents"] and self.encode == "now":
                    preparer.encoding.keep_prefix()
                pipeline.take(batch, None if bar.disable else intake)
            pipeline.finish()
        count = pipeline.count
        counted: dict[str, Any] = {field: count[field] for field in _COUNTED}
        return AddReport(
            **counted,
            reused=count["chunks"] * len(preparer.encoders) - count["encoded"] - count["on_demand"],
            skipped=tuple(skipped),
            seconds=time.perf_counter() - start,
            unknown_words=tuple(pipeline.unknown_words),
            passed=intake.passed,
            left_out=tuple(intake.left_out),
        )

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

    def _batches(self, intake: Intake, skipped: list[BadDocument]) -> Iterator[list[Prepared]]:
        """Prepared documents in batches of about BATCH_TOKENS; refused ones go to ``skipped``."""
        batch: list[Prepared] = []
        num_tokens = 0
        for found in self.preparer.ahead(intake):
            if isinstance(found, BadDocument):
                skipped.append(found)
                continue
            batch.append(found)
            num_tokens += found.num_tokens
            if num_tokens >= BATCH_TOKENS:
                yield batch
                batch, num_tokens = [], 0
        if batch:
            yield batch


class _Pipeline:
    """One run: encodes batch after batch while the puts and commits of earlier ones go on."""

    def __init__(
        self,
        ingest: Ingest,
        at_work: KeyWriter,
        writer: ChunkWriter,
        committer: concurrent.futures.ThreadPoolExecutor,
        bar: "tqdm[Any]",
    ) -> None:
        self.count: collections.Counter[str] = collections.Counter()
        self.unknown_words: dict[str, None] = {}
        self._ingest = ingest
        self._preparer = ingest.preparer
        self._encoding = ingest.preparer.encoding
        self._at_work = at_work
        self._writer = writer
        self._committer = committer
        self._bar = bar
        self._flying: dict[str, _Future[PutResult]] = {}  # puts that may not be durable yet
        self._committing: _Future[None] | None = None  # the batch before

    def take(self, batch: Sequence[Prepared], intake: Intake | None) -> None:
        """Encode a batch and have it committed; ``intake`` knows how much is still to come."""
        self._bar.set_description("encode", refresh=False)
        count = self.count
        for prepared in batch:
            count["characters"] += len(prepared.entry.document.text)
            count["documents"] += 1
            count["unchanged"] += prepared.unchanged
            count["replaced"] += prepared.replaces
            count["chunks"] += len(prepared.token_ids)
            count["tokens"] += prepared.num_tokens
            self._count_unknown(prepared)
        fraction = intake.fraction() if intake is not None else None
        if intake is not None and fraction:
            characters = intake.characters / fraction
            chunks = count["chunks"] * characters / count["characters"]
            self._bar.total = round(chunks) * len(self._preparer.encoders)
        puts: list[_Future[PutResult]] = []
        found: dict[str, dict[str, ChunkInContext]] = {}
        for encoder in self._preparer.encoders:
            more, found[encoder] = self._encode(encoder, batch)
            puts += more
        if count["there"]:
            found_before = f"KV of {count['there']} was there"
            self._bar.set_postfix_str(found_before, refresh=False)
        if self._committing is not None:
            self._committing.result()
        self._committing = self._committer.submit(self._finish_batch, batch, puts, found)

    def finish(self) -> None:
        """Wait for the last commit."""
        if self._committing is not None:
            self._committing.result()
        if self._bar.total is not None:
            self._bar.total = self._bar.n

    def _count_unknown(self, prepared: Prepared) -> None:
        """Count what the tokenizer does not know; only chunks that hold some are read again."""
        tokenizer = self._preparer.tokenizer
        if tokenizer.unk_id is None:
            return
        for chunk in prepared.entry.chunks:
            unknown = int((chunk.ids == tokenizer.unk_id).sum())
            self.count["unknown_tokens"] += unknown
            if unknown and len(self.unknown_words) < UNKNOWN_EXAMPLES:
                words = tokenizer.unknown_words(chunk.text)
                room = UNKNOWN_EXAMPLES - len(self.unknown_words)
                self.unknown_words |= dict.fromkeys(words[:room])

    def _encode(
        self, encoder: str, batch: Iterable[Prepared]
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
        self._at_work.needs(chunks_by_key)
        self._flying = {key: put for key, put in self._flying.items() if not put.done()}
        puts = [self._flying[key] for key in chunks_by_key if key in self._flying]
        settled = {key: chunk for key, chunk in chunks_by_key.items() if key not in self._flying}
        missing, unsealed = self._encoding.looked_up(encoder, settled)
        if self._ingest.encode == "on demand":
            self.count["on_demand"] += len(missing)
            self.count["there"] += len(settled) - len(missing)
            self._bar.update(total)
            return puts, {}
        self.count["unsealed"] += unsealed
        self.count["there"] += len(settled) - len(missing)
        self._bar.update(total - len(missing))
        for made in self._made(encoder, missing):
            put = made.put(self._writer.submit)
            puts.append(put)
            self._flying[made.key] = put
            self.count["encoded"] += 1
            self.count["encoded_tokens"] += len(made.chunk.ids)
            layout = self._encoding.store.layout
            self.count["kv_bytes"] += layout.stored_nbytes(len(made.chunk.ids))
            self._bar.update()
        committed -= missing.keys()
        return puts, {key: chunk for key, chunk in settled.items() if key in committed}

    def _made(self, encoder: str, missing: dict[str, ChunkInContext]) -> Iterator[Encoded]:
        """Encode chunks: as one run, or turn by turn in pieces of about a row."""
        turn = self._ingest.turn
        if turn is None:
            yield from self._encoding.encode(encoder, missing)
            return
        for piece in _pieces(missing):
            yield from turn(lambda piece=piece: list(self._encoding.encode(encoder, piece)))  # type: ignore[misc]

    def _finish_batch(
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
        self._ingest.commit([prepared for prepared in batch if prepared.commit])
        for encoder, chunks in found.items():
            self._encoding.encode_missing(encoder, chunks)


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
