"""Retrievers of the real LangChain and LlamaIndex; chunks are known by id, document or text."""

import types

import pytest
from refusal import refused

from jaxrag.base.errors import RetrievalError
from jaxrag.library.retrieve.adapters import adopted, from_langchain, from_llamaindex
from jaxrag.library.retrieve.base import Chunks

TEXTS = {1: "The lamp  burns oil.", 2: "It was lit in 1871.", 3: "The sea\nis wide.", 4: "Rain."}
DOCUMENTS = {"lighthouse": [1, 2], "coast": [3], "weather": [4]}


def by_words(text, k):
    shared = {i: len(set(text.split()) & set(own.split())) for i, own in TEXTS.items()}
    ranked = sorted((i for i in shared if shared[i]), key=lambda i: -shared[i])
    return [types.SimpleNamespace(chunk_id=i, text=TEXTS[i]) for i in ranked[:k]]


@pytest.fixture
def chunks():
    return Chunks(
        lambda ids: {i: TEXTS[i] for i in ids if i in TEXTS},
        lambda document_id: DOCUMENTS.get(document_id, []),
        by_words,
    )


def test_chunks_with_a_text(chunks):
    assert chunks.with_text("The sea is wide.") == [3]
    assert chunks.with_text("It was lit") == [2]
    assert chunks.with_text("We know: It was lit in 1871. So we do.") == [2]
    assert chunks.with_text("It was never dark.") == []
    assert chunks.with_text("  ") == []


def langchain(documents):
    module = pytest.importorskip("langchain_core.retrievers")
    documents_module = pytest.importorskip("langchain_core.documents")

    class Fixed(module.BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            assert query == "who?"
            return [
                documents_module.Document(page_content=text, metadata=metadata, id=document_id)
                for text, metadata, document_id in documents
            ]

    return Fixed()


def llamaindex(nodes):
    module = pytest.importorskip("llama_index.core.retrievers")
    schema = pytest.importorskip("llama_index.core.schema")

    class Fixed(module.BaseRetriever):
        def _retrieve(self, query_bundle):
            assert query_bundle.query_str == "who?"
            return [
                schema.NodeWithScore(
                    node=schema.TextNode(
                        text=text,
                        metadata=metadata,
                        relationships={}
                        if document_id is None
                        else {
                            schema.NodeRelationship.SOURCE: schema.RelatedNodeInfo(
                                node_id=document_id
                            )
                        },
                    ),
                    score=score,
                )
                for text, metadata, document_id, score in nodes
            ]

    return Fixed()


def test_langchain(chunks):
    retriever = from_langchain(
        langchain(
            [
                ("whatever", {"chunk_id": 4}, None),
                ("It was lit in 1871.", {"document_id": "lighthouse"}, None),
                ("The sea is wide.", {"chunk_id": "theirs-7"}, "their id"),
                ("something of the lamp", {}, "lighthouse"),
            ]
        ),
        chunks,
    )
    (found,) = retriever.search(["who?"], 10)
    assert found == [(4, 1.0), (2, 1 / 2), (3, 1 / 3), (1, 1 / 4)]
    assert retriever.search(["who?"], 2) == [found[:2]]


def test_llamaindex(chunks):
    retriever = from_llamaindex(
        llamaindex(
            [
                ("other words", {"chunk_id": "2"}, None, 0.75),
                ("The sea is wide.", {}, None, 0.5),
                ("of the lamp", {}, "lighthouse", None),
                ("nobody knows this", {}, None, 0.1),
            ]
        ),
        chunks,
    )
    assert retriever.search(["who?"], 10) == [[(2, 0.75), (3, 0.5), (1, 1 / 3)]]


def test_texts_that_are_no_chunks_are_an_error(chunks):
    foreign = [("quite unknown", {"chunk_id": 99, "document_id": "other"}, None)]
    with refused(RetrievalError, "'who?'"):
        from_langchain(langchain(foreign), chunks).search(["who?"], 3)
    assert from_langchain(langchain([]), chunks).search(["who?"], 3) == [[]]


def test_what_is_no_retriever_is_refused(chunks):
    with refused(RetrievalError):
        adopted({}, chunks)
