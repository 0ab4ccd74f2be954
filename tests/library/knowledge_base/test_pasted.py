"""A knowledge base of blocks as other stacks paste them: bare, tokenised and encoded alone."""

import numpy as np
import pytest
from refusal import refused

from jaxrag import Document, KnowledgeBase
from jaxrag.base.errors import KnowledgeBaseError
from jaxrag.reuse.encode import ChunkEncoding, ChunkInContext

TEXT = "\n\n".join(f"the mill of part {i} stands by the weir and " * 6 for i in range(9))


@pytest.fixture
def opened(text_model, tmp_path):
    """``opened(**settings)``: a new knowledge base, cut as LangChain cuts."""

    def call(**settings):
        given = {"chunk_by": "langchain:500:50", "encoders": ["isolated"]} | settings
        return KnowledgeBase.open(tmp_path / "kb", model=text_model, **given)

    return call


def blocks_of(kb, model):
    tokenizer = model.text_tokenizer()
    return [tokenizer.encode(hit.text) for hit in kb.search("mill", k=50)]


def held(kb, model, chunks):
    prefix = model.text_tokenizer().leading_ids
    return dict(kb.blocks_held(model, "isolated", prefix, chunks))


def test_blocks_are_held_as_they_are_encoded_alone(opened, text_model):
    with opened() as kb:
        kb.add([Document(id="a", text=TEXT)])
        assert kb.template.name == "bare"
        chunks = blocks_of(kb, text_model)
        assert len(chunks) >= 9
        found = held(kb, text_model, chunks)
        assert sorted(found) == list(range(len(chunks)))
        alone = ChunkEncoding(text_model, kb.store, np.zeros(0, np.int32), apart=True)
        for index, kv in found.items():
            [made] = alone.encode("isolated", {"0": ChunkInContext(chunks[index])})
            np.testing.assert_array_equal(kv.view(np.uint8), made.kv.view(np.uint8))


def test_what_a_document_holds_no_more_is_not_held(opened, text_model):
    with opened() as kb:
        kb.add([Document(id="a", text=TEXT)])
        chunks = blocks_of(kb, text_model)
        kb.remove(["a"])
        assert held(kb, text_model, chunks) == {}


def test_what_only_some_may_read_is_not_held(opened, text_model):
    with opened() as kb:
        kb.add([Document(id="a", text=TEXT, metadata={"groups": ["sales"]})])
        assert held(kb, text_model, blocks_of(kb, text_model)) == {}


def test_chunks_of_another_kind_are_not_held(opened, text_model):
    with opened(chunk_by="sentence") as kb:
        kb.add([Document(id="a", text=TEXT)])
        assert held(kb, text_model, [text_model.text_tokenizer().encode(TEXT)]) == {}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"chunk_tokens": 64}, "chunk_tokens=64"),
        ({"overlap": 0}, "overlap=0"),
        ({"template": "plain"}, "'plain'"),
    ],
)
def test_settings_that_such_chunks_have_not_are_refused(opened, settings, why):
    with refused(KnowledgeBaseError, why):
        opened(**settings)
