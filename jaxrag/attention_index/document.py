"""Indexes built once, when a long document is ingested, and used wherever it stands in a prompt.

Keys are rotated to their places inside the document, as in the pool, so a question asks with its
query rotated by its position less the document's offset. What an index learns from are queries of
the document itself, re-rotated to a spread of distances behind it: a later question may stand at
any of them. Tables go into the chunk store with the document's KV, one array a layer; keys do not,
they are in the KV already.
"""

from collections.abc import Sequence

import numpy as np
import safetensors.numpy

from jaxrag.attention_index.bank import QueryBank, rotated, spread
from jaxrag.attention_index.index import AttentionIndex, build
from jaxrag.attention_index.spec import Spec
from jaxrag.config import RopeConfig
from jaxrag.errors import RetrievalError
from jaxrag.store import KVStore, Provenance, PutResult
from jaxrag.types import HostArray

Layer = tuple[AttentionIndex, ...]  # one index a KV head


def build_layer(
    keys: HostArray,
    queries: HostArray,
    spec: Spec,
    rope: RopeConfig,
    reach: int,
    *,
    logarithmic: bool = False,
) -> Layer:
    """Index one layer of a document.

    Args:
        keys: [T, K, H] before RoPE, as stored.
        queries: [N, m, H] before RoPE, strided over the document; N a multiple of K.
        spec: of every index.
        rope: the model's rotation.
        reach: questions will stand up to so many tokens behind the document's end.
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
    asked = spread(queries.shape[1], tokens, tokens + reach, logarithmic=logarithmic)
    placed = rotated(keys.astype(np.float32).swapaxes(0, 1), np.arange(tokens), rope)
    groups = queries.reshape(kv_heads, -1, *queries.shape[1:])
    return tuple(
        build(head, QueryBank(group, asked).own(rope), spec)
        for head, group in zip(placed, groups, strict=True)
    )


def layer_array(layer: Layer) -> HostArray:
    """The tables of a layer's indexes as one uint8 array (safetensors), without their keys."""
    named = {
        f"{head}.{name}": np.ascontiguousarray(array)
        for head, index in enumerate(layer)
        for name, array in index.tables_to_arrays().items()
    }
    return np.frombuffer(safetensors.numpy.save(named), np.uint8).copy()


def put_with_indexes(
    store: KVStore,
    key: str,
    kv: HostArray,
    layers: Sequence[Layer],
    *,
    record: Provenance,
    replace: bool = False,
) -> PutResult:
    """Store the KV [L, 2, T, K, H] of a document with the indexes of its layers; ``KVStore.put``.

    Raises RetrievalError when there is not one layer of indexes for every layer of KV.
    """
    if [len(layer) for layer in layers] != [kv.shape[3]] * len(kv):
        raise RetrievalError(
            f"indexes of {len(layers)} layers for KV {list(kv.shape)}: expected {len(kv)} layers "
            f"of {kv.shape[3]}"
        )
    aux = {_name(number): layer_array(layer) for number, layer in enumerate(layers)}
    return store.put(key, kv, record=record, aux=aux, replace=replace)


def has_indexes(store: KVStore, key: str) -> bool:
    """Whether a chunk was stored with indexes. Raises ChunkCorrupt as ``KVStore.head`` does."""
    record = store.head([key])[0]
    return record is not None and _name(0) in record.aux


def load_layer(store: KVStore, key: str, layer: int, rope: RopeConfig) -> Layer:
    """The indexes of one layer of a stored document, over keys at their places inside it.

    Raises:
        ChunkMissing, ChunkCorrupt: as ``KVStore.get``.
        StoreError: the chunk was stored without indexes.
        RetrievalError: what was stored is no index of these keys.
    """
    packed = store.aux(key, _name(layer))
    try:
        named = safetensors.numpy.load(packed.tobytes())
    except safetensors.SafetensorError as error:
        raise RetrievalError(
            f"chunk {key}: {_name(layer)} is damaged: {error}; ingest it again"
        ) from error
    keys = store.get(key, layers=(layer, layer + 1))[0, 0]  # [T, K, H]
    placed = rotated(keys.astype(np.float32).swapaxes(0, 1), np.arange(len(keys)), rope)
    heads = []
    for number, head in enumerate(placed):
        mark = f"{number}."
        arrays = {
            name.removeprefix(mark): array for name, array in named.items() if name.startswith(mark)
        }
        heads.append(AttentionIndex.from_tables(arrays, head))
    return tuple(heads)


def _name(layer: int) -> str:
    """Of a layer's auxiliary array."""
    return f"attention_index_{layer}"
