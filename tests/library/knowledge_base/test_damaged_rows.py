"""Rows of the catalog that were changed behind its back: refused, told, and mended or dropped."""

import shutil

import pytest
from refusal import refused

from jaxrag.base.errors import DamagedCatalogError, KnowledgeBaseError, StoreError
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.location import mend_settings
from jaxrag.serve.generate import generate

QUESTIONS = ("amber basalt", "gneiss larch", "heath")
DOCUMENTS = [
    Document("a", "amber basalt " * 9 + "and one delta", title="Amber"),
    Document("b", "gneiss with larch " * 7 + "and two fjords", title="Gneiss", metadata={"n": 1}),
    Document("c", "heath and grove, cedar and ember", title="Heath"),
]
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
        return folder, found(kb), ask(kb).token_ids


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


def ask(kb):
    """The answer to a question that needs two chunks and their neighbours."""
    return generate(QUESTIONS[0], kb=kb, k=2, max_new_tokens=4, method="fusionrag")


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


NOT_USED = {"key"}  # a question computes it from the tokens


@pytest.mark.parametrize("name", ATTACKS)
def test_spoiled_rows_are_refused_told_and_repaired(kb, whole, name):
    statements, kinds, lost = ATTACKS[name]
    spoil(kb, *statements)
    try:
        hits = found(kb)
        ask(kb)
    except DamagedCatalogError as error:
        verdict = "refused"
        assert "\n" not in str(error)
        assert str(kb.path / "catalog.sqlite") in str(error)
        assert f"jaxrag kb verify --repair {kb.path}" in str(error)
    else:
        verdict = "same"
        assert hits == whole[1]
    assert verdict == ("same" if name in NOT_USED else "refused")
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
        assert ask(kb).token_ids == whole[2]
    else:
        kb.add([it for it in DOCUMENTS if it.id in lost])
        assert kb.verify().whole
        by_name = [sorted(hit[:5] for hit in hits) for hits in found(kb)]
        assert by_name == [sorted(hit[:5] for hit in hits) for hits in whole[1]]


QUESTION = "replace(value, 'Question', 'Answer')"
TEMPLATE = f"UPDATE settings SET value = {QUESTION} WHERE name = 'template'"


@pytest.mark.parametrize(
    ("statement", "mended"),
    [
        (TEMPLATE, ("template",)),
        ("UPDATE settings SET value = '[\"isolated\"]' WHERE name = 'encoders'", ("encoders",)),
        ("UPDATE settings SET value = '7' WHERE name = 'max_bytes'", ("max_bytes",)),
        ("UPDATE settings SET value = '{' WHERE name = 'gate:epic'", ("gate:epic",)),
        ("DELETE FROM settings WHERE name = 'gate:epic'", ("",)),
        ("UPDATE totals SET chunks = 99", ("",)),
        ("UPDATE settings SET value = replace(value, '60', '61') WHERE name = 'chunking'", None),
        ("DELETE FROM settings WHERE name = 'layout'", None),
    ],
)
def test_a_knowledge_base_with_spoiled_settings_is_not_opened(kb, whole, model, statement, mended):
    kb.set_gate("epic", {"ratio": 0.5})
    spoil(kb, statement)
    kb.close()
    for given in (None, model):
        with refused(DamagedCatalogError):
            KnowledgeBase.open(kb.path, given)
    if mended is None:
        with refused(StoreError):
            mend_settings(kb.path)
        with pytest.raises(DamagedCatalogError):
            KnowledgeBase.open(kb.path)
        return
    assert mend_settings(kb.path) == mended
    assert mend_settings(kb.path) == ()
    with KnowledgeBase.open(kb.path, model) as again:
        assert again.verify(repair=True).whole
        assert found(again) == whole[1]
        assert ask(again).token_ids == whole[2]
        assert (again.gates == {}) is ("gate" in statement)


def test_ids_in_use_are_never_given_again(kb):
    last = max(kb._catalog.chunk_ids())
    spoil(kb, "DELETE FROM reservations")
    assert min(kb._catalog.reserve(3)) > last
    spoil(kb, "DELETE FROM reservations", "DELETE FROM chunks")
    assert min(kb._catalog.reserve(1)) > last  # by their lengths


def test_an_accepted_catalog_of_yesterday_answers_as_yesterday(kb, whole, tmp_path):
    kb._catalog.checkpoint()
    yesterday = (kb.path / "catalog.sqlite").read_bytes()
    kb.add([Document("d", "amber basalt of today")])
    kb.remove(["c"])
    kb.gc(grace_seconds=0)
    kb.close()
    (kb.path / "catalog.sqlite").write_bytes(yesterday)
    with refused(KnowledgeBaseError):
        KnowledgeBase.open(kb.path, kb.model)
    with KnowledgeBase.open(kb.path, kb.model, accept_older=True) as back:
        assert found(back) == whole[1]
        assert ask(back).token_ids == whole[2]
        report = back.verify()
        assert report.rows.whole
        assert report.damaged  # the KV of what was removed today
        assert back.verify(repair=True).whole
        (added,) = back._catalog.reserve(1)
        assert added > max(back._catalog.chunk_ids())


def test_gc_frees_nothing_of_a_catalog_that_lost_rows(kb):
    spoil(kb, "DELETE FROM chunks WHERE document_id = 'a'")
    with refused(DamagedCatalogError):
        kb.gc(grace_seconds=0)


def test_verify_without_a_tokenizer_says_what_it_left_out(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "kb")
    with KnowledgeBase.open(tmp_path / "kb") as reader:  # the model was made in memory
        rows = reader.verify().rows
        assert rows.whole
        assert rows.unchecked.startswith("tokens and keys were not checked")


def test_vectors_of_documents_that_a_repair_drops_leave(make_kb, embedder):
    kb = make_kb(embedder=embedder, index="exact")
    kb.add(DOCUMENTS)
    spoil(kb, f"UPDATE chunks SET section = 'x' {FIRST}")
    assert kb.verify(repair=True).rows.lost == ("a",)
    assert len(kb._vectors.index) == kb.counts()["chunks"] > 0


def test_a_repair_forgets_of_which_chunks_neighbours_were_searched(kb):
    assert "searched" in kb._catalog.settings()
    spoil(kb, *ATTACKS["a count of a posting"][0])
    kb._verify_rows(repair=True)
    assert "searched" not in kb._catalog.settings()


def test_after_a_repair_neighbours_that_were_lost_are_encoded_again(kb):
    before = kb.counts()["encoded"]
    spoil(kb, *ATTACKS["neighbours lost"][0])
    kb.verify(repair=True)
    assert kb.counts()["encoded"] == before
    assert kb.refresh().encoded == 0
