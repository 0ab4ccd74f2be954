"""What is looked at when a prompt is in the pool: every method, alone and in one program."""

import dataclasses

import numpy as np
import pytest

from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.reuse.decode import SnapKV
from jaxrag.reuse.methods import METHODS


def seen(runner, state, there):
    """Logits [V], what was chosen to be computed again, and the queries that were kept."""
    chosen = None if state.choice is None else state.choice.tokens.tolist()
    bank = there.bank
    return (
        np.asarray(there.logits)[0],
        chosen,
        np.asarray(bank.queries),
        np.asarray(bank.positions),
    )


@pytest.mark.parametrize("method", METHODS)
def test_the_first_token_is_of_these_logits(engine_on, asked, method):
    engine = engine_on(2048)
    requests = [asked(engine, method, tokens=3, rows=2) for _ in range(2)]
    looks = inspect_prompts(engine, requests, seen)
    answers = [[], []]
    for progress in engine.iterate(requests):
        assert progress.error is None
        answers[progress.number] += progress.new
    assert [int(logits.argmax()) for logits, *_ in looks] == [answer[0] for answer in answers]


@pytest.mark.parametrize("rows", [1, 4])
def test_queries_are_of_each_own_row(engine_on, asked, rows):
    engine = engine_on(2048)
    method = dataclasses.replace(METHODS["turborag"], decode=SnapKV(capacity=8, window=4, kernel=3))
    requests = [asked(engine, method, rows=rows) for _ in range(3)]
    together = inspect_prompts(engine, requests, seen)
    for request, (logits, _, queries, positions) in zip(requests, together, strict=True):
        [alone] = inspect_prompts(engine, [request], seen)
        np.testing.assert_array_equal(logits, alone[0])
        np.testing.assert_array_equal(queries, alone[2])
        np.testing.assert_array_equal(positions, alone[3])
        assert positions.shape == (1, 4) and positions[0, -1] == request.prompt.num_tokens - 1


def test_what_looking_raises_is_the_callers_and_the_request_of_others_goes_on(engine_on, asked):
    engine = engine_on()

    def fails(*_):
        raise LookupError("not seen")

    with pytest.raises(LookupError):
        inspect_prompts(engine, [asked(engine)], fails)
    [(logits, *_)] = inspect_prompts(engine, [asked(engine, tokens=1)], seen)
    assert np.isfinite(logits).all()
    assert engine.call(lambda runner: runner.cache.allocator.num_pinned) == 0
