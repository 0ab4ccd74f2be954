"""What the engine owes when something fails: who fails, who does not, and what is left behind."""

import _thread
import dataclasses
import random
import threading

import jax
import numpy as np
import pytest

import jaxrag
from jaxrag.base.errors import Cancelled, DeadlineExceeded, EngineError, Overloaded, StoreError
from jaxrag.engine import decoding
from jaxrag.engine.admission import SchedulerSettings
from jaxrag.engine.engine import Engine, engine_of
from jaxrag.engine.prefill_queue import PrefillQueue
from jaxrag.engine.state import EngineSettings
from jaxrag.kv.cache import PagedCache
from jaxrag.reuse.methods import METHODS

RULES = ["dense", pytest.param("retrieval:recent=12,sink=2", marks=pytest.mark.slow)]


def by_rule(rule):
    return dataclasses.replace(METHODS["turborag"], decode=jaxrag.reuse.decode.rule_from(rule))


@pytest.fixture
def serve(told):
    """``serve(engine, requests)``: all at once; the client once everybody was told the last."""

    def run(engine, requests):
        client, over = told(), threading.Event()

        def sink(progress):
            client(progress)
            if len(client.last) == len(requests):
                over.set()

        client.numbers = engine.add_all([(request, sink) for request in requests])
        assert over.wait(120)
        return client

    return run


