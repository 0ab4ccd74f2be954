"""The engine: answers that end, admission by what is free, one owner of the pool, its life."""

import ast
import dataclasses
import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from refusal import refused

import jaxrag
from jaxrag.base.errors import Cancelled, EngineError, RequestError
from jaxrag.engine.engine import engine_of
from jaxrag.engine.mapping import sequence_of
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import FAILED, Prompt, Request
from jaxrag.engine.sequence import Sequence
from jaxrag.engine.state import EngineSettings
from jaxrag.kv.cache import PAGE
from jaxrag.models.model import random_model
from jaxrag.reuse.decode import rule_from
from jaxrag.reuse.encode import chunk_key
from jaxrag.reuse.methods import METHODS

EOS = 0


def request(ids, model=None, method="full_attention", tokens=4, **more):
    prompt = Prompt(np.zeros(0, np.int32), (), np.asarray(ids, np.int32))
    store = None if model is None else engine_of(model).memory
    return Request(prompt, store, METHODS[method], tokens, eos_ids=frozenset({EOS}), **more)


def a_live(tokens=4):
    return Sequence(0, request([1], tokens=tokens), [])


@pytest.mark.parametrize(
    ("steps", "new", "reason"),
    [
        ([[5, 6]], [5, 6], None),
        ([[5, EOS, 7]], [5], "stop"),  # the end is no part of the answer, nor what follows it
        ([[EOS]], [], "stop"),
        ([[5], [6, 7, 8, 9]], [6, 7, 8], "length"),
        ([[5, 6, 7, EOS]], [5, 6, 7], "stop"),
        ([[5, 6, 7], [8, 9]], [8], "length"),
    ],
)
def test_an_answer_ends(steps, new, reason):
    live = a_live()
    for ids in steps:
        told = live.accept(ids)
    assert told == (new, reason)


def test_an_answer_that_begins_again_tells_only_what_is_new():
    live = a_live(tokens=5)
    live.accept([5, 6, 7])
    live.restart()
    assert live.accept([5, 6]) == ([], None)
    assert live.accept([7, 8, 9]) == ([8, 9], "length")
    live.restart()
    with pytest.raises(EngineError, match="token 1 came out as 7 and was 6 before"):
        live.accept([5, 7])


def test_logits_that_hold_a_nan_are_no_token():
    live = a_live()
    with pytest.raises(EngineError, match="logits of token 1 hold a NaN"):
        live.accept([5, FAILED])


@pytest.fixture
def model(tiny_config):
    return random_model(tiny_config(), cache_tokens=512)


def answers(model, requests):
    """Token ids, finish reason and outcome of each request, all of them added at one moment."""
    ids, ends = [[] for _ in requests], {}
    for progress in engine_of(model).iterate(requests):
        assert progress.error is None
        ids[progress.number] += progress.new
        if progress.last:
            ends[progress.number] = progress
    ends = [ends[at] for at in range(len(requests))]
    return [(a, end.finish_reason, end.outcome) for a, end in zip(ids, ends, strict=True)]


def in_use(model):
    """Pages that somebody holds, once nothing is in flight."""
    return engine_of(model).call(
        lambda runner: runner.cache.allocator.num_pages - runner.cache.allocator.num_available
    )


@pytest.mark.parametrize(
    ("tokens", "pages"),
    [
        *[pytest.param(*few, marks=pytest.mark.slow) for few in ((1, 4), (2, 5), (17, 5))],
        (18, 6),
    ],
)
def test_every_token_that_is_run_has_a_slot_and_no_more(tiny_config, tokens, pages):
    """The last token of an answer is not run; a pool of just these pages is enough."""
    ids = range(3, 3 + 4 * PAGE)
    config = tiny_config(eos_ids=())
    roomy, tight, small = (
        random_model(config, cache_tokens=n * PAGE) for n in (16, pages, pages - 1)
    )
    ((expected, _, _),) = answers(roomy, [request(ids, roomy, tokens=tokens)])
    ((found, _, _),) = answers(tight, [request(ids, tight, tokens=tokens)])
    assert found == expected
    with pytest.raises(RequestError, match=f"need {pages * PAGE} tokens of cache, the pool has"):
        engine_of(small).add(request(ids, small, tokens=tokens), lambda progress: None)


