"""An index of words of another version is made anew when its base is opened for writing."""

import logging
import re

import pytest

from jaxrag.library.documents import Document
from jaxrag.library.retrieve import terms
from jaxrag.library.retrieve.terms import TERMS, TERMS_VERSION


@pytest.fixture
def older(make_kb, monkeypatch):
    """A base whose index of words was made by version 1, without marks; closed."""
    kb = make_kb()
    with monkeypatch.context() as patch:
        patch.setattr(terms, "terms", lambda text: re.findall(r"[^\W_]+", text.lower()))
        kb.add([Document("father", "मेरे पिता घर पर हैं amber"), Document("other", "प त नदी birch")])
    kb._catalog.forget([TERMS])
    kb.close()
    return kb.path


def found(kb, question):
    return [hit.document_id for hit in kb.search(question, mode="bm25")]


def test_for_reading_it_is_searched_as_it_is_and_says_so(older, make_kb):
    kb = make_kb(mode="r")
    assert found(kb, "पिता") == []
    assert found(kb, "amber") == ["father"]
    (note,) = kb.search("amber", mode="bm25").notes
    assert "index of words is of another version" in note
    report = kb.verify()
    assert report.whole and "words were not checked" in report.rows.unchecked


def test_for_writing_it_is_made_anew_and_says_so(older, make_kb, caplog):
    with caplog.at_level(logging.WARNING, "jaxrag"):
        kb = make_kb()
    assert f"{older}: its index of words was of another version" in caplog.text
    assert found(kb, "पिता") == ["father"]
    assert not kb.search("पिता", mode="bm25").notes
    report = kb.verify()
    assert report.whole and not report.rows.faults and not report.rows.unchecked
    kb.remove(["father"])
    assert found(kb, "amber") == []
    assert kb.verify().rows.faults == ()
    kb.close()
    caplog.clear()
    assert make_kb()._catalog.settings()[TERMS] == TERMS_VERSION
    assert not caplog.text


def test_damage_of_it_is_still_seen_and_repaired(older, make_kb):
    kb = make_kb(mode="r")
    with kb._catalog._database.transaction() as connection:
        connection.execute("UPDATE chunks SET text = 'amber' WHERE document_id = 'other'")
    kb.close()
    kb = make_kb()
    report = kb.verify()
    assert not report.whole and report.rows.faults
    assert kb.verify(repair=True).rows.repaired
    assert found(kb, "पिता") == ["father"]
    assert found(kb, "नदी") == ["other"]


def test_equal_chunks_of_documents_take_one_place(make_kb):
    kb = make_kb()
    copies = [Document(f"copy{i}", "amber birch cedar") for i in range(5)]
    kb.add([*copies, Document("other", "amber delta ember fjord grove heath larch")])
    assert found(kb, "amber") == ["copy0", "other"]
    kb.remove(["copy0"])
    assert found(kb, "amber") == ["copy1", "other"]
