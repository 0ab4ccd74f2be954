"""Layers that keep a state, in whole models: rows in pieces, and chunks put together from maps."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.config import config_from_dict, config_to_dict
from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.base.types import EMPTY, FINAL, Partial, Tokens
from jaxrag.engine.runner import ModelRunner
from jaxrag.kv.placement import AWAY
from jaxrag.models.decoder import forward, unembed
from jaxrag.models.model import random_model
from jaxrag.models.recurrent import no_memory
from jaxrag.models.rope import place
from jaxrag.models.segments import lay_out
from jaxrag.reuse.methods import METHODS, refused_methods
from jaxrag.train.config import LoraPart
from jaxrag.train.lora import adapter_specs
from jaxrag.train.primer import train_primer

B, SLOTS = 2, 48
PIECE = 13  # tokens of one program, with padding
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@functools.partial(jax.jit, static_argnums=0)
def run(config, params, table, ids, positions, used, memory, kv, seen):
    """Tokens [B, T] at slots that are their positions, behind the slots ``seen`` [SLOTS]."""

    def attend(layer, window, q, k, v, tokens, cache):
        q, k = (place(x, positions, table, config.rope) for x in (q, k))
        rows = jnp.arange(B)[:, None]
        cache = cache.at[layer, :, rows, positions].set(jnp.stack([k, v]).transpose(1, 2, 0, 3, 4))
        keys, values = (jnp.repeat(x, config.group_size, 2) for x in cache[layer])
        scores = jnp.einsum("btnh,bsnh->btns", q, keys) * config.score_scale
        shown = seen & (jnp.arange(SLOTS) <= positions[..., None])
        scores = jnp.where(shown[:, :, None], scores, -jnp.inf)
        out = jnp.einsum("btns,bsnh->btnh", jax.nn.softmax(scores), values)
        return Partial(out, jax.nn.logsumexp(scores, -1)), cache, None

    segments = jnp.where(used, FINAL, EMPTY)
    hidden, kv, (_, memory) = forward(
        params, config, Tokens(ids, positions, segments), kv, attend, recurrent=memory
    )
    return unembed(params, config, hidden), memory, kv


@pytest.fixture(scope="module")
def model(tiny_config):
    return random_model(tiny_config("qwen3_5", num_layers=4), seed=3)


@pytest.fixture
def ids(model, rng):
    return rng.integers(0, model.config.vocab_size, (B, 32), dtype=np.int32)


def piece(model, ids, start, end, memory, kv, seen, length=PIECE):
    """The tokens from ``start`` to ``end``, as a row of ``length`` tokens filled up behind."""
    at = np.minimum(np.arange(start, start + length), end)
    used = np.broadcast_to(np.arange(start, start + length) < end, (B, length))
    rows = np.broadcast_to(at.astype(np.int32), (B, length))
    memory = memory.replace(map=None)
    logits, memory, kv = run(
        model.config,
        model.params,
        model.rope(SLOTS),
        ids[:, np.minimum(at, ids.shape[1] - 1)],
        rows,
        used,
        memory,
        kv,
        seen,
    )
    return np.asarray(logits[:, : end - start]), memory, kv


def empty(model):
    return no_memory(model.config, B).replace(wants_map=True)


def nothing(model):
    c = model.config
    return jnp.zeros((c.num_kv_layers, 2, B, SLOTS, c.num_kv_heads, c.head_dim))


def test_rows_go_on_from_their_memory(model, ids):
    """In pieces with padding behind them, and token by token: as in one packed row."""
    wanted = np.asarray(model.logits(ids))
    memory, kv, everything = empty(model), nothing(model), np.ones(SLOTS, bool)
    found = []
    for start, end in ((0, 7), (7, 20), (20, 22)):
        got, memory, kv = piece(model, ids, start, end, memory, kv, everything)
        found.append(got)
    for at in range(22, 32):
        got, memory, kv = piece(model, ids, at, at + 1, memory, kv, everything, 1)
        found.append(got)
    np.testing.assert_allclose(np.concatenate(found, 1), wanted, **CLOSE)


@pytest.mark.parametrize("visible", [True, False])
def test_chunks_put_together_from_maps_are_the_packed_rows(model, ids, visible):
    """What training in block mode sees is what maps of chunks, encoded apart, give the question."""
    layout = lay_out(5, (7, 2, 11), 7)
    rows = [np.broadcast_to(it, ids.shape) for it in (layout.positions, layout.segments)]
    wanted = np.asarray(model.logits(ids, *rows, prefix_visible=visible))
    kv, none_yet = nothing(model), empty(model)
    slots = np.arange(SLOTS)
    first, prefix, kv = piece(model, ids, 0, 5, none_yet, kv, slots < 5)
    found, state, last = [first], prefix.state, prefix
    for start, end in ((5, 12), (12, 14), (14, 25)):
        seen = ((slots < 5) & visible) | ((slots >= start) & (slots < end))
        before = prefix if visible else none_yet
        logits, last, kv = piece(model, ids, start, end, before, kv, seen)
        found.append(logits)
        np.testing.assert_allclose(last.map(before.state), last.state, **CLOSE)
        state = last.map(state)
    behind = last.replace(state=state)
    found.append(piece(model, ids, 25, 32, behind, kv, slots < 32)[0])
    np.testing.assert_allclose(np.concatenate(found, 1), wanted, **CLOSE)


def test_a_config_says_what_it_is_and_others_say_nothing_of_it(model, tiny_config):
    config = model.config
    again = config_to_dict(config)
    assert config_from_dict(again) == config
    assert (config.num_kv_layers, config.stacks["recurrent"]) == (2, (0, 2))
    assert not {"recurrent", "output_gate"} & config_to_dict(tiny_config()).keys()
    assert "shared" not in config_to_dict(tiny_config("qwen3_moe"))["experts"]
    for change, said in (
        ({"layers": [True] * 4}, "some that attend"),
        ({"layers": [True, False]}, "2 for 4 layers"),
        ({"key_heads": 4}, "a multiple of the key heads"),
        ({"width": 1}, "a width of 2 or more"),
        ({"value_dim": 0}, "recurrent value_dim=0"),
    ):
        with refused(ConfigError, said):
            config_from_dict({**again, "recurrent": {**again["recurrent"], **change}})
    with refused(ConfigError, "beside a window"):
        config_from_dict({**again, "sliding_window": 5})


SERVED = {
    "full_attention",
    "full_reuse",
    "turborag",
    "turborag_composite",
    "block_attention",
    "primed",
}


def test_what_needs_pages_or_parts_of_a_chunk_refuses(model):
    """A chunk is one map of a state: no token of it is computed again, weighed or left out."""
    config = model.config
    assert {*METHODS} - {*refused_methods(config)} == SERVED
    for name, said in (
        ("cacheblend", "computes some tokens of a chunk again"),
        ("ape", "weighs attention to chunks"),
        ("packets", "holds vectors around chunks"),
        ("kcache", "keep a state in place of KV"),
    ):
        with refused(RequestError, said):
            METHODS[name].check(config)
    with refused(ConfigError, "pages hold KV alone"):
        ModelRunner(SimpleNamespace(config=config, backend=None))
    with refused(ConfigError, "no state; leave it out"):
        AWAY.check(config, None)
    with refused(ConfigError, "recurrent layers; leave it out"):
        model.decoding_with("int8")
    with refused(ConfigError, "take no adapters"):
        adapter_specs(config, LoraPart(rank=2, alpha=1.0, targets=("q",)))
    with refused(ConfigError, "not trained for layers that keep a state"):
        train_primer(model, None, (), (), None, None)
