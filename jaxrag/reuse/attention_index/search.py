"""Searching an index: keys by inner product."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.reuse.attention_index import faiss_objects, lists
from jaxrag.reuse.attention_index.index import AttentionIndex
from jaxrag.reuse.attention_index.keys import Keys
from jaxrag.reuse.attention_index.spec import Exact, Hnsw, Ivf, QueryLists, Spec, effort_of

_SCANNED = 16384  # keys that are decoded at a time


class _Turns:
    """FAISS counts for the whole process: who counts searches alone, all others together."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._searching = 0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """At the same time as other searches that are not counted."""
        with self._condition:
            self._searching += 1
        try:
            yield
        finally:
            with self._condition:
                self._searching -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While no other search runs."""
        with self._condition:
            self._condition.wait_for(lambda: not self._searching)
            yield


_TURNS = _Turns()


@dataclasses.dataclass(frozen=True, eq=False)
class FoundKeys:
    """The best keys of each query, best first.

    Attributes:
      ids: [n, k] int32 rows of the keys; -1 where fewer were found.
      scores: [n, k] float32 inner products, -inf there.
      scanned: [n] int64 keys compared with the query, centroids included; -1 where FAISS
        counts and was not asked to.
    """

    ids: HostArray
    scores: HostArray
    scanned: HostArray


class Searcher:
    """An open index; searches may run in parallel threads. Made by ``open_index``."""

    def __init__(
        self, index: AttentionIndex, engines: Sequence[Any], storage: Any, nbytes: int, count: int
    ) -> None:
        self.index = index  # Ivf and Hnsw: without the keys, which FAISS has
        self._count = count
        self.nbytes = nbytes  # of keys and tables
        self._engines = engines
        self._storage = storage
        self._rows = index.rows() if len(index.wanted) else None

    def __len__(self) -> int:
        return self._count

    def all_keys(self) -> HostArray:
        """Every key, [S, H] float32 in the caller's rows, to build again."""
        if isinstance(self.index.spec, Ivf | Hnsw):
            return faiss_objects.vectors_of(self._storage)
        keys = np.empty((len(self), self.index.keys.dim), np.float32)
        keys[self.index.rows()] = self.index.keys.decode()
        return keys

    def search_head(
        self,
        head: int,
        queries: HostArray,
        k: int,
        *,
        effort: int | None = None,
        count: bool = False,
    ) -> FoundKeys:
        """The ``k`` keys with the largest inner product for each of some queries of one head.

        Args:
            head: of the group, to which the queries belong.
            queries: [n, H] float32, rotated as the keys are.
            k: keys wanted, 1 to all of them. All of them are found exactly.
            effort: ef or probes of this search; None takes the one that was chosen when the index
                was built, or the spec's.
            count: have FAISS count what it scans; counted searches run one at a time. Of several
                queries that it counts, each gets the mean.

        Returns:
            ids and scores [n, k], scanned [n].
        """
        queries = np.ascontiguousarray(queries, np.float32)
        effort = self.chosen_effort(head) if effort is None else effort
        ids, scores, scanned = self._of_head(head, queries, k, effort, count)
        return FoundKeys(*_best(ids, scores, k), scanned)

    def scan(self, query: HostArray, k: int) -> FoundKeys:
        """The best ``k`` keys for one query [H] of any head, whatever the kind: none is missed."""
        if isinstance(self.index.spec, Ivf | Hnsw):
            scores = np.einsum("sh,h->s", self.all_keys(), query)
        else:
            keys, rows = self.index.keys, range(0, len(self), _SCANNED)
            blocks = (keys.decode(slice(at, at + _SCANNED)) for at in rows)
            scores = np.concatenate([np.einsum("sh,h->s", some, query) for some in blocks])
        best = np.argsort(-scores, kind="stable")[:k]
        ids = best if self._rows is None else self._rows[best]
        return FoundKeys(ids.astype(np.int32), scores[best], np.array(len(self)))

    @property
    def most_probes(self) -> int | None:
        """Lists or clusters that there are; None where a search probes none."""
        match self.index.spec:
            case QueryLists():
                return int(self.index.tables["table"].shape[1])
            case Ivf():
                return int(self._engines[0].nlist)
            case _:
                return None

    def kept_of(self, head: int) -> int | None:
        """Keys that a walk keeps anyway for a query head; None where nothing walks."""
        return (self.chosen_effort(head) or 1) if hasattr(self.index.spec, "ef") else None

    def chosen_effort(self, head: int) -> int:
        """The chosen effort of a query head, or the spec's; 0 where there is none."""
        return self.index.efforts[head] if self.index.efforts else effort_of(self.index.spec) or 0

    def _of_head(
        self, head: int, queries: HostArray, k: int, effort: int, count: bool
    ) -> tuple[HostArray, HostArray, HostArray]:
        """Ids in the caller's rows and scores [n, k] or more, in any order, and counts [n]."""
        keys, number = len(self), len(queries)
        everything = np.full(number, keys, np.int64)
        if k >= keys:
            scores = queries @ self.all_keys().T
            ids = np.arange(keys, dtype=np.int32)
            return np.broadcast_to(ids, scores.shape), scores, everything
        spec = self.index.spec
        if isinstance(spec, QueryLists):
            return self._lists(head, queries, k, effort)
        engine = self._engines[head if self.index.parts else 0]
        if isinstance(spec, Exact):
            with _TURNS.together():
                scores, ids = _walk(engine, spec, queries, k, effort)
            scanned = everything
        elif count:
            with _TURNS.alone():
                _reset_counts()
                scores, ids = _walk(engine, spec, queries, k, effort)
                scanned = np.full(number, _counted(engine, spec, number), np.int64)
        else:
            with _TURNS.together():
                scores, ids = _walk(engine, spec, queries, k, effort)
            scanned = np.full(number, -1, np.int64)
        missing = ids < 0
        found = ids if self._rows is None else self._rows[ids]
        return (
            np.where(missing, -1, found).astype(np.int32),
            np.where(missing, np.float32(-np.inf), scores),
            scanned,
        )

    def _lists(
        self, head: int, queries: HostArray, k: int, probes: int
    ) -> tuple[HostArray, HostArray, HostArray]:
        assert self._rows is not None
        part = head if self.index.parts else 0
        centroids, table = (self.index.tables[name][part] for name in ("centroids", "table"))
        ids = np.full((len(queries), k), -1, np.int32)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        scanned = np.empty(len(queries), np.int64)
        for row, query in enumerate(queries):
            some = lists.candidates(query, centroids, table, probes)
            scanned[row] = len(some) + len(centroids)
            kept, values = self._nearest_of(query, some, k)
            ids[row, : len(kept)], scores[row, : len(kept)] = self._rows[kept], values
        return ids, scores, scanned

    def _nearest_of(self, query: HostArray, some: HostArray, k: int) -> tuple[HostArray, HostArray]:
        """The k best of the keys ``some`` [n] of the index, in any order."""
        keys = self.index.keys
        if keys.storage == "float32":
            faiss = faiss_objects.faiss_module()
            values = np.empty(len(some), np.float32)
            at = some.astype(np.int64)
            faiss.fvec_inner_products_by_idx(
                faiss.swig_ptr(values),
                faiss.swig_ptr(query),
                faiss.swig_ptr(keys.codes),
                faiss.swig_ptr(at),
                keys.dim,
                1,
                len(some),
            )
        else:
            codes = keys.codes[some]
            values = self._storage.sa_decode(codes.view(np.uint8)) @ query
        if len(some) <= k:
            return some, values
        best = np.argpartition(values, len(some) - k)[-k:]
        return some[best], values[best]


