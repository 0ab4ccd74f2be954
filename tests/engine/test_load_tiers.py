"""Where chunk KV comes from: law 13 whatever the tier, reads ahead, one read, bounded placing."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from jaxrag.base.errors import ConfigError, StoreError
from jaxrag.engine import prefill, staging, transfers
from jaxrag.engine import runner as running
from jaxrag.engine.arena import ArenaState
from jaxrag.engine.links import FAILURES, LoadDeadline
from jaxrag.engine.mapping import sequence_of
from jaxrag.engine.state import EngineSettings
from jaxrag.reuse.methods import METHODS
from jaxrag.reuse.select import QueryGuided

ARENA = 1 << 20


class Jittery:
    """A store whose reads take as long as they like."""

    def __init__(self, inner, rng):
        self._inner, self._rng, self._lock = inner, rng, threading.Lock()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def get_many(self, *args, **kwargs):
        with self._lock:
            wait = self._rng.random() * 0.004
        time.sleep(wait)
        return self._inner.get_many(*args, **kwargs)


@pytest.mark.parametrize("form", ["native", "int8"])
def test_tokens_are_equal_whichever_tier_a_chunk_came_from(serving, asked, at_rest, form):
    """Law 13: in one engine the chunk is encoded, on the device, in host memory, in the store."""
    served = serving(arena_bytes=ARENA, form=form)
    request = asked(served.engine, chunks=3, store=served.store)
    found, expected = [], None
    for tier in ("encoded", "pool", "host", "store", "encoded"):
        if tier in ("host", "store"):
            served.evict()
        if tier == "store":
            served.engine._core.state.arena.clear()
        if tier == "encoded" and found:
            for record in list(served.store.records()):
                served.store.delete([record.key])
            served.engine.forget()
        [number] = served.add(request)
        [ids] = served.ended([number])
        told = ids, served.client.logprobs[number]
        expected = expected or told
        assert told == expected
        assert set(served.how(number)) == {tier}
        found.append(tier)
    tiers = served.engine.tiers()
    assert tiers.hits == {"encoded": 8, "pool": 4, "host": 4, "store": 4}
    assert tiers.host.chunks == tiers.pool_chunks == 4
    assert 0 < tiers.pool_bytes < tiers.max_pool_bytes
    served.until_idle()
    at_rest(served.engine)


def test_what_is_kept_of_a_whole_staging_block_is_a_copy(serving, asked, alone, rng, at_rest):
    """Blocks are filled again by the next read; a chunk as long as one is all of it."""
    served = serving(arena_bytes=1 << 24)
    requests = []
    for request in (asked(served.engine, chunks=1, store=served.store) for _ in range(4)):
        chunk = rng.integers(3, 101, running.BLOCK_TOKENS).astype(np.int32)
        prompt = dataclasses.replace(request.prompt, chunks=(chunk,), neighbours=None)
        requests.append(dataclasses.replace(request, prompt=prompt))
    expected = alone(served.engine, requests)
    for where in ("store", "host"):
        if where == "store":
            served.engine.forget()
        else:
            served.evict()
        numbers = [number for request in requests for number in served.add(request)]
        assert served.ended(numbers) == [ids for ids, _ in expected]
        for number, (_, logprobs) in zip(numbers, expected, strict=True):
            assert served.client.logprobs[number] == logprobs
            assert where in served.how(number)
    served.until_idle()
    at_rest(served.engine)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (METHODS["turborag"], {}),
        (METHODS["turborag"], {"slow_load": "compute", "load_deadline": LoadDeadline(0.002, 0)}),
        pytest.param(METHODS["fusionrag"], {}, marks=pytest.mark.slow),
        pytest.param(
            dataclasses.replace(METHODS["turborag"], misses="in_place"), {}, marks=pytest.mark.slow
        ),
    ],
    ids=["wait", "compute", "fusionrag", "in place"],
)
def test_tokens_are_equal_in_any_order_of_loads(
    serving, asked, alone, told, at_rest, rng, method, settings
):
    """Law 13, in a pool and an arena for a few chunks, with chunks asked for ahead at random."""
    first = serving(arena_bytes=0)
    requests = [
        asked(first.engine, method, chunks=int(n), tokens=6, rows=4, store=first.store)
        for n in rng.integers(1, 4, 8)
    ]
    expected = [ids for ids, _ in alone(first.engine, requests)]
    if method.misses == "encode":
        assert len(list(first.store.records())) >= 7
    one = first.store.layout.nbytes(40)
    served = serving(cache_tokens=176, arena_bytes=2 * one, place_bytes=1, **settings)
    served.engine._clock = time.monotonic
    served.store = Jittery(served.store, rng)
    alone(served.engine, served.moved(requests[0]))  # there is an engine, that reads ahead
    for _ in range(4):
        numbers = []
        for request in served.moved(*requests):
            if rng.random() < 0.7:
                read_ahead(served.engine, [request])
            if rng.random() < 0.5:
                time.sleep(rng.random() * 0.004)
            numbers += served.add(request)
        assert served.ended(numbers) == expected
    served.until_idle()
    at_rest(served.engine)
    hits = served.engine.tiers().hits
    if method.misses == "encode" and not settings:  # else it is a matter of time what comes first
        assert {"host", "store", "pool"} <= hits.keys()
        assert served.engine.tiers().host.evicted


def read_ahead(engine, requests):
    """Have chunks read as those of requests are that wait for room."""
    loads = [list(sequence_of(engine.runner.model, it).loads.values()) for it in requests]
    engine._mail.post(lambda: [engine._running_core._transfers.prefetch(it) for it in loads])


def happened(served, what):
    """Keys of the events of one kind, in order."""
    return [it.key for it in served.engine.events() if it.what == what]


def test_a_read_begins_before_admission_and_is_the_only_one(serving, stored, asked, alone, at_rest):
    """Asked for ahead, the pool full; admitted while it is read; found in the arena after."""
    [request, other], expected = stored(2, chunks=2)
    served = serving(arena_bytes=ARENA, keep_events=100)
    alone(served.engine, [asked(served.engine, "full_attention", tokens=1)])
    served.store.gate.clear()
    for _ in range(2):
        read_ahead(served.engine, served.moved(request))
    served.store.until_read()
    keys = list(sequence_of(served.engine.runner.model, *served.moved(request)).loads)
    missing = [key for key in keys if key in happened(served, "prefetch")]
    assert len(missing) >= 2 and set(happened(served, "read")) >= set(missing)
    assert not set(happened(served, "admitted")) & set(missing)  # it began before admission
    numbers = served.add(*served.moved(request, request))
    while not set(missing) <= set(happened(served, "admitted")):
        pass
    served.store.gate.set()
    assert served.ended(numbers) == expected[:1] * 2
    assert len(served.store.reads) == 1
    read_ahead(served.engine, served.moved(request))  # it is in the pool
    served.evict()
    read_ahead(served.engine, served.moved(request))  # and now in the arena
    [number] = served.add(*served.moved(request))
    assert served.ended([number]) == expected[:1]
    assert len(served.store.reads) == 1 and "host" in served.how(number)
    read_ahead(served.engine, served.moved(other))
    served.engine.call(lambda runner: None)
    served.until_idle()
    reads = len(served.store.reads)
    [number] = served.add(*served.moved(other))
    assert served.ended([number]) == expected[1:]
    assert len(served.store.reads) == reads
    assert "store" in served.how(number) and "host" not in served.how(number)  # read for it
    at_rest(served.engine)


def test_who_waits_for_room_is_read_for_meanwhile(serving, stored, asked, at_rest):
    [request], expected = stored(chunks=3)
    served = serving(cache_tokens=256, arena_bytes=ARENA, keep_events=100)
    large = asked(served.engine, "full_attention", final=60, tokens=100, rows=1, watched=True)
    [first] = served.add(large)
    served.until(lambda: served.client.ids.get(first))
    [number] = served.add(*served.moved(request, rows=1))
    served.store.until_read()
    assert not happened(served, "admitted") and first not in served.client.last
    assert served.ended([number]) == expected
    assert set(served.how(number)) == {"store"} and len(served.store.reads) == 1
    served.until_idle()
    at_rest(served.engine)


def test_chunks_in_memory_are_not_held_twice(engine_on, asked, alone):
    engine = engine_on(settings=EngineSettings(arena_bytes=ARENA))
    request = asked(engine)

    def evict(runner):
        for key in list(runner.cache.allocator.chunks):
            runner.cache.allocator.evict(key)

    for where in ("encoded", "store"):
        alone(engine, [request])
        engine.call(evict)
        read_ahead(engine, [request])
        engine.call(evict)
        assert engine.tiers().hits[where] == 3 and engine.tiers().host.chunks == 0


def test_a_long_chunk_is_placed_in_several_turns(serving, asked, alone, at_rest, monkeypatch, rng):
    """One block between two steps of those that answer."""
    for module in (staging, running):
        monkeypatch.setattr(module, "BLOCK_TOKENS", 16)
    first = serving(arena_bytes=0)
    request = asked(first.engine, chunks=1, tokens=3, store=first.store)
    chunk = rng.integers(3, 101, 90).astype(np.int32)
    request = dataclasses.replace(
        request, prompt=dataclasses.replace(request.prompt, chunks=(chunk,))
    )
    expected = [ids for ids, _ in alone(first.engine, [request])]
    served = serving(place_bytes=1)
    long = asked(served.engine, "full_attention", tokens=200, rows=4, watched=True)
    [long] = served.add(long)
    served.until(lambda: served.client.ids.get(long))
    turns, place = [], transfers.place

    def placed(runner, staged, pages, first, end):
        turns.append((served.steps, first, end))
        place(runner, staged, pages, first, end)

    monkeypatch.setattr(transfers, "place", placed)
    [number] = served.add(*served.moved(request))
    assert served.ended([number]) == expected
    blocks = [(first, end) for _, first, end in turns if end - first == 1]
    assert sorted(blocks) == sorted([(0, 1), *((n, n + 1) for n in range(6))])  # prefix, chunk
    steps = [step for step, _, _ in turns]
    assert len(set(steps)) == len(steps)  # a step between any two
    served.ended([long])
    at_rest(served.engine)


def test_in_lockstep_nothing_depends_on_time(serving, stored, asked, at_rest):
    """Loads are waited for, nothing is read ahead or kept, no link is given up."""
    [request], expected = stored()
    served = serving(
        lockstep=True, slow_load="compute", load_deadline=LoadDeadline(0.0, 1e-9), arena_bytes=ARENA
    )
    [bad] = served.moved(asked(served.engine, store=served.store))
    served.store.error = StoreError("no route")
    [also] = served.moved(asked(served.engine, chunks=3, store=served.store))
    for _ in range(FAILURES + 1):
        for error in served.ended(served.add(bad, also)):  # they share a prefix
            assert isinstance(error, StoreError) and str(error) == "no route"
    served.store.error = None
    for how in ("store", "pool"):
        read_ahead(served.engine, served.moved(request))
        [number] = served.add(*served.moved(request))
        assert served.ended([number]) == expected and set(served.how(number)) == {how}
    assert served.engine.tiers().host == ArenaState(0, 0, 0, 0)
    assert not served.engine._core.state.links._threads
    at_rest(served.engine)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"arena_bytes": -1}, "arena_bytes=-1: expected 0 or more"),
        ({"place_bytes": 0}, "place_bytes=0: expected at least 1"),
        ({"max_loading_bytes": 0}, "max_loading_bytes=0: expected at least 1"),
        ({"load_threads": 0}, "load_threads=0: expected at least 1"),
        ({"slow_load": "never"}, "slow_load='never': expected one of wait, compute"),
        ({"load_deadline": LoadDeadline(-1.0)}, "expected seconds of 0 or more"),
        ({"keep_events": -1}, "keep_events=-1: expected 0 or more"),
    ],
)
def test_settings_that_cannot_be_meant(setting, said):
    with pytest.raises(ConfigError, match=said) as caught:
        EngineSettings(**setting)
    assert "\n" not in str(caught.value)


def test_a_selector_begins_while_chunks_are_read(serving, asked, alone, at_rest, monkeypatch):
    """FusionRAG's question is run alone before its chunks are there; its choice is the same."""
    served = serving(arena_bytes=0)
    request = asked(served.engine, "fusionrag", chunks=3, store=served.store)
    [expected] = alone(served.engine, [request])
    served.engine.forget()
    begun, made, inner = threading.Event(), [], QueryGuided.ahead

    def ahead(self, model, final):
        made.append(inner(self, model, final))
        begun.set()
        return made[-1]

    monkeypatch.setattr(QueryGuided, "ahead", ahead)
    scenes, choose = [], prefill.choose

    def choosing(model, cache, selector, scene):
        scenes.append(scene)
        return choose(model, cache, selector, scene)

    monkeypatch.setattr(prefill, "choose", choosing)
    served.store.gate.clear()
    [number] = served.add(request)
    assert begun.wait(300)
    assert not scenes
    served.store.gate.set()
    assert served.ended([number]) == [expected[0]]
    assert served.client.logprobs[number] == expected[1]
    assert len(scenes) == len(made) == 1 and scenes[0].ahead is made[0]
    served.until_idle()
    at_rest(served.engine)
