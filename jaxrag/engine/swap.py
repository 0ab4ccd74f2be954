"""A request's own pages on their way to host memory and back, bit for bit."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base.types import Array, HostArray, on_host
from jaxrag.engine.runner import ModelRunner
from jaxrag.kv.cache import PagePool

_HEADS = 3  # the axis of [L, n, page, K, H]
_PAGES = 16  # that are copied at once, whatever a request has


def swap_out(runner: ModelRunner, pages: Sequence[int]) -> tuple[HostArray, HostArray]:
    """K and V of pages, [L, n, page, K / ways, H] each: this process's heads, on the host."""
    own = functools.partial(runner.model.own_heads, axis=_HEADS)
    k, v = [], []
    for start in range(0, len(pages), _PAGES):
        block = np.asarray(pages[start : start + _PAGES], np.int32)
        padded = np.pad(block, (0, _PAGES - len(block)))
        part = _gather(runner.cache.pool, padded, num_layers=runner.model.config.num_kv_layers)
        k.append(own(part.k)[:, : len(block)])
        v.append(own(part.v)[:, : len(block)])
    return np.concatenate(k, axis=1), np.concatenate(v, axis=1)


def swap_in(
    runner: ModelRunner, pages: Sequence[int], content: tuple[HostArray, HostArray]
) -> None:
    """Write what ``swap_out`` returned to as many pages."""
    nowhere = runner.cache.allocator.num_pages
    for start in range(0, len(pages), _PAGES):
        block = np.asarray(pages[start : start + _PAGES], np.int32)
        fill = _PAGES - len(block)
        padded = np.pad(block, (0, fill), constant_values=nowhere)
        k, v = (
            np.pad(x[:, start : start + _PAGES], ((0, 0), (0, fill), (0, 0), (0, 0), (0, 0)))
            for x in content
        )
        if runner.model.mesh is None:
            part = on_host(PagePool, k, v)
        else:
            put = runner.model.put_heads
            part = PagePool(put(k, _HEADS), put(v, _HEADS))
        runner.cache.update(_scatter, padded, part)


@functools.partial(jax.jit, static_argnames=("num_layers",))
def _gather(pool: PagePool, pages: Array, num_layers: int) -> PagePool:
    rows = _rows(pool, pages, num_layers)
    return PagePool(k=pool.k[rows], v=pool.v[rows])


@functools.partial(jax.jit, donate_argnames=("pool",))
def _scatter(pool: PagePool, pages: Array, content: PagePool) -> tuple[PagePool, None]:
    num_layers = content.k.shape[0]
    rows = _rows(pool, pages, num_layers)
    rows = jnp.where(pages >= pool.k.shape[0] // num_layers, pool.k.shape[0], rows)
    return pool.replace(
        k=pool.k.at[rows].set(content.k, mode="drop"), v=pool.v.at[rows].set(content.v, mode="drop")
    ), None


def _rows(pool: PagePool, pages: Array, num_layers: int) -> Array:
    """[L, n] rows of the pool."""
    layers = jnp.arange(num_layers)[:, None]
    return pool.rows(layers, pages[None], num_layers)
