"""K and V in host memory: the answers of the device, hardly a byte there, and what is refused."""

import dataclasses
import gc
import weakref

import jax
import numpy as np
import pytest

from jaxrag.attention_index import Exact, ProjectedGraph, QueryLists
from jaxrag.cache import PAGE
from jaxrag.decode import (
    Dense,
    Flat,
    InfLLM,
    Ivf,
    Quest,
    Retrieval,
    SnapKV,
    StaticWindow,
    TopN,
)
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.errors import ConfigError, RequestError
from jaxrag.methods import METHODS
from jaxrag.models.model import random_model
from jaxrag.models.rope import rope_factors, rope_table
from jaxrag.serve.generate import generate
from jaxrag.sharding import make_mesh

WINDOW = {"sink": 4, "recent": 8}
RULES = {
    "dense": Dense(),
    "static_window": StaticWindow(**WINDOW),
    "snapkv": SnapKV(capacity=12, window=4, kernel=3),
    "infllm": InfLLM(block=8, blocks=2, representatives=2, observed=16, **WINDOW),
    "quest": Quest(budget=32, dense_layers=1),
    "flat": Flat(k=4, **WINDOW),
    "ivf": Ivf(k=4, index=Exact("float32"), **WINDOW),
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


@pytest.fixture(scope="module")
def pair(model_of):
    """The other tests' model, and the same with K and V in host memory."""
    model = model_of(max_positions=1024)
    return model, dataclasses.replace(model, kv="host")


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


@pytest.mark.parametrize("name", EXACT)
def test_answers_are_those_of_the_device(pair, ids, name):
    """Several rows of different length, chunks at several offsets, tokens leaving the window."""
    model, away = pair
    documents = list(ids(90, 40, 7))
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


def test_a_short_prompt_leaves_nothing_out(pair, ids):
    """All of it is in the static pattern, until the answer grows."""
    model, away = pair
    questions = [list(map(int, ids(5)[0]))]
    for name in ("flat", "retrieval", "static_window", "infllm"):
        expected = _answers(model, questions, None, RULES[name], "full_attention")
        _same(_answers(away, questions, None, RULES[name], "full_attention"), expected)


def test_everything_is_given_back(pair, ids):
    """Pages, numbers and tickets, after answers and after one that was broken off."""
    _, away = pair
    runner = engine_of(away).runner
    documents, question = list(ids(60)), list(map(int, ids(9)[0]))
    generate(question, documents=documents, model=away, decode=RULES["flat"], max_new_tokens=4)
    free, nbytes = runner.cache.allocator.num_available, runner.cache.host.nbytes
    for stop in (None, 3):
        stream = engine_of(away)
        if stop is None:
            generate(question, documents=documents, model=away, decode=RULES["flat"])
            continue
        method = dataclasses.replace(METHODS["turborag"], decode=RULES["flat"])
        prompt = Prompt(ids(0)[0], (documents[0],), ids(9)[0])
        for count, _ in enumerate(stream.iterate([Request(prompt, stream.memory, method, 40)])):
            if count == stop:
                break
    engine_of(away).call(lambda runner: None)
    assert runner.cache.allocator.num_available == free
    assert runner.cache.host.nbytes == nbytes
    assert not runner.host_search._requests


def test_the_device_holds_the_pattern(tiny_config, ids):
    """Live arrays in decode do not grow with the context."""
    grown = []
    for tokens in (512, 4096):
        config = tiny_config(eos_ids=(), max_positions=8192)
        model = random_model(config, cache_tokens=tokens + 256, kv="host")
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


def test_bytes_are_those_of_the_formula(pair, ids):
    """Of the device: the pattern, whatever the context; of the host: K and V of every token."""
    _, away = pair
    runner = engine_of(away).runner
    config, cache = away.config, runner.cache
    tokens = cache.allocator.num_pages * PAGE
    assert cache.host.nbytes == tokens * config.kv_bytes_per_token
    assert cache.pool.k.nbytes == cache.pool.v.nbytes == 0
    said = RULES["flat"].bytes(config, tokens)
    assert said.device == 12 * config.kv_bytes_per_token
    assert said.host == tokens * config.kv_bytes_per_token


def test_host_memory_goes_with_the_pool(pair):
    _, away = pair
    memory = weakref.ref(engine_of(away).runner.cache.host)
    engine_of(away).runner.forget_cache()
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode": TopN(n=4)}, "decode rule 'topn' reads K and V on the device"),
        (
            {"decode": StaticWindow(positions="cache", **WINDOW)},
            "decode rule 'static_window' reads K and V on the device",
        ),
        ({"method": "fusionrag"}, "selector 'query_guided' reads cached KV"),
        ({"method": "cacheblend"}, "selector 'kv_deviation' reads cached KV"),
    ],
)
def test_what_is_refused(pair, ids, options, message):
    _, away = pair
    away = dataclasses.replace(away)
    with pytest.raises(RequestError, match=message) as caught:
        generate(ids(5)[0], documents=list(ids(30)), model=away, **options)
    assert "\n" not in str(caught.value)
    assert engine_of(away).runner._cache is None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv": "disk"}, RequestError, "kv='disk': expected one of device, host"),
        ({"kv": "host", "value_layers": 1}, RequestError, "value_layers=1 with kv='host'"),
    ],
)
def test_a_model_that_cannot_be(model_of, changes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(model_of(), **changes)


def test_kernels_and_meshes_are_refused(model_of, tiny_config):
    model = model_of()
    config = dataclasses.replace(model.config, kernels="pallas_interpret")
    with pytest.raises(ConfigError, match="read K and V on the device, and kv='host'"):
        dataclasses.replace(model, config=config, kv="host")
    spread = random_model(tiny_config(), mesh=make_mesh(1, 1, 2), cache_tokens=1024)
    with pytest.raises(RequestError, match="is on 2; load it without a mesh"):
        dataclasses.replace(spread, kv="host")


def test_host_memory_that_is_not_there(model_of, ids):
    for changes, message in (
        ({"cache_tokens": 1 << 40}, "bytes of host memory, and .* are free; lower cache_tokens"),
        ({"max_host_bytes": 1 << 10}, "max_host_bytes=1024; raise it, or lower cache_tokens"),
    ):
        away = dataclasses.replace(model_of(), kv="host", **changes)
        with pytest.raises(RequestError, match=message) as caught:
            generate(ids(5)[0], documents=list(ids(30)), model=away, decode=RULES["flat"])
        assert "\n" not in str(caught.value)


def test_rope_factors_are_the_table(tiny_config):
    for family in ("llama", "glm"):
        rope = tiny_config(family).rope
        positions = np.array([0, 1, 1023, 1024, 5000, 100_000])
        table, factors = rope_table(rope, 100_001), rope_factors(rope, 100_001)
        for ours, theirs in zip(factors.at(positions), table.at(positions), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=3e-7)
