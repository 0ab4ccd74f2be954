"""Groups of readers: what a caller finds, and what the KV of chunks may have seen."""

import asyncio

import pytest
from refusal import refused

from jaxrag import agenerate, generate
from jaxrag.base.errors import RequestError
from jaxrag.cli import PROGRAM
from jaxrag.cli.command import parse
from jaxrag.cli.opening import asked_of
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase

TEXTS = {"all": "amber birch", "sales": "amber cedar", "legal": "amber delta", "both": "amber"}
GROUPS = {"all": None, "sales": ["sales"], "legal": ["legal"], "both": ["legal", "sales"]}
READS = [
    (None, {"all", "sales", "legal", "both"}),
    ([], {"all"}),
    (["strangers"], {"all"}),
    (["sales"], {"all", "sales", "both"}),
    (("sales", "legal"), {"all", "sales", "legal", "both"}),
]


def of(name, groups=None, text=None):
    return Document(name, text or TEXTS[name], metadata={"groups": groups} if groups else {})


DOCUMENTS = [of(name, groups) for name, groups in GROUPS.items()]


def names(rows):
    return {getattr(row, "document_id", None) or row.id for row in rows}


class Everything:
    """A retriever that knows no filters."""

    def search(self, queries, k, *, where=None):
        return [[(chunk_id, 1.0) for chunk_id in range(1, 9)][:k] for _ in queries]


@pytest.mark.parametrize("mode", ["bm25", "vector", "hybrid", None])
def test_a_caller_finds_what_its_groups_may_read(make_kb, embedder, mode):
    kb = make_kb(embedder=embedder, index="exact")
    kb.add(DOCUMENTS)
    if mode is None:
        kb.retriever = Everything()
    for groups, expected in READS:
        for where in (None, {"$or": [{"groups": "legal"}, {"groups": {"$ne": "x"}}]}):
            hits = kb.search("amber", 4, where=where, mode=mode, groups=groups)
            assert names(hits) == names(kb.documents(where, groups=groups)) == expected
        assert len(kb.search("amber", 1, mode=mode, groups=groups)) == 1
    with refused(RequestError, "groups='sales'"):
        kb.search("amber", groups="sales")
    with refused(RequestError):
        kb.prefetch([], groups=["sales"])
    loaded = [kb.prefetch("amber", groups=groups).result() for groups in (None, ["sales"], [])]
    assert loaded[0] > loaded[1] > loaded[2] > 0


def test_answers_are_made_of_what_the_groups_may_read(make_kb):
    kb = make_kb()
    kb.add(DOCUMENTS)
    for groups, expected in READS:
        out = generate("amber", kb=kb, groups=groups, max_new_tokens=1)
        assert names(out.sources) == expected
    out = asyncio.run(agenerate("amber", kb=kb, groups=[], max_new_tokens=1))
    assert names(out.sources) == {"all"}
    # What there is beyond is not told, not even which fields it has.
    out = generate("amber", kb=kb, groups=[], where={"colour": 1}, max_new_tokens=1)
    assert out.finish_reason == "abstained"
    assert "colour" not in str(out.notes) and "groups may read" in out.notes[-1]
    with refused(RequestError):
        generate("amber", model=kb.model, documents=["amber"], groups=[])


def seen(kb):
    """What the KV of each document was encoded behind: documents by name."""
    ids = {entry.id: kb._catalog.ids_of_document(entry.id) for entry in kb.documents()}
    texts = {kb._catalog.tokens(own)[own[0]].content_id: name for name, own in ids.items()}
    rows = {name: kb._catalog.contexts(own, "neighbours") for name, own in ids.items()}
    return {
        name: {texts[it] for found in contexts.values() for it in found}
        for name, contexts in rows.items()
        if contexts
    }


EXPECTED = {
    "all": set(), "sales": {"all", "both"}, "legal": {"all", "both"}, "both": {"all"}
}  # fmt: skip


@pytest.mark.parametrize("by", ["vectors", "bm25"])
@pytest.mark.parametrize("top_n", [2, 3])
def test_kv_has_seen_only_what_all_its_readers_may_read(make_kb, embedder, by, top_n):
    vectors = {"embedder": embedder, "index": "exact"} if by == "vectors" else {}
    kb = make_kb(encoders=["neighbours"], neighbours=top_n, **vectors)
    kb.add(DOCUMENTS)
    assert seen(kb) == EXPECTED
    # A change of groups alone is a change of neighbours, both ways.
    kb.update([of("all", ["legal"])])
    assert seen(kb) == {
        "all": {"both", "legal"}, "sales": {"both"}, "legal": {"all", "both"}, "both": set()
    }  # fmt: skip
    kb.update([of("all")])
    assert seen(kb) == EXPECTED


def test_kv_that_saw_what_was_public_is_forgotten_with_the_change(make_kb, monkeypatch):
    kb = make_kb(encoders=["neighbours"], neighbours=3)
    kb.add([of("all"), of("sales", text="amber birch fjord"), of("legal", ["legal"])])
    assert seen(kb) == {"all": {"sales"}, "sales": {"all"}, "legal": {"all", "sales"}}
    monkeypatch.setattr(KnowledgeBase, "refresh", lambda self, **kwargs: None)
    (own,), (other,) = (kb._catalog.ids_of_document(it) for it in ("all", "sales"))
    content = kb._catalog.tokens([other])[other].content_id
    kb.update([of("sales", ["legal"], "amber birch fjord")])  # and nothing is encoded again yet
    assert seen(kb) == {"legal": {"all", "sales"}}
    # Another process that found the neighbours before records them after the change.
    assert kb._catalog.put_contexts("neighbours", [(own, "0" * 64, [content])]) == []
    assert "all" not in seen(kb)


def test_kv_of_a_copy_that_stays_in_a_group_is_forgotten(make_kb):
    kb = make_kb(encoders=["neighbours"], neighbours=3)
    same = "amber birch fjord"
    kb.add([of("all"), of("copy", text=same), of("secret", ["sales"], same)])
    assert seen(kb)["all"]
    kb.remove(["copy"])
    assert seen(kb) == {"all": set(), "secret": {"all"}}


@pytest.mark.parametrize(("said", "groups"), [("a,b", ("a", "b")), ("", ()), (None, None)])
def test_the_command_line_says_groups(said, groups):
    option = [] if said is None else ["--groups", said]
    args = parse(PROGRAM, ["ask", "Giso?", "--kb", "kb", *option])
    assert asked_of(args).groups == groups
