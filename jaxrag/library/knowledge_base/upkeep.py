"""Upkeep of a knowledge base: sweep what no claim holds, check what is stored, repair it.

And which documents have left the files that they came from: a document whose file is no more, a row
that was taken out. Where a folder is missing or empty this may be a disk that is not mounted, so
that what came from it is doubtful.
"""

import contextlib
import dataclasses
import datetime
import functools
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from jaxrag.base.errors import KnowledgeBaseError
from jaxrag.kv.store import ChunkStore, ReadThrough, Record
from jaxrag.kv.store.owners import Owner, Owners, this_owner
from jaxrag.library.catalog import Catalog, DocumentEntry
from jaxrag.library.catalog.audit import RowsReport
from jaxrag.library.knowledge_base.location import CATALOG
from jaxrag.library.knowledge_base.neighbours import recorded_chunks
from jaxrag.library.knowledge_base.reports import RefreshReport
from jaxrag.library.knowledge_base.vectors import ChunkVectors
from jaxrag.library.knowledge_base.writers import KeyWriter, Writers
from jaxrag.models.text.progress import progress_bar
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.reuse.attention_index.document import Indexing, is_indexed
from jaxrag.reuse.encode import ENCODERS, ChunkEncoding, gets_indexes

_REPAIR_BATCH = 256  # chunks that are encoded together
_EMBED_BATCH = 1024  # texts between two commits of the index


@dataclasses.dataclass(frozen=True)
class RemoveReport:
    """What became of the ids that were to be removed."""

    documents: int
    chunks: int
    unknown: tuple[str, ...]  # ids that name no document
    neighbours: RefreshReport | None = None  # the variants that see neighbours, encoded again


@dataclasses.dataclass(frozen=True)
class GcReport:
    """What a collection removed, or would remove."""

    chunks: int
    damaged: int  # chunks whose commit record is unreadable
    attempts: int  # of writers that died or came late
    nbytes: int  # of all these
    vectors: int
    dry_run: bool


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """What a check of every row and every chunk's KV found.

    The first four together are all chunks' KV.
    """

    ok: int
    repaired: int
    damaged: tuple[str, ...]  # keys of chunks without sound KV of their own, still
    dropped: int  # not stored, as is to be expected under a size limit or of KV on demand
    unindexed: tuple[str, ...] = ()  # keys of chunks that are whole but lack their indexes
    unsealed: tuple[str, ...] = ()  # of ``damaged``: sound, but not sealed with the secret
    rows: RowsReport | None = None  # of the catalog; None where it was not looked at
    vectors_lost: int = 0  # chunks that should have a vector and have none

    @property
    def whole(self) -> bool:
        """Whether nothing is damaged or missing now."""
        rows = self.rows is None or self.rows.whole
        return rows and not (self.damaged or self.unindexed or self.vectors_lost)


@dataclasses.dataclass(frozen=True)
class Claim:
    """What one knowledge base needs of a repository.

    Attributes:
      catalog: names the KV of its chunks.
      encoders: those whose KV it needs only where the catalog names the very key. KV that saw
        neighbours is one: which ones it saw is only known of what the catalog names.
      prefix_content: content id of the template's prefix.
      writers: at work on it.
    """

    catalog: Catalog
    encoders: Sequence[str]
    prefix_content: str | None
    writers: Writers

    @classmethod
    def of(cls, catalog: Catalog, settings: Mapping[str, Any]) -> "Claim":
        """The claim of the knowledge base with this catalog."""
        writers = Writers(catalog.path.parent)
        seeing = [name for name, encoder in ENCODERS.items() if encoder.sees_neighbours]
        encoders = [*settings["encoders"], *seeing]
        return cls(catalog, encoders, settings["prefix_content"], writers)

    def holds(self, record: Record) -> bool:
        """Whether the knowledge base needs this chunk."""
        # The writers first: one that is done with a key has made the catalog hold it before.
        return (
            self.writers.need(record.key)
            or record.content_id == self.prefix_content
            or self.catalog.is_live(record.key, record.content_id, record.encoder, self.encoders)
        )


class NamedKeys:
    """Which keys some catalogs name, as they were when the first of their part was asked for."""

    def __init__(self, catalogs: Sequence[Catalog]) -> None:
        self._catalogs = catalogs
        self._part = ""
        self._keys: frozenset[str] = frozenset()

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, str)
        if key[:2] != self._part:
            self._part = key[:2]
            self._keys = frozenset().union(
                *(catalog.keys_beginning(self._part) for catalog in self._catalogs)
            )
        return key in self._keys


