"""Rows for adapters from a data set's prompts, whatever number of passages its questions have."""

import sys

import own_answers
import pytest

from jaxrag.measure.evals.datasets.spec import DatasetItem

DOCUMENTS = tuple((f"T{at}", f"text {at}") for at in range(10))
ITEM = DatasetItem("1", "1", "Who?", DOCUMENTS, ())


def test_a_question_becomes_prompts_of_all_its_passages():
    parts = [part.documents for part in own_answers.parts_of(ITEM, 4)]
    assert [len(part) for part in parts] == [4, 4, 2] and sum(parts, ()) == DOCUMENTS
    assert [part.documents for part in own_answers.parts_of(ITEM, None)] == [DOCUMENTS]


def test_no_question_left_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(own_answers, "items_of", lambda options: [ITEM])
    words = ["hotpotqa", "--data", "file.json", "--model", "M", "--out", "rows.jsonl"]
    monkeypatch.setattr(sys, "argv", ["own_answers", *words, "--skip", "1"])
    with pytest.raises(SystemExit):
        own_answers.main()
    assert "--skip 1 leaves no question of file.json" in capsys.readouterr().err
