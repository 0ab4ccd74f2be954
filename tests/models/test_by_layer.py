"""Weights with an array for every layer: the same numbers, in the same memory, and no copies."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag import METHODS
from jaxrag.base.sharding import make_mesh
from jaxrag.base.types import FINAL, Tokens
from jaxrag.engine.decoding import BatchKey, DecodeBatch
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.models import linear as room
from jaxrag.models.attention import PackedAttend
from jaxrag.models.decoder import forward, unembed
from jaxrag.models.linear import by_layer, gains_by_layer
from jaxrag.models.model import random_model
from jaxrag.models.recurrent import packed
from jaxrag.models.rope import rope_tables
from jaxrag.models.taps import Tap
from jaxrag.reuse.decode import Dense

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.fixture
def wide(tiny_config):
    """Layers are multiples of 64 bytes; no matrix is as large as another, or as scores."""

    def make(family="llama", **changes):
        sizes = {"model_dim": 80, "mlp_dim": 224, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32}
        return tiny_config(family, **sizes, **changes)

    return make


@pytest.fixture
def params(wide, random_params):
    return jax.jit(lambda x: x)(random_params(wide()))  # out of XLA's own memory


def test_layers_lie_in_the_memory_of_the_stacked_weights(params):
    apart = by_layer(params, {"layers": range(len(params.layers.q))})
    assert len(apart.layers) == len(params.layers.q)
    for index, layer in enumerate(apart.layers):
        for name in MATRICES:
            whole, part = getattr(params.layers, name), getattr(layer, name)
            np.testing.assert_array_equal(whole[index], part)
            here = part.unsafe_buffer_pointer() - whole.unsafe_buffer_pointer()
            assert here == index * part.nbytes, name


SHARED = {
    "num_layers": 6, "window_layers": (False, True) * 3, "rope_layers": (0, 1) * 3,
    "own_kv_heads": (1, 2) * 3, "shared_layers": 2, "shared_mlp_dim": 448, "input_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "glm4", "gemma4", "qwen3_next"])
def test_the_numbers_are_those_of_the_scan(wide, random_params, family):
    changes = {"window_layers": (True, False, True)} if family == "mistral" else {}
    if family == "glm4":
        changes = {"rope": wide().rope}
    config = wide(family, **(SHARED if family == "gemma4" else changes))
    params = random_params(config)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (2, 19)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(19, dtype=jnp.int32), ids.shape)
    tokens = Tokens(ids=ids, positions=positions, segments=jnp.full_like(ids, FINAL))
    plain = PackedAttend(config, rope_tables(config, 32), prefix_visible=False)
    attend = Tap(plain, lambda q, k, v: (k, v))

    @jax.jit
    def run(params):
        memory = packed(config, tokens, False)
        hidden, _, collected = forward(params, config, tokens, None, attend, recurrent=memory)
        return unembed(params, config, hidden), collected

    apart = by_layer(params, config.stacks)
    for one, other in zip(*map(jax.tree.leaves, map(run, (params, apart))), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_layers_that_share_k_and_v_are_served_the_same(wide, monkeypatch):
    """By the scan, by a program of each kind of layer, and with int8 where decode steps read it."""
    config = wide("gemma4", **SHARED, eos_ids=())
    answers = []
    for least in (room.IN_CACHE, 0):
        monkeypatch.setattr(room, "IN_CACHE", least)
        model = random_model(config, cache_tokens=256)
        apart = isinstance(model.decoder(64, weights="decode").params.layers, list)
        assert apart == (least == 0)
        for it in (model, model.decoding_with("int8"))[: 1 + apart]:
            engine = engine_of(it)
            prompt = Prompt(np.zeros(0, np.int32), (), np.arange(5, 40, dtype=np.int32))
            request = Request(prompt, engine.memory, METHODS["full_attention"], 4)
            answers.append([(one.new, one.logprobs) for one in engine.iterate([request])])
    scan, own, small = (
        [np.concatenate(it) for it in zip(*answer, strict=True)] for answer in answers
    )
    np.testing.assert_array_equal(scan[0], own[0])
    np.testing.assert_allclose(scan[1], own[1], rtol=2e-5, atol=2e-5)
    assert scan[1][0] == small[1][0] and not np.array_equal(own[1], small[1])
    np.testing.assert_allclose(scan[1][:2], small[1][:2], atol=0.02)  # of the same tokens


def test_who_gains(params, monkeypatch):
    assert not gains_by_layer(params, None)  # the caches hold it
    monkeypatch.setattr(room, "IN_CACHE", 0)
    assert gains_by_layer(params, None)
    assert not gains_by_layer(params, make_mesh(tensor=2))
    odd = params.replace(layers=params.layers.replace(up=params.layers.up[:, :-1, :3]))
    assert not gains_by_layer(odd, None)  # a view of it would be copied
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not gains_by_layer(params, None)


def copies_of_weights(config, rows):
    """Instructions of the compiled decode step that write something as large as a weight matrix."""
    model = random_model(config, cache_tokens=1280)
    batch = DecodeBatch(ModelRunner(model), BatchKey(Dense(), 8, 0, rows))
    text = "\n".join(program.compile().as_text() for program in batch.lower())
    sizes = {getattr(model.params.layers, name)[0].size for name in MATRICES}
    sizes.add(model.params.lm_head.size)
    found = []
    for computation in re.split(r"\n(?=%|ENTRY)", text):
        if "fused" in computation.partition("(")[0]:
            continue  # what a fusion writes is its result, in the computation that calls it
        for line in computation.splitlines()[1:]:
            made = re.match(r"\s*(?:ROOT )?%\S+ = (?:bf16|f32)\[([\d,]+)\]\S* ([\w-]+)\(", line)
            if made is None or made[2] in ("parameter", "get-tuple-element", "bitcast"):
                continue
            if np.prod([int(size) for size in made[1].split(",")]) in sizes:
                found.append(line.strip())
    return found


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_step_holds_no_copy_of_a_weight_matrix(wide, monkeypatch, dtype, rows):
    monkeypatch.setattr(room, "IN_CACHE", 0)
    assert copies_of_weights(wide(dtype=dtype), rows) == []


def test_a_copy_would_be_seen(wide):
    """The scan over stacked weights takes every layer's out of them."""
    assert copies_of_weights(wide(), 1)
