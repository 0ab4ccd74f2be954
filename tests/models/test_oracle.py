"""Live comparison with transformers, where torch and transformers are installed."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrag.base.config import Llama3Scaling
from jaxrag.models import FAMILIES
from jaxrag.models.export import export_hf
from jaxrag.models.model import load_model

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("family", [it for it in FAMILIES if it != "gemma4"])
def test_exported_model_gives_the_same_logits(family, tiny_config, random_params, rng, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = tiny_config(family)
    if family == "llama":
        scaling = Llama3Scaling(8.0, 1.0, 4.0, 32)
        rope = dataclasses.replace(config.rope, theta=100.0, scaling=scaling)
        config = dataclasses.replace(config, rope=rope)
    export_hf(tmp_path / "x", random_params(config), config)
    ids = rng.integers(0, config.vocab_size, (2, 33), dtype=np.int32)
    ours = np.asarray(load_model(tmp_path / "x").logits(ids))

    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "x", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), json.dumps({k: list(v) for k, v in report.items()})
    with torch.no_grad():
        wanted = theirs(input_ids=torch.from_numpy(ids).long(), use_cache=False).logits.numpy()
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=2e-4)
