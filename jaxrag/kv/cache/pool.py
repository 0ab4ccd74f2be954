"""The paged pool: one buffer of K and one of V for all layers, on the device."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig
from jaxrag.base.types import Array

PAGE = 16  # tokens a page


class PagePool(struct.PyTreeNode):
    """One buffer for all layers: page p of layer l is row p + l * P.

    Where V of some layers lies in host memory (``cache.host.HostValues``), ``v`` ends before them,
    and what is written there is dropped.
    """

    k: Array  # [L*P, page, K, H]
    v: Array  # [L*P, page, K, H]

    def rows(self, layer: Array | int, pages: Array, num_layers: int) -> Array:
        """The rows of the pool where these pages of a layer lie, in their shape."""
        return pages + layer * (self.k.shape[0] // num_layers)

    def write(self, pages: Array, slots: Array, k: Array, v: Array) -> "PagePool":
        """Write k, v [B, T, K, H] to the slots [B, T] of requests with these pages [B, M].

        ``pages`` are already those of one layer. Slots beyond the table are dropped (padding).
        """
        page = self.k.shape[1]
        inside = slots < pages.shape[1] * page
        which = jnp.take_along_axis(pages, jnp.where(inside, slots // page, 0), axis=1)
        which = jnp.where(inside, which, self.k.shape[0])
        return PagePool(
            k=self.k.at[which, slots % page].set(k.astype(self.k.dtype), mode="drop"),
            v=self.v.at[which, slots % page].set(v.astype(self.v.dtype), mode="drop"),
        )


def empty_pool(
    config: ModelConfig, num_pages: int, sharding: Any = None, value_layers: int | None = None
) -> PagePool:
    """A pool of zeros with ``num_pages`` pages a layer; V of so many first layers, None: of all."""
    page = (PAGE, config.num_kv_heads, config.head_dim)
    rows = config.num_layers * num_pages
    v_rows = rows if value_layers is None else value_layers * num_pages
    make = jax.jit(_zeros, static_argnums=(0, 1, 2), out_shardings=sharding)
    return make((rows, *page), (v_rows, *page), config.dtype)


def _zeros(k: tuple[int, ...], v: tuple[int, ...], dtype: str) -> PagePool:
    return PagePool(k=jnp.zeros(k, dtype), v=jnp.zeros(v, dtype))
