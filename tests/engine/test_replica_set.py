"""Several engines behind the interface of one, over links that break as they are told."""

import asyncio
import contextlib
import dataclasses
import threading
import time

import pytest
from refusal import refused

from jaxrag.base.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    EngineUnavailable,
    RequestError,
    StoreError,
)
from jaxrag.base.guide import Guide
from jaxrag.engine.engine import Engine
from jaxrag.engine.jobs import ReplicaReport, StoreRef, name_of
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.kv.store import MemoryStore
from jaxrag.reuse.methods import METHODS
from jaxrag.server.state.replica import Replica
from jaxrag.server.state.replicas import Replicas

TIMEOUT = 60
ABOUT = {"weights": "w"}


class Stores:
    """Of one replica: memory, whatever is asked for."""

    def __init__(self, store, error=None):
        self.store, self.error = store, error

    def __call__(self, ref):
        if self.error is not None:
            raise self.error
        return self.store

    def memory_keys(self):
        return self.store.keys()

    def forget(self, tenant):
        keys = list(self.store.keys())
        self.store.delete(keys)
        return keys


class Link:
    """The way to a replica in this process.

    Attributes:
      dead: who asks finds it gone, and what it answers breaks off.
      asked: numbers of the jobs that came.
      after: news of a job after which it breaks; None: never.
      gate: news wait for it.
    """

    def __init__(self, name, engine, stores, about=ABOUT):
        self.name, self.engine = name, engine
        self.replica = Replica(engine, stores, about)
        self.dead, self.asked, self.after = False, [], None
        self.gate = threading.Event()
        self.gate.set()

    def _check(self):
        if self.dead:
            raise EngineUnavailable(f"replica {self.name} is gone")

    async def serve(self, job):
        self._check()
        self.asked.append(job.number)
        stream, told = self.replica.serve(job), 0
        try:
            async for news in stream:
                while not self.gate.is_set():
                    await asyncio.sleep(0.005)
                    self._check()
                if self.after is not None and told >= self.after:
                    self.dead = True
                self._check()
                told += 1
                yield news
        finally:
            await stream.aclose()

    async def report(self, server):
        self._check()
        return self.replica.report(server)

    async def stop(self, server, number):
        self.replica.stop(server, number)

    async def drop(self, keys):
        self.replica.drop(keys)

    async def forget(self, tenant):
        return self.replica.forget(tenant)


@pytest.fixture
def several(engine_on, monkeypatch):
    """``several(count, ...)``: Replicas, and links to as many engines with a store each."""
    monkeypatch.setattr("jaxrag.server.state.replicas.REPORT_SECONDS", 0.05)
    with contextlib.ExitStack() as stack:

        def make(count=2, about=ABOUT, cache_tokens=1024, routing="residency", wait=True):
            model = engine_on().runner.model
            store = MemoryStore(model.fingerprint, model.kv_layout)
            links = []
            for at in range(count):
                own = dataclasses.replace(model, cache_tokens=cache_tokens)
                own.engine = Engine(own)
                kept = MemoryStore(model.fingerprint, model.kv_layout)
                links.append(Link(str(at), own.engine, Stores(kept)))
            front = dataclasses.replace(model, cache_tokens=cache_tokens)
            front.engine = Replicas(front, routing=routing)
            refs = StoreRef("memory", "", store.fingerprint, store.layout)
            front.engine.open(links, lambda request: refs, about)
            stack.callback(front.engine.close)
            if wait:
                assert front.engine.wait(TIMEOUT) == count
            return front.engine, links, store

        yield make


@pytest.fixture
def begun(asked):
    """``begun(engine, store, **more)``: a request of the store."""
    return lambda engine, store, **more: asked(engine, store=store, **more)


def answers(engine, requests):
    """Ids or the error of each, all asked at once."""
    ids, errors = [[] for _ in requests], [None] * len(requests)
    for progress in engine.iterate(requests):
        ids[progress.number] += progress.new
        errors[progress.number] = progress.error
    return [error or found for found, error in zip(ids, errors, strict=True)]


def test_requests_get_the_tokens_of_one_engine(several, begun, engine_on, alone):
    engine, links, store = several(3)
    requests = [begun(engine, store) for _ in range(12)]
    one = engine_on()
    expected = alone(one, [dataclasses.replace(it, store=one.memory) for it in requests])
    assert answers(engine, requests) == [ids for ids, _ in expected]
    assert sum(len(it.asked) for it in links) == 12


def test_a_request_goes_where_its_chunks_are(several, begun):
    engine, links, store = several(2)
    request = begun(engine, store)
    for _ in range(5):
        answers(engine, [request])
    assert sorted(len(it.asked) for it in links) == [0, 5]


def test_round_robin_is_routing_too(several, begun):
    engine, links, store = several(2, routing="round_robin")
    request = begun(engine, store)
    for _ in range(6):
        answers(engine, [request])
    assert [len(it.asked) for it in links] == [3, 3]


