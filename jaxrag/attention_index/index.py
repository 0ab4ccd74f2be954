"""An index over the keys of one (layer, KV head): built once, arrays only, saved by name."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrag.attention_index import faiss_objects, graph, lists
from jaxrag.attention_index.keys import Keys
from jaxrag.attention_index.knn import Neighbours, nearest
from jaxrag.attention_index.spec import (
    Exact,
    Hnsw,
    Ivf,
    ProjectedGraph,
    QueryLists,
    RoarGraph,
    Spec,
    Trained,
    spec_from,
    table_of,
)
from jaxrag.errors import RetrievalError
from jaxrag.types import HostArray

_ENTRY_RANKS = 8  # of every list; the key met there most often is where a walk starts


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionIndex:
    """Keys of one KV head with what finds the best of them; E parts, a query head each or one.

    Keys are kept in an order of their own, those that a training query wants first and the most
    wanted ones in front: a search touches few cache lines outside them. Only those W keys are in
    the graph or the lists. Results are in the caller's rows.

    Attributes:
      spec: what was built; ``Exact`` where the spec asked for that below a number of keys.
      note: why it is exact although another kind was asked for; empty otherwise.
      keys: S keys in the index's order.
      wanted: [W] int32 the caller's rows of the first W keys.
      tables: by kind, "links_E" [W, degree] int32 and "entries" [E] int32; "centroids" [E, C, H]
        float32 and "table" [E, C, width] int32; "faiss" uint8; or none.
    """

    spec: Spec
    note: str
    keys: Keys
    wanted: HostArray
    tables: Mapping[str, HostArray]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def parts(self) -> int | None:
        """E: query heads that have a graph or lists of their own; None where any may ask."""
        match self.spec:
            case ProjectedGraph(share="q_head") | RoarGraph(share="q_head"):
                return len(self.tables["entries"])
            case QueryLists(share="q_head"):
                return len(self.tables["table"])
            case _:
                return None

    @property
    def nbytes(self) -> int:
        """Bytes beside the keys (of a FAISS baseline: beside the copy of the keys inside it)."""
        tables = sum(int(table.nbytes) for table in self.tables.values())
        inside = self.keys.nbytes if "faiss" in self.tables else 0
        return tables - inside + int(self.wanted.nbytes)

    def rows(self) -> HostArray:
        """[S] int32 the caller's row of each key in the index's order."""
        return _order(self.wanted, len(self.keys))

    def tables_to_arrays(self) -> dict[str, HostArray]:
        """Everything but the keys, by name; ``from_tables`` puts them back over the same keys."""
        shape = [len(self.keys), self.keys.dim]
        head = {"spec": table_of(self.spec), "note": self.note, "keys": shape}
        text = np.frombuffer(json.dumps(head, sort_keys=True).encode(), np.uint8).copy()
        return {"head": text, "wanted": self.wanted, **self.tables}

    def to_arrays(self) -> dict[str, HostArray]:
        """Everything by name, for ``numpy.savez`` or a store."""
        span = {} if self.keys.span is None else {"key_span": self.keys.span}
        return {**self.tables_to_arrays(), "key_codes": self.keys.codes, **span}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, HostArray]) -> "AttentionIndex":
        """The index of ``to_arrays``. Raises RetrievalError when arrays are missing or odd."""
        rest = {name: np.asarray(array) for name, array in arrays.items()}
        codes, span = _take(rest, "key_codes"), rest.pop("key_span", None)
        return cls._from(rest, Keys(codes, span))

    @classmethod
    def from_tables(cls, arrays: Mapping[str, HostArray], keys: HostArray) -> "AttentionIndex":
        """The index of ``tables_to_arrays`` over its keys [S, H], in the caller's rows."""
        rest = dict(arrays)
        wanted = _take(rest, "wanted")
        spec, _, shape = _head(_take(rest, "head"))
        if list(keys.shape) != shape:
            raise RetrievalError(
                f"keys of shape {list(keys.shape)}: the saved index is of {shape}; build it again"
            )
        stored = Keys.encode(keys[_order(wanted, len(keys))], spec.storage)
        return cls._from(dict(arrays), stored)

    @classmethod
    def _from(cls, arrays: dict[str, HostArray], keys: Keys) -> "AttentionIndex":
        spec, note, shape = _head(_take(arrays, "head"))
        if keys.storage != spec.storage or list(keys.codes.shape) != shape:
            raise RetrievalError(
                f"keys are {keys.storage} {list(keys.codes.shape)}, expected {spec.storage} "
                f"{shape}; build the index again"
            )
        wanted = _take(arrays, "wanted")
        made = cls(spec, note, keys, wanted, arrays)
        _check(made)
        return made