@contextlib.contextmanager
def all_claims(
    own: Claim, own_id: str, owners: Owners, others: Sequence[Path], gone: Sequence[str]
) -> Iterator[list[Claim]]:
    """The claims of every knowledge base whose chunks lie in the repository, this one first.

    One that lies where it was registered on this host is found by itself.

    Args:
      own: the claim of this knowledge base.
      others: folders of knowledge bases that lie elsewhere now.
      gone: ids of those that exist no more.

    Raises KnowledgeBaseError when one can neither be asked nor was said to be gone.
    """
    with contextlib.ExitStack() as stack:
        named = dict(_claimed(folder / CATALOG, stack) for folder in others)
        claims = [own]
        for owner in owners.all():
            if owner.id == own_id or owner.id in gone:
                continue
            claim = named.get(owner.id) or _registered(owner, stack)
            if claim is None:
                raise KnowledgeBaseError(
                    f"the repository also holds chunks of knowledge base {owner.id}, last seen at "
                    f"{owner.host}:{owner.folder}; name its folder in others, or its id in gone if "
                    "it exists no more"
                )
            claims.append(claim)
        yield claims


def _registered(owner: Owner, stack: contextlib.ExitStack) -> Claim | None:
    """The claim of an owner that still lies where it was registered."""
    path = Path(owner.folder) / CATALOG
    if owner != this_owner(owner.id, Path(owner.folder)) or not path.is_file():
        return None
    found, claim = _claimed(path, stack)
    return claim if found == owner.id else None


def _claimed(path: Path, stack: contextlib.ExitStack) -> tuple[str, Claim]:
    """The id of the knowledge base with a catalog, and its claim while the stack is held."""
    catalog = stack.enter_context(contextlib.closing(Catalog.open(path)))
    settings = catalog.settings()
    return settings["id"], Claim.of(catalog, settings)


def sweep(
    store: ChunkStore | ReadThrough,
    claims: Sequence[Claim],
    vectors: ChunkVectors | None,
    grace_seconds: float,
    dry_run: bool,
) -> GcReport:
    """Remove KV that no claim holds and vectors of no chunk, where older than the grace.

    What writers at work have announced stays, at any grace. Raises DamagedCatalogError for a claim
    whose catalog lost rows: their KV would seem unused.
    """
    for claim in claims:
        claim.catalog.check_whole()
    now = time.time()  # a writer that is not seen below reserves its ids later than this
    report = store.gc(
        lambda record: any(claim.holds(record) for claim in claims),
        grace_seconds=grace_seconds,
        dry_run=dry_run,
        busy=lambda key: any(claim.writers.need(key) for claim in claims),
        named=NamedKeys([claim.catalog for claim in claims]).__contains__,
    )
    strays = 0
    if vectors is not None:
        since = claims[0].writers.since()
        made_before = min(now - grace_seconds, now if since is None else since)
        stray = claims[0].catalog.strays(vectors.index.ids(), made_before, dry_run)
        strays = len(stray)
        if not dry_run:
            vectors.remove(stray)
            vectors.index.collect(grace_seconds)
    return GcReport(report.chunks, report.damaged, report.attempts, report.nbytes, strays, dry_run)