def test_requests_of_other_methods_and_lengths_run_side_by_side(model, rng):
    asked = [
        request(rng.integers(3, 101, size), model, method, tokens)
        for size, method, tokens in ((2, "full_attention", 9), (40, "turborag", 3), (7, "epic", 6))
    ]
    alone = [answers(model, [one])[0][:2] for one in asked]
    assert [one[:2] for one in answers(model, asked)] == alone


def test_a_client_that_wants_no_more_gets_its_outcome_and_no_token(model):
    told, done = [], threading.Event()

    def sink(progress):
        told.append(progress)
        if progress.last:
            done.set()
        return True

    engine_of(model).add(request([3, 4], model, tokens=99, watched=True), sink)
    assert done.wait(120)
    assert in_use(model) == 0
    assert [len(progress.new) for progress in told] == [1, 0]
    assert told[-1].finish_reason == "stop" and told[-1].outcome is not None


@pytest.mark.parametrize("how", ["stop", "abort"])
def test_a_request_is_ended_by_its_number(model, how):
    """From a thread that is not the engine's, in the middle of an answer."""
    engine, told = engine_of(model), []
    first, done = threading.Event(), threading.Event()

    def sink(progress):
        told.append(progress)
        first.set()
        if progress.last:
            done.set()

    number = engine.add(request([3, 4], model, tokens=300, watched=True), sink)
    assert first.wait(120)
    getattr(engine, how)(number)
    assert done.wait(120)
    assert in_use(model) == 0
    assert sum(progress.last for progress in told) == 1
    tokens = sum(len(progress.new) for progress in told)
    assert 1 <= tokens < 300
    if how == "stop":
        assert told[-1].finish_reason == "stop" and told[-1].outcome is not None
    else:
        assert isinstance(told[-1].error, Cancelled)


def test_admission_waits_for_what_is_free(model):
    """Beside a stream that holds pages, few run at once; alone they all do. The answers agree."""
    engine = engine_of(model)
    many = [request([n, *range(1, 60)], model, rows=6) for n in range(3, 9)]  # 4 pages each, of 32
    expected = [one[0] for one in answers(model, many)]
    begun, ids, most = set(), {}, []
    stream_told, done = [], threading.Event()

    def sink(progress):
        assert progress.error is None
        ids.setdefault(progress.number, []).extend(progress.new)
        begun.add(progress.number)
        most.append(len(begun))
        if progress.last:
            begun.remove(progress.number)
            if len(ids) == len(many) and not begun:
                done.set()

    engine.add_all([(one, sink) for one in many])
    assert done.wait(120)
    assert max(most) == 6
    assert list(ids.values()) == expected
    begun, ids, most = set(), {}, []
    done.clear()
    left = []

    def stream_sink(progress):
        stream_told.append(progress)
        if len(stream_told) == 1:
            left.append(engine.runner.cache.allocator.num_available)
            engine.add_all([(one, sink) for one in many])
        return done.is_set()

    held = request(range(1, 99), model, tokens=PAGE * 12, watched=True)
    engine.add(dataclasses.replace(held, eos_ids=frozenset()), stream_sink)
    assert done.wait(120)
    assert in_use(model) == 0
    assert max(most) == left[0] // 4 == 3
    assert [ids[number] for number in sorted(ids)] == expected


def test_the_pool_is_made_anew_under_an_answer_that_ended_with_a_step_in_flight(model):
    """The step comes back to nobody, its pages are free, and the next request is served."""
    engine, told, done = engine_of(model), [], threading.Event()

    def sink(progress):
        told.append(progress)
        if progress.last:
            engine._mail.post(lambda core: core.forget())  # before the step is read
            done.set()
        return True

    asked = request([3, 4], model, tokens=99, watched=True)
    engine.add(asked, sink)
    assert done.wait(120)
    ((ids, _, _),) = answers(model, [dataclasses.replace(asked, max_new_tokens=3)])
    assert ids[:1] == told[0].new
    assert in_use(model) == 0


def test_unused_chunks_count_as_room(model, rng):
    documents = [rng.integers(3, 101, 40).tolist() for _ in range(3)]
    jaxrag.generate([5, 6], documents=documents, model=model, max_new_tokens=2)
    assert in_use(model) == 0
    allocator = engine_of(model).runner.cache.allocator
    assert allocator.num_free < allocator.num_pages == allocator.num_available


