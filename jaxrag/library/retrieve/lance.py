"""Vectors in a LanceDB table: no index for small tables, IVF_FLAT above, old versions cleaned up.

LanceDB does not notice a damaged value. So every row has the xxh3-64 of its id and vector in the
column ``check``, and all rows are held against theirs when the table is opened.

An index of the kind "exact" compares every row: it reads the table into memory, and again when it
has changed, as LanceDB takes ten times as long for the same.

What the rows look like is in ``lance_rows``; no other file knows LanceDB.
"""

import contextlib
import datetime
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from jaxrag.base.errors import RetrievalError, StoreError
from jaxrag.kv.store.chunk_store import Mode
from jaxrag.library.retrieve import index_files, probes
from jaxrag.library.retrieve.base import (
    NOTHING,
    Ids,
    Vectors,
    checked_ids,
    checked_k,
    checked_rows,
    checked_vectors,
    in_order,
)
from jaxrag.library.retrieve.lance_rows import (
    CHECK,
    NUMBER,
    among,
    arrow_rows,
    checks,
    lancedb_and_arrow,
    numbered,
    schema,
)
from jaxrag.library.retrieve.row_ids import RowIds

KINDS = ("exact", "lance")

_TABLE = "chunks"
_INDEX_FROM = 20_000  # rows; below, comparing all of them is as fast
_ROWS_OF_PARTITION = 8192  # LanceDB joins and splits partitions until they are about as large
_EVERY = 1 << 20  # partitions: more than there are
_BEYOND = 1.5  # times as many candidates as should hold enough of those that a filter allows
_DEEPER = 1.25  # times as many partitions where a filter has the best lie deeper
_OPTIMIZE_EVERY = 20  # changes: small files are merged, new rows indexed, old versions removed
_KEPT = datetime.timedelta(hours=1)  # versions this young may be in use by a reader
_MOMENT = datetime.timedelta(milliseconds=1)  # the least that LanceDB takes without a warning
_LISTED_IDS = 10_000  # most ids that are written into a query
_DEEPEST = 5_000  # candidates that are looked through before allowed ids are listed instead
_MOST_HELD = 1 << 30  # bytes of vectors that ``getter`` holds
_SCORES = 1 << 24  # products of an exact search that are held at once


def kind_named(name: str) -> str:
    """The kind of index of that name, one of KINDS; RetrievalError for an unknown one."""
    if name not in KINDS:
        raise RetrievalError(f"index {name!r}: expected one of {', '.join(KINDS)}")
    return name


