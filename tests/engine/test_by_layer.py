"""Prompts that a program of one layer takes through the model answer as by one of the whole."""

import dataclasses

import numpy as np
import pytest

from jaxrag.engine.engine import Engine
from jaxrag.models import linear
from jaxrag.models.model import random_model
from jaxrag.reuse.decode import SnapKV
from jaxrag.reuse.methods import METHODS

WIDE = {"model_dim": 80, "mlp_dim": 224, "head_dim": 32}  # layers are multiples of 64 bytes


def model_of(config, apart, monkeypatch):
    monkeypatch.setattr(linear, "IN_CACHE", 0 if apart else 1 << 40)
    model = random_model(config, cache_tokens=1024)
    model.engine = Engine(model)
    assert isinstance(model.decoder(64, weights="by_layer").params.layers, list) is apart
    return model


@pytest.mark.parametrize(
    ("family", "method", "rule"),
    [("llama", "cacheblend", None), ("mistral", "turborag", None), ("qwen3", "turborag", SnapKV())],
)
def test_by_layer_as_in_a_scan(tiny_config, asked, alone, monkeypatch, family, method, rule):
    windows = {"window_layers": (True, False, True)} if family == "mistral" else {}
    config = tiny_config(family, eos_ids=(), **WIDE, **windows)
    how = dataclasses.replace(METHODS[method], **({} if rule is None else {"decode": rule}))
    models = [model_of(config, apart, monkeypatch) for apart in (False, True)]
    requests = [asked(models[0].engine, how, final=n) for n in (9, 30)]
    found = []
    for model, program in zip(models, ("jit(_whole_piece)", "jit(_layer)"), strict=True):
        engine = model.engine
        found.append(
            alone(engine, [dataclasses.replace(it, store=engine.memory) for it in requests])
        )
        assert program in engine.compiled
    for (ids, logprobs), (others, theirs) in zip(*found, strict=True):
        assert ids == others
        np.testing.assert_allclose(logprobs, theirs, rtol=2e-5, atol=2e-5)


def test_after_warm_up_nothing_is_compiled(tiny_config, asked, monkeypatch):
    config = tiny_config(eos_ids=(), **WIDE | {"mlp_dim": 240})  # which nobody else has
    engine = model_of(config, True, monkeypatch).engine
    engine.warm_up([asked(engine, "turborag", final=9, tokens=8)])
    compiled = dict(engine.compiled)
    assert not {"jit(_layer)", "jit(_begin)", "jit(_end)"} & set(compiled)  # not by this thread
    assert [it.error for it in engine.iterate([asked(engine, "turborag", final=7)])][-1] is None
    assert dict(engine.compiled) == compiled, "compiled while serving"
