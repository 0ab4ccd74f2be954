"""An index over the keys of one (layer, KV head): arrays only, saved by name."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrag.base.errors import RetrievalError
from jaxrag.base.types import HostArray
from jaxrag.reuse.attention_index import lists
from jaxrag.reuse.attention_index.keys import Keys
from jaxrag.reuse.attention_index.spec import (
    Exact,
    Hnsw,
    Ivf,
    ProjectedGraph,
    QueryLists,
    Spec,
    effort_of,
    spec_from,
    table_of,
)


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionIndex:
    """Keys of one KV head with what finds the best of them; E parts, a query head each or one.

    Keys are kept in an order of their own, those that a training query wants first and the most
    wanted ones in front: a search touches few cache lines outside them. Only those W keys are in
    the graph or the lists. Results are in the caller's rows.

    Attributes:
      spec: what was built; ``Exact`` where ``build`` found that a scan does better.
      note: why it is exact although another kind was asked for; empty otherwise.
      keys: S keys in the index's order; none where they are read from elsewhere.
      wanted: [W] int32 the caller's rows of the first W keys.
      tables: by kind, "links_E" [W, degree] int32 and "entries" [E] int32; "centroids" [E, C, H]
        float32 and "table" [E, C, width] int32, or in its place "members" [n] int32 and "starts"
        [E, C + 1] int64 (``without_keys``); "faiss" uint8; or none.
      efforts: of a search, one a query head, where they were chosen; empty where the spec says it.
    """

    spec: Spec
    note: str
    keys: Keys
    wanted: HostArray
    tables: Mapping[str, HostArray]
    efforts: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def parts(self) -> int | None:
        """E: query heads that have a graph or lists of their own; None where any may ask."""
        match self.spec:
            case ProjectedGraph(share="q_head"):
                return len(self.tables["entries"])
            case QueryLists(share="q_head"):
                return len(self.tables["centroids"])
            case _:
                return None

    @property
    def nbytes(self) -> int:
        """Bytes beside the keys (of a FAISS baseline: beside the copy of the keys inside it)."""
        tables = sum(int(table.nbytes) for table in self.tables.values())
        inside = self.keys.nbytes if "faiss" in self.tables else 0
        return tables - inside + int(self.wanted.nbytes)

    def without_keys(self) -> "AttentionIndex":
        """Lists without padding, to be searched over keys that lie elsewhere; itself if it is."""
        if "members" in self.tables:
            return self
        members, starts = lists.compact(self.tables["table"])
        tables = {
            "centroids": self.tables["centroids"], "members": members, "starts": starts
        }  # fmt: skip
        none = Keys(self.keys.codes[:0].copy(), self.keys.span)
        return dataclasses.replace(self, keys=none, tables=tables)

    def rows(self) -> HostArray:
        """[S] int32 the caller's row of each key in the index's order."""
        return _order(self.wanted, len(self.keys))

    def tables_to_arrays(self) -> dict[str, HostArray]:
        """Everything but the keys, by name; ``from_tables`` puts them back over the same keys."""
        shape = [len(self.keys), self.keys.dim]
        head = {"spec": table_of(self.spec), "note": self.note, "keys": shape}
        head["efforts"] = list(self.efforts)
        text = np.frombuffer(json.dumps(head, sort_keys=True).encode(), np.uint8).copy()
        return {"head": text, "wanted": self.wanted, **self.tables}

    @classmethod
    def from_tables(
        cls, arrays: Mapping[str, HostArray], keys: HostArray | None
    ) -> "AttentionIndex":
        """The index of ``tables_to_arrays`` over its keys [S, H], in the caller's rows.

        Without keys where they are read from elsewhere. Raises RetrievalError when arrays are
        missing or odd.
        """
        rest = dict(arrays)
        spec, note, shape, efforts = _head(_take(rest, "head"))
        wanted = _take(rest, "wanted")
        rows = _order(wanted, shape[0])
        if keys is None:
            held = Keys(np.empty((0, shape[1]), np.float32), None)
        elif list(keys.shape) == shape:
            held = Keys.encode(keys[rows], spec.storage)
        else:
            raise RetrievalError(
                f"keys of shape {list(keys.shape)}: the saved index is of {shape}; build it again"
            )
        made = cls(spec, note, held, wanted, rest, efforts)
        _check(made)
        return made


def _order(wanted: HostArray, count: int) -> HostArray:
    """The caller's rows in an index's order: the wanted ones, then the others ascending; int32."""
    if len(wanted) and not 0 <= wanted.min() <= wanted.max() < count:
        raise RetrievalError(f"wanted rows of a saved index are outside its {count} keys")
    rest = np.ones(count, bool)
    rest[wanted] = False
    return np.concatenate([wanted, np.flatnonzero(rest)]).astype(np.int32)


def _head(text: HostArray) -> tuple[Spec, str, list[int], tuple[int, ...]]:
    """The spec, the note, the shape of the keys, and the efforts."""
    try:
        head: dict[str, Any] = json.loads(text.tobytes())
        efforts = tuple(int(effort) for effort in head.get("efforts", ()))
        return spec_from(head["spec"]), str(head["note"]), list(head["keys"]), efforts
    except (ValueError, KeyError, TypeError) as error:
        raise RetrievalError(f"the head of a saved index is damaged: {error}") from error


def _take(arrays: dict[str, HostArray], name: str) -> HostArray:
    if name not in arrays:
        raise RetrievalError(f"a saved index has no array {name!r}: expected it; build it again")
    return arrays.pop(name)


def _check(index: AttentionIndex) -> None:
    """Refuse tables that would send a search outside its arrays, or that nothing can search."""
    tables, count = index.tables, len(index.wanted)
    if not (index.efforts or effort_of(index.spec) or isinstance(index.spec, Exact)):
        raise RetrievalError("a saved index has no effort: expected one a head; build it again")
    if min(index.efforts, default=1) < 1 or (index.parts or 0) > len(index.efforts) > 0:
        raise RetrievalError(
            f"efforts {list(index.efforts)} of a saved index: expected one from 1 on for each head"
        )
    match index.spec:
        case ProjectedGraph():
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
