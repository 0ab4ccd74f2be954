"""How an index over the keys of one KV head is built and searched: one frozen dataclass a kind.

A field that a class does not describe is described at ``Exact`` or ``ProjectedGraph``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from jaxrag.base.errors import ConfigError
from jaxrag.base.tables import build_named, table_from

Storage = Literal["float16", "float32", "uint8"]
Share = Literal["q_head", "group"]

STORAGE_BYTES: dict[Storage, int] = {"float32": 4, "float16": 2, "uint8": 1}  # a value of a key


@dataclasses.dataclass(frozen=True)
class Exact:
    """Every key is scanned.

    Attributes:
      storage: how keys are kept; uint8 is 8 bits a value over each dimension's range, and lossy.
    """

    storage: Storage = "float16"

    def __post_init__(self) -> None:
        _check(self)


@dataclasses.dataclass(frozen=True)
class ProjectedGraph:
    """A graph over keys, projected from the nearest keys of training queries.

    RetrievalAttention (section 3.2, arXiv:2409.10516) links "key vectors that are connected to the
    same query vectors". Here a key is linked with the ``span`` next ranks of every list it is in,
    and to the ``top`` first keys of that list. Of a key's candidates half its ``degree`` goes to
    those met most often and half is spread over the others.

    Attributes:
      degree: links a key has at most; twice that where the group shares one graph.
      knn: keys of every training query's list.
      span: ranks of a list that a key is linked with.
      top: first ranks of a list that every key of it is linked to.
      ef: keys kept while searching; more finds more and costs more. None chooses for every query
        head the least that reaches ``target_recall``, as ``build`` says.
      target_recall: share of the wanted keys that are to be found; nothing where ``ef`` is given.
      most_scanned: where a head would scan a larger share of the keys for that, every key is
        scanned instead; nothing where ``ef`` is given.
      share: "q_head" makes one graph for each query head, "group" one for all heads of the group.
      exact_below: with fewer keys than this every key is scanned instead.
      min_queries: the same with fewer training queries a head than this.
    """

    degree: int = 64
    knn: int = 100
    span: int = 4
    top: int = 4
    ef: int | None = None
    target_recall: float = 0.95
    most_scanned: float = 0.25
    share: Share = "q_head"
    storage: Storage = "float16"
    exact_below: int = 32768
    min_queries: int = 1024

    def __post_init__(self) -> None:
        _check(self)


@dataclasses.dataclass(frozen=True)
class QueryLists:
    """Training queries in clusters, and for each cluster the keys that its queries want.

    A key is in as many lists as clusters want it. A search scans the lists of the nearest clusters.

    Attributes:
      cap: keys of a list at most, the most wanted ones.
      knn: keys of every training query's list.
      probes: lists scanned; None chooses as ``ProjectedGraph.ef`` does.
      share: "q_head" makes lists for each query head, "group" one set for all heads of the group.
    """

    clusters: int = 256
    cap: int = 2048
    knn: int = 200
    rounds: int = 8
    seed: int = 0
    probes: int | None = None
    target_recall: float = 0.95
    most_scanned: float = 0.25
    share: Share = "q_head"
    storage: Storage = "float32"
    exact_below: int = 32768
    min_queries: int = 1024

    def __post_init__(self) -> None:
        _check(self)


@dataclasses.dataclass(frozen=True)
class Ivf:
    """FAISS's inverted file over clusters of the keys: a baseline that knows nothing of queries.

    Attributes:
      clusters: None takes 4 sqrt(S).
      probes: clusters scanned; None chooses as ``ProjectedGraph.ef`` does.
    """

    clusters: int | None = None
    probes: int | None = None
    target_recall: float = 0.95
    most_scanned: float = 0.25
    storage: Storage = "float16"
    exact_below: int = 32768

    def __post_init__(self) -> None:
        _check(self)


@dataclasses.dataclass(frozen=True)
class Hnsw:
    """FAISS's hierarchical graph over the keys: a baseline that knows nothing of queries.

    Attributes:
      links: of a key in the upper levels, twice that at the base.
      ef: width while searching; None chooses as ``ProjectedGraph.ef`` does.
    """

    links: int = 32
    ef_build: int = 200
    ef: int | None = None
    target_recall: float = 0.95
    most_scanned: float = 0.25
    storage: Storage = "float16"
    exact_below: int = 32768

    def __post_init__(self) -> None:
        _check(self)


Spec = Exact | ProjectedGraph | QueryLists | Ivf | Hnsw
Trained = ProjectedGraph | QueryLists

INDEXES: dict[str, type[Spec]] = {
    "exact": Exact,
    "graph": ProjectedGraph,
    "lists": QueryLists,
    "ivf": Ivf,
    "hnsw": Hnsw,
}


def name_of(spec: Spec) -> str:
    """The name of a spec's kind in ``INDEXES``."""
    return next(name for name, kind in INDEXES.items() if kind is type(spec))


def effort_of(spec: Spec) -> int | None:
    """The number that trades cost for recall in a search: ef or probes.

    None where it is chosen for each index, and for ``Exact``, which has none.
    """
    match spec:
        case Exact():
            return None
        case QueryLists() | Ivf():
            return spec.probes
        case _:
            return spec.ef


def spec_from(value: str | Mapping[str, Any], where: str = "index") -> Spec:
    """The spec of a name, or of a table with ``kind`` and fields that differ from the defaults.

    As one text the fields follow the kind: "lists:clusters=64".

    Raises ConfigError for a kind or field that is unknown, or a value out of range.
    """
    made: Spec = build_named(INDEXES, table_from(value, where, "kind"), where, "kind")
    return made


def table_of(spec: Spec) -> dict[str, Any]:
    """A spec as the JSON-able table that ``spec_from`` reads."""
    return {"kind": name_of(spec), **dataclasses.asdict(spec)}


_SHARES = ("target_recall", "most_scanned")
_MAY_BE_ZERO = {"exact_below", "min_queries", "seed", "span", "top"}
_CHOICES: dict[str, tuple[str, ...]] = {"storage": get_args(Storage), "share": get_args(Share)}


def _check(spec: Any) -> None:
    """Raise ConfigError for the first field that is out of range."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name in _CHOICES:
            if value not in _CHOICES[field.name]:
                expected = ", ".join(_CHOICES[field.name])
                raise ConfigError(f"{field.name}={value!r}: expected one of {expected}")
        elif field.name in _SHARES:
            if type(value) not in (int, float) or not 0 < value <= 1:
                raise ConfigError(f"{field.name}={value!r}: expected a share above 0, up to 1")
        elif value is not None or field.default is not None:
            least = 0 if field.name in _MAY_BE_ZERO else 1
            if type(value) is not int or value < least:
                raise ConfigError(f"{field.name}={value!r}: expected an integer from {least} on")
    if isinstance(spec, ProjectedGraph) and spec.span + spec.top == 0:
        raise ConfigError("span=0, top=0: expected at least one of them positive")
    if getattr(spec, "degree", 2) % 2 and isinstance(spec, ProjectedGraph):
        raise ConfigError(f"degree={spec.degree}: expected an even number")
