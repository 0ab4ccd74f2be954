"""What is left of a document: rows, vectors, stored KV and files that derive from it.

Of a document that was removed or replaced the catalog remembers keyed digests (catalog.forgotten),
so that what is left of it is found after its rows are gone.
"""

import collections
import contextlib
import dataclasses
import datetime
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxrag.base.errors import KnowledgeBaseError
from jaxrag.kv.store import ChunkStore, ReadThrough, Record
from jaxrag.library.catalog import Catalog
from jaxrag.library.catalog.forgotten import DerivedRows, Trace
from jaxrag.library.knowledge_base.location import CATALOG, open_repository
from jaxrag.library.knowledge_base.vectors import ChunkVectors
from jaxrag.library.knowledge_base.writers import Writers
from jaxrag.reuse.attention_index.document import is_indexed
from jaxrag.reuse.encode import ENCODERS

# What no knowledge base can look at.
ELSEWHERE = (
    "exports and files that were made of answers",
    "backups and copies of the folder",
    "stores, tiers and replicas of other machines and of other salts",
    "memory of processes that run: what it holds is asked for by no question",
    "blocks that the file system has freed",
)
_SECONDS = 3600.0  # within which a question that began before a removal has put what it encoded


@dataclasses.dataclass(frozen=True)
class Remains:
    """One kind of thing that derives from a document.

    Attributes:
      what: it is, with its place.
      count: how many there are.
      used: whether an answer may use it; if not, it waits for ``gc``.
    """

    what: str
    count: int
    used: bool


@dataclasses.dataclass(frozen=True)
class ForgottenReport:
    """What is left of a document.

    Attributes:
      document: its id.
      removed: when it last was removed or replaced, UTC in ISO 8601; None: it never was.
      remains: what derives from it; empty where nothing is left.
      elsewhere: what was not looked at.
    """

    document: str
    removed: str | None
    remains: tuple[Remains, ...]
    elsewhere: tuple[str, ...] = ELSEWHERE

    @property
    def nothing(self) -> bool:
        """Whether nothing is left of it where one can look."""
        return not self.remains

    def with_more(self, what: str, *, used: bool) -> "ForgottenReport":
        """With one more thing that is left of it."""
        return dataclasses.replace(self, remains=(*self.remains, Remains(what, 1, used)))


def look_in(folder: Path, document_id: str) -> ForgottenReport:
    """``look_for`` in a knowledge base that nobody has opened; no secret is needed for it."""
    with contextlib.ExitStack() as stack:
        catalog = stack.enter_context(contextlib.closing(Catalog.open(folder / CATALOG)))
        settings = catalog.settings()
        store = stack.enter_context(
            contextlib.closing(open_repository(folder, settings, "r", None))
        )
        vectors = None
        if settings["vectors"] is not None:
            vectors = ChunkVectors(folder, settings["vectors"], None, "r")
            stack.enter_context(contextlib.closing(vectors))
        return look_for(document_id, catalog, store, vectors)


def look_for(
    document_id: str,
    catalog: Catalog,
    store: ChunkStore | ReadThrough,
    vectors: ChunkVectors | None,
) -> ForgottenReport:
    """Look for all that derives from a document; reads every record of the store.

    Raises KnowledgeBaseError for an id that neither names a document nor named one that was
    removed: nothing could be found of it then.
    """
    if catalog.writable:
        catalog.checkpoint()
    trace, rows = catalog.trace(document_id)
    if not len(trace.chunk_ids) and not rows.documents:
        raise KnowledgeBaseError(
            f"{catalog.path.parent} has no document {document_id!r} and does not remember the "
            "removal of one; look at its id in what you removed"
        )
    remains = [
        *_in_rows(rows),
        *_in_store(trace, catalog, store),
        *(() if vectors is None else _in_vectors(trace, rows, vectors)),
        *_in_files(trace, catalog.path),
    ]
    when = None if trace.removed is None else trace.removed.isoformat(timespec="seconds")
    return ForgottenReport(document_id, when, tuple(remains))


def _in_rows(rows: DerivedRows) -> Iterator[Remains]:
    for what, count in (
        ("row of the document", rows.documents),
        ("rows of its chunks, with their texts", rows.chunks),
        ("rows of its words", rows.words),
    ):
        if count:
            yield Remains(what, count, used=True)
    for document, number, encoder in rows.contexts:
        yield Remains(f"KV that saw it: {document} #{number}, {encoder}", 1, used=True)


def _in_store(trace: Trace, catalog: Catalog, store: ChunkStore | ReadThrough) -> Iterator[Remains]:
    """Stored KV of its chunks, KV that may have seen them, and writes that never ended."""
    places = {"the store": store}
    if isinstance(store, ReadThrough):
        places = {"the store": store.remote, "tier/": store.local}
    writers = Writers(catalog.path.parent)
    for place, part in places.items():
        counts: collections.Counter[tuple[str, bool]] = collections.Counter()

        def look(record: Record, counts: collections.Counter[tuple[str, bool]] = counts) -> bool:
            named = catalog.has_key(record.key)
            if trace.is_own(record.content_id):
                indexed = " and its attention indexes" if is_indexed(record) else ""
                counts[f"KV of its chunks{indexed}", named] += 1
            elif not named and _may_have_seen(record, trace.removed):
                counts["KV that may have seen it", False] += 1
            return True

        # A collection sees records that are not believed as well, and removes none here.
        report = part.gc(look, grace_seconds=0.0, dry_run=True, busy=writers.need)
        if trace.removed is not None:
            counts["unfinished writes", False] += report.attempts
            counts["records that cannot be read", False] += report.damaged
        for (what, used), count in counts.items():
            if count:
                yield Remains(f"{what}, in {place}", count, used)


def _may_have_seen(record: Record, removed: datetime.datetime | None) -> bool:
    """Whether KV that the catalog does not name was encoded behind what nobody knows."""
    encoder = ENCODERS.get(record.encoder)
    if encoder is not None and not encoder.sees_neighbours:
        return False
    created = datetime.datetime.fromisoformat(record.created)
    return removed is None or (created - removed).total_seconds() <= _SECONDS


def _in_vectors(trace: Trace, rows: DerivedRows, vectors: ChunkVectors) -> Iterator[Remains]:
    if count := int(np.isin(vectors.index.ids(), trace.chunk_ids).sum()):
        yield Remains("vectors of its chunks", count, used=bool(rows.chunks))
    if trace.removed is not None and vectors.index.holds_rows_of(trace.removed.timestamp()):
        yield Remains("files of vectors/ that may hold rows which left", 1, used=False)


def _in_files(trace: Trace, path: Path) -> Iterator[Remains]:
    """The catalog's log, where it could not be emptied, and earlier catalogs."""
    if trace.removed is None:
        return
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size:
        yield Remains(f"{log.name}, which others read still", 1, used=False)
    for copy in sorted(path.parent.glob(f"{path.name}[.-]*")):
        known = copy.name.removeprefix(path.name)
        if known not in ("-wal", "-shm") and copy.stat().st_mtime <= trace.removed.timestamp():
            yield Remains(f"{copy.name}, a copy from before", 1, used=False)
