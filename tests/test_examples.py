"""The example corpus: every document is readable, every question's answer is found."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxrag.catalog import Catalog, Entry
from jaxrag.chunking import Chunk
from jaxrag.documents import Document, read_paths

EXAMPLES = Path(__file__).parents[1] / "examples"
QUESTIONS = [
    json.loads(line)
    for line in (EXAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()
]
CHARACTERS = 700  # of a chunk here; about 150 tokens of English


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    made = Catalog.create(tmp_path_factory.mktemp("examples") / "catalog.sqlite", {})
    for document in read_paths([EXAMPLES / "documents"]):
        assert isinstance(document, Document), document
        pieces = range(0, len(document.text), CHARACTERS)
        chunks = [
            Chunk(index, start, end, np.zeros(1, np.int32), document.text[start:end])
            for index, (start, end) in enumerate((s, s + CHARACTERS) for s in pieces)
        ]
        contents = [f"{document.id}:{chunk.index}" for chunk in chunks]
        made.put([Entry(document, "", chunks, {}, contents, made.reserve(len(chunks)))])
    yield made
    made.close()


def test_corpus_has_every_format_and_both_languages(catalog):
    documents = catalog.documents()
    assert {Path(d.file).suffix for d in documents} == {".md", ".txt", ".jsonl"}
    assert sum(d.id.endswith(("-zh.md", "-zh.txt")) for d in documents) == 2
    assert len(documents) >= 12
    assert {question["document"] for question in QUESTIONS} <= {d.id for d in documents}


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["document"])
def test_question_finds_its_document_first_and_its_answer_among_three(catalog, question):
    hits = catalog.search(question["question"], 3)
    assert hits[0].document_id == question["document"]
    found = " ".join(" ".join(hit.text.split()) for hit in hits).lower()
    assert any(answer.lower() in found for answer in question["answers"])
