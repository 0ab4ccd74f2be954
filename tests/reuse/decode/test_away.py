"""K and V in host memory: the answers of the device, hardly a byte there, and what is refused."""

import dataclasses
import gc
import weakref

import jax
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.config import NoRotation, YarnScaling
from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.base.sharding import make_mesh
from jaxrag.engine.away import start_away
from jaxrag.engine.decoding import start_decoding
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.cache import PAGE
from jaxrag.kv.placement import AWAY, KVPlacement
from jaxrag.models.model import random_model
from jaxrag.models.rope import rope_factors, rope_table
from jaxrag.reuse.attention_index import Exact, ProjectedGraph, QueryLists
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
from jaxrag.reuse.methods import METHODS
from jaxrag.serve.generate import generate

WINDOW = {"sink": 4, "recent": 8}
RULES = {
    "dense": Dense(),
    "static_window": StaticWindow(**WINDOW),
    "snapkv": SnapKV(capacity=12, window=4, kernel=3),
    "infllm": InfLLM(block=8, blocks=2, representatives=2, observed=16, **WINDOW),
    "quest": Quest(budget=32, dense_layers=1),
    "flat": Flat(k=4, **WINDOW),
    "ivf": IvfRetrieval(k=4, index=Exact("float32"), **WINDOW),
    "retrieval": Retrieval(k=4, index=Exact("float32"), **WINDOW),
    "retrieval, lists": Retrieval(
        k=4, index=QueryLists(exact_below=0, min_queries=1, clusters=4, most_scanned=1.0), **WINDOW
    ),
    "retrieval, graph": Retrieval(
        k=4,
        index=ProjectedGraph(exact_below=0, min_queries=1, most_scanned=1.0, storage="float32"),
        **WINDOW,
    ),
}
EXACT = {name: rule for name, rule in RULES.items() if "," not in name}
SLOW = ("dense", "snapkv", "infllm", "quest")


@pytest.fixture(scope="module")
def pair(model_of):
    """A model with sink logits, and the same with K and V in host memory."""
    model = model_of(max_positions=1024, sink_logits=True)
    return model, dataclasses.replace(model, placement=AWAY)


def _answers(model, questions, documents, rule, method="turborag", **changes):
    """Token ids and the logarithms of their probabilities, served together."""
    method = dataclasses.replace(METHODS[method], decode=rule, **changes)
    engine, count = engine_of(model), len(questions)
    empty = np.zeros(0, np.int32)
    requests = [
        Request(
            Prompt(empty, tuple(documents or ()), np.asarray(question, np.int32)),
            engine.memory,
            method,
            24 - 5 * n,
            rows=count,
        )
        for n, question in enumerate(questions)
    ]
    answers = [([], []) for _ in questions]
    for progress in engine.iterate(requests):
        if progress.error is not None:
            raise progress.error
        tokens, chances = answers[progress.number]
        tokens += progress.new
        chances += progress.logprobs
    return answers


def _same(ours, expected):
    for (mine, chances), (theirs, wanted) in zip(ours, expected, strict=True):
        assert mine == theirs
        np.testing.assert_allclose(chances, wanted, atol=2e-4)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in EXACT],
)
def test_answers_are_those_of_the_device(pair, ids, rng, name):
    """Several rows of different length, chunks at several offsets, tokens leaving the window.

    Equal tokens have equal keys before rotation in the first layer: none is near another, as which
    of them stands for an InfLLM block would hang on rounding.
    """
    model, away = pair
    documents = [rng.permutation(np.arange(3, 101))[:n].astype(np.int32) for n in (90, 40, 7)]
    questions = [list(map(int, q)) for q in ids(9, 30)]
    expected = _answers(model, questions, documents, EXACT[name])
    _same(_answers(away, questions, documents, EXACT[name]), expected)


@pytest.mark.parametrize(
    "name", ["flat", *(pytest.param(it, marks=pytest.mark.slow) for it in EXACT if it != "flat")]
)
def test_every_layer_is_rotated_as_its_kind_is(model_of, ids, rng, name):
    """The rules' own keys, those of the pattern, and those that are turned for indexes."""
    own, yarn = model_of().config.rope, YarnScaling(4.0, 32, 8.0, 0.5, 1.7, True)
    more = tuple(
        dataclasses.replace(own, theta=theta, scaling=scaling)
        for theta, scaling in ((70.0, yarn), (own.theta, NoRotation()))
    )
    model = model_of(
        max_positions=1024, more_ropes=more, rope_layers=(1, 2, 0), attention_scale=0.5
    )
    away = dataclasses.replace(model, placement=AWAY)
    documents = [rng.permutation(np.arange(3, 101))[:n].astype(np.int32) for n in (90, 40, 7)]
    questions = [list(map(int, q)) for q in ids(9, 30)]
    expected = _answers(model, questions, documents, EXACT[name])
    _same(_answers(away, questions, documents, EXACT[name]), expected)


