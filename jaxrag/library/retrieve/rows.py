"""Vectors by id in two appendable files: a row counts only once it is durable.

::

    rows.json     {"dim": E, "format": 1, "generation": g}, replaced atomically
    g.vectors     float32 rows of E values, one behind the other
    g.log         frames: count int64, digest of the frame, digest of this header, |count| ids
    lock          held while something is written

A frame with a count n > 0 says that the next n rows of ``g.vectors`` have these ids; its digest
(xxh3-64) covers ids and rows. A frame with n < 0 forgets its ids. Rows are made durable before
their frame is written, so what a crash leaves behind the last whole frame is overwritten by the
next writer. A last frame that was damaged later looks the same from here; the catalog tells it
apart, which names ids only after their vectors are durable (``knowledge_base.vectors``). An id
that is added again gets the new row; the old one is dead. When most rows are dead the rest is
copied to generation g + 1. All numbers are little-endian.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxrag.base.errors import StoreError, disk_errors
from jaxrag.library.retrieve.base import Ids, Mode, Vectors, in_order, refuse_missing

FORMAT = 1
_META = "rows.json"
_HEADER = struct.Struct("<qQQ")
_MIN_DEAD = 1024  # fewer dead rows than this are not worth a copy
_COPIED_ROWS = 16384  # at a time, while compacting
_TRIES = 20  # to open a generation while writers compact


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """What the files hold at one moment.

    Attributes:
      generation: of the files.
      log_bytes: how much of the log was read.
      ids: int64 [R], the id of every row.
      live: bool [R], whether the row still counts.
      vectors: float32 [R, E], mapped from the file; of a dead row too.
    """

    generation: int
    log_bytes: int
    ids: Ids
    live: NDArray[np.bool_]
    vectors: Vectors


class RowFile:
    """The vectors in one folder; any number of processes and threads may read and write them.

    Attributes:
      folder: where it lies.
      dim: E.
    """

    def __init__(self, folder: Path, dim: int, mode: Mode) -> None:
        """Use ``RowFile.open``."""
        self.folder = folder
        self.dim = dim
        self._mode = mode
        self._lock = threading.RLock()
        self._state = self._nothing(-1)

    @classmethod
    def open(cls, folder: Path, dim: int, name: str, *, mode: Mode = "rw") -> Self:
        """Open the files in a folder, or make them when they are missing and the mode is "rw".

        Raises StoreError when there is nothing to read, for another dim or format, and for rows
        whose bytes do not match their digests. ``name`` is the index's in errors.
        """
        rows = cls(folder, dim, mode)
        with disk_errors(folder):
            if not (folder / _META).is_file():
                if mode == "r":
                    raise refuse_missing(folder, name)
                rows._create()
            if mode == "rw":
                with rows._exclusive():
                    rows._sweep(rows._generation())
        rows.refresh()
        return rows

    def refresh(self) -> Rows:
        """The rows as they are now, whoever wrote them; what is returned never changes."""
        with self._lock, disk_errors(self.folder):
            for _ in range(_TRIES):
                try:
                    self._state = self._read(self._state)
                    return self._state
                except FileNotFoundError:  # compacted between two steps: start with the new files
                    continue
            raise StoreError(f"{self.folder}: files vanish while they are read; restore the folder")

    def append(self, ids: Ids, vectors: Vectors) -> None:
        """Add rows (int64 [N], float32 [N, E], ids distinct); durable when it returns."""
        if not len(ids):
            return
        with self._changing() as rows:
            path = self._path(rows.generation, "vectors")
            _write(path, vectors.data.cast("B"), len(rows.ids) * self._row_bytes)
            digest = _digest(ids)
            digest.update(vectors.data)
            self._log(rows, _frame(len(ids), ids, digest.intdigest()))

    def get(self, ids: Ids) -> Vectors:
        """The rows of ids [N] in their order, float32 [N, E]; StoreError when one is missing."""
        rows = self.refresh()
        chosen = np.flatnonzero(rows.live & np.isin(rows.ids, ids))
        return in_order(ids, rows.ids[chosen], rows.vectors[chosen], self.folder)

    def remove(self, ids: Ids) -> None:
        """Forget ids; durable when it returns."""
        with self._changing() as rows:
            held = ids[np.isin(ids, rows.ids[rows.live])]
            if len(held):
                self._log(rows, _frame(-len(held), held, _digest(held).intdigest()))

    @property
    def _row_bytes(self) -> int:
        return 4 * self.dim

    def _nothing(self, generation: int) -> Rows:
        vectors = np.zeros((0, self.dim), np.float32)
        return Rows(generation, 0, np.zeros(0, np.int64), np.zeros(0, bool), vectors)

    def _path(self, generation: int, kind: str) -> Path:
        return self.folder / f"{generation}.{kind}"

    def _generation(self) -> int:
        data = (self.folder / _META).read_bytes()
        try:
            meta = json.loads(data.decode())
            found = (meta["format"], meta["dim"], int(meta["generation"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise StoreError(
                f"{self.folder / _META} is damaged; remove the folder and embed again"
            ) from None
        if found[0] != FORMAT:
            raise StoreError(
                f"{self.folder} has format {found[0]}, this version reads format {FORMAT}; remove "
                "the folder and embed again"
            )
        if found[1] != self.dim:
            raise StoreError(
                f"{self.folder} holds vectors of {found[1]} values, asked for {self.dim}; use the "
                "embedder it was made with"
            )
        return found[2]

    # Reading

    def _read(self, known: Rows) -> Rows:
        generation = self._generation()
        if generation != known.generation:
            known = self._nothing(generation)
        log = self._path(generation, "log")
        size = log.stat().st_size
        if size <= known.log_bytes:
            return known
        with open(log, "rb") as file:
            file.seek(known.log_bytes)
            data = file.read()
        path = self._path(generation, "vectors")
        count = path.stat().st_size // self._row_bytes
        vectors = (
            np.asarray(np.memmap(path, "<f4", "r", shape=(count, self.dim)))
            if count
            else known.vectors
        )
        named, added, offset = _parse(data, vectors[len(known.ids) :])
        if offset < len(data) and _resumes(data, offset):
            raise StoreError(
                f"{log} or its vectors do not match their digests at byte "
                f"{known.log_bytes + offset}; remove {self.folder} and embed again"
            )
        # An id's last event decides; events before it are dead.
        _, last = np.unique(named[::-1], return_index=True)
        final = np.zeros(len(named), bool)
        final[len(named) - 1 - last] = True
        ids = np.concatenate([known.ids, named[added]])
        live = np.concatenate([known.live & ~np.isin(known.ids, named), final[added]])
        return Rows(generation, known.log_bytes + offset, ids, live, vectors[: len(ids)])

    # Writing

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Rows]:
        """The rows as they are while nobody else writes; afterwards this object sees the change."""
        if self._mode == "r":
            raise StoreError(f"{self.folder} was opened for reading; open it with mode 'rw'")
        with self._lock, disk_errors(self.folder), self._exclusive():
            yield self.refresh()
            rows = self.refresh()
            dead = len(rows.ids) - int(rows.live.sum())
            if dead >= _MIN_DEAD and 2 * dead > len(rows.ids):
                self._compact(rows)
                self.refresh()

    def _log(self, rows: Rows, frame: bytes) -> None:
        path = self._path(rows.generation, "log")
        os.truncate(path, rows.log_bytes)  # what a killed writer left behind the last whole frame
        _write(path, memoryview(frame), rows.log_bytes)

    def _create(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _sync_folder(self.folder.parent)
        with self._exclusive():
            if not (self.folder / _META).is_file():
                self._begin(0)

    def _begin(self, generation: int) -> None:
        """Make the (written) files of a generation the ones that count."""
        for kind in ("vectors", "log"):
            self._path(generation, kind).touch()
        _sync_folder(self.folder)
        meta = {"dim": self.dim, "format": FORMAT, "generation": generation}
        new = self.folder / f"{_META}.new"
        new.unlink(missing_ok=True)
        _write(new, memoryview(json.dumps(meta).encode()), 0)
        os.replace(new, self.folder / _META)
        _sync_folder(self.folder)
        self._sweep(generation)

    def _compact(self, rows: Rows) -> None:
        generation = rows.generation + 1
        for kind in ("vectors", "log"):
            self._path(generation, kind).unlink(missing_ok=True)
        kept = np.flatnonzero(rows.live)
        digest = _digest(rows.ids[kept])
        for start in range(0, len(kept), _COPIED_ROWS):
            part = np.ascontiguousarray(rows.vectors[kept[start : start + _COPIED_ROWS]])
            digest.update(part.data)
            _write(self._path(generation, "vectors"), part.data.cast("B"), start * self._row_bytes)
        if len(kept):
            frame = _frame(len(kept), rows.ids[kept], digest.intdigest())
            _write(self._path(generation, "log"), memoryview(frame), 0)
        self._begin(generation)

    def _sweep(self, generation: int) -> None:
        """Remove the files of other generations; who reads them keeps what is open."""
        for path in self.folder.iterdir():
            number = path.name.split(".")[0]
            if path.suffix in (".vectors", ".log", ".ivf") and number != str(generation):
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keeps other writers out, in this process and in others."""
        with self._lock, open(self.folder / "lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _write(path: Path, data: memoryview, offset: int) -> None:
    """Make bytes at an offset of a file durable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while data:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(ids: Ids) -> xxhash.xxh3_64:
    return xxhash.xxh3_64(ids.astype("<i8", copy=False).data)


def _frame(count: int, ids: Ids, digest: int) -> bytes:
    start = struct.pack("<qQ", count, digest)
    return (
        start
        + struct.pack("<Q", xxhash.xxh3_64_intdigest(start))
        + ids.astype("<i8", copy=False).tobytes()
    )


def _header(data: bytes, offset: int) -> tuple[int, int] | None:
    """The count and digest of the frame that begins at ``offset``, None when none does."""
    if offset + _HEADER.size > len(data):
        return None
    count, digest, check = _HEADER.unpack_from(data, offset)
    if count == 0 or check != xxhash.xxh3_64_intdigest(data[offset : offset + 16]):
        return None
    return count, digest


def _parse(data: bytes, vectors: Vectors) -> tuple[Ids, NDArray[np.bool_], int]:
    """The ids that whole frames name, whether each was added, and where the last frame ends."""
    named, added, offset, row = [np.zeros(0, np.int64)], [np.zeros(0, bool)], 0, 0
    while (header := _header(data, offset)) is not None:
        count, digest = header
        start = offset + _HEADER.size
        if start + 8 * abs(count) > len(data) or (count > 0 and row + count > len(vectors)):
            break
        ids = np.frombuffer(data, "<i8", abs(count), start)
        actual = _digest(ids)
        if count > 0:
            actual.update(np.ascontiguousarray(vectors[row : row + count]).data)
            row += count
        if actual.intdigest() != digest:
            break
        named.append(ids)
        added.append(np.full(len(ids), count > 0))
        offset = start + ids.nbytes
    return np.concatenate(named), np.concatenate(added), offset


def _resumes(data: bytes, offset: int) -> bool:
    """Whether another frame begins behind the broken one: no crash leaves that, but damage does."""
    return any(_header(data, place) is not None for place in range(offset + 8, len(data), 8))