def test_a_queue_is_served_by_others(several, begun):
    """What an engine had not begun to answer when it died is answered elsewhere, the same."""
    engine, links, store = several(2)
    request = begun(engine, store)
    [expected] = answers(engine, [request])
    [held] = [it for it in links if it.asked]
    held.gate.clear()
    news = []
    engine.add_all([(request, news.append) for _ in range(6)])
    deadline = time.monotonic() + TIMEOUT
    while len(held.asked) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    held.dead = True
    while sum(it.last for it in news) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ids = {}
    for progress in news:
        assert progress.error is None
        ids.setdefault(progress.number, []).extend(progress.new)
    assert list(ids.values()) == [expected] * 6


def test_a_stream_that_has_begun_fails_alone(several, begun):
    engine, links, store = several(2)
    request = begun(engine, store, tokens=24, watched=True)
    [expected] = answers(engine, [request])
    [held] = [it for it in links if it.asked]
    held.after = 1
    [error] = answers(engine, [request])
    assert isinstance(error, EngineUnavailable)
    assert str(error) == f"replica {held.name} is gone while it answered; ask again"
    assert answers(engine, [request] * 3) == [expected] * 3  # by the other
    assert engine.members[held.name]["up"] is False


def test_an_engine_that_comes_back_serves(several, begun):
    engine, links, store = several(1)
    request = begun(engine, store)
    [expected] = answers(engine, [request])
    links[0].dead = True
    while engine.members["0"]["up"]:
        time.sleep(0.01)
    with refused(EngineUnavailable, "1"):
        engine.add(request, lambda progress: None)
    assert engine.silence > 0
    links[0].dead = False
    assert engine.wait(TIMEOUT) == 1
    while not engine.members["0"]["up"]:
        time.sleep(0.01)
    assert answers(engine, [request]) == [expected]


