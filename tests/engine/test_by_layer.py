"""Programs of one layer, or of a few, answer as one of the whole model does."""

import dataclasses

import numpy as np
import pytest

from jaxrag.engine import steps
from jaxrag.engine.engine import Engine
from jaxrag.models import linear
from jaxrag.models.model import random_model
from jaxrag.reuse.decode import Flat, Retrieval, SnapKV, StaticWindow
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
    [
        ("llama", "cacheblend", None),
        ("mistral", "turborag", None),
        ("qwen3", "turborag", SnapKV()),
        ("llama", "turborag", StaticWindow(sink=4, recent=8)),
        ("llama", "turborag", Flat()),  # whose state changes
        ("llama", "kcache", None),  # V in host memory
        ("qwen3", "turborag", Retrieval()),  # whose index is asked by a callback
    ],
)
def test_by_layer_as_in_a_scan(tiny_config, asked, alone, monkeypatch, family, method, rule):
    windows = {"window_layers": (True, False, True)} if family == "mistral" else {}
    config = tiny_config(family, eos_ids=(), **WIDE, **windows)
    how = dataclasses.replace(METHODS[method], **({} if rule is None else {"decode": rule}))
    models = [model_of(config, apart, monkeypatch) for apart in (False, True)]
    requests = [asked(models[0].engine, how, final=n) for n in (9, 30)]
    monkeypatch.setattr(steps, "GROUP", 2)  # of three layers: groups of two sizes
    found = []
    whole, apart = {"jit(_whole_piece)", "jit(_whole_steps)"}, {"jit(_layer)", "jit(_some_layers)"}
    for model, others in zip(models, (apart, whole), strict=True):
        engine = model.engine
        found.append(
            alone(engine, [dataclasses.replace(it, store=engine.memory) for it in requests])
        )
        assert not others & set(engine.compiled)
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
