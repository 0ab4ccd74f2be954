"""Building an index over the keys of one KV head, of any kind, and choosing its effort."""

import jax
import numpy as np

from jaxrag.base.errors import RetrievalError
from jaxrag.base.types import HostArray
from jaxrag.reuse.attention_index import faiss_objects, graph, lists
from jaxrag.reuse.attention_index.effort import choose
from jaxrag.reuse.attention_index.index import AttentionIndex
from jaxrag.reuse.attention_index.keys import Keys
from jaxrag.reuse.attention_index.knn import Knn, nearest, nearest_on_device
from jaxrag.reuse.attention_index.spec import (
    Exact,
    Hnsw,
    Ivf,
    ProjectedGraph,
    QueryLists,
    Spec,
    Trained,
    effort_of,
)

_ENTRY_RANKS = 8  # of every list; the key met there most often is where a walk starts
_NOBODY = np.empty(0, np.int32)


def build(
    keys: HostArray,
    queries: HostArray | None,
    spec: Spec,
    *,
    asked: HostArray | None = None,
    last: HostArray | None = None,
    k: int = 100,
    knn: Knn | None = None,
) -> AttentionIndex:
    """Index the keys of one KV head.

    Args:
        keys: [S, H] floating point, rotated to their positions (or to places inside a chunk).
        queries: [G, m, H] float32, training queries of the G query heads that share the keys,
            rotated to where questions will come from (``QueryBank.over``). Kinds that are not
            trained ignore them.
        spec: which kind, and its sizes.
        asked: [G, n, H] float32, queries of the same heads that nothing is trained on, rotated
            to where questions will come from. Where the spec leaves the effort open, it is chosen
            by them.
        last: [G, e, H] float32, likewise, of the prompt's end; where they are given, the effort is
            to be enough for these as well, taken by themselves.
        k: keys that a search will want; the effort is chosen for so many.
        knn: finds the keys that queries want; None: on the accelerator where JAX has one, else on
            the host.

    Returns:
        The index. It is exact, and ``note`` says why, with fewer keys than ``exact_below``, with
        fewer queries than ``min_queries``, and where a head would scan more than ``most_scanned``
        of the keys to reach ``target_recall``.

    Raises:
        RetrievalError: shapes that do not fit, keys that are not finite, or no FAISS.
    """
    if keys.ndim != 2 or 0 in keys.shape:
        raise RetrievalError(f"keys of shape {list(keys.shape)}: expected [S, H], not empty")
    if knn is None:
        knn = nearest if jax.default_backend() == "cpu" else nearest_on_device
    note = _why_exact(len(keys), queries, asked, last, spec)
    if note or isinstance(spec, Exact):
        return _exact(keys, spec, note)
    if isinstance(spec, Ivf | Hnsw):
        made = _of_keys(keys, spec)
    else:
        _check_queries(queries, keys, "training")
        made = _trained(np.asarray(keys, np.float32), np.asarray(queries, np.float32), spec, knn)
    if effort_of(spec) is not None:
        return made
    held = [np.asarray(some, np.float32) for some in (asked, last) if some is not None]
    for some in held:
        _check_queries(some, keys, "held-out")
    chosen = choose(made, np.asarray(keys, np.float32), held, k, knn)
    return _exact(keys, spec, chosen) if isinstance(chosen, str) else chosen


def _check_queries(queries: HostArray | None, keys: HostArray, which: str) -> None:
    if queries is None or queries.ndim != 3 or queries.shape[2] != keys.shape[1]:
        shape = None if queries is None else list(queries.shape)
        raise RetrievalError(
            f"{which} queries of shape {shape} for keys {list(keys.shape)}: expected [G, m, H]"
        )


def _exact(keys: HostArray, spec: Spec, note: str) -> AttentionIndex:
    exact = spec if isinstance(spec, Exact) else Exact(spec.storage)
    return AttentionIndex(exact, note, Keys.encode(keys, spec.storage), _NOBODY, {})


def _of_keys(keys: HostArray, spec: Ivf | Hnsw) -> AttentionIndex:
    stored = Keys.encode(keys, spec.storage)
    made = (
        faiss_objects.build_ivf(stored, spec)
        if isinstance(spec, Ivf)
        else faiss_objects.build_hnsw(stored, spec)
    )
    return AttentionIndex(spec, "", stored, _NOBODY, {"faiss": faiss_objects.to_bytes(made)})


def _why_exact(
    count: int,
    queries: HostArray | None,
    asked: HostArray | None,
    last: HostArray | None,
    spec: Spec,
) -> str:
    if isinstance(spec, Exact):
        return ""
    if count < spec.exact_below:
        return f"exact: {count} keys, fewer than exact_below={spec.exact_below}"
    if isinstance(spec, Trained):
        given = sum(0 if some is None else some.shape[1] for some in (queries, asked, last))
        if given < spec.min_queries:
            return f"exact: {given} training queries, fewer than min_queries={spec.min_queries}"
    if asked is None and last is None and effort_of(spec) is None:
        return "exact: no queries to choose the effort of a search by; say ef or probes"
    return ""


def _trained(
    keys: HostArray,
    queries: HostArray,
    spec: Trained,
    knn: Knn,
) -> AttentionIndex:
    heads = [knn(head, keys, min(spec.knn, len(keys))).ids for head in queries]
    met = np.bincount(np.concatenate([ids.ravel() for ids in heads]), minlength=len(keys))
    order = np.argsort(-met, kind="stable")
    wanted = order[: np.count_nonzero(met)].astype(np.int32)
    inverse = np.empty(len(keys), np.int32)
    inverse[order] = np.arange(len(keys), dtype=np.int32)
    heads = [inverse[ids] for ids in heads]
    if spec.share == "group":
        heads, queries = [np.concatenate(heads)], queries.reshape(1, -1, queries.shape[2])
    tables = (
        _lists(heads, queries, spec)
        if isinstance(spec, QueryLists)
        else _graphs(heads, keys[wanted], spec)
    )
    stored = Keys.encode(keys[order], spec.storage)
    return AttentionIndex(spec, "", stored, wanted, tables)


def _graphs(heads: list[HostArray], keys: HostArray, spec: ProjectedGraph) -> dict[str, HostArray]:
    degree = spec.degree * (2 if spec.share == "group" else 1)
    tables: dict[str, HostArray] = {}
    entries = []
    for number, found in enumerate(heads):
        tables[f"links_{number}"] = graph.project(found, len(keys), degree, spec.span, spec.top)
        entries.append(int(np.bincount(found[:, :_ENTRY_RANKS].ravel()).argmax()))
    return {**tables, "entries": np.array(entries, np.int32)}


def _lists(heads: list[HostArray], queries: HostArray, spec: QueryLists) -> dict[str, HostArray]:
    made = []
    for found, head in zip(heads, queries, strict=True):
        centroids, cluster_of = lists.cluster(head, spec.clusters, spec.rounds, spec.seed)
        made.append((centroids, lists.members(found, cluster_of, len(centroids), spec.cap)))
    width = max(table.shape[1] for _, table in made)
    padded = [
        np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=-1)
        for _, table in made
    ]
    return {
        "centroids": np.stack([centroids for centroids, _ in made]),
        "table": np.stack(padded),
    }