def test_an_engine_with_other_weights_is_named_and_not_used(several, begun, caplog):
    engine, links, store = several(2)
    other = Link("9", links[0].engine, Stores(store), {"weights": "x"})
    engine.join(other)
    deadline = time.monotonic() + TIMEOUT
    while not engine.members["9"]["why"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    said = "replica 9 has weights x, the server w; start all alike"
    assert engine.members["9"]["why"] == said
    assert [it.message for it in caplog.records].count(said) == 1
    answers(engine, [begun(engine, store) for _ in range(6)])
    assert not other.asked


def test_where_none_is_ready_the_reason_is_told(several):
    engine, _, _ = several(1, about={"weights": "x"}, wait=False)
    with refused(ConfigError, "0"):
        engine.wait(TIMEOUT)


def test_an_engine_that_failed_to_start_is_named(several):
    engine, _, _ = several(1)

    class Failed(Link):
        async def report(self, server):
            return ReplicaReport("failed", "model/ is not there")

    engine.join(Failed("7", engine, None))
    while not engine.members["7"]["why"]:
        time.sleep(0.01)
    assert engine.members["7"]["why"] == "replica 7: model/ is not there"


def test_an_error_of_a_request_is_its_own(several, begun, engine_on):
    engine, links, store = several(2)
    bad = begun(engine, store)
    for link in links:
        link.replica._stores.error = StoreError("the bucket cannot be read")
    [error] = answers(engine, [bad])
    assert isinstance(error, StoreError) and "the bucket" in str(error)
    for link in links:
        link.replica._stores.error = None
    [ids] = answers(engine, [bad])
    assert len(ids) == 8


def test_stop_and_abort_reach_the_engine(several, begun, told):
    engine, links, store = several(1)
    long = begun(engine, store, tokens=400, watched=True)
    client = told()
    number = engine.add(long, client)
    deadline = time.monotonic() + TIMEOUT
    while not client.ids.get(number):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    engine.stop(number)
    while number not in client.last:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert client.last[number].finish_reason == "stop" and len(client.ids[number]) < 400
    number = engine.add(long, client)
    while not client.ids.get(number):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    engine.abort(number)
    while number not in client.last or links[0].engine._core.state.scheduler.live:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert isinstance(client.last[number].error, Cancelled)


def test_what_is_aborted_at_once_is_told_so(several, begun, told):
    """Also before any engine has it."""
    engine, links, store = several(2)
    client = told()
    numbers = [engine.add(begun(engine, store, tokens=400), client) for _ in range(8)]
    for number in numbers:
        engine.abort(number)
    deadline = time.monotonic() + TIMEOUT
    while len(client.last) < 8 or any(
        it.engine._core is not None and it.engine._core.state.scheduler.live for it in links
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert all(isinstance(it.error, Cancelled) for it in client.last.values())
    assert engine.where(numbers[0]) is None and engine._live == {}


def test_a_fault_of_ours_is_told_and_logged(several, begun, caplog):
    engine, _, store = several(1)
    request = begun(engine, store)
    refs, engine._refs = engine._refs, lambda request: 1 / 0
    [error] = answers(engine, [request])
    assert str(error) == "replica 0: ZeroDivisionError"
    assert "ZeroDivisionError" in caplog.text
    engine._refs = refs
    assert len(answers(engine, [request])[0]) == 8


def test_who_waits_when_the_server_ends_is_told(several, begun):
    engine, links, store = several(2)
    links[0].gate.clear()
    links[1].gate.clear()
    news = []
    engine.add_all([(begun(engine, store), news.append) for _ in range(4)])
    engine.close()
    assert len(news) == 4
    assert all("the server ends" in str(it.error) for it in news)


def test_a_client_that_has_enough_stops_its_request(several, begun):
    """As its sink says; no token of it comes after."""
    engine, _, store = several(1)
    news = []

    def sink(progress):
        news.append(progress)
        return bool(progress.new)

    number = engine.add(begun(engine, store, tokens=400, watched=True), sink)
    deadline = time.monotonic() + TIMEOUT
    while not (news and news[-1].last):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert {it.number for it in news} == {number}
    assert news[-1].finish_reason == "stop" and news[-1].outcome is not None
    assert sum(bool(it.new) for it in news) == 1


def test_a_deadline_holds_where_an_engine_says_nothing(several, begun, monkeypatch):
    monkeypatch.setattr("jaxrag.server.state.replicas._LATE_SECONDS", 0.2)
    engine, links, store = several(1)
    links[0].gate.clear()
    [error] = answers(engine, [begun(engine, store, timeout=0.3)])
    assert isinstance(error, DeadlineExceeded)
    links[0].gate.set()


def test_jobs_of_a_server_that_is_gone_are_aborted(several, begun, monkeypatch):
    engine, links, store = several(1)
    monkeypatch.setattr("jaxrag.server.state.replica.SILENT_SECONDS", 0.2)
    links[0].gate.clear()
    engine.add(begun(engine, store, tokens=900), lambda progress: None)
    live = links[0].engine
    deadline = time.monotonic() + TIMEOUT
    while live._core is None or not live._core.state.scheduler.live:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    engine._members["0"].watch.cancel()  # it asks no more
    while live._core.state.scheduler.live:
        assert time.monotonic() < deadline
        links[0].replica.report("another server")
        time.sleep(0.05)
    links[0].gate.set()


def test_an_engine_that_leaves_answers_what_it_has(several, begun):
    engine, links, store = several(2)
    request = begun(engine, store, tokens=24)
    [expected] = answers(engine, [request])
    [held] = [it for it in links if it.asked]
    held.gate.clear()
    news = []
    engine.add(request, news.append)
    leaving = threading.Thread(target=engine.leave, args=(held.name, TIMEOUT))
    leaving.start()
    while not engine.members[held.name]["leaving"]:
        time.sleep(0.01)
    assert answers(engine, [request]) == [expected]  # by the other
    assert leaving.is_alive()
    held.gate.set()
    leaving.join(TIMEOUT)
    assert held.name not in engine.members
    assert [it for progress in news for it in progress.new] == expected


def test_status_and_tiers_are_sums(several, begun):
    engine, links, store = several(2, routing="round_robin")
    answers(engine, [begun(engine, store) for _ in range(4)])
    deadline = time.monotonic() + TIMEOUT
    while engine.status() is None or engine.status().ended.get("finished") != 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    both = [it.engine.status() for it in links]
    assert engine.status().new_tokens == sum(it.new_tokens for it in both) == 32
    assert sum(engine.status().pages.values()) == sum(sum(it.pages.values()) for it in both)
    assert engine.tiers().pool_chunks == sum(it.engine.tiers().pool_chunks for it in links)
    assert 0 < engine.iterations <= sum(it.engine.iterations for it in links)
    assert engine.compiled == links[0].engine.compiled + links[1].engine.compiled


def test_dropped_keys_leave_every_pool(several, begun):
    engine, links, store = several(2, routing="round_robin")
    request = begun(engine, store)
    answers(engine, [request, request])
    keys = links[0].engine.held()[0]
    assert keys and name_of(keys[0]) < 2**64
    engine.drop(keys)
    assert [it.engine.held()[0] for it in links] == [[], []]


def test_what_a_tenant_brought_is_forgotten_by_every_engine(several, begun):
    engine, links, store = several(2, routing="round_robin")
    request = begun(engine, store)
    answers(engine, [request, request])
    there = [len(list(it.replica._stores.memory_keys())) for it in links]
    assert engine.forget_tenant("") == sum(there) > 0
    assert [list(it.replica._stores.memory_keys()) for it in links] == [[], []]
    assert [it.engine.held()[0] for it in links] == [[], []]


def test_a_request_that_fits_no_pool_is_refused_at_once(several, begun):
    engine, _, store = several(1, cache_tokens=64)
    with refused(RequestError, "64"):
        engine.add(begun(engine, store, tokens=900), lambda progress: None)


def test_a_guide_and_a_method_travel(several, begun):
    """What a request says is the same on the other side; its grammar is made there."""
    from jaxrag.engine.wire import request_of, request_table

    engine, _, store = several(1)
    sampling = SamplingParams(temperature=0.5, seed=3, guide=Guide("choice", '["a", "b"]'))
    request = begun(engine, store, method=METHODS["fusionrag"], sampling=sampling, keeps=True)
    table = request_table(request)
    again = request_of(table, store)
    for field in dataclasses.fields(request):
        if field.name != "prompt":
            assert getattr(again, field.name) == getattr(request, field.name), field.name
    assert again.prompt.ids.tolist() == request.prompt.ids.tolist()
