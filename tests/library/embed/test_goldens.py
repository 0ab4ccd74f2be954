"""Ids and vectors of every family against those transformers gave for the same weights."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxrag.library.embed import load_embedder
from jaxrag.library.embed.hf import FAMILIES, load_config

GOLDENS = Path(__file__).parents[2] / "goldens" / "embed"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
TEXTS = json.loads((GOLDENS / "texts.json").read_text(encoding="utf-8"))


def expected(name):
    with np.load(GOLDENS / name / "expected.npz") as arrays:
        return dict(arrays)


def test_there_is_a_golden_for_every_family():
    found = {load_config(GOLDENS / name)[0].model_type for name in NAMES}
    assert found == {family.model_type for family in FAMILIES}


@pytest.mark.parametrize("name", NAMES)
def test_ids(name):
    embedder = load_embedder(GOLDENS / name)
    wanted = expected(name)
    for kind, prefix in (
        ("passage", embedder.prefixes.passage),
        ("query", embedder.prefixes.query),
    ):
        ids, cut = embedder.tokenizer.encode([(prefix + text).strip() for text in TEXTS])
        assert [row.tolist() for row in ids] == [
            row[row >= 0].tolist() for row in wanted[f"{kind}/ids"]
        ]
        assert cut >= 1


@pytest.mark.parametrize("name", NAMES)
def test_vectors(name):
    embedder = load_embedder(GOLDENS / name)
    wanted = expected(name)
    for kind in ("passage", "query"):
        vectors = embedder(TEXTS, kind)
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(vectors, wanted[f"{kind}/vectors"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["minilm", "roberta"])
def test_vectors_do_not_depend_on_the_batch(name):
    wanted = expected(name)["passage/vectors"]
    for batch_tokens in (1, 100):
        embedder = load_embedder(GOLDENS / name)
        embedder.batch_tokens = batch_tokens
        np.testing.assert_allclose(embedder(TEXTS, "passage"), wanted, rtol=1e-5, atol=1e-5)
    alone = np.concatenate([embedder([text], "passage") for text in TEXTS])
    np.testing.assert_allclose(alone, wanted, rtol=1e-5, atol=1e-5)
