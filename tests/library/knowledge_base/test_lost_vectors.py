"""Vectors that damage took away: a search over the rest says so, and they are made again."""

import pytest
from refusal import refused

from jaxrag.base.errors import StoreError
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.serve.generate import generate

KINDS = ("exact", "lance")


@pytest.fixture
def whole(make_kb, text_of, embedder):
    """``whole(index)``: a knowledge base of four documents, added one by one."""

    def make(index):
        kb = make_kb(f"kb-{index}", embedder=embedder, index=index)
        for number in range(4):
            kb.add([{"id": f"doc{number}", "text": text_of(number)}])
        return kb

    return make


def found(kb, question, mode=None):
    hits = kb.search(question, 3, mode=mode)
    return [(hit.chunk_id, hit.score) for hit in hits], hits.notes


@pytest.mark.parametrize("index", KINDS)
def test_a_search_over_less_says_so_and_repair_heals(whole, text_of, index):
    kb = whole(index)
    question = text_of(2, 8)
    before = {mode: found(kb, question, mode) for mode in (None, "vector", "bm25")}
    assert [notes for _, notes in before.values()] == [(), (), ()]
    lost = kb._catalog.ids_of_document("doc2")
    kb._vectors.index.remove(lost)
    kb._vectors.index.add([10**6], kb._vectors.embedder([text_of(9)], "passage"))
    for mode in (None, "vector"):
        _, (note,) = found(kb, question, mode)
        assert note.startswith(f"the vectors of {len(lost)} of {kb.stats()['chunks']} chunks")
        assert "kb verify --repair" in note
    assert found(kb, question, "bm25") == before["bm25"]
    assert kb.stats()["vectors"]["complete"] is False
    answer = kb.search([question, text_of(1, 8)], 2)
    assert [len(hits.notes) for hits in answer] == [1, 1]
    kb.verify(repair=True)
    assert {mode: found(kb, question, mode) for mode in before} == before
    assert kb.stats()["vectors"]["complete"] is True


@pytest.mark.parametrize("index", KINDS)
def test_vectors_of_no_chunk_change_no_ranking(whole, text_of, index):
    """A batch whose documents are not there yet, or what a dead writer left."""
    kb = whole(index)
    question = text_of(2, 8)
    before = [found(kb, question, mode) for mode in (None, "vector")]
    strays = kb._vectors.embedder([question] * 40, "passage")
    kb._vectors.index.add(range(10**6, 10**6 + 40), strays)
    assert [found(kb, question, mode) for mode in (None, "vector")] == before
    kb.remove(["doc0"])
    assert found(kb, question)[1] == ()


def test_an_answer_passes_the_note_on(whole, text_of):
    kb = whole("exact")
    kb._vectors.index.remove(kb._catalog.ids_of_document("doc1"))
    answer = generate(text_of(1, 8), kb=kb, k=2, method="turborag", max_new_tokens=1)
    assert any(note.startswith("the vectors of ") for note in answer.notes)


@pytest.mark.parametrize("index", KINDS)
def test_a_damaged_vector_is_refused(whole, text_of, embedder, index):
    kb = whole(index)
    vector = kb._vectors.index.get([1])[0].tobytes()
    path, question = kb.path, text_of(1, 8)
    kb.close()
    holding = [it for it in (path / "vectors").rglob("*.lance") if it.is_file()]
    holding = [it for it in holding if vector in it.read_bytes()]
    assert holding
    for file in holding:
        data = bytearray(file.read_bytes())
        data[data.index(vector) + data[data.index(vector) :].index(0x3F)] ^= 1
        file.write_bytes(data)
    with KnowledgeBase.open(path, embedder=embedder, mode="r") as opened, refused(StoreError):
        opened.search(question)


def test_an_index_that_cannot_be_trusted_is_said_and_all_is_found(whole, text_of):
    kb = whole("lance")
    question = text_of(2, 8)
    before, _ = found(kb, question, "vector")
    kb._vectors.index.trusted = False
    for mode in ("vector", "hybrid"):
        _, (note,) = found(kb, question, mode)
        assert "cannot be trusted, so all vectors are compared" in note
    assert found(kb, question, "vector")[0] == before
    assert found(kb, question, "bm25")[1] == ()
