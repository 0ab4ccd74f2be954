"""What an engine says of itself to those who ask from outside: pages, requests, ages, pace."""

import dataclasses
import threading
import time

import pytest

from jaxrag.base.rates import WorkRate
from jaxrag.engine.admission import SchedulerSettings
from jaxrag.engine.engine import Engine
from jaxrag.engine.reuse import PartReuse, tokens_by_source
from jaxrag.engine.state import EngineSettings
from jaxrag.engine.status import Ages
from jaxrag.engine.thread import Mailbox


class Held:
    """A sink that stops the engine's thread at its first news until it is let go."""

    def __init__(self):
        self.came, self.go = threading.Event(), threading.Event()

    def __call__(self, progress):
        self.came.set()
        assert self.go.wait(120)


@pytest.fixture
def held():
    sink = Held()
    yield sink
    sink.go.set()


def clocked(shared_models, **settings):
    now = [0.0]
    model = dataclasses.replace(shared_models(), cache_tokens=240)
    model.engine = Engine(model, EngineSettings(**settings), clock=lambda: now[0])
    return model.engine, now


def test_an_engine_that_served_nobody_says_nothing(shared_models):
    engine, _ = clocked(shared_models)
    assert engine.status() is None and engine.tiers() is None
    assert (engine.silence, engine.looked) == (0.0, None)


def test_what_is_held_and_what_became_of_requests(shared_models, asked, told, at_rest):
    engine, _ = clocked(shared_models)
    first = asked(engine, "full_attention", final=90, tokens=60, watched=True)
    client, seen = told(), []

    def sink(progress):
        client(progress)
        seen.append(engine.status())  # on the engine's thread: one moment of all of it

    numbers = engine.add_all([(first, sink)] * 3)
    while not seen:
        engine.call(lambda runner: None)
    standing = seen[0]
    assert sum(standing.pages.values()) == engine.runner.num_pages
    assert standing.pages["own"] > 0
    assert sum(standing.requests.values()) == 3 and not standing.ended
    for number in numbers[1:]:
        engine.abort(number)
    while len(client.last) < 3:
        engine.call(lambda runner: None)
    at_rest(engine)
    standing = engine.status()
    assert standing.ended == {"finished": 1, "cancelled": 2}
    assert standing.new_tokens == 60 and not any(standing.requests.values())
    assert standing.pages["own"] == standing.pages["pinned"] == 0
    assert standing.waiting == standing.loading == Ages()
    assert standing.queued_cost == standing.queued_seconds == standing.waiting_tokens == 0


def test_who_waits_and_for_how_long(shared_models, asked, held, told, at_rest):
    settings = {"scheduler": SchedulerSettings(max_bypass=0)}
    engine, now = clocked(shared_models, **settings)
    large = asked(engine, "full_attention", final=90, tokens=60, watched=True)
    engine.add(large, lambda progress: None)
    engine.call(lambda runner: None)
    waiting = told()
    seen = []

    def look(progress):
        if not seen and progress.new:
            seen.append(None)
            more.extend(engine.add_all([(large, waiting), (large, waiting)]))
        elif more and len(seen) == 1 and engine.status().requests["waiting"] == 2:
            now[0] += 4.0
            seen.append(engine.status())

    more = []
    engine.add(large, look)
    while len(waiting.last) < 2:
        engine.call(lambda runner: None)
    standing = seen[1]
    assert standing.requests["decode"] == 1 and standing.requests["waiting"] == 2
    assert standing.waiting == Ages(4.0, 8.0) and standing.loading == Ages()
    prompt = large.prompt.num_tokens
    assert standing.waiting_tokens == 2 * prompt
    answers = standing.new_tokens / standing.ended["finished"]
    assert standing.queued_cost == pytest.approx(2 * prompt + 2 * 2 * answers)
    assert [held_there for held_there, _ in standing.rows.values()] == [1]
    at_rest(engine)