class VectorIndex:
    """Vectors by chunk id, searched by inner product (the cosine, for vectors of length 1).

    What it returned from ``add`` or ``remove`` is durable. It may hold ids that no catalog knows:
    whoever searches drops them. LanceDB's commits are optimistic: any number of processes may read
    and write, and an object sees what another process added at its next search. Files that cannot
    be read or written raise StoreError, vectors of another shape RequestError.

    Attributes:
      exact: whether every row is compared; else those of some partitions are from 20,000 rows on
        (``retrieve.probes``), and filtered searches look further until they have found enough.
    """

    def __init__(self, folder: Path, dim: int, exact: bool, mode: Mode) -> None:
        """Use ``VectorIndex.open``."""
        self.exact = exact
        self._folder = folder
        self._dim = dim
        self._mode = mode
        self._changes = 0  # since the last optimize
        self._indexed = False  # nothing is left to index
        self._lock = threading.RLock()
        self._change_lock = threading.RLock()  # nobody who reads waits for it; taken first
        self._held: tuple[int, Ids, Vectors] | None = None  # version of the table, and its rows
        self.trusted = True  # every file of the index is as it was written
        self._probes: probes.Probes | None = None  # as read or measured last
        self._table, self._row_ids = self._open()

    @classmethod
    def open(cls, folder: Path, dim: int, kind: str = "lance", *, mode: Mode = "rw") -> Self:
        """Open the table in a folder, or make it when it is missing and the mode is "rw".

        Raises RetrievalError for an unknown kind and when LanceDB is not installed, StoreError when
        there is nothing to read, or it holds vectors of another length or rows that differ from
        their digests.
        """
        return cls(folder, dim, kind_named(kind) == "exact", mode)

    @property
    def _path(self) -> Path:
        return self._folder / f"{_TABLE}.lance"

    @property
    def _index_files(self) -> Path:
        return self._path / "_indices"

    def _open(self) -> tuple[Any, RowIds]:
        """The table that there is, or that is made, and the ids of its rows."""
        if not self._path.is_dir() and self._mode == "r":
            raise StoreError(
                f"{self._folder} holds no vector index; open the knowledge base for writing with "
                "its embedder to make it again"
            )
        with _errors(self._folder):
            table = self._make()
            found = table.schema.field("vector").type.list_size
        if found != self._dim:
            raise StoreError(
                f"{self._folder} holds vectors of {found} values, asked for {self._dim}; use the "
                "embedder it was made with"
            )
        self._check_rows(table)
        self.trusted = self.exact or index_files.are_whole(self._folder, self._index_files)
        return table, RowIds(self._path, partial(numbered, table))

    def _make(self) -> Any:
        """The table, made where it is missing."""
        lancedb, _ = lancedb_and_arrow()
        # A reader looks for a newer version at every search.
        database = lancedb.connect(self._folder, read_consistency_interval=datetime.timedelta(0))
        if self._path.is_dir():
            return database.open_table(_TABLE)
        return database.create_table(_TABLE, schema=schema(self._dim), exist_ok=True)

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add vectors [N, E] under ids [N] >= 0; an id that is there gets the new vector."""
        ids, vectors = checked_rows(ids, vectors, self._dim)
        if not len(ids):
            return
        rows = arrow_rows(ids, vectors, self._dim)
        with self._changing():
            merge = self._table.merge_insert("id")
            merge.when_matched_update_all().when_not_matched_insert_all().execute(rows)

    def remove(self, ids: Ids) -> None:
        """Forget ids [N]; those that are not there are passed over."""
        ids = checked_ids(ids)
        if not len(ids):
            return
        with self._changing():
            for start in range(0, len(ids), _LISTED_IDS):
                self._table.delete(among(ids[start : start + _LISTED_IDS]))

    def collect(self, grace_seconds: float) -> None:
        """Free the bytes of rows that left, and of versions of the table, longer ago than that.

        A row that leaves is only marked. Where a file's marks are older than the grace its other
        rows are written anew. A file has up to 1,048,576 rows.
        """
        if self._mode == "r":
            return
        younger = max(datetime.timedelta(seconds=grace_seconds), _MOMENT)
        with self._change_lock, _errors(self._folder), _unless_in_conflict():
            self._table.optimize(cleanup_older_than=younger)
            now = time.time()
            old = [mark for mark in self._marks() if now - mark.stat().st_mtime >= grace_seconds]
            for fragment in {int(path.name.partition("-")[0]) for path in old}:
                rows = f"_rowid >= {fragment << 32} AND _rowid < {(fragment + 1) << 32}"
                self._table.update(where=rows, values_sql={"id": "id"})
            if old:
                self._table.optimize(cleanup_older_than=younger)
            self._record()

    def holds_rows_of(self, moment: float) -> bool:
        """Whether files may hold rows that left after a moment, in seconds since 1970."""
        with self._lock, _errors(self._folder):
            versions = [it["timestamp"].timestamp() for it in self._table.list_versions()]
            return any(self._marks()) or any(it <= moment for it in versions[:-1])

    def _marks(self) -> list[Path]:
        """Files that name rows which left, of all versions that are there."""
        return list((self._path / "_deletions").glob("[0-9]*"))  # others are of killed writers

    def search(
        self, vectors: Vectors, k: int, allowed: Ids | None = None
    ) -> tuple[Ids, NDArray[np.float32]]:
        """The up to ``k`` best of each query, best first, by inner product; equal ones by id.

        Args:
          vectors: float32 [Q, E].
          k: at least 1.
          allowed: int64 [M] ascending, the only ids that may be found; None allows all.

        Returns:
          ids int64 [Q, k], padded with -1; scores float32 [Q, k], padded with -inf.
        """
        queries, k = checked_vectors(vectors, self._dim), checked_k(k)
        ids = np.full((len(queries), k), NOTHING, np.int64)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        if not len(queries) or (allowed is not None and not len(allowed)):
            return ids, scores
        with _errors(self._folder):
            if self.exact:
                hits = self._compare_all(queries, k, allowed)
            elif allowed is None:
                hits = self._ask(queries, k, self._partitions())
            else:
                hits = self._ask_for_allowed(queries, k, allowed)
        for query, (named, score) in enumerate(hits):
            best = np.lexsort((named, -score))[:k]
            ids[query, : len(best)], scores[query, : len(best)] = named[best], score[best]
        return ids, scores

    def get(self, ids: Ids) -> Vectors:
        """The vectors of ids [N] in their order, float32 [N, E]; StoreError when one is missing."""
        requested = checked_ids(ids)
        return in_order(requested, *self._rows_of(requested), self._folder)

    def _rows_of(self, ids: Ids) -> tuple[Ids, Vectors]:
        """Of the rows with these ids those that are there: distinct ids and their vectors."""
        found, rows = [np.zeros(0, np.int64)], [np.zeros((0, self._dim), np.float32)]
        for start in range(0, len(ids), _LISTED_IDS):
            asked = np.unique(ids[start : start + _LISTED_IDS])
            with _errors(self._folder):
                ask = self._table.search().where(among(asked)).select(["id", "vector"])
                table = ask.limit(len(asked)).to_arrow()
            vectors = table["vector"].combine_chunks().flatten().to_numpy()
            found.append(table["id"].to_numpy().astype(np.int64))
            rows.append(vectors.reshape(-1, self._dim).astype(np.float32))
        named, first = np.unique(np.concatenate(found), return_index=True)
        return named, np.concatenate(rows)[first]

    def getter(self, count: int) -> Callable[[Ids], Vectors]:
        """``get`` for calls that ask for about ``count`` ids together, of the rows there are now.

        Where that is much of a table of up to 1 GiB, the table is read once and held.
        """
        rows = len(self)
        if 4 * count < rows or 4 * rows * self._dim > _MOST_HELD:
            return self.get
        with _errors(self._folder):
            ids, vectors = self._read(self._table)
        ids, vectors = ids[order := np.argsort(ids)], vectors[order]

        def get(requested: Ids) -> Vectors:
            requested = checked_ids(requested)
            places = np.minimum(np.searchsorted(ids, requested), len(ids) - 1)
            if np.array_equal(ids[places], requested):
                return vectors[places]
            return in_order(requested, ids, vectors, self._folder)  # an error names what is missing

        return get

    def ids(self) -> Ids:
        """Every id it holds, ascending, int64 [N]."""
        with _errors(self._folder):
            column = self._table.search().select(["id"]).to_arrow()["id"]
        return np.sort(column.to_numpy()).astype(np.int64)

    def __len__(self) -> int:
        with _errors(self._folder):
            return int(self._table.count_rows())

    def close(self) -> None:
        """Merge what the last changes left in small files."""
        with self._change_lock, _errors(self._folder):
            self._held = None
            if self._changes:
                self._optimize()
            self._row_ids.close()

    def _check_rows(self, table: Any) -> None:
        with _errors(self._folder):
            for batch in table.search().select(["id", "vector", CHECK]).to_batches():
                ids = batch.column("id").to_numpy()
                vectors = batch.column("vector").flatten().to_numpy().reshape(-1, self._dim)
                if not np.array_equal(checks(ids, vectors), batch.column(CHECK).to_numpy()):
                    raise ValueError("rows differ from their digests")

    def _compare_all(
        self, queries: Vectors, k: int, allowed: Ids | None
    ) -> list[tuple[Ids, NDArray[np.float32]]]:
        """The best ids and scores of each query, in no fixed order, and what is as good as they."""
        ids, vectors = self._rows()
        if allowed is not None:
            chosen = np.flatnonzero(np.isin(ids, allowed))
            ids, vectors = ids[chosen], vectors[chosen]
        found = []
        at_once = max(1, _SCORES // max(1, len(ids)))
        for start in range(0, len(queries), at_once):
            for scores in queries[start : start + at_once] @ vectors.T:
                least = np.partition(scores, -k)[-k] if k < len(ids) else -np.inf
                best = np.flatnonzero(scores >= least)
                found.append((ids[best], scores[best]))
        return found

    def _rows(self) -> tuple[Ids, Vectors]:
        """Every id and its vector, as they are now."""
        table = self._table
        with self._lock:
            version = table.version
            if self._held is None or self._held[0] != version:
                self._held = version, *self._read(table)
            return self._held[1:]

    def _read(self, table: Any) -> tuple[Ids, Vectors]:
        rows = table.search().select(["id", "vector"]).to_arrow()
        values = rows["vector"].combine_chunks().flatten().to_numpy()
        return rows["id"].to_numpy(), values.reshape(-1, self._dim)

    def _ask(
        self, queries: Vectors, limit: int, partitions: int | None, where: str | None = None
    ) -> list[tuple[Ids, NDArray[np.float32]]]:
        """Ids and scores of each query, in no fixed order; partitions None: of every row."""
        ask = (
            self._table.search(queries).distance_type("dot").select(["_distance"]).with_row_id(True)
        )
        ask = ask.limit(limit)
        if where is not None:
            ask = ask.where(where, prefilter=True)
        if partitions is None or not self.trusted:
            ask = ask.bypass_vector_index()
        else:
            ask = ask.minimum_nprobes(partitions)  # 0: as many more as filtered rows need
            ask = ask.maximum_nprobes(partitions if where is None else 0)
        rows = ask.to_arrow()
        numbers = rows[NUMBER].to_numpy().astype(np.int64)
        named = self._row_ids.of(numbers, self._table.count_rows)
        score = 1 - rows["_distance"].to_numpy().astype(np.float32)  # Lance's is 1 - product
        if "query_index" in rows.column_names:
            owner = rows["query_index"].to_numpy()
        else:
            owner = np.zeros(len(named), np.int32)
        there = named != NOTHING
        return [
            (named[chosen], score[chosen])
            for chosen in (there & (owner == query) for query in range(len(queries)))
        ]

    def _ask_for_allowed(
        self, queries: Vectors, k: int, allowed: Ids
    ) -> list[tuple[Ids, NDArray[np.float32]]]:
        """Search for so many that ``k`` allowed ones should be among them; if not, for more.

        Where that would be too many the allowed ids are listed, if there are few enough.
        """
        count = self._table.count_rows()
        limit = math.ceil(_BEYOND * k * max(1.0, count / len(allowed)))
        if limit > _DEEPEST and len(allowed) <= _LISTED_IDS:
            return self._ask(queries, k, self._partitions(), among(allowed))
        while True:
            partitions = None if limit >= count else math.ceil(_DEEPER * self._partitions())
            hits = []
            for named, score in self._ask(queries, min(limit, count), partitions):
                place = np.minimum(np.searchsorted(allowed, named), len(allowed) - 1)
                keep = allowed[place] == named
                hits.append((named[keep], score[keep]))
            if limit >= count or all(len(named) >= k for named, _ in hits):
                return hits
            limit *= 4

    def _partitions(self) -> int:
        """How many partitions a question is compared with."""
        with self._lock:
            if self._probes is None:
                self._probes = probes.read(self._folder) or probes.Probes(0, _EVERY)
            return self._probes.partitions

    def _measure_probes(self, count: int) -> None:
        """Find out how many partitions to compare, of an index that has grown."""
        known = probes.read(self._folder)
        if known is not None and known.serves(count):
            return
        ids = self.ids()
        _, queries = self._rows_of(ids[:: math.ceil(len(ids) / probes.ASKED)])  # others may remove
        exact = [named for named, _ in self._ask(queries, probes.DEPTH, None)]

        def ask(partitions: int) -> list[Ids]:
            return [named for named, _ in self._ask(queries, probes.DEPTH, partitions)]

        self._probes = probes.measured(count, 2 * math.ceil(count / _ROWS_OF_PARTITION), exact, ask)
        probes.write(self._folder, self._probes)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        if self._mode == "r":
            raise StoreError(f"{self._folder} was opened for reading; open it with mode 'rw'")
        with self._change_lock, _errors(self._folder):
            yield
            self._changes += 1
            if self._changes >= _OPTIMIZE_EVERY:
                self._optimize()
            if not self.exact and not (self._indexed and self._changes and self.trusted):
                self._index_when_large()

    def _optimize(self) -> None:
        with _unless_in_conflict():
            self._table.optimize(cleanup_older_than=_KEPT)
            self._changes = 0
            self._record()

    def _record(self) -> None:
        """What is in the index's files now is what was written."""
        if self.trusted:
            index_files.record(self._folder, self._index_files)

    def _index_when_large(self) -> None:
        lancedb, _ = lancedb_and_arrow()
        count = self._table.count_rows()
        if count >= _INDEX_FROM and not (self.trusted and len(self._table.list_indices()) == 2):
            partitions = math.ceil(count / _ROWS_OF_PARTITION)
            vectors = lancedb.index.IvfFlat(distance_type="dot", num_partitions=partitions)
            with _unless_in_conflict():
                self._table.create_index("id", config=lancedb.index.BTree())
                self._table.create_index("vector", config=vectors)
                if not self.trusted:  # files of before stay as long as another writer may need them
                    index_files.forget(self._folder)
                    self.trusted = True
                self._record()
        self._indexed = count >= _INDEX_FROM and len(self._table.list_indices()) == 2
        if self._indexed:
            self._measure_probes(count)


@contextlib.contextmanager
def _unless_in_conflict() -> Iterator[None]:
    """Upkeep gives way to another process that changes the table; the next change tries again."""
    try:
        yield
    except RuntimeError as error:
        if "conflict" not in str(error).lower():
            raise


@contextlib.contextmanager
def _errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (StoreError, RetrievalError):
        raise
    except Exception as error:  # of a damaged table LanceDB raises whatever comes, also RustPanic
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise StoreError(
            f"{folder}: LanceDB: {reason}; check the disk, its free space and your permissions, or "
            "remove the folder and embed again"
        ) from error
