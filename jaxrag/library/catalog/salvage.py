"""A damaged catalog is made whole again from what its file still holds.

Every page ends in a checksum, so it is known which are as they were written. Where one bit of a
page is flipped, the checksum mostly says which; where it names several, digests of the rows tell.
Nothing is lost then. Where more is wrong, the rows of all other pages are read from their bytes,
held against their digests, and put into a new file. Documents that lost a row are dropped and
named. Settings that are not as written are made whole
where their digests prove it, so that the catalog can be opened.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from jaxrag.base.disk import sync_folder
from jaxrag.base.errors import DamagedCatalogError, StoreError
from jaxrag.base.types import Connection, HostArray
from jaxrag.library.catalog.catalog import Catalog
from jaxrag.library.catalog.database import (
    Database,
    damaged,
    is_open,
    remove_files,
    to_json,
)
from jaxrag.library.catalog.digests import (
    CHUNKS,
    DOCUMENTS,
    KEYS,
    SETTINGS,
    TOTALS,
    DigestTable,
    Totals,
)
from jaxrag.library.catalog.forgotten import FORGOTTEN
from jaxrag.library.catalog.pages import (
    PAGE_BYTES,
    flips,
    lost_pages,
    mend,
    rows_of,
    turn,
    wrong_pages,
)
from jaxrag.library.catalog.rows import ChunkRow, DocumentRow
from jaxrag.library.retrieve.base import searched_text
from jaxrag.library.retrieve.bm25 import BM25Index

_GAP = 1 << 24  # chunk ids that are never given, as reservations may be lost
_INDEXED = 256  # chunks whose texts are indexed together
_LOCKS = (0x40000000, 512)  # where SQLite locks a file, and how many bytes

_Row = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Salvage:
    """What became of a damaged catalog.

    Attributes:
      mended: pages in which a flipped bit was turned back.
      unreadable: pages that are wrong beyond that, or gone.
      settings: how many are lost, none that was needed.
      lost: ids of documents that lost rows; they are to be added again.
      nameless: how many documents lost all of theirs, None where that is not known.
      kept: where the damaged file is now.
    """

    mended: int
    unreadable: int
    documents: int
    settings: int
    lost: tuple[str, ...]
    nameless: int | None
    kept: str

    @property
    def is_loss(self) -> bool:
        """Whether anything is gone that was in the catalog."""
        return bool(self.lost or self.settings) or self.nameless != 0


def salvage(path: Path, needed: Collection[str]) -> Salvage | None:
    """Make a damaged catalog whole; None where all of its pages are.

    The damaged file is kept as ``catalog.sqlite.damaged``. Who is killed meanwhile leaves one of
    them in place. Nothing is done, and None returned, while anybody has the catalog open.

    Args:
      needed: the settings without which a catalog is of no use.

    Raises:
      DamagedCatalogError: too little of it is left.
      KnowledgeBaseError: it is whole, and another version made it.
      StoreError: files cannot be written.
    """
    if is_open(path):
        return None
    with contextlib.suppress(StoreError), contextlib.closing(Database(path)) as database:
        database.check_version()
        database.checkpoint()
    new = path.with_name(f"{path.name}-salvage")
    try:
        # Closing any descriptor of the file drops the lock; ``pages`` hold one too, to the end.
        with open(path, "r+b") as file:
            if not lock_out(file.fileno()):
                return None
            pages = _pages(path, file)
            found = _saved(path, pages, new, needed)
            if found is not None:
                replace(path, new, Path(found.kept))
            return found
    except OSError as error:
        raise StoreError(
            f"catalog {path} cannot be repaired: {error}; check the disk, its free space and your "
            "permissions"
        ) from error
    finally:
        remove_files(new)


def lock_out(descriptor: int) -> bool:
    """Keep every other process from opening the file with SQLite; False where one has it open."""
    start, length = _LOCKS
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _pages(path: Path, file: BinaryIO) -> HostArray:
    """A private copy of the pages, uint8 [P, PAGE_BYTES], made as it is changed."""
    size = os.fstat(file.fileno()).st_size
    count = size // PAGE_BYTES  # of a page that is cut nothing can be believed
    if not count:
        raise damaged(path, f"it has {size} bytes, nothing can be read of it")
    return np.memmap(file, np.uint8, "c", shape=(count, PAGE_BYTES))


def _saved(path: Path, pages: HostArray, new: Path, needed: Collection[str]) -> Salvage | None:
    """Write to ``new`` what can be saved of the pages, which are mended in place."""
    wrong = wrong_pages(pages)
    left = [number for number in wrong if not mend(pages[number])]
    mended = len(wrong) - len(left)
    if 0 not in left:
        left += lost_pages(pages)
    named = len(pages) if 0 in left else int.from_bytes(pages[0, 28:32].tobytes(), "big")
    size = path.stat().st_size
    unreadable = len(left) + max(0, named - len(pages), int(size > pages.size))
    kept = path.with_name(f"{path.name}.damaged")
    if not unreadable:
        if not mended:
            return None
        with open(new, "wb") as file:
            file.write(pages.data)
            file.flush()
            os.fsync(file.fileno())
        log = path.with_name(f"{path.name}-wal")  # could not be read without the first page
        if log.exists():
            new.with_name(f"{new.name}-wal").write_bytes(log.read_bytes())
        with contextlib.closing(Catalog.open(new)) as catalog:
            documents = catalog.counts()["documents"]
            catalog.checkpoint()
        return Salvage(mended, 0, documents, 0, (), 0, str(kept))
    found = _Found.read(pages, left)
    missing = sorted(set(needed) - found.settings.keys())
    if missing:
        raise StoreError(
            f"catalog {path}: the setting {missing[0]!r} is lost, and nothing can be told without "
            "it; restore a copy, or ingest again into another folder"
        )
    whole, totals = found.whole_documents(), found.totals
    if not whole and (totals is None or totals.documents):
        raise StoreError(
            f"catalog {path}: no document can be read of it; restore a copy, or ingest again into "
            "another folder"
        )
    lost = sorted((found.documents.keys() | found.chunks.keys()) - set(whole))
    found.write(new, whole, lost)
    nameless = None if totals is None else max(0, totals.documents - len(whole) - len(lost))
    settings = 0 if totals is None else max(0, totals.settings - len(found.settings))
    return Salvage(mended, unreadable, len(whole), settings, tuple(lost), nameless, str(kept))


@dataclasses.dataclass
class _Found:
    """Rows as they stand in the pages, held against their digests, which they keep.

    Attributes:
      contexts: content ids by place, by chunk and encoder.
      forgotten: what is remembered of removed documents, by name.
      last: the last chunk id that was ever seen.
      totals: None where they are lost.
    """

    settings: dict[str, _Row] = dataclasses.field(default_factory=dict)
    documents: dict[str, _Row] = dataclasses.field(default_factory=dict)
    chunks: dict[str, dict[int, _Row]] = dataclasses.field(
        default_factory=lambda: defaultdict(dict)
    )
    keys: dict[int, set[_Row]] = dataclasses.field(default_factory=lambda: defaultdict(set))
    contexts: dict[tuple[int, str], dict[int, str]] = dataclasses.field(
        default_factory=lambda: defaultdict(dict)
    )
    forgotten: dict[str, _Row] = dataclasses.field(default_factory=dict)
    last: int = 0
    totals: Totals | None = None

    @classmethod
    def read(cls, pages: HostArray, wrong: Sequence[int]) -> Self:
        """All rows of the tables that cannot be computed from others."""
        found = cls()
        for row, sure in _rows(pages, wrong):
            if _is_of(SETTINGS, row):
                found.settings[row[0]] = row
            elif _is_of(DOCUMENTS, row):
                found.documents[row[0]] = row
            elif _is_of(CHUNKS, row):
                found.chunks[row[1]][row[0]] = row
                found.last = max(found.last, row[0])
            elif _is_of(FORGOTTEN, row):
                found.forgotten[row[0]] = row
            elif _is_of(TOTALS, row):
                found.totals = Totals(*row[1:-1])
            elif _has_types(row, int, str, str, int):
                found.keys[row[0]].add(row)
            elif sure and _has_types(row, int, str, int, str):
                found.contexts[row[0], row[1]][row[2]] = row[3]
            elif sure and _has_types(row, int, int, float):
                found.last = max(found.last, row[1])
        return found

    def whole_documents(self) -> list[str]:
        """Ids of the documents of which every chunk is there, in order."""
        whole = []
        for name, row in sorted(self.documents.items()):
            chunks = self.chunks.get(name, {}).values()
            numbers = sorted(ChunkRow(*chunk[:-1]).number for chunk in chunks)
            if numbers == list(range(DocumentRow(*row[:-1]).num_chunks)):
                whole.append(name)
        return whole

    def write(self, new: Path, whole: Sequence[str], lost: Sequence[str]) -> None:
        """Make a catalog of these documents, whose postings and lengths come from their texts."""
        Catalog.create(new, {}).close()
        with contextlib.closing(Database(new)) as database:
            with database.transaction() as connection:
                _insert(connection, SETTINGS, self.settings.values())
                _insert(connection, DOCUMENTS, (self.documents[name] for name in whole))
                _insert(connection, FORGOTTEN, self.forgotten.values())
                index = BM25Index(connection, path=new)
                chunks = ((name, row) for name in whole for row in self.chunks[name].values())
                for some in itertools.batched(chunks, _INDEXED):
                    _insert(connection, CHUNKS, (row for _, row in some))
                    texts = {}
                    for name, row in some:
                        title = DocumentRow(*self.documents[name][:-1]).title
                        texts[row[0]] = searched_text(title, ChunkRow(*row[:-1]).text)
                        self._write_keys(connection, row[0])
                    index.add(texts)
                connection.execute(
                    "INSERT INTO reservations VALUES (?, ?, ?)",
                    (self.last + 1, self.last + _GAP, time.time()),
                )
                if self.settings["vectors"][1] != "null":
                    gone = [(i,) for name in lost for i in self.chunks.get(name, ())]
                    connection.executemany("INSERT INTO leaving VALUES (?)", gone)
                Totals.counted(connection).write(connection)
            database.checkpoint()

    def _write_keys(self, connection: Connection, chunk_id: int) -> None:
        """The keys of a chunk with what stood in front of it, where both are whole."""
        for row in self.keys.get(chunk_id, ()):
            _, encoder, *_ = row
            places = self.contexts.get((chunk_id, encoder), {})
            seen = [places.get(place, "") for place in range(len(places))]
            if KEYS.digest((*row[:-1], *seen)) == row[-1]:
                _insert(connection, KEYS, [row])
                connection.executemany(
                    "INSERT INTO contexts VALUES (?, ?, ?, ?)",
                    [(chunk_id, encoder, place, name) for place, name in enumerate(seen)],
                )


def _rows(pages: HostArray, wrong: Sequence[int]) -> Iterator[tuple[_Row, bool]]:
    """All rows that stand in pages, and whether they are as they were written.

    Of a wrong page, and of rows that reach into it, those that there are with each bit turned back
    that explains its checksum: digests tell the rows that were written.
    """
    cut: set[int] = set()
    for number, row in rows_of(pages, wrong):
        if row is None:
            cut.add(number)
        else:
            yield row, True
    for number in wrong:
        others = {*wrong} - {number}
        for flip in flips(pages[number]):
            turn(pages[number], *flip)
            for _, row in rows_of(pages, others, {number, *cut}):
                if row is not None:
                    yield row, False
            turn(pages[number], *flip)


def _is_of(table: DigestTable, row: _Row) -> bool:
    return len(row) == len(table.columns) + 1 and table.is_whole(row)


def _has_types(row: _Row, *types: type) -> bool:
    return tuple(map(type, row)) == types


def _insert(connection: Connection, table: DigestTable, rows: Iterable[_Row]) -> None:
    """Rows with the digests that they have."""
    connection.executemany(table.insert(), rows)


def replace(path: Path, new: Path, kept: Path) -> None:
    """Put a new file in the place of a locked one, which is kept with its log."""
    log, memory = (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))
    remove_files(kept)
    os.link(path, kept)
    if log.exists():  # frames of the old file must not meet the new one
        os.rename(log, kept.with_name(f"{kept.name}-wal"))
    memory.unlink(missing_ok=True)
    os.replace(new, path)
    sync_folder(path.parent)


def mend_settings(
    path: Path,
    needed: Collection[str],
    candidates: Callable[[str, Mapping[str, Any]], Iterable[Any]],
    defaults: Mapping[str, Any],
) -> tuple[str, ...]:
    """Make settings and totals whole that are not as written.

    A setting that is neither needed nor has a default is forgotten.

    Args:
      needed: the settings without which it cannot be opened.
      candidates: what a setting may have been, by its name and the settings that are whole; the one
        that has its digest is taken.
      defaults: what takes its place where there is none.

    Returns the names of those that were mended or forgotten; "" stands for settings that are gone
    without a name, and for totals. Raises StoreError for one that is needed and lost.
    """
    changed: list[str] = []
    with contextlib.closing(Database(path)) as database:
        database.check_format()
        if not database.writable:
            return ()
        with database.transaction() as connection:
            rows = connection.execute(f"SELECT {SETTINGS.select()} FROM settings").fetchall()
            whole = {row[0]: json.loads(row[1]) for row in rows if SETTINGS.is_whole(row)}
            digests = {row[0]: row[2] for row in rows if row[0] not in whole}
            gone = set(needed) - whole.keys() - digests.keys()
            for name, digest in [*digests.items(), *((name, None) for name in sorted(gone))]:
                value = _restored(name, digest, candidates(name, whole), defaults)
                if value is None and name in needed:
                    raise StoreError(
                        f"catalog {path}: the setting {name!r} is not as written, and nothing "
                        "tells what it was; restore a copy, or ingest again into another folder"
                    )
                connection.execute("DELETE FROM settings WHERE name = ?", (name,))
                if value is not None:
                    connection.execute(SETTINGS.insert(), SETTINGS.row((name, value)))
                changed.append(name)
            try:
                known: Totals | None = Totals.read(connection, path)
            except DamagedCatalogError:
                known = None
            totals = (known or Totals.counted(connection)).with_settings(connection)
            if totals != known:
                totals.write(connection)
                changed += [] if changed else [""]
        database.checkpoint()
    return tuple(changed)


def _restored(
    name: str, digest: int | None, candidates: Iterable[Any], defaults: Mapping[str, Any]
) -> str | None:
    """The value of a setting as JSON; None where nothing tells it."""
    for text in map(to_json, candidates):
        if SETTINGS.digest((name, text)) == digest:
            return text
    return to_json(defaults[name]) if name in defaults else None
