"""Vectors in front of chunks: the loss by the engine, its fall, and runs that go on."""

import dataclasses

import jax
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import TrainError
from jaxrag.base.sharding import make_mesh
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.store import MemoryStore, derive
from jaxrag.measure.evals.priming import start_layers
from jaxrag.models.model import random_model
from jaxrag.reuse.encode import wrapped
from jaxrag.reuse.methods import METHODS
from jaxrag.train.primer import PrimerPrompt, PrimerSettings, train_primer

LAYERS = "layers"
QUICK = PrimerSettings(steps=6, learning_rate=0.05, batch=2, every=2)


@pytest.fixture(scope="module")
def model(tiny_config):
    return random_model(tiny_config("llama"), seed=4, cache_tokens=2048)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(3)

    def ids(n):
        return rng.integers(3, 101, n).astype(np.int32)

    return [
        PrimerPrompt(ids(5), tuple(ids(n) for n in lengths), ids(7), ids(answer))
        for lengths, answer in (((14, 9), 1), ((20, 6, 11), 1), ((8,), 3), ((17, 13), 2))
    ]


@pytest.fixture
def start(model):
    return np.asarray(model.params.embed)[20:26].astype(np.float32)


@pytest.fixture
def start_of(model, prompts, start):
    """What a run begins as: vectors, or K and V of every layer."""
    return lambda form: start_layers(model, prompts[0].prefix, start) if form == LAYERS else start


def between(model, prompts, header, count):
    """Prompts of packets; as they are where ``header`` is no number."""
    if header in (None, LAYERS):
        return prompts
    around = (model.config.vocab_size, header, count)
    return [
        dataclasses.replace(it, packets=tuple(wrapped(ids, *around) for ids in it.chunks))
        for it in prompts
    ]


def log_softmax(x):
    x = x.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def by_engine(model, prompt, vectors, name):
    """KL at the first token of the answer, by the stored KV that the engine makes and maps."""
    store = MemoryStore(derive(model.fingerprint, salt=name), model.kv_layout)
    asked = Prompt(prompt.prefix, prompt.chunks, prompt.final)
    held = dataclasses.replace(asked, chunks=prompt.packets or prompt.chunks)
    found = []
    for method, it, primer in (
        ("full_attention", asked, None),
        ("packets" if prompt.packets else "primed", held, vectors),
    ):
        request = Request(it, store, METHODS[method], 1, primer=primer)
        [logits] = inspect_prompts(
            engine_of(model), [request], lambda runner, state, there: np.asarray(there.logits)[0]
        )
        found.append(log_softmax(logits))
    full, block = found
    return float((np.exp(full) * (full - block)).sum())


def first_loss(model, prompts, start, out):
    """The held-out KL before the first step."""
    looks = []
    settings = dataclasses.replace(QUICK, steps=1, batch=1)
    train_primer(model, start, prompts, prompts, settings, out, told=looks.append)
    return looks[0].held_out


@pytest.mark.parametrize("header", [None, 0, 4])
@pytest.mark.parametrize("family", ["granite", "gemma3"])
def test_the_loss_is_the_divergence_of_what_the_engine_answers(
    tiny_config, prompts, tmp_path, request, family, header
):
    model = random_model(tiny_config(family), seed=4, cache_tokens=2048)
    start = np.asarray(model.params.embed)[20:26].astype(np.float32)
    prompts = between(model, prompts, header, len(start))
    for number, prompt in enumerate(prompts[:2]):  # with answers of one token
        expected = by_engine(model, prompt, start, f"{request.node.name}{number}")
        found = first_loss(model, [prompt], start, tmp_path / "p.safetensors")
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert expected > 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_of_layers_too(tiny_config, prompts, tmp_path, request, family):
    """And before the first step it is that of the vectors from which they are."""
    model = random_model(tiny_config(family), seed=4, cache_tokens=2048)
    vectors = np.asarray(model.params.embed)[20:26].astype(np.float32)
    start, prompt = start_layers(model, prompts[0].prefix, vectors), prompts[0]
    one, other = (first_loss(model, [prompt], it, tmp_path / "p") for it in (vectors, start))
    assert other == pytest.approx(one, rel=1e-5)
    moved = start + np.random.default_rng(2).normal(size=start.shape).astype(np.float32)
    found = first_loss(model, [prompt], moved, tmp_path / "p")
    expected = by_engine(model, prompt, moved, request.node.name)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert abs(found - one) > 1e-5


