"""KV in int8, retrieval and KCache with families that differ most: they work, or say why not."""

import dataclasses

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.engine.engine import Engine
from jaxrag.engine.state import EngineSettings
from jaxrag.kv.store import MemoryStore
from jaxrag.models.model import random_model
from jaxrag.reuse.methods import METHODS

WINDOWED = ("gemma3", "gpt_oss", "olmo3")
FAMILIES = (*WINDOWED, "mixtral", "qwen3_moe", "granite", "smollm3")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_goes_with_a_family(tiny_config, asked, alone, family):
    layers = {"window_layers": (True, False)} if family == "gpt_oss" else {}
    config = tiny_config(family, num_layers=2, eos_ids=(), **layers)
    model = random_model(config, cache_tokens=1024)

    def engine():
        model.engine = Engine(model, EngineSettings())
        return model.engine

    first = engine()
    layout = dataclasses.replace(model.kv_layout, stored="int8")
    request = asked(first, tokens=4, store=MemoryStore(model.fingerprint, layout))
    told = alone(first, [request])
    assert alone(engine(), [request]) == told  # of what was stored
    prompt = request.prompt
    for name in ("retrieval_attention", "kcache"):
        if family in WINDOWED:
            with refused(RequestError, "see 7 tokens only (sliding window)", name_of(name)):
                METHODS[name].check(config)
            continue
        last = engine()
        wanted, found = (
            alone(last, [dataclasses.replace(asked(last, it, tokens=4), prompt=prompt)])
            for it in ("full_attention", name)
        )
        assert found[0][0] == wanted[0][0]  # so short a prompt is attended to whole
        np.testing.assert_allclose(found[0][1], wanted[0][1], rtol=1e-4)


def name_of(method):
    return repr(METHODS[method].decode.name)
