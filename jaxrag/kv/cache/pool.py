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

    Of a model with windows a page p is also so many parts, named -1 - (p * parts + part), each with
    KV of the layers without one alone. ``part_layers`` [L] is where in a part
    a layer lies; one with a window lies where the first without it does: nobody sees a token of the
    chunk in it, and whatever others hold comes near no answer. ``sources`` [L], where layers share
    K and V, is whose each takes (``ModelConfig.kv_sources``); L counts those with KV elsewhere.
    """

    k: Array  # [L*P, page, K, H]
    v: Array  # [L*P, page, K, H]
    part_layers: tuple[int, ...] | None = struct.static(default=None)
    sources: tuple[int, ...] | None = struct.static(default=None)

    @property
    def page_parts(self) -> int:
        """How many parts a page has."""
        return (
            1 if self.part_layers is None else len(self.part_layers) // (max(self.part_layers) + 1)
        )

    def rows(self, layer: Array | int, pages: Array, num_layers: int) -> Array:
        """The rows of the pool where these pages of a layer lie, in their shape.

        ``num_layers`` are those with KV.
        """
        if self.sources is not None:
            layer = jnp.array(self.sources)[layer]
        size = self.k.shape[0] // num_layers
        whole = pages + layer * size
        if self.part_layers is None:
            return whole
        count = max(self.part_layers) + 1
        page, part = jnp.divmod(-1 - pages, self.page_parts)
        of_part = page + (part * count + jnp.array(self.part_layers)[layer]) * size
        return jnp.where(pages < 0, of_part, whole)

    def write(self, pages: Array, slots: Array, k: Array, v: Array) -> "PagePool":
        """Write k, v [B, T, K, H] to the slots [B, T] of requests with these pages [B, M].

        ``pages`` are already those of one layer. Slots beyond the table are dropped (padding).
        """
        page = self.k.shape[1]
        inside = slots < pages.shape[1] * page
        which = jnp.take_along_axis(pages, jnp.where(inside, slots // page, 0), axis=1)
        which = jnp.where(inside, which, self.k.shape[0])
        return self.replace(
            k=self.k.at[which, slots % page].set(k.astype(self.k.dtype), mode="drop"),
            v=self.v.at[which, slots % page].set(v.astype(self.v.dtype), mode="drop"),
        )


def empty_pool(
    config: ModelConfig, num_pages: int, sharding: Any = None, value_layers: int | None = None
) -> PagePool:
    """A pool of zeros with ``num_pages`` pages a layer; V of so many first layers, None: of all."""
    page = (PAGE, config.num_kv_heads, config.head_dim)
    layers = config.num_kv_layers
    rows = layers * num_pages
    v_rows = rows if value_layers is None else value_layers * num_pages
    place = {layer: at for at, layer in enumerate(config.global_layers)}
    part_layers = tuple(place.get(it, 0) for it in range(layers))
    parted = part_layers if 0 < len(place) < layers else None
    make = jax.jit(_zeros, static_argnums=(0, 1, 2, 3), out_shardings=sharding)
    pool = make((rows, *page), (v_rows, *page), config.dtype, parted)
    return pool.replace(sources=config.kv_sources)


def _zeros(
    k: tuple[int, ...], v: tuple[int, ...], dtype: str, part_layers: tuple[int, ...] | None
) -> PagePool:
    return PagePool(k=jnp.zeros(k, dtype), v=jnp.zeros(v, dtype), part_layers=part_layers)
