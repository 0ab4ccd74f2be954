"""The gated delta rule: layers whose memory of the tokens is one matrix a head, and maps of it.

A token with key k, value v, decay a <= 0 and rate b makes of the state S [Dk, Dv] of a value head

    exp(a) (I - b k k^T) S + b k v^T

and reads q^T S behind that. So what a run of tokens does is S -> A S + B, whatever S is; such maps
compose (``StateMap``). A token of decay 0 and rate 0 changes nothing: that is how padding is given.

A tile of tokens is done at once. With c the decays summed up to a token, u_t, what token t writes,
solves a triangular system, and is linear in the state S before the tile:

    u_t = b_t (v_t - exp(c_t) k_t^T S - sum over s < t of exp(c_t - c_s) (k_t k_s) u_s)

A difference of sums is never taken: a decay is the sum of those between two tokens, none of which
is positive, so that nothing overflows and small ones are exact beside large ones.

**Blocks.** A row of a prefix ``p``, chunks ``a`` and ``b`` and a final block ``q`` is read as if a
chunk's encoder had had the prefix alone (or nothing) before it, and the final block had the
composition of all maps in order. That is one recurrence in which two states run over the same
tokens: a local one that is set back as a chunk begins, and one of everything in order.

    tokens       p   p   a   a   a   b   b   q   q
    local        0 > P > P > . > . > .                   the chunk's encoder
                         P < - - - < P > . > .           (0 where the prefix is hidden)
    in order     0 > . > . > . > . > . > . > X > . > .   the final block begins with X
    reads it     local . . . . . . . . . . .   in order

The convolution sees along the same ways: before a chunk's first token are the last ones of the
prefix, or nothing, and before the final block's the last ones of the last chunk, behind whatever
that chunk itself had before it. Which tokens a token comes behind is ``Paths``, of all layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrag.base import struct
from jaxrag.base.types import EMPTY, FINAL, PREFIX, Array, Tokens
from pallas_kernels.visibility import EXAMPLE_MASK, QUESTION_SHIFT

TILE = 64
_BLOCK = 8  # rows of a system that are solved one after the other


class Writes(struct.PyTreeNode):
    """What tokens do to the state of each value head; float32."""

    k: Array  # [B, T, Hv, Dk]
    v: Array  # [B, T, Hv, Dv]
    decay: Array  # [B, T, Hv] the logarithm, at most 0
    beta: Array  # [B, T, Hv] 0..1

    def of(self, used: Array) -> "Writes":
        """The same with tokens that are not ``used`` [B, T] changing nothing."""
        there = used[..., None]
        return self.replace(
            decay=jnp.where(there, self.decay, 0.0), beta=jnp.where(there, self.beta, 0.0)
        )


class StateMap(struct.PyTreeNode):
    """What a run of tokens makes of a state S: a S + b."""

    a: Array  # [..., Dk, Dk]
    b: Array  # [..., Dk, Dv]

    def __call__(self, state: Array) -> Array:
        """The state [..., Dk, Dv] behind these tokens, from that before them."""
        return _times(self.a, state) + self.b


def compose(first: StateMap, then: StateMap) -> StateMap:
    """One map of the tokens of ``first`` and, behind them, those of ``then``."""
    return StateMap(_times(then.a, first.a), then(first.b))


def _times(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def by_steps(q: Array, writes: Writes, state: Array) -> tuple[Array, Array]:
    """Token after token: q [B, T, Hv, Dk] -> what they read [B, T, Hv, Dv], the last state.

    ``state`` [B, Hv, Dk, Dv] is that before the first of them. For decoding, where T is 1.
    """

    def step(state: Array, token: tuple[Array, Writes]) -> tuple[Array, Array]:
        q, it = token
        state = state * jnp.exp(it.decay)[..., None, None]
        new = it.beta[..., None] * (it.v - _times(it.k[..., None, :], state)[..., 0, :])
        state = state + it.k[..., None] * new[..., None, :]
        return state, _times(q[..., None, :], state)[..., 0, :]

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, writes))
    state, out = lax.scan(step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def by_tiles(q: Array, writes: Writes, state: Array, tile: int = TILE) -> tuple[Array, Array]:
    """The same as ``by_steps``, a tile of tokens at a time."""
    queries, tokens = _tiled((q, writes), tile)
    solved = _solved(tokens, _plain(tokens))
    reads, scores = _asked(queries, tokens, solved)

    def step(state: Array, tile: tuple[StateMap, _Solved, Array, Array]) -> tuple[Array, Array]:
        behind, its, reads, scores = tile
        new = its.new - _times(its.old, state)
        return behind(state), _times(reads, state) + _times(scores, new)

    state, out = lax.scan(step, state, (_maps(tokens, solved), solved, reads, scores))
    return _joined(out, q.shape[1]), state


def chunk_map(writes: Writes, tile: int = TILE) -> StateMap:
    """The map of all tokens of a row: a [B, Hv, Dk, Dk], b [B, Hv, Dk, Dv]."""
    tokens = _tiled(writes, tile)
    maps = _maps(tokens, _solved(tokens, _plain(tokens)))
    first = jax.tree.map(lambda x: x[0], maps)
    then = jax.tree.map(lambda x: x[1:], maps)
    return lax.scan(lambda whole, tile: (compose(whole, tile), None), first, then)[0]


class _Solved(struct.PyTreeNode):
    """What the tokens of tiles write, new - old S, and by what they are seen; C tokens a tile."""

    old: Array  # [..., C, Dk]
    new: Array  # [..., C, Dv]
    since: Array  # [..., C] the decay of what was there before the tile
    seen: Array  # [..., C, C] what is left of what a token wrote at another, 0 where it is not seen


def _tiled[T](tree: T, tile: int) -> T:
    """Arrays [B, T, H, ...] as tiles [n, B, H, C, ...], the last of them filled up with zeros."""

    def cut(x: Array) -> Array:
        size = min(tile, x.shape[1])
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size), *[(0, 0)] * (x.ndim - 2)])
        x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    return jax.tree.map(cut, tree)


def _joined(tiles: Array, length: int) -> Array:
    """Inverse of ``_tiled`` for one array."""
    x = jnp.moveaxis(tiles, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _plain(tokens: Writes) -> Array:
    """Of tokens of which each sees those before it and itself."""
    size = tokens.beta.shape[-1]
    return jnp.tril(jnp.ones((size, size), bool))


def _decays(sees: Array, decay: Array) -> tuple[Array, Array]:
    """What is left at rows that see some of a tile's tokens: before the tile, and of each token.

    ``sees`` [..., E, C], ``decay`` [..., C]; the logarithm [..., E], and a factor [..., E, C].
    """
    on_way = jnp.where(sees, decay[..., None, :], 0.0)
    after = jnp.tril(jnp.ones((decay.shape[-1],) * 2), -1)
    between = jnp.where(sees, _times(on_way, after), -jnp.inf)
    return on_way.sum(-1), jnp.exp(between)


def _solved(tokens: Writes, sees: Array) -> _Solved:
    """Of tokens [..., C, D] what each writes, where each sees those of ``sees`` [..., C, C]."""
    since, seen = _decays(sees, tokens.decay)
    by = tokens.beta[..., None]
    system = by * seen * _times(tokens.k, jnp.swapaxes(tokens.k, -1, -2))
    old = by * jnp.exp(since)[..., None] * tokens.k
    new = by * tokens.v
    inverse = _inverse(system)
    return _Solved(_times(inverse, old), _times(inverse, new), since, seen)


@jax.custom_vjp
def _inverse(system: Array) -> Array:
    """Of I and what ``system`` [..., C, C] has below its diagonal.

    In blocks, by products. What solves triangular systems on a CPU goes row by row, and waits for
    all threads at each: 53 ms for 48 systems of 64 rows on two busy cores, and this 1.8.
    """
    count = system.shape[-1]
    size = max(_BLOCK, 1 << (count - 1).bit_length())
    whole = jnp.pad(system, [(0, 0)] * (system.ndim - 2) + [(0, size - count)] * 2)

    def cut(down: int, size_of: int, step: int) -> Array:
        """Blocks that begin so many rows below the diagonal."""
        starts = range(0, size, step)
        each = [whole[..., at + down :, at:][..., :size_of, :size_of] for at in starts]
        return jnp.stack(each, -3)

    corner, unit = cut(0, _BLOCK, _BLOCK), jnp.eye(_BLOCK, dtype=system.dtype)
    rows = [jnp.broadcast_to(unit[0], corner.shape[:-1])]
    for at in range(1, _BLOCK):
        before = jnp.stack(rows, -2)
        rows.append(unit[at] - (corner[..., at, :at, None] * before).sum(-2))
    found, half = jnp.stack(rows, -2), _BLOCK
    while half < size:
        first, then = found[..., 0::2, :, :], found[..., 1::2, :, :]
        below = -_times(then, _times(cut(half, half, 2 * half), first))
        above = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        found = jnp.concatenate([above, jnp.concatenate([below, then], -1)], -2)
        half *= 2
    return found[..., 0, :count, :count]


def _inverse_forward(system: Array) -> tuple[Array, Array]:
    inverse = _inverse(system)
    return inverse, inverse


def _inverse_backward(inverse: Array, given: Array) -> tuple[Array]:
    turned = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_times(_times(turned, given), turned), -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)


def _asked(q: Array, tokens: Writes, solved: _Solved) -> tuple[Array, Array]:
    """What queries [..., C, Dk] take of the state before the tile, and [..., C, C] of writes."""
    reads = jnp.exp(solved.since)[..., None] * q
    return reads, solved.seen * _times(q, jnp.swapaxes(tokens.k, -1, -2))


def _maps(tokens: Writes, solved: _Solved) -> StateMap:
    """Of every tile."""
    keys = jnp.swapaxes(solved.seen[..., -1, :, None] * tokens.k, -1, -2)
    left = jnp.exp(solved.since[..., -1])[..., None, None] * jnp.eye(keys.shape[-2])
    return StateMap(left - _times(keys, solved.old), _times(keys, solved.new))


class Paths(struct.PyTreeNode):
    """Who comes behind whom in packed rows, in tiles, in two recurrences: local, and in order.

    Three states are carried: of the run of tokens, of the prefix, of all in order.
    """

    sees: Array  # [n, 2, B, C, C] bool: the tokens of its tile that a token is behind, and itself
    base: Array  # [n, 2, B, C, 3] the carried state from which its way enters the tile, or none
    asked: Array  # [n, 2, B, C] the recurrence in which it reads
    ends: Array  # [n, 2, B, 3, C] bool: the tokens that a carried state behind the tile is of
    kept: Array  # [n, B, 3, 3] which carried state that goes on from, or none
    before: Array  # [B, T, W - 1] the tokens before it, the nearest last; -1 where there is none


def paths(tokens: Tokens, prefix_visible: bool, width: int, tile: int = TILE) -> Paths:
    """Of packed rows [B, T], in which parts lie in order and the tokens of a part together.

    ``width`` is W of the convolution.
    """
    size = min(tile, tokens.ids.shape[1])
    segments = _filled(tokens.segments, size)
    ids = 0 * segments if tokens.examples is None else _filled(tokens.examples, size)
    run, example = _numbered(segments, ids), _numbered(ids & EXAMPLE_MASK)

    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size), 1, 0)

    def behind(number: Array) -> tuple[Array, Array]:
        """Are two tokens of the same; had a token's begun before the tile?"""
        its = cut(number)
        last = jnp.concatenate([0 * its[:1, :, -1:], its[:-1, :, -1:]])
        return its[..., None] == its[..., None, :], its == last

    (mine, begun), (same, example_begun) = behind(run), behind(example)
    kind, question = cut(segments), cut(ids) >> QUESTION_SHIFT > 0
    used, final = kind != EMPTY, kind == FINAL
    prefix, shared, of_prefix = kind == PREFIX, used & ~question, (kind > FINAL) & prefix_visible
    of_prefix_too = of_prefix[..., None] & prefix[..., None, :]
    causal = jnp.tril(jnp.ones((size, size), bool))
    sees = jnp.stack([mine | of_prefix_too, mine | shared[..., None, :]], 1)
    sees &= (causal & same & used[..., None, :])[:, None]

    none = jnp.zeros_like(used)
    of_run = jnp.stack([begun, begun & question], 1)
    of_part = jnp.stack([of_prefix & example_begun, none], 1)
    in_order = jnp.stack([none, example_begun], 1)
    base = jnp.stack([of_run, ~of_run & of_part, ~of_run & in_order], -1)
    asked = jnp.stack([~final, final], 1)
    last = same[..., -1, :]
    ends = [sees[..., -1, :] & asked[..., -1:]]
    ends += [jnp.stack([prefix & last, none], 1), jnp.stack([none, shared & last], 1)]
    kept = jnp.eye(3, dtype=bool) & example_begun[..., -1, None, None]
    kept = kept.at[..., 0, :].set((base[..., -1, :] & asked[..., -1:]).any(1))
    before = _before(segments, run, example, jnp.stack([(segments == PREFIX) & prefix_visible,
        (segments != EMPTY) & (ids >> QUESTION_SHIFT == 0)]), width)  # fmt: skip
    return Paths(
        sees=sees,
        base=base.astype(jnp.float32),
        asked=asked.astype(jnp.float32),
        ends=jnp.stack(ends, 3),
        kept=kept.astype(jnp.float32),
        before=before[:, : tokens.ids.shape[1]],
    )


