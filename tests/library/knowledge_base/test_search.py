"""Finding chunks: by words, vectors, both, or a plug-in; filters, re-ranking, lost vectors."""

import types

import numpy as np
import pytest
from refusal import refused

from jaxrag import generate
from jaxrag.base.errors import KnowledgeBaseError, RequestError, RetrievalError
from jaxrag.library.documents import Document
from jaxrag.library.embed import as_embedder
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.retrieve.base import Found

DOCUMENTS = [
    Document("a", "amber birch cedar", metadata={"year": 2019}),
    Document("b", "amber birch delta", metadata={"year": 2020}),
    Document("c", "ember fjord grove", metadata={"year": 2021}),
]


@pytest.fixture
def vector_kb(make_kb, embedder):
    kb = make_kb(embedder=embedder, index="exact")
    kb.add(DOCUMENTS)
    return kb


def names(hits):
    return [hit.document_id for hit in hits]


def test_modes(vector_kb, make_kb):
    assert names(vector_kb.search("delta", k=3, mode="bm25")) == ["b"]
    assert len(vector_kb.search("delta", k=3, mode="vector")) == 3
    hybrid = vector_kb.search("delta", k=3, mode="hybrid")
    assert names(hybrid)[0] == "b"
    assert [hit.chunk_id for hit in hybrid] == [
        hit.chunk_id for hit in vector_kb.search("delta", k=3)
    ]
    with refused(RequestError, "bm25"):
        vector_kb.search("delta", mode="words")
    plain = make_kb("plain")
    plain.add(DOCUMENTS)
    assert names(plain.search("delta")) == ["b"]
    with refused(RequestError):
        plain.search("delta", mode="hybrid")


class Plugin:
    """Knows chunks that are gone, and what it was asked."""

    def __init__(self, ranking):
        self.ranking = ranking
        self.asked = []

    def search(self, queries, k, *, where=None):
        self.asked.append((list(queries), k, where))
        return [[Found(i, 1.0 / (n + 1)) for n, i in enumerate(self.ranking)][:k] for _ in queries]


def from_langchain_like(chunks):
    """As a retriever of another framework is made: after the knowledge base was opened."""
    return Plugin(chunks.of_document("b"))


def test_a_retriever_answers_and_the_catalog_decides(tmp_path, make_kb, model):
    made = make_kb()
    made.add(DOCUMENTS)
    a, b, c = (made.search(word, k=1)[0].chunk_id for word in ("cedar", "delta", "grove"))
    made.close()
    plugin = Plugin([900, 901, 902, c, a, b])
    with KnowledgeBase.open(tmp_path / "kb", model, retriever=plugin) as kb:
        assert names(kb.search("anything", k=2)) == ["c", "a"]
        assert plugin.asked[0] == (["anything"], 2, None)
        assert plugin.asked[-1][1] > 2, "places of chunks that are gone were not filled"
        where = {"year": {"$lt": 2021}}
        assert names(kb.search("anything", k=5, where=where)) == ["a", "b"]
        assert plugin.asked[-1][2] == where
        assert names(kb.search("delta", mode="bm25")) == ["b"]
        kb.retriever = from_langchain_like(kb.chunks)
        assert names(kb.search("anything")) == ["b"]
    with refused(RetrievalError):
        KnowledgeBase.open(tmp_path / "kb", retriever="nobody's")


def test_a_reranker_sees_more_and_decides_the_order(tmp_path, make_kb, model):
    made = make_kb()
    made.add(DOCUMENTS)
    made.close()
    seen = []

    def last_letter(question, texts):
        seen.append((question, list(texts)))
        return [ord(text[-1]) for text in texts]

    with KnowledgeBase.open(tmp_path / "kb", model, reranker=last_letter) as kb:
        (hit,) = kb.search("amber", k=1)
        assert (hit.document_id, hit.score) == ("a", ord("r"))
        ((question, texts),) = seen
        assert question == "amber"
        assert sorted(texts) == ["amber birch cedar", "amber birch delta"]


def test_an_embedder_is_added_later_and_an_interrupted_run_goes_on(
    tmp_path, make_kb, model, embedder
):
    kb = make_kb()
    kb.add(DOCUMENTS)
    kb.close()
    with KnowledgeBase.open(tmp_path / "kb", model, embedder=embedder, index="exact") as kb:
        assert names(kb.search("delta")) == ["b"]  # still by words
        with refused(RequestError):
            kb.search("delta", mode="vector")
        first = kb.search("cedar", k=1)[0]
        kb._vectors.add([first.chunk_id], [first.text])  # as far as a killed run came
    with KnowledgeBase.open(tmp_path / "kb", embedder=embedder, mode="rw") as kb:
        assert kb.embed() == 2
        assert kb.embed() == 0
        assert len(kb.search("delta", k=3, mode="vector")) == 3


def test_adding_makes_the_missing_vectors_first(tmp_path, make_kb, model, embedder):
    make_kb().add(DOCUMENTS)
    with KnowledgeBase.open(tmp_path / "kb", model, embedder=embedder, index="exact") as kb:
        kb.add(["larch"])
        assert len(kb.search("larch", k=9, mode="vector")) == 4


