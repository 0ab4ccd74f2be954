"""The example corpora: every document is readable, every question's answer is found."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxrag.library.catalog import Catalog, NewDocument
from jaxrag.library.documents import Document, read_paths
from jaxrag.library.documents.chunking import Chunk, Chunking, split
from jaxrag.models.text.prompts import template_named
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.tasks.world import FIRST_HE, FIRST_SHE, LAST, REFUSAL, split_of, words

EXAMPLES = Path(__file__).parents[1] / "examples"
QUESTIONS = [
    json.loads(line)
    for line in (EXAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()
]
VILLAGE = [
    json.loads(line)
    for line in (EXAMPLES / "village-questions.jsonl").read_text(encoding="utf-8").splitlines()
]
CONFIGS = Path(__file__).parents[1] / "configs"
K = 6  # chunks a question, as `jaxrag demo` asks for
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
        made.put([NewDocument(document, "", chunks, {}, contents, made.reserve(len(chunks)))])
    yield made
    made.close()


def test_corpus_has_every_format_and_both_languages(catalog):
    documents = catalog.documents()
    assert {Path(d.file).suffix for d in documents} == {".md", ".txt", ".jsonl"}
    assert sum(d.id.endswith(("-zh.md", "-zh.txt")) for d in documents) == 2
    assert len(documents) >= 12
    assert {question["sources"][0] for question in QUESTIONS} <= {d.id for d in documents}


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["sources"][0])
def test_question_finds_its_document_first_and_its_answer_among_three(catalog, question):
    hits = catalog.search(question["question"], 3)
    assert hits[0].document_id == question["sources"][0]
    found = " ".join(" ".join(hit.text.split()) for hit in hits).lower()
    assert any(answer.lower() in found for answer in question["answers"])


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(CONFIGS / "tokenizers" / "synthetic")


@pytest.fixture(scope="module")
def village(tmp_path_factory, tokenizer):
    made = Catalog.create(tmp_path_factory.mktemp("village") / "catalog.sqlite", {})
    for document in read_paths([EXAMPLES / "village"]):
        assert isinstance(document, Document), document
        chunks = split(document.text, tokenizer, Chunking(20, 0, "sentence"))
        contents = [f"{document.id}:{chunk.index}" for chunk in chunks]
        made.put([NewDocument(document, "", chunks, {}, contents, made.reserve(len(chunks)))])
    yield made
    made.close()


def test_the_village_is_cut_into_its_paragraphs(village):
    documents = village.documents()
    assert {Path(d.file).suffix for d in documents} == {".md", ".txt", ".jsonl"}
    assert 12 <= len(documents) <= 16
    numbers = []
    for document in documents:
        chunks = [chunk.text.strip() for chunk in village.chunks(document.id)]
        assert all(re.fullmatch(r"File \d\d: [^:\n]+\.", chunk) for chunk in chunks)
        numbers += {chunk[:7] for chunk in chunks}
    assert len(set(numbers)) == len(numbers)
    assert sum(d.num_chunks == 2 for d in documents) == 3


def test_the_model_knows_every_word_of_the_village_and_none_of_its_people(village, tokenizer):
    texts = [chunk.text for d in village.documents() for chunk in village.chunks(d.id)]
    texts += [text for row in VILLAGE for text in (row["question"], *row["answers"])]
    for text in texts:
        assert tokenizer.unknown_words(text) == []
        for first, last in itertools.pairwise(words(text)):
            if first in (*FIRST_SHE, *FIRST_HE) and last in LAST:
                assert split_of(first, last) == "test", (first, last)


def test_the_village_asks_every_kind(village):
    kinds = [row["kind"] for row in VILLAGE]
    assert set(kinds) == {"hop1", "cross", "latest", "hop2", "unknown"}
    assert {d for row in VILLAGE for d in row["sources"]} <= {d.id for d in village.documents()}


@pytest.mark.parametrize("row", VILLAGE, ids=lambda row: row["question"])
def test_a_village_question_finds_what_it_needs_in_order(row, village):
    template = template_named(str(CONFIGS / "templates" / "short.toml"))
    hits = template.arrange(village.search(row["question"], K))
    assert hits[0].document_id == row["sources"][0]
    for name in row["sources"]:
        places = [i for i, hit in enumerate(hits) if hit.document_id == name]
        assert [hits[i].chunk_index for i in places] == list(range(len(village.chunks(name))))
        assert places == list(range(places[0], places[-1] + 1))
    said = " ".join(hit.text for hit in hits if hit.document_id in row["sources"])
    assert all((answer in said) == (answer != REFUSAL) for answer in row["answers"])
    if row["kind"] == "latest":
        assert said.index(row["answers"][0]) > said.index("lives in")
