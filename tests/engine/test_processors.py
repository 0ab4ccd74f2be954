"""Penalties, biases, what is kept, lengths, likeliest tokens: as numpy has it, in any company."""

import dataclasses
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.base.guide import Guide
from jaxrag.engine.admission import SchedulerSettings
from jaxrag.engine.decoding import DecodeBatch
from jaxrag.engine.processors import ProcessorRows
from jaxrag.engine.sampling_params import MOST_TOP, SamplingParams
from jaxrag.engine.state import EngineSettings

VOCAB = 101
KEPT = tuple(range(30, 70))
ASKING = (
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(1.0, seed=3, repetition_penalty=1.8, top_logprobs=4),
    SamplingParams(0.8, top_k=9, seed=5, frequency_penalty=-1.0, logit_bias=((7, 5.0), (9, -90.0))),
    SamplingParams(top_logprobs=MOST_TOP),
    SamplingParams(2.0, seed=6, min_p=0.3, bad_words=((40,), (41, 42)), allowed_token_ids=KEPT),
)


def expected_logits(logits, request, answer):
    """Oracle: the logits [V] of the next token behind an answer; plain Python, float64."""
    said, out = request.sampling, logits.astype(np.float64)
    prompt = {int(it) for ids in (request.prompt.prefix, *request.prompt.chunks) for it in ids}
    prompt |= set(request.prompt.final.tolist())
    for token_id, bias in said.logit_bias:
        out[token_id] += bias
    for token_id in range(len(out)):
        count = answer.count(token_id)
        if count or token_id in prompt:
            factor = said.repetition_penalty
            out[token_id] *= factor if out[token_id] < 0 else 1 / factor
        out[token_id] -= said.frequency_penalty * count + said.presence_penalty * (count > 0)
    if len(answer) < said.min_tokens:
        out[list(request.eos_ids)] = -np.inf
    return kept_logits(out, said, answer)


def kept_logits(out, said, answer):
    """Oracle: -inf for what is left out; allowed tokens and bad words, then ``min_p``."""
    if said.allowed_token_ids is not None:
        out[sorted({*range(len(out))} - {*said.allowed_token_ids})] = -np.inf
    for *before, last in said.bad_words:
        if len(before) <= len(answer) and answer[len(answer) - len(before) :] == before:
            out[last] = -np.inf
    if said.min_p and said.temperature:
        share = np.exp((out - out.max()) / said.temperature)
        out[share < said.min_p] = -np.inf
    return out


def test_logits_are_changed_as_the_formulas_say(engine_on, asked, rng):
    engine, eos = engine_on(), frozenset({4, 50})
    said = SamplingParams(0.0, 0, 1.0, 0, 0.7, -0.3, 1.4, ((5, 20.0), (6, -100.0)), 2)
    requests = [asked(engine, sampling=it, eos_ids=eos) for it in (said, SamplingParams())]
    asking = [(it.sampling, it.prompt.ids, it.eos_ids, None) for it in requests]
    answers = [[5, 5, 8], [9, 9, 9]]
    logits = rng.normal(size=(3, VOCAB)).astype(np.float32)
    rows = jax.tree.map(jnp.asarray, ProcessorRows.of(asking, 3, VOCAB))
    for at in range(3):
        got = np.asarray(rows.applied(jnp.asarray(logits), jnp.full(3, at)))
        for row in range(2):
            oracle = expected_logits(logits[row], requests[row], answers[row][:at])
            np.testing.assert_allclose(got[row], oracle, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got[1:], logits[1:])
        assert np.isneginf(got[0, [4, 50]]).all() == (at < 2)
        rows = rows.counted(jnp.asarray([answers[0][at], answers[1][at], -1]))