@pytest.mark.parametrize("rule", RULES)
def test_a_thousand_aborts_leave_nothing(engine_on, asked, alone, told, at_rest, rule):
    """At any moment: queued, loading, prefilling, indexing, decoding, done."""
    engine = engine_on(cache_tokens=512)
    rng = random.Random(3)
    kept = [asked(engine, by_rule(rule), tokens=6, rows=4) for _ in range(4)]
    expected = alone(engine, kept)
    client, doomed = told(), told()
    numbers, left, count = [], [], 1000 if rule == "dense" else 200
    for at in range(count):
        if at % (count // 4) == 0:
            numbers.append(engine.add(kept[len(numbers)], client))
        number = engine.add(
            asked(engine, by_rule(rule), tokens=rng.randrange(1, 40), rows=4), doomed
        )
        left.append(number)
        while left and rng.random() < 0.5:
            engine.abort(left.pop(rng.randrange(len(left))))
    for number in left:
        engine.abort(number)
    engine.abort(numbers[-1] + 10**9)  # unknown: nothing happens
    for _ in engine.iterate([kept[0]]):
        pass
    while len(client.last) < len(kept):
        engine.call(lambda runner: None)
    assert [(client.ids[n], client.logprobs[n]) for n in numbers] == expected
    at_rest(engine)
    assert len(doomed.last) == count  # everybody is told the last, once
    ended = engine._core.state.scheduler.ended
    cancelled = sum(isinstance(it.error, Cancelled) for it in doomed.last.values())
    assert ended["cancelled"] == cancelled and sum(ended.values()) == count + 2 * len(kept) + 1


def breaking(monkeypatch, breaks):
    """Let a step raise after it took the pool, whenever ``breaks(batch, rows)``."""
    step = decoding.DecodeBatch.step

    def broken(batch, block, processes):
        out = step(batch, block, processes)
        if breaks(batch):
            for x in jax.tree.leaves(batch._runner.cache.pool):
                x.delete()
            raise RuntimeError("injected")
        return out

    monkeypatch.setattr(decoding.DecodeBatch, "step", broken)


@pytest.mark.parametrize("rule", RULES)
def test_a_step_that_takes_the_pool_with_it_costs_nobody_a_token(
    engine_on, asked, alone, serve, at_rest, monkeypatch, caplog, rule
):
    engine = engine_on(cache_tokens=512)
    requests = [asked(engine, by_rule(rule), tokens=12, rows=4, watched=n == 0) for n in range(6)]
    expected = alone(engine, requests)
    steps = iter(range(1000))
    breaking(monkeypatch, lambda batch: next(steps) == 3)
    client = serve(engine, requests)
    assert [(client.ids[n], client.logprobs[n]) for n in client.numbers] == expected
    assert engine._core.state.epoch == 1
    assert "its pool is made anew" in caplog.text
    at_rest(engine)


def test_who_ends_while_it_is_prefilled_joins_no_batch(
    engine_on, asked, alone, serve, at_rest, monkeypatch
):
    engine = engine_on(cache_tokens=512)
    requests = [asked(engine, tokens=6, rows=4)] * 2
    [expected] = alone(engine, requests[:1])
    end, together = PrefillQueue._end, []

    def ending(queue, group, prefill):
        together.append(len(group.members))
        engine._core.abort(group.members[0].number)
        end(queue, group, prefill)

    monkeypatch.setattr(PrefillQueue, "_end", ending)
    client = serve(engine, requests)
    assert together == [2]
    first, second = client.numbers
    assert isinstance(client.last[first].error, Cancelled)
    assert (client.ids[second], client.logprobs[second]) == expected
    assert engine._core.state.restarts == 0
    at_rest(engine)


def test_a_request_that_breaks_every_step_fails_alone(
    engine_on, asked, alone, serve, at_rest, monkeypatch
):
    engine = engine_on(cache_tokens=512)
    requests = [asked(engine, tokens=12, rows=4) for _ in range(5)]
    expected = alone(engine, requests)
    bad = requests[2]

    def breaks(batch):
        rows = [row for rows in engine._core._batches._rows.values() for row in rows]
        return any(live is not None and live.request is bad for live in rows)

    breaking(monkeypatch, breaks)
    client = serve(engine, requests)
    for number, request, (ids, logprobs) in zip(client.numbers, requests, expected, strict=True):
        error = client.last[number].error
        if request is bad:
            assert isinstance(error, EngineError) and "injected" in str(error)
        else:
            assert error is None and (client.ids[number], client.logprobs[number]) == (
                ids,
                logprobs,
            )
    at_rest(engine)


def test_a_pool_that_cannot_be_made_anew_fails_everybody_and_is_tried_again(
    engine_on, asked, alone, serve, at_rest, monkeypatch
):
    engine = engine_on(cache_tokens=512)
    requests = [asked(engine, tokens=12, rows=4) for _ in range(3)]
    expected = alone(engine, requests)
    steps, create = iter(range(1000)), PagedCache.create
    breaking(monkeypatch, lambda batch: next(steps) == 1)
    fails = iter([True, True])

    def out_of_memory(*args, **kwargs):
        if next(fails, False):
            raise RuntimeError("out of memory")
        return create(*args, **kwargs)

    monkeypatch.setattr(PagedCache, "create", out_of_memory)
    client = serve(engine, requests)
    told = [client.last[number].error for number in client.numbers]
    assert all(isinstance(it, EngineError) and "out of memory" in str(it) for it in told)
    assert alone(engine, requests) == expected
    at_rest(engine)


def test_who_is_stopped_while_it_begins_again_is_aborted(engine_on, asked, alone, told, at_rest):
    engine, client = engine_on(), told()
    long = asked(engine, tokens=40, watched=True)

    def sink(progress):
        client(progress)
        if len(client.ids[progress.number]) == 1:  # both are done before the next iteration
            engine._mail.post(lambda: engine._running_core.forget())
            engine.stop(progress.number)

    number = engine.add(long, sink)
    while not client.last:
        engine.call(lambda runner: None)
    assert isinstance(client.last[number].error, Cancelled)
    assert len(alone(engine, [long])[0][0]) == 40
    at_rest(engine)


def test_a_nan_in_one_row_fails_that_row(engine_on, asked, alone, serve, at_rest, rng):
    engine = engine_on(cache_tokens=512)
    requests = [asked(engine, tokens=8, rows=4) for _ in range(3)]
    expected = alone(engine, requests)
    poison = rng.integers(3, 101, 24).astype(np.int32)
    bad = dataclasses.replace(
        requests[0], prompt=dataclasses.replace(requests[0].prompt, chunks=(poison,))
    )
    plan = jaxrag.engine.mapping.sequence_of(engine.runner.model, bad)
    load = plan.parts[1].load
    [made] = jaxrag.engine.staging.encode([load])
    made.chunk.kv[:, 1, 3] = np.nan
    load.encoding.offer(made.chunk)
    client = serve(engine, [requests[0], bad, *requests[1:]])
    error = client.last[client.numbers[1]].error
    assert isinstance(error, EngineError) and "NaN" in str(error)
    others = [n for at, n in enumerate(client.numbers) if at != 1]
    assert [(client.ids[n], client.logprobs[n]) for n in others] == expected
    at_rest(engine)


def test_a_pool_asked_for_ten_times_what_it_holds_serves_everybody(
    engine_on, asked, alone, serve, at_rest
):
    engine = engine_on(cache_tokens=192)
    requests = [asked(engine, tokens=10, rows=4) for _ in range(6)] * 5
    assert (
        sum(jaxrag.engine.mapping.most_pages(engine.runner.model, r) for r in requests)
        > 10 * engine.runner.num_pages
    )
    expected = alone(engine, requests[:6]) * 5
    client = serve(engine, requests)
    assert [(client.ids[n], client.logprobs[n]) for n in client.numbers] == expected
    at_rest(engine)


class Failing:
    """A store that cannot be read."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def get_many(self, *args, **kwargs):
        raise StoreError("disk: cannot be read")


def test_storage_that_fails_fails_those_who_wait_for_it(engine_on, asked, alone, serve, at_rest):
    engine = engine_on()
    good = asked(engine, tokens=5, rows=4)
    expected = alone(engine, [good])
    bad = asked(engine_on(), tokens=5, rows=4, store=Failing(engine.memory))
    bad = dataclasses.replace(
        bad, prompt=dataclasses.replace(bad.prompt, chunks=(np.arange(3, 30, dtype=np.int32),))
    )
    client = serve(engine, [bad, good, bad])
    told = [client.last[n].error for n in client.numbers]
    assert isinstance(told[0], StoreError) and isinstance(told[2], StoreError)
    assert [(client.ids[client.numbers[1]], client.logprobs[client.numbers[1]])] == expected
    at_rest(engine)


def test_a_client_that_fails_ends_its_own_request(engine_on, asked, alone, told, at_rest):
    engine = engine_on()
    request = asked(engine, tokens=9, rows=2)

    def failing(progress):
        raise ValueError("a client's fault")

    engine.add(request, failing)
    assert len(alone(engine, [request])[0][0]) == 9
    at_rest(engine)


def test_a_full_queue_says_so_and_a_deadline_ends_what_waits(
    shared_models, asked, serve, at_rest, alone
):
    now = [0.0]
    settings = EngineSettings(scheduler=SchedulerSettings(max_waiting=2))
    model = dataclasses.replace(shared_models(), cache_tokens=240)
    engine = model.engine = Engine(model, settings, clock=lambda: now[0])
    long = asked(engine, "full_attention", final=90, tokens=60, rows=1, watched=True)
    waits = asked(engine, "full_attention", final=90, tokens=60, rows=1)
    timed = dataclasses.replace(waits, timeout=5.0)

    def sink(progress):
        if progress.number == 0 and not now[0]:
            now[0] = 1.0
            more.extend(engine.add_all([(timed, late), (waits, late), (waits, late)]))
        elif len(more) == 3 and now[0] == 1.0:
            now[0] = 7.0

    more, errors, over = [], {}, threading.Event()

    def late(progress):
        if progress.last:
            errors[progress.number] = progress.error
            if len(errors) == 3:
                over.set()

    engine.add(long, sink)
    assert over.wait(120)
    first, second, third = (errors[number] for number in more)
    assert isinstance(first, DeadlineExceeded) and "timeout=5.0 s" in str(first)
    assert second is None
    assert isinstance(third, Overloaded)
    at_rest(engine)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_the_caller_aborts_what_it_asked(shared_models, rng, at_rest):
    """Ctrl-C while ``generate`` waits: nothing of it goes on, and the next question is answered."""
    model = dataclasses.replace(shared_models(), cache_tokens=512)
    engine = engine_of(model)
    ids, documents = rng.integers(3, 101, 9).tolist(), [rng.integers(3, 101, 20).tolist()]
    options = {"documents": documents, "model": model, "max_new_tokens": 200}
    stream = iter(jaxrag.generate(ids, **options, stream=True))

    def interrupt():
        while not engine._core or not any(
            "first" in it.moments for it in engine._core.state.live.values()
        ):
            pass
        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        list(stream)  # without a tokenizer no piece of text comes before the end
    short = jaxrag.generate(ids, **{**options, "max_new_tokens": 3})
    assert len(short.token_ids) == 3
    at_rest(engine)


def test_serving_compiles_nothing_that_was_compiled_before(rng, engine_on, asked, serve, at_rest):
    """New requests of shapes that were served: nothing is even traced."""
    engine = engine_on(cache_tokens=512)
    methods = ["turborag", "full_attention"]
    requests = [asked(engine, name, tokens=n, rows=4) for name in methods for n in (1, 9, 12)]
    serve(engine, requests)
    serve(engine, requests)
    jax.config.update("jax_no_tracing", True)
    try:
        other = [
            dataclasses.replace(it.prompt, final=rng.integers(3, 101, 9).astype(np.int32))
            for it in requests
        ]
        again = [
            dataclasses.replace(it, prompt=prompt, max_new_tokens=n)
            for it, prompt, n in zip(requests, other, 2 * (1, 5, 14), strict=True)
        ]
        client = serve(engine, again)
    finally:
        jax.config.update("jax_no_tracing", False)
    assert [client.last[n].error for n in client.numbers] == [None] * len(again)
    at_rest(engine)
