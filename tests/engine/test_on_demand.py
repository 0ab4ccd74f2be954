"""A chunk that no store has is encoded by one process, and the others wait for it."""

import dataclasses
import time

import pytest

from jaxrag.engine import staging, transfers
from jaxrag.engine.engine import Engine
from jaxrag.engine.mapping import sequence_of
from jaxrag.engine.state import EngineSettings
from jaxrag.kv.store import ChunkStore, leases

TIMEOUT = 60


@pytest.fixture
def processes(shared_models, tmp_path, monkeypatch):
    """``processes(seconds)``: two engines with a store each, of one repository."""
    stores = []

    def make(count=2, seconds=TIMEOUT):
        monkeypatch.setattr(leases.Leases.__init__, "__defaults__", (seconds,))
        found = []
        for _ in range(count):
            model = dataclasses.replace(shared_models(), cache_tokens=1024)
            at = tmp_path / "store"
            stores.append(ChunkStore.open(at, model.fingerprint, model.kv_layout, mode="rw"))
            model.engine = Engine(model, EngineSettings(arena_bytes=0))
            found.append((model.engine, stores[-1]))
        return found

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def encoded(monkeypatch):
    """Keys of all chunks that any engine encoded."""
    keys = []

    def counting(loads, **more):
        keys.extend(load.key for load in loads)
        return staging.encode(loads, **more)

    monkeypatch.setattr(transfers, "encode", counting)
    return keys


def until(true):
    deadline = time.monotonic() + TIMEOUT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_engines_that_need_a_chunk_at_once_encode_it_once(processes, asked, alone, told, encoded):
    both = processes()
    requests = [asked(both[0][0], chunks=3) for _ in range(6)]
    expected = [ids for ids, _ in alone(both[0][0], requests)]  # from a store of its own
    encoded.clear()
    both[0][0].call(lambda runner: [runner.cache.allocator.evict(it) for it in held(runner)])
    clients = [told() for _ in both]
    numbers = [
        engine.add_all([(dataclasses.replace(it, store=store), client) for it in requests])
        for (engine, store), client in zip(both, clients, strict=True)
    ]
    for client, own in zip(clients, numbers, strict=True):
        until(lambda client=client: len(client.last) == len(requests))
        assert [client.last[it].error for it in own] == [None] * len(own)
        assert [client.ids[it] for it in own] == expected
    assert len(encoded) == len(set(encoded)) > 1
    until(lambda: not left(both[0][1]))


def held(runner):
    return list(runner.cache.allocator.chunks)


def left(store):
    """Leases that are there."""
    return store._leases._backend.paths(store._leases._prefix)


def test_where_the_holder_dies_another_goes_on(processes, asked, told, encoded):
    """After the lease's time; a holder that lives keeps the others waiting."""
    (engine, store), (_, dead) = processes(seconds=0.5)
    dead._leases._renew = lambda key, generation: None
    request = asked(engine, store=store, chunks=1)
    keys = list(sequence_of(engine.runner.model, request).loads)
    assert all(dead.lease(key) for key in keys)
    client = told()
    begun = time.monotonic()
    [number] = engine.add_all([(request, client)])
    until(lambda: client.last)
    assert client.last[number].error is None and time.monotonic() - begun >= 0.4
    assert sorted(encoded) == sorted(keys)
    assert {row.how for row in client.last[number].outcome.reuse} >= {"encoded"}


def test_who_is_aborted_lets_go_of_the_lease(processes, asked, told, encoded):
    (engine, store), (other_engine, other) = processes()
    request = asked(engine, store=store, chunks=2)
    client = told()
    engine.call(lambda runner: None)
    queue = engine._core._transfers._to_encode
    take, queue.take = queue.take, lambda is_wanted: []  # nothing is encoded now
    number = engine.add(request, client)
    until(lambda: len(left(store)) == 3)
    engine.abort(number)
    until(lambda: number in client.last)
    queue.take = take
    engine._core.state.post(lambda: None)
    second = told()
    [own] = other_engine.add_all([(dataclasses.replace(request, store=other), second)])
    until(lambda: second.last)
    assert second.last[own].error is None
    until(lambda: not left(store))
