"""Which pages a program of a paged kernel reads, as short lists made before the kernel starts.

A segment is a range of neighbouring live pages with one offset: the query is turned to its frame
once, and every key tile inside it is one plain loop without branches, which Triton can pipeline.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.visibility import within_window

Array = jax.Array

_HIDDEN = jnp.iinfo(jnp.int32).max


class Segments(NamedTuple):
    """Page ranges of every query tile, in table order; split s has first[s] .. first[s + 1] - 1."""

    start: Array  # [B, I, M] int32 first page of the table
    stop: Array  # [B, I, M] int32 one past the last
    first: Array  # [B, I, splits + 1] int32


def page_range(slot_position: Array, page: int) -> tuple[Array, Array]:
    """Lowest and highest position in every page: two [B, M]; INT32_MAX and -1 where all hide."""
    slots = slot_position.reshape(slot_position.shape[0], -1, page)
    return slots.min(-1), jnp.where(slots == _HIDDEN, -1, slots).max(-1)


def live_pages(
    slot_position: Array, page: int, q_low: Array, q_high: Array, window: Array | int | None
) -> Array:
    """Which pages some query of a tile may see: [B, I, M] bool; q_low, q_high [B, I].

    A tile of padding alone has q_high = -1 and sees nothing.
    """
    low, high = page_range(slot_position, page)
    live = low[:, None] <= q_high[:, :, None]
    return live & within_window(q_low[:, :, None], high[:, None], window)


def segments_of(live: Array, offsets: Array, splits: int, pages_per_tile: int) -> Segments:
    """Cut live pages [B, I, M] into segments, spread evenly over the splits.

    A split is a whole number of tiles of ``pages_per_tile`` pages where offsets allow.
    """
    rank = jnp.cumsum(live, axis=-1, dtype=jnp.int32) - 1
    share = -(-(rank[..., -1:] + 1) // (splits * pages_per_tile)) * pages_per_tile
    share = jnp.maximum(share, 1)
    alike = jnp.concatenate(
        (jnp.zeros_like(offsets[:, :1], bool), offsets[:, 1:] == offsets[:, :-1]), axis=1
    )
    before = jnp.concatenate((jnp.zeros_like(live[..., :1]), live[..., :-1]), axis=-1)
    opens = live & ~(before & alike[:, None] & (rank % share != 0))
    start, stop = _ranges(live, opens)
    below = (rank // share)[..., None] < jnp.arange(splits + 1)
    first = (opens[..., None] & below).sum(-2, dtype=jnp.int32)
    return Segments(start, stop, first)


def tiles_of(live: Array, offsets: Array, splits: int, pages_per_tile: int) -> Segments:
    """Cut live pages [B, I, M] into ranges of at most ``pages_per_tile``, evenly over the splits.

    A range is a key tile: neighbouring live pages with one offset.
    """
    alike = jnp.concatenate(
        (jnp.zeros_like(offsets[:, :1], bool), offsets[:, 1:] == offsets[:, :-1]), axis=1
    )
    before = jnp.concatenate((jnp.zeros_like(live[..., :1]), live[..., :-1]), axis=-1)
    page = lax.broadcasted_iota(jnp.int32, live.shape, live.ndim - 1)
    run = lax.cummax(jnp.where(live & ~(before & alike[:, None]), page, 0), axis=live.ndim - 1)
    opens = live & ((page - run) % pages_per_tile == 0)
    start, stop = _ranges(live, opens)
    count = opens.sum(-1, dtype=jnp.int32)[..., None]
    first = count * jnp.arange(splits + 1, dtype=jnp.int32) // splits
    return Segments(start, stop, first)


def _ranges(live: Array, opens: Array) -> tuple[Array, Array]:
    """Start and end of every range of live pages, in order; one begins wherever ``opens``."""
    num_pages = live.shape[-1]
    goes_on = jnp.concatenate((live & ~opens, jnp.zeros_like(live[..., :1])), axis=-1)[..., 1:]
    closes = live & ~goes_on
    number = jnp.cumsum(opens, axis=-1, dtype=jnp.int32) - 1
    page = lax.broadcasted_iota(jnp.int32, live.shape, live.ndim - 1)

    def listed(chosen: Array, values: Array) -> Array:
        rows, tiles = (jnp.arange(n)[:, None] for n in live.shape[:2])
        at = jnp.where(chosen, number, num_pages)
        empty = jnp.zeros(live.shape, jnp.int32)
        return empty.at[rows[:, :, None], tiles[None], at].set(values, mode="drop")

    return listed(opens, page), listed(closes, page + 1)