@pytest.mark.parametrize("name", ["retrieval, lists", "retrieval, graph"])
def test_trained_indexes_find_what_there_is(pair, ids, name):
    """With every list or link followed they miss nothing."""
    model, away = pair
    question = [list(map(int, ids(200)[0]))]
    rule = RULES[name]
    effort = {"probes": 4} if isinstance(rule.index, QueryLists) else {"ef": 400}
    rule = dataclasses.replace(rule, index=dataclasses.replace(rule.index, **effort))
    expected = _answers(model, question, None, RULES["flat"], "full_attention")
    _same(_answers(away, question, None, rule, "full_attention"), expected)


@pytest.mark.parametrize("method", ["full_attention", "full_reuse", "epic"])
def test_methods(pair, ids, method):
    model, away = pair
    documents, questions = list(ids(50, 33)), [list(map(int, ids(12)[0]))]
    options = {} if method != "epic" else {"recompute_ratio": 0.3}
    expected = _answers(model, questions, documents, RULES["flat"], method, **options)
    _same(_answers(away, questions, documents, RULES["flat"], method, **options), expected)


@pytest.mark.slow
def test_a_short_prompt_leaves_nothing_out(pair, ids):
    """All of it is in the static pattern, until the answer grows."""
    model, away = pair
    questions = [list(map(int, ids(5)[0]))]
    for name in ("flat", "retrieval", "static_window", "infllm"):
        expected = _answers(model, questions, None, RULES[name], "full_attention")
        _same(_answers(away, questions, None, RULES[name], "full_attention"), expected)


def test_everything_is_given_back(pair, ids):
    """Pages, numbers and tickets: after answers, one that was broken off, and one that failed."""
    _, away = pair
    engine, documents = engine_of(away), list(ids(60))

    def ask(rule, stop=None):
        method = dataclasses.replace(METHODS["turborag"], decode=rule)
        prompt = Prompt(ids(0)[0], tuple(documents), ids(40)[0])
        for count, progress in enumerate(
            engine.iterate([Request(prompt, engine.memory, method, 40)])
        ):
            if progress.error is not None:
                raise progress.error
            if count == stop:
                return

    def held(runner):
        search = runner.host_search
        assert not search._begun
        return runner.cache.allocator.num_available, runner.cache.host.nbytes, set(search._requests)

    ask(RULES["flat"])
    before = engine.call(held)
    ask(RULES["retrieval"])
    assert engine.call(held) == before
    ask(RULES["flat"], stop=3)
    assert engine.call(held) == before
    small = dataclasses.replace(RULES["retrieval, lists"], max_host_bytes=100)
    with refused(RequestError, "max_host_bytes=100") as caught:
        ask(small)
    assert "\n" not in str(caught.value)
    assert engine.call(held) == before


