"""Chunks encoded behind their neighbours: the KV of one prefill, packed, under own keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.errors import RequestError
from jaxrag.base.types import FINAL, Partial, Tokens
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.store import MemoryStore
from jaxrag.models.decoder import forward
from jaxrag.models.model import random_model
from jaxrag.models.rope import place
from jaxrag.reuse.encode import (
    ENCODERS,
    ChunkEncoding,
    StoredNeighbours,
    chunk_key,
    encode_chunks,
    joint,
    provenance,
)
from jaxrag.reuse.encode import neighbours as behind
from jaxrag.reuse.methods import Method

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ALWAYS = ("mistral", "glm4")  # windowed; partial and interleaved rotary. The others with the slow
FAMILIES = [
    *ALWAYS,
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("llama", "qwen2", "qwen3", "glm")),
]
SEEING = [name for name, encoder in ENCODERS.items() if encoder.sees_neighbours]


@pytest.fixture(scope="module")
def model_of(tiny_config):
    made = {}

    def make(family="llama"):
        if family not in made:
            made[family] = random_model(tiny_config(family), seed=1)
        return made[family]

    return make


def ids(rng, *lengths):
    return [rng.integers(3, 101, n).astype(np.int32) for n in lengths]


class Dense:
    """Attention to given KV at given positions and to the new tokens, by the definition."""

    def __init__(self, config, rope, context, positions):
        self.config, self.rope = config, rope
        self.context, self.positions = jnp.asarray(context), jnp.asarray(positions)

    def __call__(self, layer, window, q, k, v, tokens, cache):
        config, at = self.config, tokens.positions[0]
        old = place(self.context[layer, 0], self.positions, self.rope, config.rope)
        keys = jnp.concatenate((old, place(k[0], at, self.rope, config.rope)))
        values = jnp.concatenate((self.context[layer, 1], v[0]))
        groups = config.num_heads // config.num_kv_heads
        scores = jnp.einsum(
            "tnh,snh->nts", place(q[0], at, self.rope, config.rope), jnp.repeat(keys, groups, 1)
        )
        apart = at[:, None] - jnp.concatenate((self.positions, at))[None]
        seen = apart >= 0 if window is None else (apart >= 0) & (apart < window)
        scores = jnp.where(seen, scores * config.head_dim**-0.5, -jnp.inf)
        out = jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores, -1), jnp.repeat(values, groups, 1))
        return Partial(out[None], jax.nn.logsumexp(scores, -1).T[None]), cache, (k, v)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kv_is_that_of_the_chunk_over_the_neighbours_own_kv(rng, model_of, family):
    """Equation 10: their KV behind the prefix, turned to where they stand, and the chunk last."""
    model = model_of(family)
    prefix, one, two, chunk = ids(rng, 5, 17, 9, 23)
    context = [next(encode_chunks(model, "isolated", prefix[:0], [prefix]))[1]]
    context += [next(encode_chunks(model, "after_prefix", prefix, [x]))[1] for x in (one, two)]
    context = np.concatenate(context, axis=2)  # [L, 2, 31, K, H]
    position = np.arange(31 + 23, dtype=np.int32)
    tokens = Tokens(
        ids=chunk[None], positions=position[None, 31:], segments=np.full((1, 23), FINAL, np.int32)
    )
    dense = Dense(model.config, model.rope(54), context, position[:31])
    _, _, (k, v) = forward(model.params, model.config, tokens, None, dense)
    ((_, kv),) = encode_chunks(model, "neighbours", prefix, [chunk], [[one, two]])
    np.testing.assert_allclose(kv, np.stack((k[:, 0], v[:, 0]), axis=1), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_jointly_the_kv_is_that_of_one_prefill_with_the_chunk_last(rng, model_of, family):
    model = model_of(family)
    prefix, one, two, chunk = ids(rng, 5, 17, 9, 23)
    whole = np.concatenate((one, two, chunk))
    ((_, full),) = encode_chunks(model, "after_prefix", prefix, [whole])
    ((_, kv),) = encode_chunks(model, "neighbours_joint", prefix, [chunk], [[one, two]])
    np.testing.assert_allclose(kv, full[:, :, -23:], **CLOSE)


def test_the_neighbours_own_kv_is_taken_from_the_store(rng, model_of):
    model = model_of()
    prefix, one, two, chunk = ids(rng, 5, 17, 9, 23)
    fresh = MemoryStore(model.fingerprint, model.kv_layout)
    own = StoredNeighbours(ChunkEncoding(model, fresh, prefix))
    results = []
    for _ in range(2):
        ((_, kv),) = encode_chunks(model, "neighbours", prefix, [chunk], [[one, two, one]], own)
        results.append(kv)
    assert sorted(own.computed) == [9, 17]
    np.testing.assert_array_equal(*results)
    assert {record.encoder for record in fresh.records()} == {"after_prefix"}
    keys = [chunk_key(model.fingerprint, model, "after_prefix", prefix, x) for x in (one, two)]
    assert sorted(keys) == sorted(fresh.keys())
    # What the store holds is what the chunk sees.
    fresh.put(keys[0], np.zeros_like(fresh.get(keys[0])), replace=True,
              record=provenance(model, "after_prefix", prefix, one))  # fmt: skip
    ((_, other),) = encode_chunks(model, "neighbours", prefix, [chunk], [[one, two, one]], own)
    assert np.abs(other[1:] - results[0][1:]).max() > 1e-3


@pytest.mark.parametrize("encoder", SEEING)
def test_without_neighbours_it_is_the_chunk_behind_the_prefix(rng, model_of, encoder):
    prefix, chunk = ids(rng, 6, 19)
    ((_, kv),) = encode_chunks(model_of(), encoder, prefix, [chunk], [()])
    ((_, expected),) = encode_chunks(model_of(), "after_prefix", prefix, [chunk])
    np.testing.assert_allclose(kv, expected, **CLOSE)


@pytest.mark.parametrize("encoder", SEEING)
def test_examples_that_share_a_row_do_not_see_each_other(rng, model_of, encoder, monkeypatch):
    for module in (behind, joint):
        monkeypatch.setattr(module, "ROW_TOKENS", 256)
    model, prefix = model_of("mistral"), ids(rng, 4)[0]
    chunks = ids(rng, 12, 150, 3, 1, 40)
    others = [ids(rng, 10, 5), ids(rng, 200), [], ids(rng, 1, 1, 1), ids(rng, 300, 7)]
    together = dict(encode_chunks(model, encoder, prefix, chunks, others))
    assert sorted(together) == list(range(5))
    for index, chunk in enumerate(chunks):
        ((_, alone),) = encode_chunks(model, encoder, prefix, [chunk], [others[index]])
        assert alone.shape == (3, 2, len(chunk), 2, 10) == together[index].shape
        np.testing.assert_allclose(together[index], alone, **CLOSE)


def test_neighbours_change_the_kv_and_their_order_too(rng, model_of):
    prefix, one, two, chunk = ids(rng, 4, 15, 15, 20)
    found = [
        next(encode_chunks(model_of(), "neighbours", prefix, [chunk], [others]))[1]
        for others in ([], [one], [one, two], [two, one])
    ]
    for index, kv in enumerate(found):
        for other in found[index + 1 :]:
            assert np.abs(kv[1:] - other[1:]).max() > 1e-3  # the first layer sees the chunk alone


def test_keys_name_neighbours_and_their_order(rng, model_of):
    model = model_of()
    prefix, one, two, chunk = ids(rng, 4, 15, 15, 20)

    def key(encoder, others, seen=prefix):
        return chunk_key(model.fingerprint, model, encoder, seen, chunk, others)

    keys = [key(name, others) for name in SEEING for others in ([], [one], [one, two], [two, one])]
    keys += [key("neighbours", [one], prefix[:-1]), key("after_prefix", None)]
    keys += [key("neighbours", [np.concatenate((one, two))])]
    assert len(set(keys)) == len(keys)
    assert key("after_prefix", None) == key("after_prefix", [])
    assert key("neighbours", [one.copy()]) == key("neighbours", [one])


def test_what_an_encoder_cannot_do_is_refused(rng, model_of):
    model = model_of()
    prefix, one, chunk = ids(rng, 4, 15, 20)
    with pytest.raises(RequestError, match="'neighbours' needs the neighbours of every chunk"):
        encode_chunks(model, "neighbours", prefix, [chunk])
    with pytest.raises(RequestError, match="'neighbours_joint' needs the neighbours"):
        chunk_key(model.fingerprint, model, "neighbours_joint", prefix, chunk)
    with pytest.raises(RequestError, match="'isolated' sees no neighbours"):
        encode_chunks(model, "isolated", prefix, [chunk], [[one]])
    with pytest.raises(RequestError, match="neighbours of 1 chunks for 2"):
        encode_chunks(model, "neighbours", prefix, [chunk, chunk], [[one]])
    with pytest.raises(RequestError, match="chunk 1 has 20 tokens behind 604"):
        list(encode_chunks(model, "neighbours", prefix, [chunk] * 2, [[], [one] * 40]))
    with pytest.raises(RequestError, match="chunk 0 has 0 tokens"):
        list(encode_chunks(model, "neighbours", prefix, [chunk[:0]], [[one]]))


def test_chunks_of_one_bucket_compile_one_program(rng, model_of):
    model = model_of("qwen2")
    prefix = ids(rng, 4)[0]

    def encode(*lengths):
        chunks, others = ids(rng, *lengths), [ids(rng, n + 100, 20) for n in lengths]
        for encoder in SEEING:
            list(encode_chunks(model, encoder, prefix, chunks, others))
        return behind._encode._cache_size(), joint.run_packed._cache_size()

    before = encode(30)
    assert encode(31) == encode(60) == before


def test_the_pool_takes_chunks_behind_their_neighbours_from_the_store(rng, model_of):
    model = model_of("glm")
    prefix, one, two, chunk = ids(rng, 4, 15, 15, 20)

    def found(chunks, neighbours):
        """Where the KV of each chunk came from."""
        prompt = Prompt(prefix, chunks, one[:1], neighbours)
        request = Request(prompt, engine_of(model).memory, Method("tried", "neighbours"), 1)

        def look(runner, state, there):
            return [part.origin for part in state.parts[1:]]

        [origins] = inspect_prompts(engine_of(model), [request], look)
        return origins

    first = found((chunk, one), ((one, two), ()))
    assert [it.how for it in first] == ["encoded", "encoded"]
    # (tokens that ran, keys that the last of them saw): both chunks, and the own KV of both.
    assert sorted(first[0].runs) == [(15, 4 + 15)] * 2 + [(20, 4 + 30 + 20)]
    assert first[1].runs == ((15, 4 + 15),)
    engine_of(model).forget()
    again = found((chunk, chunk), ((one, two), (two,)))
    assert [it.how for it in again] == ["store", "encoded"]
    assert again[1].runs == ((20, 4 + 15 + 20),)
