"""The account of a run: what is compared with what, on which questions; and its tables."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrag.measure.evals import synthetic as accuracy
from jaxrag.measure.evals.options import ModelRead, SyntheticOptions
from jaxrag.measure.evals.scoring import READS, draw
from jaxrag.measure.evals.statistics import difference, recovery, share
from jaxrag.measure.evals.synthetic import AskedSamples, run
from jaxrag.measure.evals.synthetic_report import tables
from jaxrag.measure.table import page
from jaxrag.tasks.synthetic import KINDS, describe

MODELS = {"raw": "raw", "tuned": "tuned"}
SHARES = {  # of right answers, by model and read
    ("raw", "full"): 0.9,
    ("raw", "block"): 0.5,
    ("raw", "composite"): 0.3,
    ("tuned", "full"): 0.88,
    ("tuned", "block"): 0.85,
    ("tuned", "composite"): 0.7,
}


@pytest.fixture
def verdicts(monkeypatch, village_model, rng):
    """Scoring is replaced by known verdicts: Options of the two models, and the verdicts."""
    right = {ModelRead(*cell): rng.random(400) < p for cell, p in SHARES.items()}
    names = {reader: name for name, reader in READS.items()}

    def load(path, dtype):
        return dataclasses.replace(village_model, path=path)

    def score(written, read, heard):
        heard(len(written.samples))
        return right[ModelRead(written.model.path, names[read])]

    monkeypatch.setattr(accuracy, "load_model", load)
    monkeypatch.setattr(accuracy, "scored", score)
    options = SyntheticOptions(models=MODELS, questions=400, compare=((ModelRead("tuned", "block"),
                      ModelRead("raw", "block")),))  # fmt: skip
    return options, right


def test_every_figure_is_of_the_cells_it_names(verdicts):
    options, right = verdicts
    result = run(options, progress=False)
    asked = AskedSamples.of(draw(options.task, options.seed, 400))
    assert result["questions"]["all"] == 400 == sum(result["questions"][kind] for kind in KINDS)
    for cell in result["cells"]:
        values = right[ModelRead(cell["model"], cell["read"])]
        for kind, found in cell["accuracy"].items():
            rows = asked.groups()[kind]
            assert found == share(values[rows], asked.sample[rows])._asdict()
    best = right[ModelRead("raw", "full")]
    pairs = {(row["a"], row["b"]): row["difference"]["all"] for row in result["differences"]}
    assert len(pairs) == 5 + 2 + 1
    expected = difference(right[ModelRead("raw", "block")], best, asked.sample)
    assert pairs["raw:block", "raw:full"] == expected._asdict()
    expected = difference(right[ModelRead("tuned", "full")], best, asked.sample)
    assert pairs["tuned:full", "raw:full"] == expected._asdict()
    assert pairs["tuned:block", "tuned:composite"]["value"] > 0
    assert pairs["tuned:block", "raw:block"]["value"] > 0.2
    found = {row["read"]: row["recovery"] for row in result["recovery"]}
    lost, back = right[ModelRead("raw", "block")], right[ModelRead("tuned", "block")]
    assert found["block"] == recovery(lost, back, best, asked.sample)._asdict()
    assert {row["model"] for row in result["recovery"]} == {"tuned"}
    assert json.loads(json.dumps(result)) == json.loads(json.dumps(result, allow_nan=False))


def test_the_shortcut_is_that_of_these_questions(verdicts):
    options, _ = verdicts
    result = run(options, progress=False)
    samples = draw(options.task, options.seed, 400)
    guesses = [q.guess for sample in samples for q in sample.questions]
    assert result["shortcut"]["all"] == pytest.approx(np.mean(guesses))
    wide = describe(options.task, options.seed, len(samples))
    for kind in KINDS:
        assert result["shortcut"][kind] == pytest.approx(wide[kind]["shortcut"], abs=0.02)


def test_tables_show_the_figures(verdicts):
    options, right = verdicts
    result = run(options, progress=False)
    found = list(tables(result))
    assert [len(table.rows) for table in found] == [3, 3 + 6, 1 + 8, 1 + 4 - 2]
    for table in found:
        assert {len(row) for row in table.rows} == {len(table.rows[0])}
    value = 100 * right[ModelRead("raw", "block")].mean()
    assert found[0].rows[1][2].startswith(f"{value:.1f} [")
    loss = 100 * (right[ModelRead("raw", "block")].mean() - right[ModelRead("raw", "full")].mean())
    assert found[2].rows[1][:2] == ["raw:block", "raw:full"]
    assert found[2].rows[1][2].startswith(f"{loss:+.1f} [")
    text = page(tables(result))
    assert f"| raw | {found[0].rows[1][1]} |" in text
    assert "400 questions" in text and "95 % intervals" in text


def test_a_loss_that_is_none_has_no_recovery(verdicts):
    options, right = verdicts
    right[ModelRead("raw", "block")] = right[ModelRead("raw", "full")]
    result = run(options, progress=False)
    assert {row["read"]: row["recovery"] for row in result["recovery"]}["block"] is None
    assert "undefined" in page(tables(result))
