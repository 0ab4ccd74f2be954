"""Guided answers among others: of the form, and bit for bit as alone, whatever happens."""

import dataclasses
import json
import re
import threading

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import EngineError, RequestError
from jaxrag.base.guide import Guide
from jaxrag.engine import decoding
from jaxrag.engine.admission import SchedulerSettings
from jaxrag.engine.engine import Engine
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.engine.state import EngineSettings
from jaxrag.models.text.guidance import Grammar, Matcher
from jaxrag.reuse.methods import METHODS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GUIDES = (
    Guide("json_schema", json.dumps(SCHEMA)),
    Guide("regex", "[A-Z][a-z]{2,9} [0-9]{3}"),
    Guide("choice", '["this one", "that one", "neither"]'),
)
OTHERS = (
    SamplingParams(1.0, seed=4),
    SamplingParams(presence_penalty=1.2, top_logprobs=3),
    SamplingParams(0.7, seed=9, top_k=20),
)


@pytest.fixture
def engine(text_model):
    return made(text_model)


def made(text_model, **settings):
    model = dataclasses.replace(text_model, cache_tokens=1024)
    model.engine = Engine(model, EngineSettings(**settings))
    return model.engine


@pytest.fixture
def asked(text_model, rng):
    """``asked(engine, guide, ...)``: a request of random chunks whose answer is drawn."""
    eos_ids = frozenset(text_model.config.eos_ids)

    def make(engine, guide=None, tokens=60, **more):
        sampling = SamplingParams(1.0, seed=int(rng.integers(1000)), guide=guide)
        sampling = dataclasses.replace(more.pop("sampling", sampling), guide=guide)
        parts = [rng.integers(10, 600, n).astype(np.int32) for n in (3, 20, 31, 9)]
        prompt = Prompt(parts[0], tuple(parts[1:3]), parts[3])
        given = {"sampling": sampling, "eos_ids": eos_ids, "rows": 4} | more
        return Request(prompt, engine.memory, METHODS["turborag"], tokens, **given)

    return make


def check(text, guide):
    """The text is of the form."""
    if guide.kind == "json_schema":
        found = json.loads(text)
        assert found.keys() == {"name", "age"} and 0 <= found["age"] <= 99
        assert len(found["name"]) <= 12
    elif guide.kind == "regex":
        assert re.fullmatch(guide.text, text)
    else:
        assert text in json.loads(guide.text)


def test_law_13_whoever_has_the_other_rows(engine, asked, alone, told, at_rest, text_model):
    guided = [asked(engine, it) for it in GUIDES * 2]
    others = [asked(engine, tokens=25, sampling=it) for it in OTHERS]
    requests = [it for pair in zip(guided, others * 2, strict=True) for it in pair]
    expected = alone(engine, requests)
    client = told()
    for progress in engine.iterate(requests):
        client(progress)
    assert [(client.ids[n], client.logprobs[n]) for n in range(len(requests))] == expected
    for request, (ids, _) in zip(requests, expected, strict=True):
        if request.sampling.guide is not None:
            check(text_model.text_tokenizer().decode(ids), request.sampling.guide)
    assert all(client.last[n].finish_reason == "stop" for n in range(0, 12, 2))
    at_rest(engine)


def test_greedy_answers_take_the_best_of_what_is_allowed(engine, asked, alone, text_model):
    request = asked(engine, GUIDES[1], sampling=SamplingParams())
    [(ids, _)] = alone(engine, [request])
    check(text_model.text_tokenizer().decode(ids), GUIDES[1])
    assert alone(engine, [request])[0][0] == ids


def test_an_answer_may_be_cut(engine, asked, text_model):
    request = asked(engine, GUIDES[0], tokens=5)
    *_, last = engine.iterate([request])
    assert last.finish_reason == "length"
    [one] = engine.iterate([asked(engine, GUIDES[2], tokens=1)])
    text = text_model.text_tokenizer().decode(one.new)
    assert any(it.startswith(text) for it in json.loads(GUIDES[2].text))


def test_who_was_set_aside_goes_on_in_the_form(text_model, asked, alone, told, at_rest):
    engine = made(text_model, scheduler=SchedulerSettings(classes=2))
    worst = [asked(engine, GUIDES[0], priority=1, watched=True, rows=2) for _ in range(2)]
    better = [asked(engine, it, tokens=12, rows=2) for it in (None, GUIDES[1], None)]
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
    assert [(client.ids[n], client.logprobs[n]) for n in numbers] == expected
    assert engine._core.state.scheduler.preempted >= 1
    at_rest(engine)


def test_who_is_begun_again_follows_the_form_from_its_start(
    engine, asked, alone, at_rest, monkeypatch
):
    requests = [asked(engine, GUIDES[0]), asked(engine)]
    expected = alone(engine, requests)
    step, steps = decoding.DecodeBatch.step, iter(range(10**6))

    def breaks_once(batch, *arguments):
        if next(steps) == 4:
            raise RuntimeError("the device is gone")
        return step(batch, *arguments)

    monkeypatch.setattr(decoding.DecodeBatch, "step", breaks_once)
    ids = {0: [], 1: []}
    for progress in engine.iterate(requests):
        ids[progress.number] += progress.new
    assert [ids[0], ids[1]] == [it for it, _ in expected]
    assert engine._core.state.restarts == 1
    at_rest(engine)


def test_an_answer_without_a_way_on_fails_alone(engine, asked, alone, told, at_rest, monkeypatch):
    requests = [asked(engine, GUIDES[0]), asked(engine, GUIDES[1])]
    expected = alone(engine, requests[1:])
    take = Matcher.take

    def taken(matcher, token_id):
        if matcher.form == "json_schema":
            raise EngineError("the answer cannot take the form")
        return take(matcher, token_id)

    monkeypatch.setattr(Matcher, "form", property(lambda it: it._form), raising=False)
    made_by = Grammar.matcher

    def matcher(grammar):
        one = made_by(grammar)
        one._form = grammar.guide.kind
        return one

    monkeypatch.setattr(Grammar, "matcher", matcher)
    monkeypatch.setattr(Matcher, "take", taken)
    client = told()
    for progress in engine.iterate(requests):
        client(progress)
    assert isinstance(client.last[0].error, EngineError)
    assert (client.ids[1], client.logprobs[1]) == expected[0]
    at_rest(engine)


def test_a_least_length_is_refused_beside_a_form():
    with refused(RequestError, "min_tokens=2"):
        SamplingParams(min_tokens=2, guide=GUIDES[0])
