"""Rows of the catalog that were changed behind its back: refused, told, and mended or dropped."""

import shutil

import pytest

from jaxrag.documents import Document
from jaxrag.errors import DamagedCatalogError
from jaxrag.knowledge_base import KnowledgeBase
from jaxrag.serve.generate import generate

QUESTIONS = ("amber basalt", "gneiss larch", "heath")
DOCUMENTS = [
    Document("a", "amber basalt " * 9 + "and one delta", title="Amber"),
    Document("b", "gneiss with larch " * 7 + "and two fjords", title="Gneiss", metadata={"n": 1}),
    Document("c", "heath and grove, cedar and ember", title="Heath"),
]
OTHER = "(SELECT {0} FROM chunks WHERE document_id = 'a' AND number = 1)"
FIRST = "WHERE document_id = 'a' AND number = 0"
SECOND = "WHERE document_id = 'b' AND number = 1"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model):
    """The folder of a knowledge base that nobody may change, and what is found in it."""
    folder = tmp_path_factory.mktemp("whole") / "kb"
    with KnowledgeBase.open(
        folder, model, template="plain", chunk_tokens=60, overlap=4,
        encoders=["isolated", "neighbours"], neighbours=2,
    ) as kb:  # fmt: skip
        kb.add(DOCUMENTS)
        return folder, found(kb), len(kb._catalog.chunk_ids())


@pytest.fixture
def kb(whole, tmp_path, model):
    shutil.copytree(whole[0], tmp_path / "kb")
    with KnowledgeBase.open(tmp_path / "kb", model) as kb:
        yield kb


def found(kb):
    return [
        [(hit.document_id, hit.chunk_index, hit.title, hit.text, hit.ids.tolist(), hit.score)
         for hit in kb.search(question, 9)]
        for question in QUESTIONS
    ]  # fmt: skip


def spoil(kb, *statements):
    """Change rows as a foreign program does: without foreign keys."""
    connection = kb._catalog._database.connection
    connection.execute("PRAGMA foreign_keys = OFF")
    for statement in statements:
        connection.execute(statement)
    connection.execute("PRAGMA foreign_keys = ON")


def swap(column):
    """Two chunks trade what they hold."""
    return (
        f"CREATE TEMP TABLE held AS SELECT {column} AS it FROM chunks {FIRST}",
        f"UPDATE chunks SET {column} = (SELECT {column} FROM chunks {SECOND}) {FIRST}",
        f"UPDATE chunks SET {column} = (SELECT it FROM held) {SECOND}",
        "DROP TABLE held",
    )


# name -> statements, the kinds of faults that verify tells, documents that --repair has to drop
ATTACKS = {
    "ids swapped": (swap("ids"), {"chunk"}, ()),
    "texts swapped": (swap("text"), {"chunk", "word"}, ()),
    "rows swapped but for their names": (
        (*swap("ids"), *swap("text"), *swap("content_id")),
        {"chunk", "key", "word"}, ("a", "b"),
    ),
    "ids of odd length": ((f"UPDATE chunks SET ids = x'010203' {FIRST}",), {"chunk"}, ()),
    "ids that are text": ((f"UPDATE chunks SET ids = 'seven' {FIRST}",), {"chunk"}, ()),
    "a number that is text": (
        (f"UPDATE chunks SET number = 'seven' {FIRST}",), {"document", "chunk"}, ("a",),
    ),
    "content id": ((f"UPDATE chunks SET content_id = 'f00' {FIRST}",), {"chunk", "key"}, ()),
    "digest of a chunk": ((f"UPDATE chunks SET xxh3 = 7 {FIRST}",), {"chunk"}, ()),
    "section of a chunk": ((f"UPDATE chunks SET section = 'x' {FIRST}",), {"chunk"}, ("a",)),
    "chunk deleted": ((f"DELETE FROM chunks {FIRST}",), {"document", "word", "total", "key"}, "a"),
    "title": (("UPDATE documents SET title = 'Other' WHERE id = 'a'",),
              {"document", "word"}, ("a",)),
    "metadata": (("UPDATE documents SET metadata = '{}' WHERE id = 'b'",), {"document"}, ("b",)),
    "metadata is no JSON": (
        ("UPDATE documents SET metadata = '{' WHERE id = 'b'",), {"document"}, ("b",),
    ),
    "number of chunks": (("UPDATE documents SET num_chunks = 1 WHERE id = 'a'",),
                         {"document"}, ()),
    "digest of a document": (("UPDATE documents SET digest = '00' WHERE id = 'a'",),
                             {"document"}, ()),
    "document deleted": (
        ("DELETE FROM documents WHERE id = 'a'",), {"document", "word", "total"}, ("a",),
    ),
    "key": (("UPDATE chunk_keys SET key = 'f00' WHERE encoder = 'isolated'",), {"key"}, ()),
    "key of neighbours": (
        ("UPDATE chunk_keys SET key = 'f00' WHERE encoder = 'neighbours'",), {"key"}, (),
    ),
    "neighbours lost": (("DELETE FROM contexts WHERE place = 1",), {"key"}, ()),
    "neighbours swapped": (("UPDATE contexts SET place = 1 - place + 10",
                            "UPDATE contexts SET place = place - 10"), {"key"}, ()),
    "lengths emptied": (("DELETE FROM lengths",), {"word", "total"}, ()),
    "postings emptied": (("DELETE FROM postings",), {"word"}, ()),
    "a posting deleted": (("DELETE FROM postings WHERE term = 'amber' AND chunk_id = 1",),
                          {"word"}, ()),
    "a count of a posting": (("UPDATE postings SET count = count + 1 WHERE term = 'amber' "
                              "AND chunk_id = 1",), {"word"}, ()),
    "words forgotten": (
        ("DELETE FROM postings WHERE term = 'amber'", "DELETE FROM terms WHERE term = 'amber'"),
        {"word", "total"}, (),
    ),
    "totals emptied": (("DELETE FROM totals",), {"total"}, ()),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_spoiled_rows_are_refused_told_and_repaired(kb, whole, name):
    statements, kinds, lost = ATTACKS[name]
    spoil(kb, *statements)
    answers = []
    for question in QUESTIONS:
        try:
            answers.append(generate(question, kb=kb, k=2, max_new_tokens=2, method="fusionrag"))
        except DamagedCatalogError as error:
            assert "\n" not in str(error)
            assert str(kb.path / "catalog.sqlite") in str(error)
            assert f"jaxrag kb verify --repair {kb.path}" in str(error)
    if len(answers) == len(QUESTIONS):  # what they rest on was not spoiled
        assert found(kb) == whole[1]
    report = kb.verify().rows
    assert {fault.kind for fault in report.faults} == kinds
    assert not report.whole
    repaired = kb.verify(repair=True)
    assert repaired.rows.lost == tuple(lost)
    assert repaired.rows.unnamed == 0
    assert {fault.kind for fault in repaired.rows.faults} == kinds
    assert repaired.whole is (not lost)
    assert kb.verify().whole
    if not lost:
        assert found(kb) == whole[1]
        assert generate("heath", kb=kb, k=2, max_new_tokens=2, method="fusionrag").sources
    else:
        kb.add([it for it in DOCUMENTS if it.id in lost])
        assert kb.verify().whole
        by_name = [sorted(hit[:5] for hit in hits) for hits in found(kb)]
        assert by_name == [sorted(hit[:5] for hit in hits) for hits in whole[1]]
