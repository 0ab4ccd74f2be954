"""Rows of hundreds of documents, made by scripts/make_long_documents.py."""

import itertools
import json
import random
import sys

import make_long_documents
import pytest

from jaxrag.tasks.synthetic import SyntheticTask, sample
from jaxrag.tasks.world import words

TASK = SyntheticTask(chunks=(8, 24), relations=3, full_names=1.0, questions=12, split="train")


def row(length, chunk_tokens, seed=3):
    drawn = (sample(TASK, seed, n) for n in itertools.count())
    return make_long_documents.make_row(random.Random(seed), drawn, length, chunk_tokens, 24)


@pytest.mark.parametrize("chunk_tokens", [0, 64, 256])
def test_a_row_fills_its_length_and_no_more(chunk_tokens):
    made = row(1024, chunk_tokens)
    sizes = [len(words(chunk)) for chunk in made["chunks"]]
    tokens = sum(sizes) + 2 * len(sizes)
    assert 512 < tokens <= 1024
    assert not chunk_tokens or max(sizes) <= chunk_tokens
    assert made == row(1024, chunk_tokens)


def test_each_question_is_about_one_of_the_samples_alone():
    """Its documents are there, in their order, and no other sample names its people."""
    made = row(1024, 0)
    drawn = [sample(TASK, 3, n) for n in range(50)]
    by_question = {question.question: one for one in drawn for question in one.questions}
    assert len(made["questions"]) == 24
    for asked in made["questions"]:
        places = [made["chunks"].index(text) for text in by_question[asked["question"]].chunks]
        assert len(places) == len(set(places))


def test_the_file(tmp_path, monkeypatch):
    path = tmp_path / "runs" / "rows.jsonl"
    arguments = [str(path), "--tokens", "256,512", "--rows", "2", "--chunk-tokens", "0,32"]
    monkeypatch.setattr(sys, "argv", ["make_long_documents.py", *arguments])
    make_long_documents.main()
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [made["length"] for made in rows] == [256, 256, 512, 512]
    assert [made["chunk_tokens"] for made in rows] == [0, 32, 0, 32]
