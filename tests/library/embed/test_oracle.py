"""Live comparison with transformers, where torch and transformers are installed."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxrag.library.embed import load_embedder
from jaxrag.library.embed.hf import Prefixes
from jaxrag.library.embed.text import EncoderTokenizer

pytestmark = pytest.mark.oracle

GOLDENS = Path(__file__).parents[2] / "goldens" / "embed"
TEXTS = ["The mill stands by the weir.", "", "白鹭 wait", " ".join(["heron"] * 20)]


@pytest.mark.parametrize("name", ["minilm", "bge", "multilingual_e5"])
def test_vectors(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    embedder = load_embedder(GOLDENS / name)
    embedder.prefixes = Prefixes()
    embedder.tokenizer = EncoderTokenizer.load(GOLDENS / name, 18, embedder.config.vocab_size)
    model, report = transformers.AutoModel.from_pretrained(
        GOLDENS / name, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), json.dumps({k: list(v) for k, v in report.items()})
    ids, _ = embedder.tokenizer.encode(TEXTS)
    wanted = []
    for row in ids:
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([row.tolist()])).last_hidden_state[0]
        vector = hidden[0] if embedder.pooling == "cls" else hidden.mean(0)
        wanted.append((vector / vector.norm()).numpy())
    np.testing.assert_allclose(embedder(TEXTS, "passage"), wanted, rtol=1e-5, atol=1e-5)
