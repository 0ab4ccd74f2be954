"""Tiny models with engines of their own, prompts of random chunks, and stores that misbehave."""

import dataclasses

import numpy as np
import pytest

from jaxrag.engine.engine import Engine
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.state import EngineSettings
from jaxrag.methods import METHODS
from jaxrag.models.model import random_model


@pytest.fixture(scope="session")
def shared_models(tiny_config):
    """Random models by dtype, made once."""
    made = {}

    def make(dtype="float32"):
        if dtype not in made:
            made[dtype] = random_model(tiny_config(eos_ids=(), dtype=dtype))
        return made[dtype]

    return make


@pytest.fixture
def engine_on(shared_models):
    """``engine_on(cache_tokens=..., dtype=..., settings=...)``: an engine over a shared model."""

    def make(cache_tokens=1024, dtype="float32", settings=None, **changes):
        model = dataclasses.replace(shared_models(dtype), cache_tokens=cache_tokens, **changes)
        model.engine = Engine(model, settings or EngineSettings())
        return model.engine

    return make


@pytest.fixture
def asked(rng):
    """``asked(engine, method=..., ...)``: a request of random chunks from a few shared ones."""
    library = [rng.integers(3, 101, size).astype(np.int32) for size in (20, 33, 16, 7, 40, 18)]

    def make(engine, method="turborag", chunks=2, final=9, tokens=8, store=None, **more):
        method = METHODS[method] if isinstance(method, str) else method
        chosen = rng.choice(len(library), chunks, replace=False)
        prompt = Prompt(
            rng.integers(3, 101, 5).astype(np.int32),
            tuple(library[i] for i in chosen),
            rng.integers(3, 101, final).astype(np.int32),
            neighbours=tuple((library[(i + 1) % len(library)],) for i in chosen),
        )
        prompt = dataclasses.replace(prompt, prefix=library[0][:5])
        return Request(prompt, store or engine.memory, method, tokens, **more)

    return make


class Told:
    """A client that keeps what it is told, by number, and stops whom it is asked to stop."""

    def __init__(self):
        self.ids, self.logprobs, self.last = {}, {}, {}

    def __call__(self, progress):
        assert progress.number not in self.last, "told after the last"
        self.ids.setdefault(progress.number, []).extend(progress.new)
        self.logprobs.setdefault(progress.number, []).extend(progress.logprobs)
        if progress.last:
            self.last[progress.number] = progress


@pytest.fixture
def told():
    """A class of clients."""
    return Told


@pytest.fixture
def alone():
    """``alone(engine, requests)``: what each gives when nobody else is there: (ids, logprobs)."""

    def run(engine, requests):
        out = []
        for request in requests:
            client = Told()
            for progress in engine.iterate([request]):
                client(dataclasses.replace(progress, number=0))
            if client.last[0].error is not None:
                raise client.last[0].error
            out.append((client.ids[0], client.logprobs[0]))
        return out

    return run


def at_rest(engine):
    """Nothing is held by anybody: what an engine is to come back to."""
    engine.call(lambda runner: None)
    state = engine._core.state
    state.scheduler.check()
    allocator = engine.runner.cache.allocator
    assert not state.live and not state.ending and not state.scheduler.live
    assert allocator.num_available == allocator.num_pages
    assert not engine.runner.host_search._requests


@pytest.fixture(name="at_rest")
def at_rest_fixture():
    """``at_rest(engine)`` asserts that nothing is held by anybody."""
    return at_rest
