"""The pool's pages in host memory: K and V, or V alone, of some layers.

Heads come first, so that the keys of a head lie behind each other and are searched in place.
"""

import threading

import jax.numpy as jnp
import numpy as np

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.kv.cache.budget import available_bytes
from jaxrag.kv.cache.host import Moved, host_buffer
from jaxrag.kv.cache.pool import PAGE
from jaxrag.kv.placement import KVPlacement


class HostPool:
    """Rows of K and V in host memory; slot s of page p is row p * PAGE + s.

    K are the KV heads that this process holds: all of them, unless several hold the model.

    Attributes:
      first_head: the first of them.
      k: [L, K, R, H] of all layers; None where K is on the device.
      v: [L', K, R, H] of the last L' layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        placement: KVPlacement,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """Zeros, of the KV heads from the first of ``heads`` up to the second; None: of all.

        Raises RequestError beyond the ceiling, and where there is no such memory.
        """
        layers, dtype = config.num_kv_layers, jnp.dtype(config.dtype)
        self.first_head, end = heads or (0, config.num_kv_heads)
        held = end - self.first_head
        shape = (held, num_pages * PAGE, config.head_dim)
        need = placement.host_bytes(config, num_pages * PAGE) * held // config.num_kv_heads
        takes = f"{placement.on_host(config)} of {num_pages * PAGE} tokens takes {need} bytes"
        most, free = placement.max_host_bytes, available_bytes()
        if most is not None and need > most:
            raise RequestError(
                f"{takes} of host memory, max_host_bytes={most}; raise it, or lower cache_tokens"
            )
        if free is not None and need > free:
            raise RequestError(f"{takes} of host memory, and {free} are free; lower cache_tokens")
        self.first_layer = placement.layers_on_device(config)
        try:
            self.k = host_buffer((layers, *shape), dtype) if placement.away else None
            self.v = host_buffer((layers - self.first_layer, *shape), dtype)
        except MemoryError:
            raise RequestError(
                f"{takes}, more than there is host memory; lower cache_tokens"
            ) from None
        self._moved = Moved()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Of K and V."""
        return self.v.nbytes + (0 if self.k is None else self.k.nbytes)

    @property
    def moved(self) -> Moved:
        """What prefill has moved so far."""
        with self._lock:
            return self._moved

    def count(self, pushed: int = 0, brought: int = 0) -> None:
        """So many bytes have crossed."""
        with self._lock:
            self._moved += Moved(pushed, brought)

    def values(self, layer: int) -> HostArray | None:
        """V of a layer, [K, R, H]; None where it is on the device."""
        return None if layer < self.first_layer else self.v[layer - self.first_layer]

    def write(self, layer: int, rows: HostArray, k: HostArray | None, v: HostArray | None) -> None:
        """Put k, v [n, K, H] of a layer, from the device, into rows [n]; what is not kept, not."""
        moved = 0
        if self.k is not None and k is not None:
            self.k[layer][:, rows] = k.swapaxes(0, 1)
            moved += k.nbytes
        mine = self.values(layer)
        if mine is not None and v is not None:
            mine[:, rows] = v.swapaxes(0, 1)
            moved += v.nbytes
        self.count(pushed=moved)

    def put(self, rows: HostArray, k: HostArray | None, v: HostArray) -> None:
        """Put k [L, n, K, H] and v [L', n, K, H], from a store, into rows [n]."""
        if self.k is not None and k is not None:
            self.k[:, :, rows] = k.swapaxes(1, 2)
        self.v[:, :, rows] = v.swapaxes(1, 2)


def rows_of(pages: HostArray) -> HostArray:
    """The rows [M * PAGE] int64 of pages [M]."""
    rows: HostArray = np.asarray(pages, np.int64)[:, None] * PAGE + np.arange(PAGE)
    return rows.reshape(-1)
