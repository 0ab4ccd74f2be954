"""Indexes built once, when a long document is ingested, and used wherever it is in a prompt.

Keys are rotated to their places inside the document, as in the pool, so a question asks with its
query rotated by its position less the document's offset. What an index learns from are queries of
the document itself, re-rotated to a spread of distances behind it: a later question may stand at
any of them. Tables go into the chunk store with the document's KV, one array a layer; keys do not,
they are in the KV already.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import safetensors.numpy

from jaxrag.base.config import RopeConfig
from jaxrag.base.errors import ConfigError, RetrievalError
from jaxrag.base.tables import build as build_from_table
from jaxrag.base.tables import table_from
from jaxrag.base.types import HostArray
from jaxrag.kv.store.base import KVStore
from jaxrag.kv.store.layout import WHOLE, HeadShare
from jaxrag.kv.store.record import Record
from jaxrag.reuse.attention_index.bank import QueryBank, rotated
from jaxrag.reuse.attention_index.build import build
from jaxrag.reuse.attention_index.index import AttentionIndex
from jaxrag.reuse.attention_index.spec import (
    INDEXES,
    Exact,
    QueryLists,
    Spec,
    Trained,
    name_of,
    spec_from,
    table_of,
)

IN_PLACE = (Exact, QueryLists)  # kinds that search keys wherever these lie
LayerIndexes = tuple[AttentionIndex, ...]  # one index a KV head


@dataclasses.dataclass(frozen=True)
class Indexing:
    """What indexes long chunks get when they are encoded, to be stored with their KV.

    Attributes:
      spec: of every index, of a kind that learns from queries. Chunks of fewer tokens than its
        ``exact_below`` get none: they are scanned.
      queries: of each query head, kept from evenly spread tokens of the chunk while it is encoded.
      reach: questions will stand up to so many tokens behind the chunk's end.
      k: keys that a question's search will want; the effort is chosen for so many.
      logarithmic: learn from as many queries in every doubling of that distance, and know more of
        questions right behind the chunk than of distant ones; else evenly.
    """

    spec: Trained = dataclasses.field(default_factory=QueryLists)
    queries: int = 4096
    reach: int = 32768
    k: int = 100
    logarithmic: bool = False

    def __post_init__(self) -> None:
        for field, kind in (("queries", int), ("reach", int), ("k", int), ("logarithmic", bool)):
            value = getattr(self, field)
            if type(value) is not kind or (kind is int and value < 1):
                expected = "a positive integer" if kind is int else "true or false"
                raise ConfigError(f"{field}={value!r}: expected {expected}")
        fewest = min(self.queries, self.spec.exact_below)  # a chunk may be no longer than this
        if self.spec.min_queries > max(fewest, 1):
            raise ConfigError(
                f"min_queries={self.spec.min_queries}: indexes learn from {fewest} queries, of "
                f"queries={self.queries} and chunks from exact_below={self.spec.exact_below} "
                "tokens on; lower min_queries, or raise the others"
            )

    def covers(self, tokens: int) -> bool:
        """Whether a chunk of that many tokens gets indexes."""
        return tokens >= self.spec.exact_below

    def to_table(self) -> dict[str, Any]:
        """The JSON-able table that ``indexing_from`` reads."""
        own = {name: getattr(self, name) for name in _OWN}
        return {**table_of(self.spec), **own}


_OWN = ("queries", "reach", "k", "logarithmic")  # fields of Indexing beside the spec's


def indexing_from(
    value: "str | Mapping[str, Any] | Indexing", where: str = "attention_index"
) -> Indexing:
    """An Indexing by the name of its kind, or from a table {kind = ..., settings}, or itself.

    As one text the settings follow the kind: "lists:clusters=64,reach=8192". Raises ConfigError.
    """
    if isinstance(value, Indexing):
        return value
    settings = table_from(value, where, "kind")
    own = {name: settings.pop(name) for name in _OWN if name in settings}
    spec = spec_from(settings, where)
    if not isinstance(spec, Trained):
        kinds = [name for name, kind in INDEXES.items() if kind in get_args(Trained)]
        raise ConfigError(
            f"{where}: kind={name_of(spec)!r} learns nothing from a document's queries: expected "
            f"one of {', '.join(kinds)}"
        )
    return build_from_table(Indexing, {"spec": spec, **own}, where)


def build_layer(
    keys: HostArray,
    queries: HostArray,
    spec: Spec,
    rope: RopeConfig,
    reach: int,
    *,
    k: int = 100,
    logarithmic: bool = False,
) -> LayerIndexes:
    """Index one layer of a document.

    Args:
        keys: [T, K, H] before RoPE, as stored.
        queries: [N, m, H] before RoPE, strided over the document; N a multiple of K.
        reach: questions will stand up to so many tokens behind the document's end.
        k: keys that a search will want.
        logarithmic: learn from as many queries in every doubling of the distance.

    Raises:
        RetrievalError: shapes that do not fit, or keys that are not finite.
        RequestError: a reach below 1.
    """
    if keys.ndim != 3 or queries.ndim != 3 or len(queries) % max(keys.shape[1], 1):
        raise RetrievalError(
            f"keys {list(keys.shape)} and queries {list(queries.shape)} of a layer: expected "
            "[T, K, H] and [N, m, H] with N a multiple of K"
        )
    tokens, kv_heads, _ = keys.shape
    placed = rotated(keys.astype(np.float32).swapaxes(0, 1), np.arange(tokens), rope)
    groups = queries.reshape(kv_heads, -1, *queries.shape[1:])
    nowhere = np.zeros(queries.shape[1], np.int32)
    made = []
    for head, group in zip(placed, groups, strict=True):
        trained, asked = QueryBank(group, nowhere).lessons(
            rope, tokens, tokens + reach, logarithmic=logarithmic
        )
        made.append(build(head, trained, spec, asked=asked, k=k))
    return tuple(made)


def layer_array(layer: LayerIndexes) -> HostArray:
    """The tables of a layer's indexes as one uint8 array (safetensors), without their keys."""
    named = {
        f"{head}.{name}": np.ascontiguousarray(array)
        for head, index in enumerate(layer)
        for name, array in index.tables_to_arrays().items()
    }
    return np.frombuffer(safetensors.numpy.save(named), np.uint8).copy()


