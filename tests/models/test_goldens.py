"""Logits and greedy tokens of every family against those transformers gave for the same weights."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxrag.models import FAMILIES
from jaxrag.models.hf import load_config
from jaxrag.models.model import load_model

GOLDENS = Path(__file__).parent.parent / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}


@pytest.fixture(scope="module", params=NAMES)
def golden(request):
    directory = GOLDENS / request.param
    with np.load(directory / "expected.npz") as arrays:
        expected = dict(arrays)
    return load_model(directory, dtype="float32"), expected


def test_there_is_a_golden_for_every_family():
    assert {load_config(GOLDENS / name).family for name in NAMES} == set(FAMILIES)


def test_causal_logits_and_greedy_tokens(golden):
    model, expected = golden
    prompt, continuation = expected["ids"], expected["greedy"]
    length = prompt.shape[1]
    logits = np.asarray(model.logits(np.concatenate([prompt, continuation], axis=1)))
    np.testing.assert_allclose(logits[:, :length], expected["logits"], **TOLERANCE)
    np.testing.assert_array_equal(logits.argmax(-1)[:, length - 1 : -1], continuation)


@pytest.mark.parametrize("layout", ["prefix_hidden", "prefix_visible", "composite"])
def test_block_logits(golden, layout):
    model, expected = golden
    if f"{layout}/ids" not in expected:  # a window is measured in order: no composite positions
        assert layout == "composite"
        assert model.config.sliding_window is not None
        return
    segments = expected[f"{layout}/segments"]
    logits = model.logits(
        expected[f"{layout}/ids"],
        expected[f"{layout}/positions"],
        segments,
        prefix_visible=layout == "prefix_visible",
    )
    got = np.asarray(logits)[segments != 0]
    np.testing.assert_allclose(got, expected[f"{layout}/logits"], **TOLERANCE)


@pytest.mark.parametrize("name", [it for it in NAMES if not it.startswith("gemma4")])
def test_config_of_transformers_4_reads_the_same(name, tmp_path):
    directory = tmp_path / name
    shutil.copytree(GOLDENS / name, directory)
    (directory / "config_v4.json").replace(directory / "config.json")
    assert "rope_theta" in json.loads((directory / "config.json").read_text())
    assert load_config(directory) == load_config(GOLDENS / name)