def test_the_device_holds_the_pattern(tiny_config, ids):
    """Live arrays in decode do not grow with the context."""
    grown = []
    for tokens in (512, 4096):
        config = tiny_config(eos_ids=(), max_positions=8192)
        model = random_model(config, cache_tokens=tokens + 256, placement=AWAY)
        weights = sum(x.nbytes for x in jax.tree.leaves(model.params))
        documents, question = list(ids(*[256] * (tokens // 256))), list(map(int, ids(9)[0]))
        before = {id(x) for x in jax.live_arrays()}
        held = []
        for _ in _tokens_of(model, question, documents, Flat(k=4, **WINDOW)):
            new = [x for x in jax.live_arrays() if id(x) not in before]
            held.append(sum(x.nbytes for x in new))
        grown.append(held[-1])
        assert weights
    assert grown[1] <= grown[0] * 1.1


def _tokens_of(model, question, documents, rule):
    method = dataclasses.replace(METHODS["turborag"], decode=rule)
    prompt = Prompt(np.zeros(0, np.int32), tuple(documents), np.asarray(question, np.int32))
    engine = engine_of(model)
    yield from engine.iterate([Request(prompt, engine.memory, method, 8, watched=True)])


@pytest.mark.parametrize("kv", [pytest.param("device", marks=pytest.mark.slow), "host"])
def test_bytes_are_those_of_the_formula(pair, ids, kv):
    """What is allocated for one request in a pool that is its own, by where it lies."""
    model = dataclasses.replace(pair[kv == "host"])  # other requests scatter pages over a pool
    config, room = model.config, 16
    empty = np.zeros(0, np.int32)
    prompt = Prompt(empty, ids(288, 64), ids(160)[0])
    for name, rule in RULES.items():
        method = dataclasses.replace(METHODS["turborag"], decode=rule)
        request = Request(prompt, engine_of(model).memory, method, room + 1)

        def allocated(runner, state, there, rule=rule):
            number = runner.host_search.admit()
            try:
                here = (runner, state, rule, there.bank, room, number)
                return _allocated(*here) if kv == "host" else _allocated_on_device(*here)
            finally:
                runner.host_search.release([number])

        tokens = prompt.num_tokens + room
        assert tokens % PAGE == 0
        [(device, host)] = inspect_prompts(engine_of(model), [request], allocated)
        said = rule.bytes(config, tokens, KVPlacement(kv))
        assert device == said.device, name
        kept = tokens * (config.kv_bytes_per_token + 8) if kv == "host" else 0
        assert kept <= host <= said.host, name


def _allocated(runner, state, rule, bank, room, number):
    begun = start_away(runner, state, rule, bank, room, number)
    request = runner.host_search._requests[number]
    rows = len(state.table.pages) * PAGE
    host = rows * runner.model.config.kv_bytes_per_token
    [layers], [memory] = request.far.values(), request.memory.values()
    host += memory[0].rows.nbytes + memory[0].offsets.nbytes
    host += sum(far.account.index_bytes for far in layers if far is not None)
    return begun.state.k.nbytes + begun.state.v.nbytes, host


def _allocated_on_device(runner, state, rule, bank, room, number):
    begun = start_decoding(runner, state, rule, bank, room, number)
    held = None if begun is None else begun.state
    if isinstance(rule, Retrieval):
        held = None  # numbers of requests and positions of the tail
    elif isinstance(rule, SnapKV):
        held = held.chosen
    pages = len(state.table.pages)
    device = pages * PAGE * runner.model.config.kv_bytes_per_token
    slots = begun and begun.order.shape[1]
    for x in jax.tree.leaves(held):
        # States are made for the slots of a table, which is padded; by pages, or by blocks.
        share = 1 if isinstance(rule, SnapKV) else _share_of(rule, x, pages * PAGE, slots)
        device += round(x.nbytes * share)
    return device, runner.host_search.account_of([number]).index_bytes


def _share_of(rule, x, tokens, slots):
    if isinstance(rule, Quest):
        return tokens / slots
    blocks = -(-(tokens - rule.sink) // rule.block)
    return blocks * rule.representatives / x.shape[-1]


def test_host_memory_goes_with_the_pool(pair):
    _, away = pair
    memory = weakref.ref(engine_of(away).runner.cache.host)
    engine_of(away).runner.forget_cache()
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode": TopN(n=4)}, "'topn'"),
        (
            {"decode": StaticWindow(positions="cache", **WINDOW)},
            "'static_window'",
        ),
        ({"method": "fusionrag"}, "'query_guided'"),
        ({"method": "cacheblend"}, "'kv_deviation'"),
    ],
)
def test_what_is_refused(pair, ids, options, message):
    _, away = pair
    away = dataclasses.replace(away)
    with refused(RequestError, message) as caught:
        generate(ids(5)[0], documents=list(ids(30)), model=away, **options)
    assert "\n" not in str(caught.value)
    assert engine_of(away).runner._cache is None


@pytest.mark.parametrize(
    ("placement", "error", "message"),
    [
        (KVPlacement("disk"), RequestError, "kv='disk': expected one of device, host"),
        (KVPlacement("host", 1), RequestError, "value_layers=1 with kv='host'"),
    ],
)
def test_a_model_that_cannot_be(model_of, placement, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(model_of(), placement=placement)


def test_kernels_and_heads_without_an_owner_are_refused(model_of, tiny_config):
    model = model_of()
    config = dataclasses.replace(model.config, kernels="pallas_interpret")
    with refused(ConfigError, "kv='host'"):
        dataclasses.replace(model, config=config, placement=AWAY)
    spread = random_model(tiny_config(), mesh=make_mesh(1, 1, 4), cache_tokens=1024)
    with refused(RequestError, "2"):
        dataclasses.replace(spread, placement=AWAY)


def test_host_memory_that_is_not_there(model_of, ids):
    for tokens, placement, message in (
        (1 << 40, AWAY, "cache_tokens"),
        (
            2048,
            KVPlacement("host", max_host_bytes=1 << 10),
            "max_host_bytes=1024",
        ),
    ):
        away = dataclasses.replace(model_of(), placement=placement, cache_tokens=tokens)
        with refused(RequestError, message) as caught:
            generate(ids(5)[0], documents=list(ids(30)), model=away, decode=RULES["flat"])
        assert "\n" not in str(caught.value)


def test_rope_factors_are_the_table(tiny_config):
    for family in ("llama", "glm"):
        at = tiny_config(family)
        positions = np.array([0, 1, 1023, 1024, 5000, 100_000])
        table, factors = rope_table(at.rope, 100_001), rope_factors(at, 100_001)
        for ours, theirs in zip(factors.at(positions), table.at(positions), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=3e-7)