def build(
    keys: HostArray,
    queries: HostArray | None,
    spec: Spec,
    *,
    knn: Callable[[HostArray, HostArray, int], Neighbours] = nearest,
) -> AttentionIndex:
    """Index the keys of one KV head.

    Args:
        keys: [S, H] floating point, rotated to their positions (or to places inside a chunk).
        queries: [G, m, H] float32, training queries of the G query heads that share the keys,
            rotated to where questions will come from (``QueryBank.at``). Kinds that are not
            trained ignore them.
        spec: which kind, and its sizes.
        knn: finds the keys that training queries want; ``nearest_on_device`` where there is one.

    Returns:
        The index. With fewer keys than ``exact_below`` or fewer queries than ``min_queries`` it is
        exact, and ``note`` says why.

    Raises:
        RetrievalError: shapes that do not fit, keys that are not finite, or no FAISS.
    """
    if keys.ndim != 2 or 0 in keys.shape:
        raise RetrievalError(f"keys of shape {list(keys.shape)}: expected [S, H], not empty")
    note = _why_exact(len(keys), queries, spec)
    nobody = np.empty(0, np.int32)
    if note or isinstance(spec, Exact):
        exact = spec if isinstance(spec, Exact) else Exact(spec.storage)
        return AttentionIndex(exact, note, Keys.encode(keys, spec.storage), nobody, {})
    if isinstance(spec, Ivf | Hnsw):
        stored = Keys.encode(keys, spec.storage)
        made = (
            faiss_objects.build_ivf(stored, spec)
            if isinstance(spec, Ivf)
            else faiss_objects.build_hnsw(stored, spec)
        )
        return AttentionIndex(spec, "", stored, nobody, {"faiss": faiss_objects.to_bytes(made)})
    if queries is None or queries.ndim != 3 or queries.shape[2] != keys.shape[1]:
        shape = None if queries is None else list(queries.shape)
        raise RetrievalError(
            f"training queries of shape {shape} for keys {list(keys.shape)}: expected [G, m, H]"
        )
    return _trained(np.asarray(keys, np.float32), np.asarray(queries, np.float32), spec, knn)


def _why_exact(count: int, queries: HostArray | None, spec: Spec) -> str:
    if isinstance(spec, Exact):
        return ""
    if count < spec.exact_below:
        return f"exact: {count} keys, fewer than exact_below={spec.exact_below}"
    if isinstance(spec, Trained):
        given = 0 if queries is None else queries.shape[1]
        if given < spec.min_queries:
            return f"exact: {given} training queries, fewer than min_queries={spec.min_queries}"
    return ""


def _trained(
    keys: HostArray,
    queries: HostArray,
    spec: Trained,
    knn: Callable[[HostArray, HostArray, int], Neighbours],
) -> AttentionIndex:
    heads = [knn(head, keys, min(spec.knn, len(keys))).ids for head in queries]
    met = np.bincount(np.concatenate([found.ravel() for found in heads]), minlength=len(keys))
    order = np.argsort(-met, kind="stable")
    wanted = order[: np.count_nonzero(met)].astype(np.int32)
    inverse = np.empty(len(keys), np.int32)
    inverse[order] = np.arange(len(keys), dtype=np.int32)
    heads = [inverse[found] for found in heads]
    if spec.share == "group":
        heads, queries = [np.concatenate(heads)], queries.reshape(1, -1, queries.shape[2])
    tables = (
        _lists(heads, queries, spec)
        if isinstance(spec, QueryLists)
        else _graphs(heads, keys[wanted], spec)
    )
    stored = Keys.encode(keys[order], spec.storage)
    return AttentionIndex(spec, "", stored, wanted, tables)


def _graphs(
    heads: list[HostArray], keys: HostArray, spec: ProjectedGraph | RoarGraph
) -> dict[str, HostArray]:
    degree = spec.degree * (2 if spec.share == "group" else 1)
    tables: dict[str, HostArray] = {}
    entries = []
    for number, found in enumerate(heads):
        tables[f"links_{number}"] = (
            graph.project(found, len(keys), degree, spec.span, spec.top)
            if isinstance(spec, ProjectedGraph)
            else graph.project_roar(found, keys, degree)
        )
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


def _order(wanted: HostArray, count: int) -> HostArray:
    """The caller's rows in an index's order: the wanted ones, then the others ascending; int32."""
    if len(wanted) and not 0 <= wanted.min() <= wanted.max() < count:
        raise RetrievalError(f"wanted rows of a saved index are outside its {count} keys")
    rest = np.ones(count, bool)
    rest[wanted] = False
    return np.concatenate([wanted, np.flatnonzero(rest)]).astype(np.int32)


def _head(text: HostArray) -> tuple[Spec, str, list[int]]:
    """The spec, the note and the shape of the keys."""
    try:
        head: dict[str, Any] = json.loads(text.tobytes())
        return spec_from(head["spec"]), str(head["note"]), list(head["keys"])
    except (ValueError, KeyError, TypeError) as error:
        raise RetrievalError(f"the head of a saved index is damaged: {error}") from error


def _take(arrays: dict[str, HostArray], name: str) -> HostArray:
    if name not in arrays:
        raise RetrievalError(f"a saved index has no array {name!r}: expected it; build it again")
    return arrays.pop(name)


def _check(index: AttentionIndex) -> None:
    """Refuse tables that would send a search outside its arrays."""
    tables, count = index.tables, len(index.wanted)
    match index.spec:
        case ProjectedGraph() | RoarGraph():
            parts = range(len(tables.get("entries", ())))
            expected = {"entries", *(f"links_{part}" for part in parts)}
        case QueryLists():
            expected = {"centroids", "table"}
        case Ivf() | Hnsw():
            expected = {"faiss"}
        case _:
            expected = set()
    if tables.keys() != expected or (not tables and expected):
        raise RetrievalError(
            f"a saved index has {', '.join(sorted(tables)) or 'no tables'}: expected "
            f"{', '.join(sorted(expected)) or 'none'}; build it again"
        )
    for name, table in tables.items():
        if table.dtype == np.int32 and table.size and not -1 <= table.min() <= table.max() < count:
            raise RetrievalError(f"{name} of a saved index points outside it; build it again")