def test_what_is_kept_is_what_the_definitions_say(rng):
    words = ((3,), (7, 8), (8, 7, 8), (5, 5), (8,) * 31 + (9,))
    asking = [
        SamplingParams(min_p=0.2),  # greedy: nothing
        SamplingParams(1.5, min_p=0.2),
        SamplingParams(0.5, min_p=1.0, bad_words=words),
        SamplingParams(bad_words=words),
        SamplingParams(1.0, min_p=0.05, bad_words=words, allowed_token_ids=(3, 5, 7, 8, 11)),
        SamplingParams(allowed_token_ids=(90,)),
    ]
    assert [it.processes for it in asking] == [False, *[True] * 5]
    none = np.zeros(0, np.int32)
    count = len(asking) + 1  # the last asks nothing
    given = [(it, none, frozenset(), None) for it in asking]
    rows = jax.tree.map(jnp.asarray, ProcessorRows.of(given, count, VOCAB))
    answers, left_out = rng.choice([5, 7, 8], size=(count, 40)), 0
    answers[3, 3:36] = 8
    for at in range(40):
        logits = rng.normal(size=(count, VOCAB)).astype(np.float32)
        got = np.asarray(rows.applied(jnp.asarray(logits), jnp.full(count, at)))
        for row, said in enumerate(asking):
            oracle = kept_logits(logits[row].copy(), said, answers[row, :at].tolist())
            np.testing.assert_array_equal(got[row], oracle)
            left_out += np.isneginf(got[row]).sum()
        np.testing.assert_array_equal(got[-1], logits[-1])
        assert np.isneginf(got[3, 9]) == (answers[3, :at].tolist()[-31:] == [8] * 31)
        rows = rows.counted(jnp.asarray(answers[:, at]))
    assert left_out > 40 * (4 * VOCAB // 3)


def test_a_form_comes_before_words():
    """Where words would leave nothing of what a form allows, the form is kept."""
    said = SamplingParams(bad_words=((6,), (7,)))
    none = np.zeros(0, np.int32)
    rows = ProcessorRows.of([(said, none, frozenset(), None)] * 2, 2, VOCAB)
    rows.allowed[:] = 0
    rows.allowed[0, 0], rows.allowed[1, 0] = 1 << 6 | 1 << 7, 1 << 6 | 1 << 9
    got = np.asarray(jax.tree.map(jnp.asarray, rows).applied(jnp.zeros((2, VOCAB)), jnp.zeros(2)))
    assert [np.flatnonzero(np.isfinite(it)).tolist() for it in got] == [[6, 7], [9]]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_holds_no_bad_word(engine_on, asked, alone, temperature):
    engine = engine_on()
    said = SamplingParams(temperature, seed=4)
    request = asked(engine, tokens=24, sampling=said)

    def answer(**changes):
        changed = dataclasses.replace(request, sampling=dataclasses.replace(said, **changes))
        [(ids, _)] = alone(engine, [changed])
        return ids

    plain = answer()
    single, pair = (plain[0],), tuple(plain[3:5])
    assert single[0] not in answer(bad_words=(single,))
    told = answer(bad_words=(pair,))
    assert told[0] == plain[0] and told != plain
    assert pair not in itertools.pairwise(told)
    assert set(answer(allowed_token_ids=KEPT)) <= set(KEPT)
    assert (
        answer(min_p=1.0, temperature=temperature or 1.0)
        == alone(engine, [dataclasses.replace(request, sampling=SamplingParams())])[0][0]
    )


@pytest.fixture
def mixed(engine_on, asked):
    """An engine, and requests of which every other asks for something."""

    def make(rows=4, **settings):
        engine = engine_on(cache_tokens=512, **settings)
        plain = [SamplingParams(), SamplingParams(1.0, seed=8)]
        said = [it for pair in zip(ASKING, plain * 3, strict=False) for it in pair]
        return engine, [asked(engine, tokens=14, rows=rows, sampling=it) for it in said]

    return make


def test_an_answer_follows_the_formulas(mixed, alone):
    """Greedy tokens with penalties are those that the oracle takes from the told logits."""
    engine, requests = mixed()
    said = dataclasses.replace(ASKING[0], top_logprobs=MOST_TOP)
    request = dataclasses.replace(requests[0], sampling=said, max_new_tokens=24)
    answer: list[int] = []
    for progress in engine.iterate([request]):
        for token_id, logprob, top in zip(
            progress.new, progress.logprobs, progress.top, strict=True
        ):
            ids, values = map(list, zip(*top, strict=True))
            assert values == sorted(values, reverse=True) and len(ids) == MOST_TOP
            told = np.full(VOCAB, -99.0)
            told[ids] = values
            assert expected_logits(told, request, answer).argmax() == token_id
            assert dict(top)[token_id] == logprob
            answer.append(token_id)
    assert len(answer) == 24
    [(plain, _)] = alone(engine, [dataclasses.replace(request, sampling=SamplingParams())])
    assert len(set(answer)) > len(set(plain))


def test_who_asks_changes_nobody_elses_logits(mixed, alone, told, at_rest):
    """Law 13: bit for bit what each gives alone, where its neighbours need no processors."""
    engine, requests = mixed()
    expected = alone(engine, requests)
    client = told()
    for progress in engine.iterate(requests):
        client(progress)
    assert [(client.ids[n], client.logprobs[n]) for n in range(len(requests))] == expected
    ordinary = [dataclasses.replace(it, sampling=SamplingParams()) for it in requests]
    assert alone(engine, ordinary[1:2]) == alone(engine, ordinary[1:2])
    at_rest(engine)


def test_who_was_set_aside_keeps_what_it_counted(mixed, alone, told, at_rest):
    """Both ways: among others that ask for nothing, and one that asks for nothing among them."""
    settings = EngineSettings(scheduler=SchedulerSettings(classes=2))
    engine, requests = mixed(rows=2, settings=settings)
    worst = [
        dataclasses.replace(it, priority=1, watched=True, max_new_tokens=30) for it in requests[:2]
    ]
    better = [dataclasses.replace(it, priority=0) for it in (requests[3], *requests[2:])]
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
    assert engine._core.state.scheduler.preempted >= 2
    at_rest(engine)


def test_the_state_is_there_only_while_somebody_asks(mixed, monkeypatch):
    """Steps of who asks for nothing, alone, are those of the program without."""
    engine, requests = mixed()
    seen, step = [], DecodeBatch.step

    def watched(batch, block, processes):
        new = step(batch, block, processes)
        seen.append((processes, batch._rows.sampling.processors is not None, new.top is not None))
        return new

    monkeypatch.setattr(DecodeBatch, "step", watched)
    short = dataclasses.replace(requests[0], max_new_tokens=4, watched=True)
    longer = dataclasses.replace(requests[1], max_new_tokens=14, watched=True)
    for _ in engine.iterate([longer, short]):
        pass
    assert set(seen) == {(False, False, False), (True, True, True)}
    assert seen[-1] == (False, False, False)


def test_an_answer_does_not_end_early(engine_on, asked, alone):
    engine = engine_on()
    request = asked(engine, tokens=9)
    [(ids, _)] = alone(engine, [request])
    ends = dataclasses.replace(request, eos_ids=frozenset({ids[0], ids[2]}))
    assert alone(engine, [ends])[0][0] == []
    later = dataclasses.replace(ends, sampling=SamplingParams(min_tokens=3))
    [(longer, _)] = alone(engine, [later])
    assert len(longer) >= 3 and not ends.eos_ids & set(longer[:3])


def test_a_single_token_is_processed_too(engine_on, asked, alone):
    engine = engine_on()
    said = SamplingParams(logit_bias=((33, 100.0),), top_logprobs=2)
    request = asked(engine, tokens=1, sampling=said)
    assert alone(engine, [request])[0][0] == [33]


def test_every_choice_draws_for_itself():
    said = SamplingParams(1.0, seed=7)
    assert said.of_choice(0) is said
    seeds = [said.of_choice(n).seed for n in range(50)]
    assert len(set(seeds)) == 50
    assert seeds == [SamplingParams(1.0, seed=7).of_choice(n).seed for n in range(50)]
    assert SamplingParams(1.0, seed=8).of_choice(1).seed not in seeds


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty=2.1: expected a number from -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan: expected"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: expected a number from 0.01 to 100"),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias=101.0: expected numbers from -100 to 100"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias=-1: expected an integer from 0"),
        ({"logit_bias": ((1, 1.0),) * 1025}, "logit_bias has 1025 entries: expected at most 1024"),
        ({"min_tokens": -1}, "min_tokens=-1: expected"),
        ({"top_logprobs": 21}, "top_logprobs=21: expected an integer from 0 to 20"),
        ({"min_p": 1.1}, "min_p=1.1: expected a number from 0 to 1"),
        ({"bad_words": ("",)}, "bad_words='': expected texts, or tuples"),
        ({"bad_words": ("a" * 1025,)}, "of 1 to 1024"),
        ({"bad_words": ((1,) * 33,)}, "of 1 to 32"),
        ({"bad_words": ((-1,),)}, "bad_words=-1: expected an integer"),
        ({"bad_words": ((1,),) * 257}, "bad_words has 257 entries: expected at most 256"),
        ({"bad_words": (7,)}, "bad_words=7: expected texts, or tuples of token ids"),
        ({"allowed_token_ids": ()}, "allowed_token_ids=(): expected one or more"),
        (
            {"allowed_token_ids": (1,), "guide": Guide("regex", "a")},
            "allowed_token_ids=(1,): expected one or more, and no form",
        ),
    ],
)
def test_what_is_out_of_range_is_refused(changes, words):
    with pytest.raises(RequestError) as refused:
        SamplingParams(**changes)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("said", "value"),
    [
        (SamplingParams(logit_bias=((VOCAB + 40, 1.0),)), VOCAB + 40),
        (SamplingParams(bad_words=((5,), (3, VOCAB))), VOCAB),
        (SamplingParams(bad_words=("falcon",)), "falcon"),
        (SamplingParams(allowed_token_ids=(3, VOCAB)), VOCAB),
        (SamplingParams(allowed_token_ids=(5, 6), bad_words=((5,), (1, 6))), (5, 6)),
        (SamplingParams(allowed_token_ids=(4,), min_tokens=1), (4,)),
    ],
)
def test_no_token_is_refused(engine_on, asked, said, value):
    engine = engine_on()
    request = asked(engine, sampling=said, eos_ids=frozenset({4}))
    with refused(RequestError, value):
        engine.add(request, print)


def test_words_are_spelled_with_and_without_a_space():
    ids = {"falcon": [7], " falcon": [8], "tall": [3, 4], " tall": [5, 6, 4], "at": [9], " at": [9]}
    said = SamplingParams(bad_words=(" falcon", "tall", "at", (1, 2))).spelled(ids.__getitem__)
    assert said.bad_words == ((8,), (7,), (3, 4), (9,), (1, 2))
    assert said.spelled(ids.__getitem__) == said
    with refused(RequestError, ()):
        SamplingParams(bad_words=("x",)).spelled(lambda text: [])
