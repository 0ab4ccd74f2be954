"""How far the KV that an answer is read from stands from full attention's, layer by layer."""

from collections import abc
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base.shapes import bucket
from jaxrag.base.types import Array, HostArray
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prefill import Prefilled
from jaxrag.engine.prefilled import prefilled
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import PromptPart, Sequence
from jaxrag.kv.cache import PAGE, PagePool
from jaxrag.kv.store import KVStore
from jaxrag.models.decoder import Decoder
from jaxrag.models.model import Model
from jaxrag.models.rope import place
from jaxrag.reuse.encode import encode_chunks
from jaxrag.reuse.methods import Method


class Deviation(NamedTuple):
    """Means over chunk tokens, [L, 2] float64 each; on axis 1, 0 is K and 1 is V.

    ``squared`` is the squared difference, summed over KV heads and dimensions (FusionRAG equations
    7 and 8); ``relative`` divides it by the squared length of what full attention computes.
    """

    squared: HostArray
    relative: HostArray


def kv_deviation(
    model: Model, store: KVStore, method: Method, prompts: abc.Sequence[Prompt]
) -> Deviation:
    """Deviation of the chunk tokens' KV as the answers to these prompts see it.

    After recomputation: a recomputed token counts with its new KV. Prompts are served one at a
    time; each has a chunk. Raises as ``prefilled`` does.
    """
    engine = engine_of(model)
    shape = (model.config.num_layers, 2)
    apart, length, tokens = np.zeros(shape), np.zeros(shape), 0
    whole = [np.concatenate((it.prefix, *it.chunks)) for it in prompts]
    fresh = engine.call(  # plain causal attention
        lambda runner: dict(encode_chunks(model, "isolated", whole[0][:0], whole))
    )
    for index, prompt in enumerate(prompts):

        def look(
            runner: ModelRunner, state: Sequence, there: Prefilled, at: int = index
        ) -> HostArray:
            return _of_request(runner, state, prompts[at], fresh[at])

        [one] = prefilled(engine, [Request(prompt, store, method, 1)], look)
        apart, length = apart + one[0], length + one[1]
        tokens += sum(map(len, prompt.chunks))
    return Deviation(apart / tokens, apart / length)


def _of_request(
    runner: ModelRunner, mapped: Sequence, prompt: Prompt, fresh: HostArray
) -> HostArray:
    """Sums over the chunk tokens, [2, L, 2]: squared difference, squared length of ``fresh``.

    ``fresh`` [L, 2, T, K, H] is the KV of prefix and chunks under full attention.
    """
    page, slot, places = _where(mapped, prompt)
    count = len(page)
    size = bucket(count, 64)
    padded = np.zeros((*fresh.shape[:2], size, *fresh.shape[3:]), fresh.dtype)
    padded[:, :, :count] = fresh[:, :, len(prompt.prefix) :]
    sums = _sums(
        runner.cache.pool,
        runner.model.decoder(int(places.max()) + 1),
        *map(jnp.asarray, (padded, *(np.pad(x, (0, size - count)) for x in (page, slot, places)))),
        jnp.asarray(np.arange(size) < count),
    )
    return np.asarray(sums, np.float64)


def _where(mapped: Sequence, prompt: Prompt) -> tuple[HostArray, HostArray, HostArray]:
    """Of each chunk token, int32 [C]: its page, its slot there, what its key is rotated to."""
    prefix, count = len(prompt.prefix), sum(map(len, prompt.chunks))
    chunks = mapped.parts[1:]
    if any(len(part.slots) for part in chunks):
        slots = np.concatenate([part.slots for part in chunks])
        places: HostArray = np.concatenate([_rotated_to(part) for part in chunks])
    else:  # run with the final block
        places = np.arange(prefix, prefix + count, dtype=np.int32)
        slots = mapped.first_slot + places
    if mapped.choice is not None:
        chosen = mapped.choice.tokens
        slots[chosen] = mapped.first_slot + np.arange(len(chosen), dtype=np.int32)
        places[chosen] = prefix + chosen
    return np.array(mapped.table.pages, np.int32)[slots // PAGE], slots % PAGE, places


def _rotated_to(part: PromptPart) -> HostArray:
    """What the keys of a part are rotated to in the pool: stored ones to places in their chunk."""
    if part.resident is None or part.kept:
        return part.positions
    return np.arange(len(part.ids), dtype=np.int32)


@jax.jit
def _sums(
    pool: PagePool,
    decoder: Decoder,
    fresh: Array,
    page: Array,
    slot: Array,
    places: Array,
    real: Array,
) -> Array:
    """[2, L, 2] float32: squared differences from the pool, and squared lengths."""
    config, sums = decoder.config, []
    for layer in range(config.num_layers):
        k = place(fresh[layer, 0], places, decoder.rope, config.rope)
        for new, cached in ((k, pool.k), (fresh[layer, 1], pool.v)):
            new = new.astype(jnp.float32)
            old = cached[pool.rows(layer, page, config.num_layers), slot]
            apart = jnp.square(new - old.astype(jnp.float32)).sum((1, 2))
            length = jnp.square(new).sum((1, 2))
            sums.append(jnp.stack([jnp.where(real, x, 0).sum() for x in (apart, length)]))
    return jnp.stack(sums).reshape(config.num_layers, 2, 2).transpose(2, 0, 1)
