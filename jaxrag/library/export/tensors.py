"""Chunk KV as the tensors that other programs expect, in a safetensors file."""

import functools
from collections.abc import Callable

from jaxrag.base.types import HostArray
from jaxrag.kv.store import KVLayout
from jaxrag.models.tensor_files import NewTensor

Load = Callable[[], HostArray]  # [L, 2, T, K, H]; called once for every tensor
Arrange = Callable[[KVLayout, int, Load], list[NewTensor]]


def huggingface_tensors(layout: KVLayout, tokens: int, load: Load) -> list[NewTensor]:
    """``layers.{i}.key`` and ``layers.{i}.value``, each [1, K, T, H].

    What ``transformers.Cache.update(key, value, i)`` takes for a batch of one.
    """
    shape = (1, layout.num_kv_heads, tokens, layout.head_dim)

    def heads_first(layer: int, which: int) -> HostArray:
        return load()[layer, which].swapaxes(0, 1)[None]

    return [
        NewTensor(
            name=f"layers.{layer}.{name}",
            dtype=layout.numpy_dtype,
            shape=shape,
            values=functools.partial(heads_first, layer, which),
        )
        for layer in range(layout.num_layers)
        for which, name in enumerate(("key", "value"))
    ]


def lmcache_tensors(layout: KVLayout, tokens: int, load: Load) -> list[NewTensor]:
    """One tensor ``kv`` [2, L, T, K * H], LMCache's memory format ``KV_2LTD``."""
    width = layout.num_kv_heads * layout.head_dim
    shape = (2, layout.num_layers, tokens, width)
    return [
        NewTensor(
            name="kv",
            dtype=layout.numpy_dtype,
            shape=shape,
            values=lambda: load().swapaxes(0, 1).reshape(shape),
        )
    ]