def test_loading_is_told_from_waiting(stored, serving):
    requests, expected = stored(1)
    other = serving()
    other.store.gate.clear()
    numbers = other.add(*other.moved(*requests))
    other.store.until_read()
    other.now[0] = 3.0
    standing = other.engine.status()
    assert standing.requests["loading"] == 1 and not standing.requests["waiting"]
    assert (standing.loading, standing.waiting) == (Ages(3.0, 3.0), Ages())
    assert standing.pages["loading"] > 0
    assert sum(standing.pages.values()) == other.engine.runner.num_pages
    for _ in range(1000):  # its thread may be at the end of a step
        if not other.engine.silence:
            break
        time.sleep(0.01)
    assert other.engine.silence == 0.0  # it waits for the store, and would hear anybody
    other.store.gate.set()
    assert other.ended(numbers) == expected


def test_a_thread_that_is_held_up_is_seen(shared_models, asked, held):
    engine, now = clocked(shared_models)
    engine.add(asked(engine, tokens=3), held)
    assert held.came.wait(120)
    assert engine.silence == 0.0
    now[0] = 90.0
    assert engine.silence == 90.0 and engine.looked == 0.0
    held.go.set()
    engine.call(lambda runner: None)
    while engine.silence:  # at the turn behind the job
        pass
    assert engine.looked == 90.0


def test_a_pool_that_is_lost_is_counted(engine_on, asked, alone, monkeypatch):
    engine = engine_on()
    request = asked(engine, tokens=3)
    alone(engine, [request])
    assert engine.status().restarts == 0
    step, fails = engine._core._batches.step_and_deliver, iter([True])

    def broken():
        if engine._core.state.live and next(fails, False):
            raise RuntimeError("injected")
        return step()

    monkeypatch.setattr(engine._core._batches, "step_and_deliver", broken)
    with pytest.raises(Exception, match="injected"):
        alone(engine, [request])
    assert engine.status().restarts == 1
    engine.forget()  # was asked for, and is no fault
    assert engine.status().restarts == 1


def test_chunks_that_left_the_pool_are_counted(engine_on, asked, alone):
    engine = engine_on(cache_tokens=160)
    for _ in range(6):
        alone(engine, [asked(engine, tokens=3)])
    assert engine.status().evicted > 0


def test_pace_forgets_and_does_not_count_idle_time():
    pace = WorkRate()
    assert pace.per_second is None
    pace.work(0.0, 0.0)
    pace.work(2.0, 100.0)
    assert pace.per_second == 50.0
    pace.rest()
    pace.work(1000.0, 0.0)
    assert pace.per_second == 50.0
    pace.work(1030.0, 30 * 200)  # a half-life at another pace
    assert pace.per_second == pytest.approx((50 + 6000) / (1 + 30))


def test_a_mailbox_knows_when_its_thread_was_last_seen():
    now, gate, seen = [10.0], threading.Event(), threading.Event()

    def serve(mail):
        while events := mail.first():
            for event in events:
                event()

    mail = Mailbox("test", serve, clock=lambda: now[0])
    assert (mail.looked, mail.silence) == (None, 0.0)

    def stuck():
        seen.set()
        assert gate.wait(120)

    mail.post(stuck)
    assert seen.wait(120)
    now[0] = 17.0
    assert (mail.looked, mail.silence) == (10.0, 7.0)
    gate.set()
    until = time.monotonic() + 120
    while mail.silence and time.monotonic() < until:
        pass
    assert (mail.looked, mail.silence) == (10.0, 0.0)


def test_tokens_of_a_prompt_by_source_add_up():
    rows = [
        PartReuse("prefix", 5, "prefix hit", "pool", 0, ""),
        PartReuse("chunk 0", 20, "chunk hit", "store", 4, ""),
        PartReuse("chunk 1", 30, "chunk hit", "host", 0, ""),
        PartReuse("chunk 2", 10, "encoded", None, 3, "missing"),
        PartReuse("chunk 3", 8, "in place", None, 0, "missing"),
        PartReuse("turn 0", 6, "computed", None, 0, ""),
    ]
    found = tokens_by_source(rows, 90)
    assert found == {
        "pool": 5, "host": 30, "store": 16, "encoded": 7, "computed": 90 - 5 - 30 - 16 - 7
    }  # fmt: skip
    assert tokens_by_source([], 4) == {**dict.fromkeys(found, 0), "computed": 4}
