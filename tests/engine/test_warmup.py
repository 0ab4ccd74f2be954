"""Programs are compiled before anybody waits: side by side, few of them, and none afterwards."""

import dataclasses
import time

import pytest

from jaxrag.engine.decode_batches import DecodeBatches
from jaxrag.engine.engine import Engine
from jaxrag.models.model import random_model

LENGTHS = (9, 30)  # of questions: one a width


@pytest.fixture
def fresh(tiny_config):
    """An engine over a model of sizes that nobody else has compiled."""
    model = random_model(tiny_config(eos_ids=(), mlp_dim=72), cache_tokens=1024)
    model.engine = Engine(model)
    return model.engine


@pytest.mark.parametrize("method", ["turborag", pytest.param("fusionrag", marks=pytest.mark.slow)])
def test_after_warm_up_nothing_is_compiled(fresh, asked, method):
    def requests(tokens):
        return [asked(fresh, method, final=n, tokens=tokens, rows=4) for n in LENGTHS]

    programs = fresh.warm_up(requests(20))
    assert len(LENGTHS) + 2 < programs <= 40
    # The large ones were compiled side by side, not by the engine's thread.
    large = {"jit(_whole_steps)", "jit(_place)"} | (
        {"jit(_whole_piece)"} if method == "turborag" else set()
    )
    assert not large & set(fresh.compiled)
    compiled = dict(fresh.compiled)
    for tokens in (1, 7, 20):
        for one in requests(tokens):
            watched = dataclasses.replace(one, watched=tokens == 7)
            assert [it.error for it in fresh.iterate([watched])][-1] is None
    assert dict(fresh.compiled) == compiled, "compiled while serving"


def test_all_compiling_of_a_request_is_in_its_account(fresh, asked, monkeypatch):
    """That of the steps behind its first token, too; its parts add up to what it took."""
    monkeypatch.setattr(
        DecodeBatches, "expect", lambda self, key: None
    )  # nothing is compiled beside
    *_, last = fresh.iterate([asked(fresh, "turborag", final=9, tokens=5)])
    out, every = last.outcome, fresh.compile_times.between
    began = out.moments["added"]
    first = began + out.first_seconds
    assert out.compile_seconds == pytest.approx(every(began, float("inf")))
    assert out.compile_seconds > every(began, first) > 0
    parts = out.wait_seconds + out.load_seconds + out.prefill_seconds
    assert parts + every(began, first) == pytest.approx(out.first_seconds)
    took = parts + out.compile_seconds + 4 * out.per_token
    assert out.first_seconds < took <= time.monotonic() - began