def layer_arrays(layers: Sequence[LayerIndexes]) -> dict[str, HostArray]:
    """The auxiliary arrays of a chunk that hold its indexes, by name."""
    return {_name(number): layer_array(layer) for number, layer in enumerate(layers)}


def build_arrays(
    keys: HostArray, queries: HostArray, indexing: Indexing, ropes: Sequence[RopeConfig]
) -> dict[str, HostArray]:
    """Build the indexes of a chunk; the auxiliary arrays that hold them.

    Args:
        keys: [L, T, K, H] before RoPE.
        queries: [L, N, m, H] before RoPE, strided over the chunk.
        ropes: [L] of every layer.

    Raises RetrievalError as ``build_layer`` does.
    """
    it = indexing
    return layer_arrays(
        [
            build_layer(layer, asked, it.spec, rope, it.reach, k=it.k, logarithmic=it.logarithmic)
            for layer, asked, rope in zip(keys, queries, ropes, strict=True)
        ]
    )


def is_indexed(record: Record | None) -> bool:
    """Whether the record is that of a chunk that was stored with indexes."""
    return record is not None and _name(0) in record.aux


def indexes_nbytes(aux: Mapping[str, int]) -> int:
    """Bytes of the indexes among auxiliary arrays, bytes by name; 0 without any."""
    return sum(nbytes for name, nbytes in aux.items() if name.startswith(_NAME))


def stored_spec(store: KVStore, key: str) -> Spec:
    """What the stored indexes of a chunk are; errors as ``load_layer``."""
    named = _tables(store, key, 0)
    try:
        spec = json.loads(named["0.head"].tobytes())["spec"]
    except (KeyError, ValueError, TypeError) as error:
        raise RetrievalError(
            f"chunk {key}: {_name(0)} has no head: {error}; ingest it again"
        ) from error
    return spec_from(spec)


def load_layer(
    store: KVStore,
    key: str,
    layer: int,
    rope: RopeConfig,
    *,
    in_place: bool = False,
    share: HeadShare = WHOLE,
) -> LayerIndexes:
    """The indexes of one layer of a stored document, over keys at their places inside it.

    Of a share of the KV heads, of which ``store`` gives the keys.

    ``in_place``: those that can be searched over keys elsewhere (``IN_PLACE``) come without keys.

    Raises:
        ChunkMissing: as ``KVStore.get``.
        ChunkCorrupt: as ``KVStore.get``.
        StoreError: the chunk was stored without indexes.
        RetrievalError: what was stored is no index of these keys.
    """
    named = _tables(store, key, layer)
    heads: dict[str, dict[str, HostArray]] = {}
    for name, array in named.items():
        head, _, own = name.partition(".")
        heads.setdefault(head, {})[own] = array
    first, end = share.heads(len(heads))
    numbers = sorted(map(int, heads))[first:end]
    if in_place:
        bare = [AttentionIndex.from_tables(heads[str(number)], None) for number in numbers]
        if all(isinstance(index.spec, IN_PLACE) for index in bare):
            return tuple(
                index.without_keys() if isinstance(index.spec, QueryLists) else index
                for index in bare
            )
    keys = store.get(key, layers=(layer, layer + 1))[0, 0]  # [T, K, H]
    placed = rotated(keys.astype(np.float32).swapaxes(0, 1), np.arange(len(keys)), rope)
    return tuple(
        AttentionIndex.from_tables(heads.get(str(number), {}), head)
        for number, head in enumerate(placed, first)
    )


def _tables(store: KVStore, key: str, layer: int) -> dict[str, HostArray]:
    packed = store.aux(key, _name(layer))
    try:
        named: dict[str, HostArray] = safetensors.numpy.load(packed.tobytes())
    except safetensors.SafetensorError as error:
        raise RetrievalError(
            f"chunk {key}: {_name(layer)} is damaged: {error}; ingest it again"
        ) from error
    return named


_NAME = "attention_index_"


def _name(layer: int) -> str:
    """Of a layer's auxiliary array."""
    return f"{_NAME}{layer}"
