"""Prefill layer by layer: the logits of prefill piece by piece, and every byte moved once."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxrag.base.config import NoRotation, RopeConfig, YarnScaling
from jaxrag.engine import layerwise
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.placement import AWAY, KVPlacement
from jaxrag.models.model import random_model
from jaxrag.reuse.decode import InfLLM, Observe, TopN
from jaxrag.reuse.methods import METHODS

FAR = (
    AWAY,
    pytest.param(KVPlacement(value_layers=0), marks=pytest.mark.slow),
    KVPlacement(value_layers=1),
)

# Layers with YaRN's attention factor and without rotation, and norms behind their parts alone.
YARN = RopeConfig(100.0, 10, False, YarnScaling(4.0, 32, 8.0, 0.5, 1.7, True))
KINDS = {
    "rope": YARN,
    "more_ropes": (dataclasses.replace(YARN, scaling=NoRotation()),),
    "rope_layers": (1, 0, 1),
    "post_norms": True,
    "pre_norms": False,
    "qk_norm": True,
    "joint_qk_norm": True,
}
EVERY = ("epic", "full_attention", "full_reuse", "turborag")


@pytest.fixture
def a_prompt(rng):
    def make(prefix=5, chunks=(37, 600, 1, 16), final=9):
        ids = [rng.integers(3, 101, n).astype(np.int32) for n in (prefix, *chunks, final)]
        return Prompt(ids[0], tuple(ids[1:-1]), ids[-1])

    return make


class Looking(TopN):
    """A rule that has some queries kept and uses none."""

    observe = Observe("strided", 8)


ASKING = InfLLM(block=8, blocks=2, representatives=2, sink=4, recent=8, observed=8)


def _prefilled(model, prompt, method):
    """Logits [V], kept queries and their positions, and bytes moved."""
    engine, layers = engine_of(model), model.placement.value_layers
    rule = ASKING if layers is None else Looking(device_layers=layers)
    method = dataclasses.replace(METHODS[method], decode=rule)
    tokens = 1 if model.config.sliding_window else 4  # no rule attends by a window away
    host = engine.runner.cache.host
    before = host and host.moved

    def seen(runner, state, there):
        kept = np.asarray(there.bank.queries), np.asarray(there.bank.positions)
        return np.asarray(there.logits)[0], *kept, host and host.moved - before

    request = Request(prompt, engine.memory, method, tokens)
    [found] = inspect_prompts(engine, [request], seen)
    return found


@pytest.mark.parametrize("far", FAR, ids=str)
@pytest.mark.parametrize(
    ("family", "changes", "methods"),
    [
        ("granite", {**KINDS, "sink_logits": True}, ("epic", "turborag")),
        pytest.param("granite", KINDS, ("epic", "turborag"), marks=pytest.mark.slow),
        pytest.param("llama", {}, ("full_attention", "full_reuse"), marks=pytest.mark.slow),
        pytest.param("glm", {}, EVERY, marks=pytest.mark.slow),  # interleaved
        pytest.param("llama", {"sliding_window": 24}, EVERY[:3], marks=pytest.mark.slow),
    ],
)
def test_it_is_prefill(tiny_config, a_prompt, far, family, changes, methods):
    config = tiny_config(family, **{"eos_ids": (), "max_positions": 8192, **changes})
    model = random_model(config, cache_tokens=4096)
    far = model.placed(far)
    prompts = (a_prompt(), a_prompt(0, (64, 64), 40))
    for method, prompt in itertools.product(methods, prompts):
        ours = _prefilled(far, prompt, method)
        expected = _prefilled(model, prompt, method)
        for mine, theirs in zip(ours[:3], expected[:3], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("far", FAR, ids=str)
def test_blocks_and_pieces(tiny_config, a_prompt, far, monkeypatch):
    """Prompts of several pieces, beside chunks of several blocks."""
    monkeypatch.setattr(layerwise, "PREFILL_TOKENS", 64)
    monkeypatch.setattr(layerwise, "BLOCK_PAGES", 4)
    config = tiny_config("granite", eos_ids=(), max_positions=8192, **KINDS)
    model = random_model(config, cache_tokens=4096)
    far = model.placed(far)
    for prompt in (a_prompt(3, (200, 130), 150), a_prompt(0, (100,), 65)):
        for method in ("turborag", "full_attention"):
            ours = _prefilled(far, prompt, method)[0]
            np.testing.assert_allclose(ours, _prefilled(model, prompt, method)[0], atol=2e-5)


@pytest.mark.parametrize("far", FAR, ids=str)
def test_bytes_move_once(tiny_config, a_prompt, far):
    """What is computed goes to the host once and does not come back; chunks come in once."""
    model = random_model(tiny_config(eos_ids=(), max_positions=8192), cache_tokens=8192)
    model = model.placed(far)
    config = model.config
    layers = 2 * config.num_layers if far == AWAY else config.num_layers - far.value_layers
    row = layers * config.num_kv_heads * config.head_dim * 4
    for final in (1025,):  # two pieces
        prompt = a_prompt(0, (), final)
        *_, moved = _prefilled(model, prompt, "full_attention")
        assert (moved.pushed, moved.brought) == (row * final, 0)
    prompt = a_prompt(0, (512, 1024), 100)
    *_, moved = _prefilled(model, prompt, "turborag")
    assert (moved.pushed, moved.brought) == (row * 100, row * 1536)


def test_a_context_longer_than_what_the_device_holds(tiny_config, a_prompt):
    """The device's pool is empty, whatever the context."""
    model = random_model(
        tiny_config(eos_ids=(), max_positions=8192), cache_tokens=2048, placement=AWAY
    )
    _prefilled(model, a_prompt(0, (), 1500), "full_attention")
    cache = engine_of(model).runner.cache
    assert cache.pool.k.nbytes == cache.pool.v.nbytes == 0
    assert cache.host.nbytes == cache.allocator.num_pages * 16 * model.config.kv_bytes_per_token