def test_a_writer_from_before_the_embedder_is_refused(tmp_path, make_kb, model, embedder):
    before = make_kb()
    KnowledgeBase.open(tmp_path / "kb", model, embedder=embedder, index="exact").close()
    with refused(KnowledgeBaseError):
        before.add(DOCUMENTS)


def test_another_embedder_or_none_at_hand_is_refused(vector_kb, model, embedder):
    other = as_embedder(lambda texts: np.ones((len(texts), 64), np.float32), name="ones")
    with refused(KnowledgeBaseError):
        KnowledgeBase.open(vector_kb.path, model, embedder=other)
    with refused(KnowledgeBaseError, "index=exact"):
        KnowledgeBase.open(vector_kb.path, model, embedder=embedder, index="lance")
    with KnowledgeBase.open(vector_kb.path, model) as kb:
        with refused(KnowledgeBaseError):
            kb.search("amber")
        with refused(KnowledgeBaseError):
            kb.add(["more amber"])
        assert names(kb.search("cedar", mode="bm25")) == ["a"]
        assert len(kb.documents()) == 3
        kb.remove(["a"])  # needs no embedder


def test_an_index_without_an_embedder_or_of_no_kind_is_refused(tmp_path, model, embedder):
    with refused(KnowledgeBaseError):
        KnowledgeBase.open(tmp_path / "kb", model, index="exact")
    with refused(RetrievalError):
        KnowledgeBase.open(tmp_path / "kb", model, embedder=embedder, index="annoy")
    assert not (tmp_path / "kb").exists()


def test_vectors_of_chunks_that_left_are_removed_after_a_crash(
    tmp_path, vector_kb, model, embedder
):
    (left,) = vector_kb._catalog.remove(["a"])  # killed before the index heard of it
    assert left in vector_kb._vectors.index.ids()
    assert "a" not in names(vector_kb.search("amber birch cedar", k=3, mode="vector"))
    vector_kb.close()
    with KnowledgeBase.open(tmp_path / "kb", model, embedder=embedder) as kb:
        assert left not in kb._vectors.index.ids()
        assert kb._catalog.leaving() == []


def test_vectors_of_a_commit_that_never_came_go_with_gc(vector_kb):
    lost = list(vector_kb._catalog.reserve(1))
    vector_kb._vectors.add(lost, ["amber birch cedar"])
    assert "a" in names(vector_kb.search("amber birch cedar", k=1, mode="vector"))
    assert vector_kb.gc().vectors == 0, "its writer may still be at work"
    vector_kb._catalog.reserve(1)
    assert vector_kb.gc(grace_seconds=0, dry_run=True).vectors == 1
    assert vector_kb.gc(grace_seconds=0).vectors == 1
    assert lost[0] not in vector_kb._vectors.index.ids()


class LangChainLike:
    """What a LangChain retriever has: ``invoke``, which gives documents."""

    def invoke(self, query):
        return [types.SimpleNamespace(page_content="amber birch delta", metadata={}, id=None)]


def test_a_retriever_of_another_framework_is_set_as_it_is(make_kb):
    kb = make_kb()
    kb.add(DOCUMENTS)
    kb.retriever = LangChainLike()
    assert names(kb.search("anything")) == ["b"]
    kb.retriever = object()
    with refused(RetrievalError):
        kb.search("anything")


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ({"year": {"$gte": 2090}}, None),  # one that could match, and does not
        ({"year": {"$gte": "2020"}}, "'year' is a number in every document that has it, and comp"),
        ({"code": 7}, "'code' is text in every document that has it, and compared with 7: numbers"),
        ({"tags": "sea"}, None),
        ({"colour": "red"}, "no document has 'colour' in its metadata, which has code, tags, year"),
        ({"colour": {"$ne": "red"}}, None),
    ],
    ids=repr,
)
def test_a_filter_that_nothing_can_match_says_why(make_kb, where, why):
    kb = make_kb()
    kb.add([*DOCUMENTS, Document("d", "iris", metadata={"code": "7", "tags": ["sea", "salt"]})])
    found = kb.why_nothing(where)
    assert len(found) == (why is not None)
    assert why is None or found[0].startswith(why)
    if why is not None:
        assert kb.documents(where) == []


def test_an_answer_without_chunks_says_what_is_wrong_with_the_filter(make_kb):
    kb = make_kb()
    assert kb.why_nothing({"year": 1}) == [
        "no document has 'year' in its metadata, which has no field at all"
    ]
    kb.add(DOCUMENTS)
    out = generate("amber?", kb=kb, where={"year": "2019"}, max_new_tokens=1, unanswerable="ask")
    assert out.notes[0] == "no chunk was found for the question; it was asked without any"
    assert out.notes[1].startswith("where: 'year' is a number in every document that has it")
    assert len(generate("amber?", kb=kb, where={"year": 2019}, max_new_tokens=1).sources) == 1
