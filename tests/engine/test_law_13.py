"""Law 13: tokens do not depend on company, arrival, load order, cancellations or preemptions.

Against one request at a time: at equal rows logits are bit-equal (seen through the log-probability
of every token, a function of all logits of its step); in float32 tokens are equal across rows.
"""

import dataclasses
import random
import threading
import time

import pytest
from matrix import ALL_METHODS, METHODS, RULES

from jaxrag.base.errors import Cancelled
from jaxrag.engine.admission import SchedulerSettings
from jaxrag.engine.state import EngineSettings

BY_RULE = [("turborag", rule) for rule in RULES]
BY_METHOD = [(name, "dense") for name in METHODS if name != "gradual"]  # it needs more layers


def by(*usual, slow):
    """Parametrise by method and rule."""
    marked = [pytest.param(*it, marks=pytest.mark.slow) for it in slow if it not in usual]
    return pytest.mark.parametrize(("method", "rule"), [*usual, *marked])


def made_of(method, rule):
    return dataclasses.replace(ALL_METHODS[method], decode=RULES[rule])


ROWS = 4


class Shuffled:
    """A store whose reads take as long as they like."""

    def __init__(self, inner, seed):
        self._inner, self._random = inner, random.Random(seed)
        self._lock = threading.Lock()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def get_many(self, *args, **kwargs):
        with self._lock:
            wait = self._random.random() * 0.004
        time.sleep(wait)
        return self._inner.get_many(*args, **kwargs)


def busy(engine, requests, rng, told, *, cancel=0.3, best=()):
    """Serve requests at random moments among others that are cancelled; what each was told."""
    client, doomed = told(), told()
    numbers, others = [], []
    for at, request in enumerate(requests):
        while rng.random() < cancel:
            company = requests[rng.integers(len(requests))]
            others.append(engine.add(company, doomed))
            if rng.random() < 0.5:
                time.sleep(rng.random() * 0.003)
                engine.abort(others.pop())
        if at in best:
            request = dataclasses.replace(request, priority=0)
        numbers.append(engine.add(request, client))
        if rng.random() < 0.5:
            time.sleep(rng.random() * 0.003)
    for number in others:
        engine.abort(number)
    deadline = time.monotonic() + 120
    while len(client.last) < len(numbers) and time.monotonic() < deadline:
        time.sleep(0.002)
    out = []
    for number in numbers:
        last = client.last[number]
        if last.error is not None:
            raise last.error
        out.append((client.ids[number], client.logprobs[number]))
    for last in doomed.last.values():
        assert last.error is None or isinstance(last.error, Cancelled)
    return out


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@by(("turborag", "dense"), ("turborag", "retrieval"), ("fusionrag", "dense"),
    ("full_reuse_in_place", "dense"), slow=BY_RULE + BY_METHOD)  # fmt: skip
def test_nobody_changes_anothers_logits(
    engine_on, asked, alone, told, at_rest, rng, method, rule, dtype
):
    method = made_of(method, rule)
    engine = engine_on(cache_tokens=512, dtype=dtype)
    requests = [
        asked(engine, method, chunks=int(rng.integers(1, 4)), tokens=int(n), rows=ROWS)
        for n in rng.integers(1, 14, 7)
    ]
    expected = alone(engine, requests)
    crowded = engine_on(cache_tokens=512, dtype=dtype)
    store = Shuffled(engine.memory, int(rng.integers(1 << 30)))
    moved = [dataclasses.replace(request, store=store) for request in requests]
    got = busy(crowded, moved, rng, told)
    assert got == expected
    at_rest(crowded)
    at_rest(engine)


@by(("turborag", "dense"), slow=[*BY_RULE, ("cacheblend", "dense")])
def test_who_was_set_aside_goes_on_as_if_never(
    engine_on, asked, alone, told, at_rest, method, rule
):
    """Requests of a better class come when two of the worst have begun to answer."""
    method = made_of(method, rule)
    settings = EngineSettings(scheduler=SchedulerSettings(classes=3))
    engine = engine_on(cache_tokens=512 if method.rewrites else 256, settings=settings)
    worst = [asked(engine, method, tokens=30, rows=2, priority=2, watched=True) for _ in range(2)]
    better = [asked(engine, method, tokens=9, rows=2, priority=n % 2) for n in range(5)]
    expected = alone(engine, worst + better)
    client, numbers, over = told(), [], threading.Event()

    def sink(progress):
        client(progress)
        if len(client.ids) == 2 and len(numbers) == 2:
            numbers.extend(engine.add_all([(request, sink) for request in better]))
        if len(client.last) == len(expected):
            over.set()

    numbers += engine.add_all([(request, sink) for request in worst])
    assert over.wait(120)
    for number in numbers:
        if client.last[number].error is not None:
            raise client.last[number].error
    assert [(client.ids[n], client.logprobs[n]) for n in numbers] == expected
    assert engine._core.state.scheduler.preempted >= 2
    at_rest(engine)


def test_blocks_are_as_single_steps(engine_on, asked, alone):
    """Somebody watches, or nobody: the same bits."""
    engine = engine_on()
    requests = [asked(engine, tokens=20, rows=2) for _ in range(2)]
    watched = [dataclasses.replace(request, watched=True) for request in requests]
    assert alone(engine, requests) == alone(engine, watched)
