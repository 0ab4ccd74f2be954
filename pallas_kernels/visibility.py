"""Who sees whom: the two rules that every attention op applies, tile by tile.

Packed (training, offline encoding): query i sees key j iff j is not empty, j is not later than i in
order, both belong to the same packed example, and (same segment, or j is in the prefix and the
prefix is visible, or i is in the final block). One prompt of a prefix `p`, chunks `a` and `b` and a
final block `q`, prefix hidden (left) and visible (right); rows are queries, columns keys:

        p p a a b b q q            p p a a b b q q
    p   1 . . . . . . .        p   1 . . . . . . .
    p   1 1 . . . . . .        p   1 1 . . . . . .
    a   . . 1 . . . . .        a   1 1 1 . . . . .
    a   . . 1 1 . . . .        a   1 1 1 1 . . . .
    b   . . . . 1 . . .        b   1 1 . . 1 . . .
    b   . . . . 1 1 . .        b   1 1 . . 1 1 . .
    q   1 1 1 1 1 1 1 .        q   1 1 1 1 1 1 1 .
    q   1 1 1 1 1 1 1 1        q   1 1 1 1 1 1 1 1

Cached (question prefill, sparse recompute, decode): key slot j is visible to query i iff
``slot_position[j] <= query_position[i]``. Hidden slots hold INT32_MAX, padding queries hold -1.

A sliding window W adds ``position_i - position_j < W`` to both; it is refused where positions are
not the order of the tokens, so position and order agree wherever a window is used.
"""

import jax
import jax.numpy as jnp

EMPTY = 0
PREFIX = 1
FINAL = 2

# examples = example | question << QUESTION_SHIFT. Tokens of question 0 belong to every question of
# their example: documents shared by several questions that do not see each other.
QUESTION_SHIFT = 16
EXAMPLE_MASK = (1 << QUESTION_SHIFT) - 1

Array = jax.Array


def packed_visible(
    q_order: Array,
    k_order: Array,
    q_segment: Array,
    k_segment: Array,
    q_example: Array | None,
    k_example: Array | None,
    prefix_visible: bool,
) -> Array:
    """The packed rule for broadcastable int32 arrays; returns bool of the broadcast shape."""
    see = (q_segment == k_segment) | (q_segment == FINAL)
    if prefix_visible:
        see |= k_segment == PREFIX
    see &= (k_segment != EMPTY) & (q_segment != EMPTY) & (k_order <= q_order)
    if q_example is not None and k_example is not None:
        k_question = k_example >> QUESTION_SHIFT
        see &= (q_example & EXAMPLE_MASK) == (k_example & EXAMPLE_MASK)
        see &= (k_question == 0) | (k_question == q_example >> QUESTION_SHIFT)
    return see


def cached_visible(q_position: Array, slot_position: Array) -> Array:
    """The cached rule for broadcastable int32 arrays."""
    return slot_position <= q_position


def within_window(q_position: Array, k_position: Array, window: Array | int | None) -> Array | bool:
    """The sliding-window bound; True where there is no window."""
    return True if window is None else q_position - k_position < window


def overlaps(a_low: Array, a_high: Array, b_low: Array, b_high: Array) -> Array:
    """Do the closed intervals [a_low, a_high] and [b_low, b_high] meet?"""
    return (a_low <= b_high) & (b_low <= a_high)


def tile_range(x: Array, tile: int, valid: Array | None = None) -> tuple[Array, Array]:
    """Minimum and maximum of every tile of the last axis: [..., T] -> two of [..., T / tile].

    Entries that are not ``valid`` are left out; an all-invalid tile has minimum > maximum.
    """
    shape = (*x.shape[:-1], x.shape[-1] // tile, tile)
    low = high = x
    if valid is not None:
        info = jnp.iinfo(x.dtype)
        low, high = jnp.where(valid, x, info.max), jnp.where(valid, x, info.min)
    return low.reshape(shape).min(-1), high.reshape(shape).max(-1)
