"""Programs are compiled before anybody waits: side by side, few of them, and none afterwards."""

import dataclasses

import pytest

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
    large = {"jit(_steps)", "jit(_place)"} | (
        {"jit(_whole_piece)"} if method == "turborag" else set()
    )
    assert not large & set(fresh.compiled)
    compiled = dict(fresh.compiled)
    for tokens in (1, 7, 20):
        for one in requests(tokens):
            watched = dataclasses.replace(one, watched=tokens == 7)
            assert [it.error for it in fresh.iterate([watched])][-1] is None
    assert dict(fresh.compiled) == compiled, "compiled while serving"
