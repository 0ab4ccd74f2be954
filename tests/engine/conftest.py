"""Tiny models with engines of their own, prompts of random chunks, and stores that misbehave."""

import dataclasses
import threading

import numpy as np
import pytest

from jaxrag.base.errors import StoreError
from jaxrag.engine.engine import Engine
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.state import EngineSettings
from jaxrag.kv.store import ChunkStore
from jaxrag.models.model import random_model
from jaxrag.reuse.methods import METHODS

TIMEOUT = 120  # seconds in which what must happen happens


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
        if method.wraps:
            config = engine.runner.model.config
            more.setdefault("primer", np.eye(2, config.model_dim, dtype=np.float32))
            prompt = prompt.in_packets(config.vocab_size, 1, 2)
        elif method.sees_primer:
            more.setdefault("primer", library[4])
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


class Odd:
    """A store whose reads do as they are told.

    Attributes:
      reads: keys of every read that began, in order.
      gate: reads wait for it; open at first.
      error: what reads raise.
      full: puts find no room.
    """

    def __init__(self, inner):
        self._inner, self._changed = inner, threading.Condition()
        self.reads, self.gate, self.error, self.full = [], threading.Event(), None, False
        self.gate.set()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def get_many(self, keys, *args, **kwargs):
        with self._changed:
            self.reads.append(tuple(keys))
            self._changed.notify_all()
        assert self.gate.wait(TIMEOUT)
        if self.error is not None:
            raise self.error
        return self._inner.get_many(keys, *args, **kwargs)

    def put(self, *args, **kwargs):
        if self.full:
            raise StoreError("disk: no space left")
        return self._inner.put(*args, **kwargs)

    def until_read(self, count=1):
        """Wait until so many reads have begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.reads) >= count, TIMEOUT)


class Served:
    """An engine over an odd store, its clock, and what its clients were told.

    Attributes:
      now: seconds, in a list.
      steps: tokens that anybody was told.
    """

    def __init__(self, engine, store, now):
        self.engine, self.store, self.now, self.client = engine, store, now, Told()
        self.steps = 0
        self._changed = threading.Condition()

    def add(self, *requests):
        return self.engine.add_all([(request, self._sink) for request in requests])

    def _sink(self, progress):
        with self._changed:
            self.client(progress)
            self.steps += len(progress.new)
            self._changed.notify_all()

    def moved(self, *requests, **changes):
        """The same requests to this engine's store."""
        return [dataclasses.replace(it, store=self.store, **changes) for it in requests]

    def until(self, condition):
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT)

    def ended(self, numbers):
        """What each was told, once all are over: tokens, or the error."""
        self.until(lambda: all(number in self.client.last for number in numbers))
        lasts = [self.client.last[number] for number in numbers]
        return [it.error or self.client.ids[it.number] for it in lasts]

    def how(self, number):
        """Where the KV of every part came from."""
        return [row.where or row.how for row in self.client.last[number].outcome.reuse]

    def advance(self, seconds):
        """Let time pass, and the engine notice."""
        self.now[0] += seconds
        self.engine._mail.post(lambda: None)

    def evict(self):
        """Let all chunks leave the pool."""

        def job(runner):
            for key in list(runner.cache.allocator.chunks):
                runner.cache.allocator.evict(key)

        self.engine.call(job)

    def link(self):
        """The state of the link to the store."""
        return next(it for it in self.engine.tiers().links if it.name == self.store.location)

    def until_idle(self, late=0):
        """Wait for threads that have answered to be done; nothing may be on its way then."""

        def idle():
            links = self.engine.tiers().links
            waits = sum(it.queued + it.bytes_in_flight for it in links)
            return not waits and sum(it.late for it in links) == late

        assert any(idle() for _ in range(1_000_000)), self.engine.tiers().links
        self.engine._core.state.arena.check()


@pytest.fixture
def serving(shared_models, tmp_path):
    """``serving(**settings)``: an engine over a store on disk, which lacks everything at first."""
    stores = []

    def make(cache_tokens=1024, form="native", **settings):
        model = dataclasses.replace(shared_models(), cache_tokens=cache_tokens)
        now = [0.0]
        if not stores:
            layout = dataclasses.replace(model.kv_layout, stored=form)
            at = tmp_path / "store"
            stores.append(ChunkStore.open(at, model.fingerprint, layout, mode="rw"))
        engine = model.engine = Engine(model, EngineSettings(**settings), clock=lambda: now[0])
        store = Odd(stores[0])
        stores.append(store)
        return Served(engine, store, now)

    yield make
    for store in stores[1:]:
        store.gate.set()


@pytest.fixture
def stored(serving, asked, alone):
    """``stored(count, ...)``: requests whose chunks are on disk, and what is answered to each."""

    def make(count=1, **options):
        first = serving(arena_bytes=0)
        requests = [asked(first.engine, store=first.store, **options) for _ in range(count)]
        return requests, [ids for ids, _ in alone(first.engine, requests)]

    return make
