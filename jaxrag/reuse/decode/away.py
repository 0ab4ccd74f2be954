"""Decoding a request whose K and V lie in host memory (RetrievalAttention section 3, algorithm 1).

The device holds the static pattern alone: the first ``sink`` tokens and a ring of the ``recent``
newest. In every layer it hands q and the newest K and V to the host, attends to the pattern while
the host attends to what the rule chooses of the rest, and merges the two (equations 4 and 5).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig
from jaxrag.base.sharding import by_device, device_axes
from jaxrag.base.types import HIDDEN, Array, HostArray, Partial, Tokens, on_host
from jaxrag.kv.cache import PAGE
from jaxrag.kv.cache.host_pool import HostPool, rows_of
from jaxrag.models.attention import Scale, merge, scale_of, scored
from jaxrag.models.rope import RopeFactors, place, scale_rotary
from jaxrag.reuse.attention_index import rotated_unscaled
from jaxrag.reuse.decode.far import HostLayer
from jaxrag.reuse.decode.host_search import NO_REQUEST, HostSearch


class Pattern(struct.PyTreeNode):
    """The static pattern of every layer, W = sink + recent, on the device.

    Position p stands at p while that is below ``sink``, else at sink + (p - sink) % recent.

    Attributes:
      numbers: [L, B] int32 of the requests on the host; NO_REQUEST for a padding row.
      k: [L, B, W, K, H] at their positions.
      v: [L, B, W, K, H].
    """

    numbers: Array
    k: Array
    v: Array


class PatternAxes(NamedTuple):
    """How the devices of a mesh split a Pattern: rows, and KV heads."""

    numbers: PartitionSpec = device_axes(None, "batch")
    k: PartitionSpec = device_axes(None, "batch", None, "kv_heads")
    v: PartitionSpec = device_axes(None, "batch", None, "kv_heads")


PATTERN = PatternAxes()


@dataclasses.dataclass(frozen=True)
class AwayAttend:
    """One new token a row, over the pattern on the device and the rest on the host.

    The cache is the Pattern.

    Attributes:
      far: does the rule read anything outside the pattern?
    """

    config: ModelConfig
    rope: RopeFactors
    window: tuple[int, int]
    host: HostSearch
    far: bool

    def __call__(
        self,
        layer: Array,
        window: Array | int | None,
        q: Array,
        k: Array,
        v: Array,
        tokens: Tokens,
        cache: Pattern,
    ) -> tuple[Partial, Pattern, None]:
        """Write, then attend; shapes as Attend, T = 1."""
        config, at = self.config, jnp.maximum(tokens.positions, 0)
        rope = self.rope.of_layer(layer)
        k, v = place(k, at, rope, config.rope), v.astype(config.dtype)
        k = k.astype(config.dtype)
        placed = place(q, at, rope, config.rope)
        asked = scale_rotary(q[:, 0], rope, config.rope).astype(jnp.float32)
        rows, heads = device_axes("batch"), device_axes("batch", "kv_heads")
        new, pattern = device_axes("batch", None, "kv_heads"), PATTERN
        where = (device_axes(), pattern.numbers, rows)
        operands = (where, (heads, new, new, new), pattern[1:])
        attend = by_device(self.host.mesh, self._attend, operands, (new, new, *pattern[1:]))
        here = (layer, cache.numbers, tokens.positions[:, 0])
        out, lse, *kept = attend(here, (asked, placed, k, v), (cache.k, cache.v))
        part = Partial(out.astype(q.dtype), lse)
        return part, cache.replace(k=kept[0], v=kept[1]), None

    def _attend(
        self,
        share: Array | int,
        place: tuple[Array, Array, Array],
        new: tuple[Array, Array, Array, Array],
        pattern: tuple[Array, Array],
    ) -> tuple[Array, Array, Array, Array]:
        """``__call__`` of one device, on its rows and heads: its part of out, lse and pattern.

        Args:
            share: number of its run of KV heads.
            place: the layer [], the requests' numbers [L, B] and the positions [B].
            new: the query as the host is asked [B, N, H], and at its position [B, 1, N, H]; K and V
                [B, 1, K, H].
            pattern: its K and V.
        """
        layer, numbers, position = place
        asked, placed, k, v = new
        pattern_k, pattern_v = pattern
        ticket, kv_heads = None, k.shape[2]
        if self.far:
            heads = asked.reshape(-1, kv_heads, self.config.group_size, self.config.head_dim)
            ticket = self._start(share, layer, numbers[layer], heads, k[:, 0], v[:, 0], position)
            # The pattern's turn comes when the host has begun.
            placed, ticket = lax.optimization_barrier((placed, ticket))
        index = jnp.where(position >= 0, _index(position, *self.window), pattern_k.shape[2])
        rows = jnp.arange(len(position))
        pattern_k = pattern_k.at[layer, rows, index].set(k[:, 0], mode="drop")
        pattern_v = pattern_v.at[layer, rows, index].set(v[:, 0], mode="drop")
        kept = (pattern_k[layer], pattern_v[layer])
        part = _attend(placed[:, 0], *kept, position, self.window, scale_of(self.config))
        if ticket is not None:
            part = merge([part, self._wait(ticket, part)])
        return part.out.reshape(placed.shape), part.lse, pattern_k, pattern_v

    def _start(self, *arrays: Array | int) -> Array:
        """Hand q [B, K, G, H], k and v [B, K, H] of a layer to the host, which goes on alone."""

        def start(*arrays: Any) -> HostArray:
            share, layer, numbers, q, k, v, position = (np.asarray(x) for x in arrays)
            at, part = int(layer), self.host.part(int(share))
            self.host.write(at, numbers, k, v, position, part)
            return np.asarray(self.host.start(at, numbers, q, position, part), np.int32)

        ticket: Array = io_callback(start, jax.ShapeDtypeStruct((), jnp.int32), *arrays)
        return ticket

    def _wait(self, ticket: Array, part: Partial) -> Partial:
        """What the host found, of the shapes of ``part``, which is awaited before it."""
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (part.out, part.lse))

        def wait(ticket: Any, ready: Any) -> tuple[HostArray, ...]:
            found = self.host.wait(int(ticket))
            return tuple(x.reshape(s.shape) for x, s in zip(found, shapes, strict=True))

        return Partial(*io_callback(wait, shapes, ticket, part.lse))


def pattern_of(
    config: ModelConfig,
    window: tuple[int, int],
    layers: list[HostLayer],
    position: int,
    number: int,
) -> Pattern:
    """The pattern of one request whose prompt ends at ``position``, on the host: B = 1.

    Of the KV heads that ``layers`` have.
    """
    sink, recent = window
    first = np.arange(min(sink, position + 1))
    last = np.arange(max(sink, position + 1 - recent), position + 1)
    positions = np.concatenate((first, last)).astype(np.int64)
    shape = (len(layers), 1, sink + recent, len(layers[0].k), config.head_dim)
    k, v = (np.zeros(shape, jnp.dtype(config.dtype)) for _ in range(2))
    index = np.where(positions < sink, positions, sink + (positions - sink) % recent)
    for at, layer in enumerate(layers):
        rows = layer.rows[positions]
        keys, rope = layer.k[:, rows].astype(np.float32), config.rope_of(at)
        keys = rotated_unscaled(keys, layer.offsets[positions], rope)
        k[at, 0, index] = keys.swapaxes(0, 1).astype(k.dtype)
        v[at, 0, index] = layer.v[:, rows].swapaxes(0, 1)
    return on_host(Pattern, np.full((len(layers), 1), number, np.int32), k, v)


def host_layers(
    host: HostPool,
    pages: HostArray,
    offsets: HostArray,
    slot_position: HostArray,
    next_position: int,
    next_slot: int,
    room: int,
) -> list[HostLayer]:
    """Every layer of one request, by position, from its page table after prefill.

    ``pages`` [M], ``offsets`` [M], ``slot_position`` [M * PAGE]; ``room`` tokens may follow.
    """
    assert host.k is not None
    room = min(room, len(pages) * PAGE - next_slot)
    rows, turned = rows_of(pages), np.repeat(offsets, PAGE)
    by_position = np.zeros(next_position + room, np.int64)
    by_offset = np.zeros(next_position + room, np.int32)
    slots = np.flatnonzero(slot_position != HIDDEN)
    by_position[slot_position[slots]] = rows[slots]
    by_offset[slot_position[slots]] = turned[slots]
    by_position[next_position:] = rows[next_slot : next_slot + room]
    return [
        HostLayer(k, v, by_position.astype(np.int32), by_offset)
        for k, v in zip(host.k, host.v, strict=True)
    ]


def _index(position: Array, sink: int, recent: int) -> Array:
    return jnp.where(position < sink, position, sink + (position - sink) % recent)


def _attend(
    q: Array, k: Array, v: Array, position: Array, window: tuple[int, int], scale: Scale
) -> Partial:
    """Attention of q [B, N, H], in place, to what the pattern [B, W, K, H] holds: T = 1."""
    sink, recent = window
    batch, width, num_kv_heads, dim = k.shape
    at = jnp.arange(width)
    behind = (position[:, None] - at) % recent  # of the ring, how far the newest is ahead
    there = jnp.where(at < sink, at <= position[:, None], position[:, None] - behind >= sink)
    heads = q.reshape(batch, num_kv_heads, -1, dim)
    scores = jnp.einsum("bkgh,bwkh->bkgw", heads, k, preferred_element_type=jnp.float32)
    scores = jnp.where(there[:, None, None], scored(scores, scale), -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None])
    out = jnp.einsum("bkgw,bwkh->bkgh", weights, v.astype(jnp.float32))
    return Partial(out=out.reshape(batch, 1, -1, dim), lse=lse.reshape(batch, 1, -1))


__all__ = ["NO_REQUEST", "AwayAttend", "Pattern", "host_layers", "pattern_of"]