def open_index(index: AttentionIndex) -> Searcher:
    """Make the FAISS objects that search an index; graphs of one index share one key storage.

    They hold copies of keys and links, which the searcher uses from then on: when the caller lets
    go of ``index`` there is one of each. Raises RetrievalError when FAISS is not installed or
    refuses a saved baseline.
    """
    nbytes, count = index.keys.nbytes + index.nbytes, len(index)
    match index.spec:
        case QueryLists():
            # FAISS decodes codes of 16 and 8 bits; it holds no keys for that.
            decoder = faiss_objects.storage_of(index.keys, empty=True)
            return Searcher(index, [], decoder, nbytes, count)
        case Ivf() | Hnsw():
            engine = faiss_objects.from_bytes(index.tables["faiss"])
            none = Keys(index.keys.codes[:0].copy(), index.keys.span)
            without = dataclasses.replace(index, keys=none, tables={})
            return Searcher(without, [engine], engine, nbytes, count)
    storage = faiss_objects.storage_of(index.keys)
    entries = index.tables.get("entries", ())
    engines = [
        faiss_objects.graph_over(storage, index.tables[f"links_{part}"], int(entry))
        for part, entry in enumerate(entries)
    ]
    held = dataclasses.replace(
        index,
        keys=faiss_objects.keys_in(storage, index.keys),
        tables={name: table for name, table in index.tables.items() if name == "entries"},
    )
    return Searcher(held, engines or [storage], storage, nbytes, count)


def _walk(
    engine: Any, spec: Spec, query: HostArray, k: int, effort: int
) -> tuple[HostArray, HostArray]:
    """Queries [n, H] through a FAISS index."""
    faiss = faiss_objects.faiss_module()
    scores: HostArray
    ids: HostArray
    if isinstance(spec, Exact):
        scores, ids = engine.search(query, k)
        return scores, ids
    if isinstance(spec, Ivf):
        parameters = faiss.SearchParametersIVF(nprobe=effort)
    else:
        parameters = faiss.SearchParametersHNSW(efSearch=max(effort, k))
    scores, ids = engine.search(query, k, params=parameters)
    return scores, ids


def _reset_counts() -> None:
    faiss = faiss_objects.faiss_module()
    faiss.cvar.hnsw_stats.reset()
    faiss.cvar.indexIVF_stats.reset()


def _counted(engine: Any, spec: Spec, queries: int) -> int:
    """Keys compared with each of so many queries, on average."""
    faiss = faiss_objects.faiss_module()
    if isinstance(spec, Ivf):
        return int(faiss.cvar.indexIVF_stats.ndis) // queries + int(engine.nlist)
    return int(faiss.cvar.hnsw_stats.ndis) // queries


def _best(ids: HostArray, scores: HostArray, k: int) -> tuple[HostArray, HostArray]:
    """The k best of each row, best first."""
    if scores.shape[1] > k:
        kept = np.argpartition(scores, scores.shape[1] - k, axis=1)[:, -k:]
        ids, scores = np.take_along_axis(ids, kept, 1), np.take_along_axis(scores, kept, 1)
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)
