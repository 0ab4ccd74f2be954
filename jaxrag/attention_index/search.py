"""Searching an index: keys by inner product, and all heads of a layer."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrag.attention_index import faiss_objects, lists
from jaxrag.attention_index.index import AttentionIndex
from jaxrag.attention_index.spec import Exact, Hnsw, Ivf, QueryLists, Spec, effort_of
from jaxrag.errors import RequestError, RetrievalError
from jaxrag.types import HostArray

_COUNTING = threading.Lock()  # FAISS counts for the whole process


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The best keys of each query head, best first.

    Attributes:
      ids: [..., G, k] int32 rows of the keys; -1 where fewer were found.
      scores: [..., G, k] float32 inner products, -inf there.
      scanned: [..., G] int64 keys compared with the query, centroids included; -1 where FAISS
        counts and was not asked to.
    """

    ids: HostArray
    scores: HostArray
    scanned: HostArray


class Searcher:
    """An open index; searches may run in parallel threads. Made by ``open_index``."""

    def __init__(
        self, index: AttentionIndex, engines: Sequence[Any], storage: Any, nbytes: int
    ) -> None:
        self.index = index
        self.nbytes = nbytes  # of keys and tables
        self._engines = engines
        self._storage = storage
        self._rows = index.rows() if len(index.wanted) else None

    def __len__(self) -> int:
        return len(self.index)

    def all_keys(self) -> HostArray:
        """Every key, [S, H] float32 in the caller's rows, to build again."""
        keys = np.empty((len(self), self.index.keys.dim), np.float32)
        keys[self.index.rows()] = self.index.keys.decode()
        return keys

    def search(
        self,
        queries: HostArray,
        k: int,
        *,
        effort: int | Sequence[int] | None = None,
        count: bool = False,
    ) -> Found:
        """The ``k`` keys with the largest inner product, for each query head.

        Args:
            queries: [G, H] float32, rotated as the keys are.
            k: keys wanted. All of them are found exactly.
            effort: ef or probes of this search, for all heads or one each; None takes the spec's.
            count: have FAISS count what it scans; counted searches run one at a time.

        Raises:
            RequestError: ``k`` or ``effort`` out of range.
            RetrievalError: queries of the wrong shape or number of heads.
        """
        queries = self._checked(queries, k)
        heads = len(queries)
        efforts = self._efforts(heads, effort)
        if k >= len(self):
            scores = queries @ self.index.keys.decode().T
            ids = np.broadcast_to(self.index.rows(), scores.shape)
            scanned = np.full(heads, len(self.index), np.int64)
        else:
            ids, scores, scanned = self._core(queries, k, efforts, count)
        return Found(*_best(ids, scores, k), scanned)

    def _checked(self, queries: HostArray, k: int) -> HostArray:
        dim, parts = self.index.keys.dim, self.index.parts
        if queries.ndim != 2 or queries.shape[1] != dim or parts not in (None, len(queries)):
            raise RetrievalError(
                f"queries of shape {list(queries.shape)}: expected [{parts or 'G'}, {dim}]"
            )
        if not 1 <= k <= len(self):
            raise RequestError(f"k={k} of {len(self)} keys: expected 1 to {len(self)}")
        return np.ascontiguousarray(queries, np.float32)

    def _efforts(self, heads: int, effort: int | Sequence[int] | None) -> list[int]:
        """One effort a head; 0 where the index has none."""
        given = effort_of(self.index.spec) or 0 if effort is None else effort
        efforts = [given] * heads if isinstance(given, int) else list(given)
        if len(efforts) != heads or (effort is not None and min(efforts) < 1):
            raise RequestError(f"effort={effort}: expected at least 1, or that for {heads} heads")
        return efforts

    def _core(
        self, queries: HostArray, k: int, efforts: Sequence[int], count: bool
    ) -> tuple[HostArray, HostArray, HostArray]:
        """Ids in the caller's rows, scores and counts of every head."""
        heads = len(queries)
        spec = self.index.spec
        if isinstance(spec, QueryLists):
            return self._lists(queries, k, efforts)
        ids = np.empty((heads, k), np.int64)
        scores = np.empty((heads, k), np.float32)
        scanned = np.full(heads, -1, np.int64)
        for head in range(heads):
            engine = self._engines[head if self.index.parts else 0]
            one = slice(head, head + 1)
            if count and not isinstance(spec, Exact):
                with _COUNTING:
                    _reset_counts()
                    scores[one], ids[one] = _walk(engine, spec, queries[one], k, efforts[head])
                    scanned[head] = _counted(engine, spec)
            else:
                scores[one], ids[one] = _walk(engine, spec, queries[one], k, efforts[head])
        if isinstance(spec, Exact):
            scanned[:] = len(self.index)
        missing = ids < 0
        found = ids if self._rows is None else self._rows[ids]
        return (
            np.where(missing, -1, found).astype(np.int32),
            np.where(missing, np.float32(-np.inf), scores),
            scanned,
        )

    def _lists(
        self, queries: HostArray, k: int, probes: Sequence[int]
    ) -> tuple[HostArray, HostArray, HostArray]:
        heads = len(queries)
        centroids, table = self.index.tables["centroids"], self.index.tables["table"]
        ids = np.full((heads, k), -1, np.int32)
        scores = np.full((heads, k), -np.inf, np.float32)
        scanned = np.empty(heads, np.int64)
        assert self._rows is not None
        for head, query in enumerate(queries):
            part = head if self.index.parts else 0
            some = lists.candidates(query, centroids[part], table[part], probes[head])
            scanned[head] = len(some) + len(centroids[part])
            kept, values = self._nearest_of(query, some, k)
            ids[head, : len(kept)], scores[head, : len(kept)] = self._rows[kept], values
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
    nbytes = index.keys.nbytes + index.nbytes
    match index.spec:
        case QueryLists():
            # FAISS decodes codes of 16 and 8 bits; it holds no keys for that.
            decoder = faiss_objects.storage_of(index.keys, empty=True)
            return Searcher(index, [], decoder, nbytes)
        case Ivf() | Hnsw():
            engine = faiss_objects.from_bytes(index.tables["faiss"])
            without = dataclasses.replace(index, tables={})
            return Searcher(without, [engine], engine, nbytes + index.keys.nbytes)
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
    return Searcher(held, engines or [storage], storage, nbytes)


