"""Published outputs scored again, on files made here in the same form."""

import json
import subprocess

import pytest
import rescore

from jaxrag.base.errors import RequestError


@pytest.fixture
def checkout(tmp_path):
    lines = ["| Task | x |"]
    for task, (name, _) in rescore.TASKS.items():
        lines.append(f"| {task} | 50.00% | < 60% |" + " 50.00% |" * (len(rescore.MODELS) - 2))
        for model in rescore.MODELS:
            path = tmp_path / "results" / model / f"preds_{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [
                {"id": 0, "prediction": "17", "ground_truth": "17"},
                {"id": 1, "pred": "x", "label": ["23"]},
            ]
            path.write_text("\n".join([*map(json.dumps, rows), '{"cut', ""]), encoding="utf-8")
    (tmp_path / "README.md").write_text("\n".join(lines), encoding="utf-8")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "all"], check=True)
    return tmp_path


def test_scores_beside_printed_ones(checkout):
    result = rescore.measure(rescore.RescoreOptions(checkout))
    assert len(result["rows"]) == len(rescore.TASKS) * len(rescore.MODELS)
    assert all(it["same"] and it["n"] == 2 and it["damaged"] == 1 for it in result["rows"])
    assert rescore.report(result) == ["35 of 35 scores as printed"]


def test_a_score_that_differs_is_told(checkout):
    path = checkout / "results" / "kimi" / "preds_passkey.jsonl"
    path.write_text('{"prediction": "17", "ground_truth": "17"}', encoding="utf-8")
    lines = rescore.report(rescore.measure(rescore.RescoreOptions(checkout)))
    assert lines[0].startswith("34 of 35") and lines[1].startswith("Retrieve.PassKey, kimi: 100.00")


def test_a_bound_is_no_digit():
    assert rescore.agrees("4.99", "< 5") and not rescore.agrees("5.00", "< 5")
    assert not rescore.agrees("12.35", "12.34")


def test_what_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(RequestError, match="expected a checkout"):
        rescore.measure(rescore.RescoreOptions(tmp_path))
    (tmp_path / "README.md").write_text("# else", encoding="utf-8")
    with pytest.raises(RequestError, match=r"expected scores of En\.QA"):
        rescore.measure(rescore.RescoreOptions(tmp_path))