@pytest.mark.parametrize(
    "decode", ["dense", pytest.param("retrieval:recent=8,sink=4", marks=pytest.mark.slow)]
)
def test_a_deleted_model_frees_weights_and_pool(tiny_config, rng, decode):
    model = random_model(tiny_config(), cache_tokens=512)
    ids = rng.integers(3, 101, 40).tolist()
    options = {"documents": [], "method": "full_attention", "max_new_tokens": 3, "decode": decode}
    jaxrag.generate(ids, model=model, **options)
    runner = engine_of(model).runner
    for thread in threading.enumerate():  # it ends when there is nothing to do
        if thread.name == "jaxrag-engine":
            thread.join(120)
    held = [weakref.ref(x) for x in (model, runner.cache.pool.k, runner.cache.pool.v)]
    held += [weakref.ref(model.params.embed), weakref.ref(model.rope(1).cos)]
    host = runner.host_search  # a compiled step names it
    host.admit()
    del model, runner
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    assert not host._requests
    assert host._pool is None


def test_requests_side_by_side_report_their_own_indexes(tiny_config, rng):
    model = random_model(tiny_config(), cache_tokens=2048)
    rule = rule_from("retrieval:recent=8,sink=4")
    asked = []
    for size in (40, 90):
        one = request(rng.integers(3, 101, size), model, rows=2)
        asked.append(dataclasses.replace(one, method=dataclasses.replace(one.method, decode=rule)))
    expected = [answers(model, [one])[0][2].indexes for one in asked]
    assert 0 < expected[0]["keys"] < expected[1]["keys"]
    assert [outcome.indexes for _, _, outcome in answers(model, asked)] == expected


def test_the_pool_has_one_owner():
    """One place binds the pool anew, ``PagedCache.run``; nobody else assigns it."""
    root = Path(jaxrag.__file__).parent
    binds = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            if node.attr == "pool" or (node.attr == "_pool" and path.parent.name == "cache"):
                binds.append((path.relative_to(root).as_posix(), node.attr))
    assert binds == [("kv/cache/cache.py", "_pool")] * 2  # at the start, and in ``run``


def test_heat_is_counted_in_requests_and_halves_as_the_settings_say(engine_on, asked, alone):
    """A pool with room for four chunks of one page: the fifth takes the place of the coldest."""
    chunks = [np.full(PAGE, 3 + number, np.int32) for number in range(5)]

    def left(half_life):
        engine = engine_on(cache_tokens=5 * PAGE, settings=EngineSettings(half_life=half_life))
        requests = [
            dataclasses.replace(
                asked(engine, tokens=2), prompt=Prompt(chunk[:0], (chunk,), chunk[: PAGE // 2])
            )
            for chunk in chunks
        ]
        alone(engine, [requests[at] for at in (0, 0, 0, 1, 1, 2, 3, 2, 3, 4, 4)])
        pool = engine.runner.cache.allocator
        plans = [sequence_of(engine.runner.model, request) for request in requests]
        return [at for at, plan in enumerate(plans) if plan.parts[1].load.key not in pool]

    assert left(half_life=1000) == [1]  # two uses, and those are the oldest
    assert left(half_life=0.5) == [0]


def test_pool_evicts_unused_chunks_and_refuses_what_cannot_fit(rng, engine_on):
    engine = engine_on(cache_tokens=9 * PAGE)
    one, two, three, final = (
        rng.integers(3, 101, n).astype(np.int32) for n in (3 * PAGE, 3 * PAGE, 3 * PAGE, 1)
    )
    model = engine.runner.model
    key = chunk_key(model.fingerprint, model, "isolated", final[:0], one)

    def look(*chunks):
        """Where the first chunk came from, free pages, and whether the first of all is there."""
        asked = Request(Prompt(final[:0], chunks, final), engine.memory, METHODS["turborag"], 1)

        def seen(runner, state, there):
            allocator = runner.cache.allocator
            return state.parts[1].origin.how, allocator.num_free, key in allocator

        [found] = inspect_prompts(engine, [asked], seen)
        return found

    assert look(one, two) == ("encoded", 2, True)
    with refused(RequestError, "cache_tokens"):
        look(one, two, three)
    # The least recently used left, the store keeps it.
    assert look(three) == ("encoded", 2, False)
    assert look(one)[::2] == ("store", True)
