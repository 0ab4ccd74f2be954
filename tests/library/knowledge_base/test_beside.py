"""A knowledge base beside others: encoding in turns, chunks cut elsewhere, several threads."""

import concurrent.futures

import pytest

from jaxrag.library.documents import Document
from jaxrag.library.documents.chunking import split


def test_encoding_takes_turns_piece_by_piece(make_kb, text_of, encoded):
    """A turn runs about a row; what it raises ends the run, and what was committed stays."""
    turns = []

    def turn(job):
        turns.append("turn")
        return job()

    documents = [Document(f"d{i}", text_of(i, 300)) for i in range(3)]
    kb, plain = make_kb("turns"), make_kb("plain")
    report = kb.add(documents, turn=turn)
    assert report.encoded == plain.add(documents).encoded > len(turns) > 1
    assert [hit.chunk_id for hit in kb.search("amber")] == [
        hit.chunk_id for hit in plain.search("amber")
    ]

    def refuse(job):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        kb.add([Document("new", text_of(9, 300))], turn=refuse)
    assert [entry.id for entry in kb.documents()] == ["d0", "d1", "d2"]


def test_chunks_that_were_cut_elsewhere_are_taken_as_they_are(make_kb, text_of):
    kb, other = make_kb("a"), make_kb("b")
    document = Document("d", text_of(1, 100))
    made = split(document.text, kb.model.tokenizer, kb.chunking)
    asked = []

    def cut(found):
        asked.append(found.id)
        return made

    kb.add([document], cut=cut)
    other.add([document])
    assert asked == ["d"]
    assert kb._catalog.keys("d") == other._catalog.keys("d")


@pytest.mark.parametrize("index", [pytest.param("lance", marks=pytest.mark.slow), "exact"])
def test_threads_add_remove_and_search_one_knowledge_base(make_kb, text_of, embedder, index):
    """What one thread removed no other finds, and nothing that was added is lost."""
    kb = make_kb(embedder=embedder, index=index)
    kb.add([Document("stays", text_of(0, 40))])

    def change(part):
        for i in range(2):
            name = f"{part}-{i}"
            kb.add([Document(name, text_of(part * 10 + i, 30))])
            assert any(hit.document_id == name for hit in kb.search("amber birch cedar", 200))
            if i % 2:
                kb.remove([name])
                assert all(hit.document_id != name for hit in kb.search("amber birch cedar", 200))

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(change, part) for part in range(3)]:
            done.result()
    assert {entry.id for entry in kb.documents()} == {
        "stays", *(f"{part}-{i}" for part in range(3) for i in (0,)),
    }  # fmt: skip
    assert len(kb._vectors.index) == kb._catalog.counts()["chunks"]
