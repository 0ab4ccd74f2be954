"""One prefill for all rules: answers, queries and notes are those of a prefill for each."""

import dataclasses

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ContextExceeded
from jaxrag.engine.direct import map_request, prefill_observed, unmap
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prefill import Prefill
from jaxrag.engine.request import Prompt, Request
from jaxrag.measure.evals.long.ask import Asker, own_queries
from jaxrag.models.model import random_model
from jaxrag.reuse.decode import rule_from
from jaxrag.reuse.methods import METHODS

WINDOW = "sink=4,recent=16"
SEARCH = f"k=12,{WINDOW},index.exact_below=0"
RULES = (
    "dense",
    f"static_window:{WINDOW}",
    "snapkv:capacity=40,window=16",
    f"infllm:{WINDOW},block=8,blocks=3,representatives=2,observed=50",
    "quest:budget=32,dense_layers=1",
    f"flat:k=12,{WINDOW}",
    f"ivf:{SEARCH},index=ivf",
    f"retrieval:{SEARCH},index=graph,index.min_queries=16,queries=90",
    "topn:n=8",
)
TOKENS = 19


@pytest.fixture(scope="module")
def model(tiny_config):
    config = tiny_config(vocab_size=600, num_layers=2, max_positions=1024, eos_ids=())
    return random_model(config, cache_tokens=2048)


@pytest.fixture(scope="module")
def requests_under(model):
    """The same prompts, of 215 and 190 tokens, as requests of a rule; ``ends`` end an answer."""
    rng = np.random.default_rng(3)
    prompts = [
        Prompt(*(rng.integers(3, 600, n).astype(np.int32) for n in (5,)),
               (rng.integers(3, 600, length).astype(np.int32),),
               rng.integers(3, 600, 10).astype(np.int32))
        for length in (200, 175)
    ]  # fmt: skip

    def make(rule, tokens=TOKENS, ends=()):
        method = dataclasses.replace(METHODS["full_attention"], decode=rule_from(rule))
        store = engine_of(model).memory
        return [
            Request(prompt, store, method, tokens, eos_ids=frozenset(ends), rows=2)
            for prompt in prompts
        ]

    return make


def asked(model, rules):
    return engine_of(model).call(lambda runner: Asker(runner).ask(rules))


def served(model, requests):
    """(token ids, why the answer ended) of requests, each with a prefill of its own."""
    found = [([], None) for _ in requests]
    for progress in engine_of(model).iterate(requests):
        assert progress.error is None
        ids, _ = found[progress.number]
        found[progress.number] = (ids + progress.new, progress.finish_reason)
    return found


@pytest.mark.slow
def test_every_rule_answers_as_after_a_prefill_of_its_own(model, requests_under, monkeypatch):
    wanted = {rule: served(model, requests_under(rule)) for rule in RULES}
    assert len({tuple(ids) for found in wanted.values() for ids, _ in found}) > 9  # rules differ
    widths = []
    run = Prefill.next_piece
    monkeypatch.setattr(Prefill, "next_piece", lambda self: widths.append(run(self)))
    asked(model, [requests_under("dense")])
    one = list(widths)
    found = asked(model, [requests_under(rule) for rule in RULES])
    assert widths == 2 * one  # no more is run for nine rules
    for rule, answers in zip(RULES, found, strict=True):
        assert [(one.token_ids, one.finish_reason) for one in answers] == wanted[rule], rule
    (again,) = asked(model, [requests_under(RULES[2])])
    assert [one.token_ids for one in again] == [ids for ids, _ in wanted[RULES[2]]]


@pytest.mark.slow
def test_answers_end_where_they_end(model, requests_under):
    ((first, second),) = asked(model, [requests_under("dense")])
    assert first.finish_reason == "length" and len(first.token_ids) == TOKENS
    end = first.token_ids[4]
    ends = requests_under("dense", ends=[end])
    ((short, other),) = asked(model, [ends])
    assert short.token_ids == first.token_ids[: first.token_ids.index(end)]
    assert short.finish_reason == "stop"
    assert [(one.token_ids, one.finish_reason) for one in (short, other)] == served(model, ends)
    ((one, two),) = asked(model, [requests_under(RULES[1], tokens=1)])
    assert (one.token_ids, two.token_ids) == (first.token_ids[:1], second.token_ids[:1])
    assert one.seconds is None


def test_steps_are_timed_once_they_are_compiled(model, requests_under):
    def twice(runner):
        asker = Asker(runner)
        return [asker.ask([requests_under("dense", tokens=5)]) for _ in range(2)]

    (((cold, _),), ((warm, _),)) = engine_of(model).call(twice)
    assert cold.seconds is None and warm.seconds > 0


@pytest.mark.slow
def test_a_rule_is_given_the_queries_that_it_would_ask_for(model, requests_under):
    rules = [rule for rule in RULES if rule_from(rule).observe is not None]
    assert len(rules) == 4

    def compare(runner):
        states = [map_request(runner, request, TOKENS) for request in requests_under("dense")]
        longest = max(len(state.ids) for state in states)
        everything = dataclasses.replace(rule_from(RULES[3]), observed=longest).observe
        bank = prefill_observed(runner, states, everything).bank
        for rule in map(rule_from, rules):
            for row, state in enumerate(states):
                alone = prefill_observed(runner, [state], rule.observe).bank
                own = own_queries(bank, row, state, rule)
                count = own.positions.shape[1]
                assert count == min(rule.observe.count, len(state.ids))
                np.testing.assert_array_equal(own.positions, alone.positions[:, :count])
                np.testing.assert_allclose(
                    own.queries, alone.queries[:, :, :count], rtol=1e-4, atol=1e-5
                )
        for state in states:
            unmap(runner, state)

    engine_of(model).call(compare)


def test_the_pool_has_its_pages_back(model, requests_under):
    def free(runner):
        return runner.cache.allocator.num_free

    before = engine_of(model).call(free)
    asked(model, [requests_under(rule) for rule in RULES[:2]])
    assert engine_of(model).call(free) == before
    bad = [dataclasses.replace(one, prompt=Prompt(one.prompt.prefix, one.prompt.chunks * 20,
                                                  one.prompt.final))
           for one in requests_under("dense")]  # fmt: skip
    with refused(ContextExceeded):
        asked(model, [[*requests_under("dense")[:1], *bad]])
    assert engine_of(model).call(free) == before
