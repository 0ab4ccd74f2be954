"""Gemma 3 270M, pretrained: windows, layers of two kinds, and what transformers makes of them.

`make real` fetches its weights, `make test-real` runs this; without the weights all is skipped. The
goldens are of scripts/make_real_goldens.py.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import jaxrag
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.reuse.methods import METHODS

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "models" / "gemma-3-270m-q4_k_m.gguf"
GOLDENS = json.loads((ROOT / "tests/goldens/gemma3-270m.json").read_text(encoding="utf-8"))
HANDBOOK = ROOT / "examples" / "handbook"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not MODEL.is_file(), reason="no weights: `make real` fetches them"),
]


@pytest.fixture(scope="module")
def model():
    return jaxrag.load_model(MODEL, dtype="float32", cache_tokens=8192)


def test_prompts_are_cut_as_by_transformers(model):
    tokenizer = model.tokenizer
    for row in GOLDENS["rows"]:
        assert [*tokenizer.leading_ids, *tokenizer.encode(row["text"])] == row["ids"]


def test_logits_are_those_of_transformers(model):
    """Of some prompts that are longer than a window."""
    rows = GOLDENS["rows"]
    assert max(len(row["ids"]) for row in rows) > model.config.sliding_window
    for row in rows:
        found = np.asarray(model.logits(np.array([row["ids"]]))[0, -1])
        np.testing.assert_allclose(found[GOLDENS["places"]], row["logits"], atol=2e-3)


def test_answers_are_those_of_transformers(model):
    engine, nothing = engine_of(model), np.zeros(0, np.int32)
    for row in GOLDENS["rows"]:
        prompt = Prompt(nothing, (), np.array(row["ids"], np.int32))
        asked = Request(prompt, engine.memory, METHODS["full_attention"], len(row["answer"]))
        assert [it for told in engine.iterate([asked]) for it in told.new] == row["answer"]


def test_all_tokens_computed_again_are_full_attention(model, tmp_path):
    """Of chunks that were stored behind a primer and lie at other places, beyond a window."""
    settings = {"chunk_tokens": 256, "stored": "native"}
    chapters = sorted(HANDBOOK.glob("*.md"))[4:6]
    with jaxrag.KnowledgeBase.open(tmp_path / "kb", model=model, **settings) as kb:
        kb.add(jaxrag.read_paths(chapters))
        asked = {"kb": kb, "k": 3, "max_new_tokens": 12}
        question = "How long is the cableway?"
        full = jaxrag.generate(question, method="full_attention", **asked)
        again = jaxrag.generate(question, method="primed_fusion", recompute_ratio=1.0, **asked)
    assert again.token_ids == full.token_ids
    assert again.counts["recomputed"] > again.counts["reused"]
