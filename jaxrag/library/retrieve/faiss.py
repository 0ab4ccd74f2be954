"""FAISS over the rows of a ``RowFile``: compared one by one when few, an inverted file when many.

The rows are the truth; the FAISS index is made from them and kept in memory. A trained inverted
file (IVF) is saved beside them as ``g.ivf``, replaced atomically, and caught up with the rows when
it is loaded. Its last 8 bytes are the xxh3-64 of those before; where they differ it is not used.
Removal and filters select rows while searching.
"""

import contextlib
import math
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxrag.base.errors import RetrievalError, StoreError
from jaxrag.library.retrieve.base import (
    NOTHING,
    Ids,
    Mode,
    Vectors,
    checked_ids,
    checked_k,
    checked_rows,
    checked_vectors,
)
from jaxrag.library.retrieve.exact import search_rows
from jaxrag.library.retrieve.rows import RowFile, Rows

_IVF_FROM = 50_000  # rows
_PROBES = 16  # lists that a question is compared with
_SAMPLE = 64  # rows a list that clusters are learned from
_GROWTH = 4  # learn new clusters when there are this many times as many rows
_ADDED_ROWS = 65_536  # at a time
_DIGEST_BYTES = 8
_READ_BYTES = 1 << 22  # at a time, for a digest


class FaissIndex:
    """A vector index that FAISS searches. See ``VectorIndex`` and ``RowFile``.

    From 50,000 rows on a search without ``allowed`` is approximate; one with it is always exact.
    """

    def __init__(self, rows: RowFile, mode: Mode) -> None:
        """Use ``FaissIndex.open``."""
        self._rows = rows
        self._mode = mode
        self._lock = threading.RLock()
        self._generation = -1
        self._index: Any = None

    @classmethod
    def open(cls, folder: Path, dim: int, *, mode: Mode = "rw") -> Self:
        """Open the index in a folder.

        Raises RetrievalError when FAISS is not installed, and what ``RowFile.open`` does.
        """
        _faiss()
        index = cls(RowFile.open(folder, dim, "faiss", mode=mode), mode)
        index._current()
        return index

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add vectors [N, E] under ids [N]; see ``VectorIndex``."""
        self._rows.append(*checked_rows(ids, vectors, self._rows.dim))
        self._current()

    def remove(self, ids: Ids) -> None:
        """Forget ids; see ``VectorIndex``."""
        self._rows.remove(checked_ids(ids))

    def search(
        self, vectors: Vectors, k: int, allowed: Ids | None = None
    ) -> tuple[Ids, NDArray[np.float32]]:
        """The up to ``k`` best of each query [Q, E]; see ``VectorIndex``."""
        faiss = _faiss()
        queries, k = checked_vectors(vectors, self._rows.dim), checked_k(k)
        if allowed is not None:
            return search_rows(self._rows.refresh(), queries, k, allowed)
        with self._lock:
            rows = self._current()
            options: dict[str, Any] = {}
            bits = np.packbits(rows.live, bitorder="little")  # lives until the search is over
            if not rows.live.all():
                options["sel"] = faiss.IDSelectorBitmap(bits.size, faiss.swig_ptr(bits))
            if self._is_trained():
                parameters = faiss.SearchParametersIVF(nprobe=_PROBES, **options)
            else:
                parameters = faiss.SearchParameters(**options)
            scores, found = self._index.search(queries, k, params=parameters)
        missing = found < 0
        ids = np.where(missing, NOTHING, rows.ids[found] if len(rows.ids) else found)
        return ids, np.where(missing, np.float32(-np.inf), scores)

    def get(self, ids: Ids) -> Vectors:
        """The vectors of ids [N], float32 [N, E]; see ``VectorIndex``."""
        return self._rows.get(checked_ids(ids))

    def ids(self) -> Ids:
        """Every id, ascending."""
        rows = self._rows.refresh()
        return np.sort(rows.ids[rows.live])

    def __len__(self) -> int:
        return int(self._rows.refresh().live.sum())

    def close(self) -> None:
        """Free the memory."""
        with self._lock:
            self._index, self._generation = None, -1

    def _is_trained(self) -> bool:
        return hasattr(self._index, "nprobe")

    def _current(self) -> Rows:
        """The rows as they are now, all of them in the FAISS index."""
        faiss = _faiss()
        with self._lock:
            rows = self._rows.refresh()
            if rows.generation != self._generation:
                self._index, self._generation = faiss.IndexFlatIP(self._rows.dim), rows.generation
            large = len(rows.ids) >= _IVF_FROM
            if large and not self._is_trained():
                self._load(rows)
            if large and self._mode == "rw" and self._clusters_are_few(len(rows.ids)):
                self._train(rows)
            self._catch_up(rows)
            return rows

    def _clusters_are_few(self, count: int) -> bool:
        return not self._is_trained() or count > _GROWTH * self._index.nlist**2

    def _catch_up(self, rows: Rows) -> None:
        for start in range(self._index.ntotal, len(rows.ids), _ADDED_ROWS):
            self._index.add(np.ascontiguousarray(rows.vectors[start : start + _ADDED_ROWS]))

    def _train(self, rows: Rows) -> None:
        faiss = _faiss()
        lists = math.isqrt(len(rows.ids))
        index = faiss.IndexIVFFlat(
            faiss.IndexFlatIP(self._rows.dim), self._rows.dim, lists, faiss.METRIC_INNER_PRODUCT
        )
        stride = max(1, len(rows.ids) // (lists * _SAMPLE))
        index.train(np.ascontiguousarray(rows.vectors[::stride]))
        self._index = index
        self._catch_up(rows)
        new = self._path.with_name(f"{rows.generation}.{os.getpid()}.new.ivf")
        try:
            faiss.write_index(index, str(new))
            with open(new, "r+b") as file:
                file.write(_digest(file, os.fstat(file.fileno()).st_size))
            os.replace(new, self._path)
        except (RuntimeError, OSError) as error:
            new.unlink(missing_ok=True)
            reason = str(error).splitlines()[0]
            raise StoreError(
                f"{self._path}: {reason}; check the disk, its free space and your permissions"
            ) from error

    def _load(self, rows: Rows) -> None:
        """Use the saved inverted file, if there is one that belongs to these rows."""
        if not self._path.is_file():
            return
        with contextlib.suppress(RuntimeError):  # not readable: the rows are searched without it
            if not _is_whole(self._path):
                return
            index = _faiss().read_index(str(self._path))
            if index.d == self._rows.dim and index.ntotal <= len(rows.ids):
                self._index = index

    @property
    def _path(self) -> Path:
        return self._rows.folder / f"{self._generation}.ivf"


def _digest(file: BinaryIO, nbytes: int) -> bytes:
    """The xxh3-64 of the next bytes of a file."""
    state = xxhash.xxh3_64()
    while nbytes and (data := file.read(min(nbytes, _READ_BYTES))):
        state.update(data)
        nbytes -= len(data)
    return state.digest()


def _is_whole(path: Path) -> bool:
    """Whether a file is what was written: it ends in the digest of what stands before."""
    with open(path, "rb") as file:
        digest = _digest(file, max(0, os.fstat(file.fileno()).st_size - _DIGEST_BYTES))
        return file.read() == digest


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise RetrievalError(
            "the index 'faiss' needs the package faiss-cpu; pip install faiss-cpu, or use 'exact'"
        ) from None
    return faiss