def _filled(x: Array, size: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)])


def _numbered(*marks: Array) -> Array:
    """The number of the run of equal marks [B, T] that a token is in, from 1 on."""
    new = [jnp.diff(it, axis=1, prepend=it[:, :1] - 1) != 0 for it in marks]
    return jnp.cumsum(jnp.stack(new).any(0), axis=1)


def _before(segments: Array, run: Array, example: Array, ahead: Array, width: int) -> Array:
    """``Paths.before``; ``ahead`` [2, B, T]: tokens that a chunk, and a final block, is behind."""
    at = jnp.arange(run.shape[1])
    last = lax.cummax(jnp.where(ahead, at, -1), axis=2)
    last = jnp.pad(last[..., :-1], [(0, 0), (0, 0), (1, 0)], constant_values=-1)
    part = jnp.where(segments > FINAL, last[0], jnp.where(segments == FINAL, last[1], -1))
    part = jnp.where(_taken(example, part) == example, part, -1)
    first = jnp.diff(run, axis=1, prepend=0) != 0
    nearest = jnp.where(first, part, at - 1)
    found = [nearest]
    while len(found) < width - 1:
        found.append(jnp.where(found[-1] < 0, -1, _taken(nearest, found[-1])))
    return jnp.stack(found[::-1], -1)


