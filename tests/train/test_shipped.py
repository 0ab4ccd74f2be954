"""The model in checkpoints/: the laws on its weights, its figures, and how it was made."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.sharding import make_mesh
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Prompt, Request
from jaxrag.measure.evals.scoring import READS, draw, scored, write
from jaxrag.measure.evals.synthetic_report import tables
from jaxrag.measure.table import page
from jaxrag.models.decoder import unembed
from jaxrag.models.model import load_model
from jaxrag.reuse.methods import METHODS
from jaxrag.tasks.synthetic import SyntheticTask
from jaxrag.train.config import RunPart, load_config
from jaxrag.train.log import METRICS_FILE, read_metrics
from jaxrag.train.loop import train
from jaxrag.train.packing import lay_piece, pack_batch
from jaxrag.train.step import Program

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "checkpoints" / "synthetic-0.8m"
LOSSES = ROOT / "tests" / "goldens" / "shipped_loss.json"
WEIGHTS = ("full", "dual", "long")
RECORDED = (
    "full",
    "dual",
)  # in results.json; "long": measure/evals/long/test_record.py
ASKED = 60  # questions that the tests ask; the figures are of some thousand
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(scope="module")
def model_of():
    """``model_of("dual")``: a loaded set of weights."""
    return functools.cache(lambda name: load_model(SHIPPED / name, cache_tokens=8192))


@pytest.fixture(scope="module")
def results():
    """What `jaxrag eval synthetic` wrote of these weights."""
    return json.loads((SHIPPED / "results.json").read_text(encoding="utf-8"))


@functools.cache
def training_forward(config):
    """The forward pass of a training step, compiled, to logits [B, T, V]."""
    program = Program(
        config=config, dtype="float32", remat="none", logits_tokens=4096, lora_scale=None,
        mesh=make_mesh(),
    )  # fmt: skip

    def forward(params, rope, batch):
        hidden, _ = program.hidden(params, None, rope, batch.tokens)
        return unembed(params, config, hidden)

    return jax.jit(forward)


def cached_logits(model, method, prompt):
    """Logits of the last token through stored chunks, pool and page tables."""
    request = Request(prompt, engine_of(model).memory, METHODS[method], 1)
    [logits] = inspect_prompts(
        engine_of(model), [request], lambda *seen: np.asarray(seen[2].logits)[0]
    )
    return logits


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_law_2_training_and_cached_inference_agree(model_of, name, read):
    """Several samples a row, several questions a sample; logits before and inside the answers."""
    model, how = model_of(name), READS[read]
    written = write(model, draw(SyntheticTask(chunks=(4, 6), split="test"), 11, 10))
    pieces = [lay_piece(tokens, how.full, how.positions) for tokens in written.ids]
    batch = jax.tree.map(jnp.asarray, pack_batch([pieces], 512))
    packed = np.asarray(training_forward(model.config)(model.params, model.rope(512), batch)[0])
    start = 0
    for tokens, piece in zip(written.ids, pieces, strict=True):
        for final, (first, end) in zip(tokens.finals, piece.questions, strict=True):
            for at in {first, end - 1}:  # what predicts the first and the last token of the answer
                said = final.response[: at - first]
                ids = np.concatenate((final.question, said)).astype(np.int32)
                cached = cached_logits(model, how.method, Prompt(tokens.prefix, tokens.chunks, ids))
                np.testing.assert_allclose(cached, packed[start + at], **CLOSE)
                assert cached.argmax() == packed[start + at].argmax()
        start += len(piece)


@pytest.mark.parametrize("name", RECORDED)
def test_it_answers_as_recorded(model_of, results, name):
    """The recorded verdicts on the first questions, but for a tie that rounding decides."""
    assert results["models"][name]["weights"] == model_of(name).digest, "results.json is of others"
    task = SyntheticTask(**{**results["task"], "chunks": tuple(results["task"]["chunks"])})
    written = write(model_of(name), draw(task, results["seed"], ASKED))
    recorded = {row["read"]: row for row in results["answered"] if row["model"] == name}
    for read, how in READS.items():
        assert recorded[read]["questions"] == ASKED
        assert len(recorded[read]["differing"]) <= 1
        assert abs(int(scored(written, how).sum()) - recorded[read]["packed_right"]) <= 1


def test_the_record_tells_the_story(results):
    """Full attention works, block-wise reading costs, and fine-tuning mends it."""
    cells = {(c["model"], c["read"]): c["accuracy"] for c in results["cells"]}
    assert results["questions"]["all"] >= 4000
    assert results["shortcut"]["all"] < 0.5
    assert cells["full", "full"]["all"]["value"] >= 0.9
    drop = cells["full", "full"]["all"]["value"] - cells["full", "block"]["all"]["value"]
    assert drop >= 0.15
    recovered = {(r["model"], r["read"]): r["recovery"]["value"] for r in results["recovery"]}
    assert recovered["dual", "block"] >= 0.85


def test_the_card_shows_the_record(results):
    card = (SHIPPED / "README.md").read_text(encoding="utf-8")
    assert page(tables(results)).strip() in card, "paste what --markdown wrote into the card"
    assert "TODO" not in card


def test_it_is_small_and_complete():
    files = [path for path in SHIPPED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 30e6
    for name in WEIGHTS:
        present = {path.name for path in (SHIPPED / name).iterdir()}
        needed = "config.json model.safetensors tokenizer.json tokenizer_config.json prompt.toml"
        needed += " reading.toml"
        assert set(needed.split()) <= present


@pytest.mark.parametrize(
    ("steps", "falls_to"),
    [pytest.param(n, x, marks=pytest.mark.slow) for n, x in ((20, 0.8), (300, 0.75))],
)
def test_a_shortened_run_of_its_config_learns_as_recorded(tmp_path, monkeypatch, steps, falls_to):
    """The same data in the same order: every tenth loss, within what other processors round."""
    monkeypatch.chdir(ROOT)  # paths in configs are relative
    config = load_config("configs/train/shipped.toml")
    config = dataclasses.replace(config, run=RunPart(log_every=10, save_every=0), eval=())
    train(config, tmp_path / "run", stop_after=steps, progress=False)
    found = [line["loss"] for line in read_metrics(tmp_path / "run" / METRICS_FILE)]
    recorded = [line["loss"] for line in json.loads(LOSSES.read_text(encoding="utf-8"))]
    assert len(found) == steps // 10
    np.testing.assert_allclose(found[:3], recorded[: len(found)][:3], rtol=2e-3)
    np.testing.assert_allclose(found, recorded[: len(found)], rtol=0.05)
    assert found[-1] < falls_to * found[0]