def gc_note(report: GcReport) -> dict[str, Any]:
    """What is remembered of a collection, JSON-able."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"finished": now, "chunks": report.chunks, "bytes": report.nbytes,
            "vectors": report.vectors}  # fmt: skip


def verify(
    store: ChunkStore | ReadThrough,
    catalog: Catalog,
    indexing: Indexing | None,
    max_bytes_per_second: float | None,
    *,
    limited: bool,
    progress: bool,
) -> VerifyReport:
    """Check every chunk's KV, and that chunks have the indexes that they get by ``indexing``.

    ``limited``: a chunk that is missing was dropped under a size limit, or is encoded on demand,
    and is left so.
    """
    with progress_bar(None, "verify", "B", shown=progress, scale=True) as bar:
        verified = store.verify(
            catalog.all_keys(),
            max_bytes_per_second=max_bytes_per_second,
            told=bar.update,
            finite=True,
        )
    damaged = (*verified.corrupt, *verified.unsealed, *(() if limited else verified.missing))
    dropped = len(verified.missing) if limited else 0
    bare = [] if indexing is None else _unindexed(store, catalog, indexing, set(damaged))
    return VerifyReport(verified.ok, 0, damaged, dropped, tuple(bare), verified.unsealed)


def repair(
    report: VerifyReport, catalog: Catalog, template: PromptTemplate, encoding: ChunkEncoding
) -> VerifyReport:
    """Encode again what ``verify`` found damaged, missing or without indexes."""
    repaired = set[str]()
    wanted = [*report.damaged, *report.unindexed]
    chunks = recorded_chunks(catalog, encoding.model, template, wanted)
    with KeyWriter.at_work(catalog.path.parent) as at_work:
        for encoder, by_key in chunks.items():
            at_work.needs(by_key)
            for batch in itertools.batched(by_key.items(), _REPAIR_BATCH):
                for made in encoding.encode(encoder, dict(batch)):
                    encoding.store.put(**made.for_store(replace=True))
                    repaired.add(made.key)
    damaged = tuple(key for key in report.damaged if key not in repaired)
    bare = tuple(key for key in report.unindexed if key not in repaired)
    whole = report.ok - (len(report.unindexed) - len(bare))
    unsealed = tuple(key for key in report.unsealed if key not in repaired)
    return VerifyReport(whole, len(repaired), damaged, report.dropped, bare, unsealed)


def _unindexed(
    store: ChunkStore | ReadThrough, catalog: Catalog, indexing: Indexing, but: Set[str]
) -> list[str]:
    """Keys of the catalog's chunks that are stored without the indexes that they should have."""
    bare = []
    for keys in itertools.batched((key for key in catalog.all_keys() if key not in but), 1000):
        for record in store.head(keys, on_corrupt="skip"):
            if record is None or is_indexed(record):
                continue
            if gets_indexes(indexing, record.encoder, record.tokens):
                bare.append(record.key)
    return bare


def embed_missing(catalog: Catalog, vectors: ChunkVectors, progress: bool) -> int:
    """Make the vectors of chunks that have none; returns how many."""
    missing = vectors.compared(catalog).lost
    with progress_bar(len(missing), "embed", "chunk", shown=progress) as bar:
        for start in range(0, len(missing), _EMBED_BATCH):
            texts = catalog.searched_texts(missing[start : start + _EMBED_BATCH])
            vectors.add(list(texts), list(texts.values()))
            bar.update(len(texts))
    return len(missing)


@dataclasses.dataclass(frozen=True)
class Gone:
    """Documents below the paths of a run that it did not come upon.

    Attributes:
      ids: of those whose file is no more, or was read to its end without them.
      doubtful: of those whose file is no more, as is all else in its folder.
      kept: how many have a file that is there and could not be read whole.
    """

    ids: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()
    kept: int = 0


def compare(
    entries: Iterable[DocumentEntry], paths: Iterable[Path], seen: set[str], whole: set[str]
) -> Gone:
    """What has left the files.

    Args:
      entries: all documents of the knowledge base.
      paths: files and folders that were read, or that are not there.
      whole: resolved paths of the files that were read to their end.
    """
    roots = [os.path.realpath(path) for path in paths]
    is_bare = functools.cache(_is_bare)
    gone, doubtful, kept = [], [], 0
    for entry in entries:
        if entry.file is None or entry.id in seen:
            continue
        above = [root for root in roots if _holds(root, entry.file)]
        if not above:
            continue
        if entry.file in whole:
            gone.append(entry.id)
        elif not _is_no_more(entry.file):
            kept += 1
        elif any(is_bare(_nearest(entry.file, root)) for root in above):
            doubtful.append(entry.id)
        else:
            gone.append(entry.id)
    return Gone(tuple(gone), tuple(doubtful), kept)


def _holds(root: str, file: str) -> bool:
    return file == root or file.startswith(root.rstrip(os.sep) + os.sep)


def _is_no_more(path: str) -> bool:
    """Whether it is certain that nothing is there; a place that cannot be looked at is not."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _nearest(file: str, root: str) -> str:
    """The folder nearest above a file that is there; at most the root."""
    folder = file
    while folder != root:
        folder = os.path.dirname(folder)
        if not _is_no_more(folder):
            break
    return folder


def _is_bare(folder: str) -> bool:
    """Whether nothing is in a folder that would be read, or the folder is not there at all."""
    try:
        return all(name.startswith(".") for name in os.listdir(folder))
    except NotADirectoryError:
        return False
    except OSError:
        return True