def _taken(x: Array, at: Array) -> Array:
    return jnp.take_along_axis(x, jnp.maximum(at, 0), 1)


def by_paths(q: Array, writes: Writes, paths: Paths) -> Array:
    """What tokens of packed rows read, [B, T, Hv, Dv], all memories empty before a row."""
    queries, tokens = _tiled((q, writes), paths.sees.shape[-1])
    both = jax.tree.map(lambda x: x[:, None], tokens)
    solved = _solved(both, paths.sees[:, :, :, None])
    reads, scores = _asked(queries[:, None] * paths.asked[:, :, :, None, :, None], both, solved)
    since, seen = _decays(paths.ends[:, :, :, None], both.decay)
    left = paths.kept[:, :, None] * jnp.exp(since.sum(1))[..., None]  # [n, B, Hv, 3, 3]

    def step(states: Array, tile: Any) -> tuple[Array, Array]:
        base, its, reads, scores, left, seen, keys = tile

        def carried(x: Array) -> Array:
            """x [2, B, H, C, Dk] times the state that each token's way enters the tile from."""
            each = x[..., None, :] * base[:, :, None, :, :, None]
            flat = states.reshape(*states.shape[:2], -1, states.shape[-1])
            return _times(each.reshape(*x.shape[:-1], -1), flat)

        new = its.new - carried(its.old)
        out = (carried(reads) + _times(scores, new)).sum(0)
        rows = seen[..., None] * keys[:, :, None]  # [2, B, H, 3, C, Dk]
        added = _times(jnp.swapaxes(rows, -1, -2), new[:, :, :, None]).sum(0)
        flat = states.reshape(*states.shape[:3], -1)
        return _times(left, flat).reshape(states.shape) + added, out

    batch, heads, _, keys = tokens.k.shape[1:]
    nothing = jnp.zeros((batch, heads, 3, keys, tokens.v.shape[-1]), jnp.float32)
    tiles = paths.base, solved, reads, scores, left, seen, tokens.k
    return _joined(lax.scan(step, nothing, tiles)[1], q.shape[1])