def search_heads(
    searchers: Sequence[Searcher],
    queries: HostArray,
    k: int,
    pool: concurrent.futures.Executor | None = None,
    *,
    count: bool = False,
) -> Found:
    """Search the K indexes of a layer with queries [K, G, H]; results are [K, G, ...].

    With a ``pool`` of threads the heads are searched in parallel; FAISS releases the interpreter.
    """
    if len(searchers) != len(queries):
        raise RetrievalError(f"{len(queries)} KV heads of queries for {len(searchers)} indexes")

    def one(number: int) -> Found:
        return searchers[number].search(queries[number], k, count=count)

    numbers = range(len(searchers))
    found = list(map(one, numbers) if pool is None else pool.map(one, numbers))
    return Found(
        np.stack([each.ids for each in found]),
        np.stack([each.scores for each in found]),
        np.stack([each.scanned for each in found]),
    )


def _walk(
    engine: Any, spec: Spec, query: HostArray, k: int, effort: int
) -> tuple[HostArray, HostArray]:
    """One query [1, H] through a FAISS index."""
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


def _counted(engine: Any, spec: Spec) -> int:
    faiss = faiss_objects.faiss_module()
    if isinstance(spec, Ivf):
        return int(faiss.cvar.indexIVF_stats.ndis) + int(engine.nlist)
    return int(faiss.cvar.hnsw_stats.ndis)


def _best(ids: HostArray, scores: HostArray, k: int) -> tuple[HostArray, HostArray]:
    """The k best of each row, best first."""
    if scores.shape[1] > k:
        kept = np.argpartition(scores, scores.shape[1] - k, axis=1)[:, -k:]
        ids, scores = np.take_along_axis(ids, kept, 1), np.take_along_axis(scores, kept, 1)
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)