@pytest.mark.parametrize("header", [None, 3, LAYERS])
def test_it_falls_and_nothing_but_the_vectors_moves(model, prompts, start_of, tmp_path, header):
    start = start_of(header)
    before = jax.tree.map(np.array, model.params)
    looks = []
    settings = dataclasses.replace(QUICK, steps=30)
    prompts = between(model, prompts, header, len(start))
    out = tmp_path / "p.safetensors"
    found = train_primer(model, start, prompts, prompts, settings, out, told=looks.append)
    held = [it.held_out for it in looks if it.held_out is not None]
    assert held[-1] < 0.9 * held[0]
    assert [it.step for it in looks] == list(range(31))
    assert found.shape == start.shape and found.dtype == np.float32
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, model.params))
    assert not list(tmp_path.iterdir())  # the state of a run that is done is gone


@pytest.mark.parametrize("header", [None, 3, LAYERS])
def test_a_run_that_was_ended_goes_on_to_the_same(model, prompts, start_of, tmp_path, header):
    start = start_of(header)
    out, prompts = tmp_path / "p.safetensors", between(model, prompts, header, len(start))
    whole = train_primer(model, start, prompts, [], QUICK, out)

    class Ended(Exception):
        pass

    def end(progress):
        if progress.step == 5:  # the last state is of step 4
            raise Ended

    with pytest.raises(Ended):
        train_primer(model, start, prompts, [], QUICK, out, told=end)
    seen = []
    again = train_primer(model, start, prompts, [], QUICK, out, resume=True, told=seen.append)
    np.testing.assert_array_equal(whole, again)
    assert [it.step for it in seen] == [5, 6]


def test_the_state_of_another_run_is_refused(model, prompts, start, tmp_path):
    out = tmp_path / "p.safetensors"

    def end(progress):
        if progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_primer(model, start, prompts, [], QUICK, out, told=end)
    other = dataclasses.replace(QUICK, seed=1)
    for held, settings in ((prompts, other), (between(model, prompts, 3, len(start)), QUICK)):
        with refused(TrainError, "another run", "--resume"):
            train_primer(model, start, held, [], settings, out, resume=True)
    train_primer(model, start, prompts, [], other, out)  # anew


@pytest.mark.parametrize("form", [None, LAYERS])
def test_on_a_mesh_as_on_one_device(tiny_config, prompts, start, start_of, tmp_path, form):
    given = start_of(form)
    config = tiny_config("llama", model_dim=start.shape[1])
    found = []
    for mesh in (None, make_mesh(2, 1, 2)):
        model = random_model(config, seed=4, mesh=mesh, cache_tokens=2048)
        found.append(train_primer(model, given, prompts, [], QUICK, tmp_path / "p.safetensors"))
    np.testing.assert_allclose(*found, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"steps": 0}, "steps=0"), ({"learning_rate": 2.0}, "learning_rate=2.0")],
)
def test_settings_out_of_range_are_refused(changes, words):
    with refused(TrainError, words):
        PrimerSettings(**changes)


def test_no_prompt_and_no_numbers_are_refused(model, prompts, start, tmp_path):
    with refused(TrainError, "no prompt"):
        train_primer(model, start, [], prompts, QUICK, tmp_path / "p")
    with refused(TrainError, "nan", "float32"):
        train_primer(model, start * np.nan, prompts, [], QUICK, tmp_path / "p")
