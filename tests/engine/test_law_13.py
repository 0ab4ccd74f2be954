"""Law 13: tokens do not depend on company, arrival, load order, cancellations or preemptions.

Against one request at a time: at equal rows logits are bit-equal (seen through the log-probability
of every token, a function of all logits of its step); in float32 tokens are equal across rows.
"""

import dataclasses
import random
import threading
import time

import pytest

from jaxrag.base.errors import Cancelled
from jaxrag.engine.admission import SchedulerSettings
from jaxrag.engine.state import EngineSettings
from jaxrag.reuse.attention_index import Exact
from jaxrag.reuse.decode import (
    Dense,
    Flat,
    InfLLM,
    IvfRetrieval,
    Quest,
    Retrieval,
    SnapKV,
    StaticWindow,
    TopN,
)
from jaxrag.reuse.methods import METHODS, Method
from jaxrag.reuse.select import SELECTORS


def slow(*values):
    """The same, in the slow tests."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


RULES = [
    Dense(),
    StaticWindow(sink=2, recent=12),
    SnapKV(capacity=24, window=4),
    InfLLM(block=8, blocks=2, representatives=2, sink=2, recent=12, observed=8),
    Quest(budget=32, dense_layers=1),
    Flat(k=6, sink=2, recent=12),
    IvfRetrieval(k=6, sink=2, recent=12),
    Retrieval(k=6, sink=2, recent=12, index=Exact()),
    Retrieval(k=6, sink=2, recent=12, queries=16),
    TopN(n=12),
]
PLAIN = METHODS["turborag"]
BY_RULE = [dataclasses.replace(PLAIN, decode=rule) for rule in RULES]
BY_SELECTOR = [
    Method(f"by {name}", encoder="after_prefix", selector=SELECTORS[name](), recompute_ratio=0.3)
    for name in SELECTORS
    if name not in ("none", "all")
]
OTHERS = [
    METHODS["full_attention"],
    METHODS["turborag_composite"],
    METHODS["fusionrag"],
    dataclasses.replace(PLAIN, name="gaps", misses="in_place"),
]
ROWS = 4
REWRITING = next(method for method in BY_SELECTOR if method.rewrites)  # copies of its chunks
METHODS_SET_ASIDE = [BY_RULE[0], *slow(REWRITING, *BY_RULE[1:5], BY_RULE[8])]


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


@pytest.mark.parametrize("dtype", ["float32", *slow("bfloat16")])
@pytest.mark.parametrize(
    "method",
    [
        BY_RULE[0],
        BY_RULE[8],
        OTHERS[2],
        *slow(*BY_RULE[1:8], BY_RULE[9], *BY_SELECTOR, *OTHERS[:2]),
        OTHERS[3],
    ],
    ids=lambda m: f"{m.name}-{m.decode.name}",
)
def test_nobody_changes_anothers_logits(engine_on, asked, alone, told, at_rest, rng, method, dtype):
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


@pytest.mark.parametrize("method", METHODS_SET_ASIDE, ids=lambda m: f"{m.name}-{m.decode.name}")
def test_who_was_set_aside_goes_on_as_if_never(engine_on, asked, alone, told, at_rest, method):
    """Requests of a better class come when two of the worst have begun to answer."""
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


@pytest.mark.parametrize(
    "method",
    [BY_RULE[0], *slow(*BY_RULE[1:], *OTHERS)],
    ids=lambda m: f"{m.name}-{m.decode.name}",
)
def test_tokens_are_equal_across_rows(engine_on, asked, alone, rng, method):
    engine = engine_on(cache_tokens=512)
    requests = [asked(engine, method, tokens=10) for _ in range(2)]
    one, *others = (
        [ids for ids, _ in alone(engine, [dataclasses.replace(r, rows=n) for r in requests])]
        for n in (1, 8)
    )
    assert others == [one]


def test_blocks_are_as_single_steps(engine_on, asked, alone):
    """Somebody watches, or nobody: the same bits."""
    engine = engine_on()
    requests = [asked(engine, tokens=20, rows=2) for _ in range(2)]
    watched = [dataclasses.replace(request, watched=True) for request in requests]
    assert alone(engine, requests) == alone(engine, watched)
