"""Live comparison with transformers, in this interpreter or that of PEER_PYTHON."""

import dataclasses
import subprocess
from pathlib import Path

import numpy as np
import pytest
from peers import peer_python

from jaxrag.base.config import Llama3Scaling
from jaxrag.models import FAMILIES
from jaxrag.models.export import convert, export_hf
from jaxrag.models.model import load_model

pytestmark = pytest.mark.oracle

SCRIPT = Path(__file__).with_name("logits_in_transformers.py")


@pytest.mark.parametrize("family", [it for it in FAMILIES if it != "gemma4"])
def test_exported_model_gives_the_same_logits(family, tiny_config, random_params, rng, tmp_path):
    config = tiny_config(family)
    if family == "llama":
        scaling = Llama3Scaling(8.0, 1.0, 4.0, 32)
        rope = dataclasses.replace(config.rope, theta=100.0, scaling=scaling)
        config = dataclasses.replace(config, rope=rope)
    export_hf(tmp_path / "x", random_params(config), config)
    convert(tmp_path / "x", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to="huggingface")
    ids = rng.integers(0, config.vocab_size, (2, 33), dtype=np.int32)
    ours = np.asarray(load_model(tmp_path / "x").logits(ids))
    np.save(tmp_path / "ids.npy", ids)
    asked = (tmp_path / "back", tmp_path / "ids.npy", tmp_path / "logits.npy")
    done = subprocess.run(
        [peer_python("torch", "transformers"), SCRIPT, *asked], text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    wanted = np.load(tmp_path / "logits.npy")
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=2e-4)
