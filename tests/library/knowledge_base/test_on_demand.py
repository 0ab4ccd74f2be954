"""Documents that are added without KV: found at once, encoded by the first question."""

import time

from refusal import refused

from jaxrag.base.errors import JaxragError, KnowledgeBaseError, RequestError
from jaxrag.engine import staging, transfers
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.serve.generate import generate

DOCUMENTS = [Document(name, f"{name} is a stone") for name in ("basalt", "gneiss", "schist")]


def ask(kb, name):
    return generate(f"{name}?", kb=kb, method="turborag", k=1, max_new_tokens=2)


def test_only_what_is_asked_for_is_encoded(make_kb, encoded):
    kb, other = make_kb(encoders=["isolated"]), make_kb("other", encoders=["isolated"])
    report = kb.add(DOCUMENTS, encode="on demand")
    assert sum(encoded) == 0
    assert (report.documents, report.encoded, report.reused, report.on_demand) == (3, 0, 0, 3)
    assert kb.search("gneiss", k=1)[0].document_id == "gneiss"
    assert (kb.stats()["chunks"], kb.stats(walk=True)["stored"]["missing"]) == (3, 3)
    first = ask(kb, "gneiss")
    assert first.counts["encoded"] and not first.counts["reused"]
    assert ask(kb, "gneiss").counts["encoded"] == 0
    assert kb.stats(walk=True)["stored"]["missing"] == 2
    other.add(DOCUMENTS)
    assert first.text == ask(other, "gneiss").text
    assert other.stats(walk=True)["stored"]["missing"] == 0
    # What is stored already is not encoded again, on demand or now.
    again = kb.add([*DOCUMENTS, Document("marble", "marble is one")], encode="on demand")
    assert (again.reused, again.on_demand, again.unchanged) == (1, 3, 3)
    now = kb.add(DOCUMENTS)
    assert (now.encoded, now.reused, now.on_demand) == (2, 1, 0)
    assert kb.stats(walk=True)["stored"]["missing"] == 1


def test_missing_kv_is_no_damage_there(make_kb):
    kb, other = make_kb(encoders=["isolated"]), make_kb("other", encoders=["isolated"])
    kb.add(DOCUMENTS, encode="on demand")
    report = kb.verify()
    assert report.whole and (report.ok, report.dropped) == (0, 3)
    assert kb.gc(grace_seconds=0).chunks == 0
    with KnowledgeBase.open(kb.path) as reader:
        assert reader.verify().dropped == 3
    other.add(DOCUMENTS)
    other.store.delete(list(other.store.keys())[:1])
    assert not other.verify().whole


def test_what_cannot_be_meant(make_kb):
    with refused(RequestError, "encode='later'"):
        make_kb().add(DOCUMENTS, encode="later")
    kb = make_kb("near", encoders=["after_prefix", "neighbours"])
    with refused(KnowledgeBaseError):
        kb.add(DOCUMENTS, encode="on demand")
    assert kb.documents() == []


def test_a_document_that_is_removed_while_it_is_encoded(make_kb, monkeypatch):
    """Whoever asked gets an answer or a clear error; nothing of it stays for good."""
    kb = make_kb(encoders=["isolated"])
    kb.add([Document(it, f"{it} grows") for it in ("alder", "birch")], encode="on demand")

    removed = []

    def encode(loads, **more):
        made = staging.encode(loads, **more)
        removed.append(kb.remove(["alder"]).documents)
        return made

    monkeypatch.setattr(transfers, "encode", encode)
    try:
        assert ask(kb, "alder").text
    except JaxragError as error:
        assert "alder" in str(error) and "\n" not in str(error)
    assert removed == [1]
    assert kb.search("alder", k=1) == []
    kb.gc(grace_seconds=0)
    assert kb.verify_forgotten("alder").nothing
    stats = kb.stats(walk=True)["stored"]
    assert (stats["orphans"], stats["missing"]) == (0, 1)
    deadline = time.monotonic() + 30
    while any(it.is_file() for it in (kb.path / "leases").rglob("*")):
        assert time.monotonic() < deadline
    assert ask(kb, "birch").counts["encoded"]


STUCK = """
import sys, time
import jaxrag
from jaxrag.engine import transfers

def encode(loads, **more):
    print("encodes", len(loads), flush=True)
    time.sleep(600)

transfers.encode = encode
with jaxrag.KnowledgeBase.open(sys.argv[1], model=jaxrag.load_model(sys.argv[2])) as kb:
    jaxrag.generate(sys.argv[3], kb=kb, k=6, max_new_tokens=4)
"""
