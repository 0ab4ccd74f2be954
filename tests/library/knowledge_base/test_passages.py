"""Passages that neighbours are found among, as a knowledge base of the same would find them."""

import numpy as np
import pytest

from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base.neighbours import GivenChunk
from jaxrag.library.knowledge_base.passages import PassageCorpus
from jaxrag.library.retrieve.base import searched_text
from jaxrag.models.text.prompts import template_named

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "larch"]


@pytest.fixture(scope="module")
def passages():
    """Titles and texts; two are the same text under other titles."""
    draws = (np.random.default_rng(seed).choice(WORDS, 6) for seed in range(30))
    found = [(f"Page {n}", " ".join(words)) for n, words in enumerate(draws)]
    return (*found, ("Page 30", found[0][1]))


def given(corpus, title, text):
    tokenizer = corpus.model.text_tokenizer()
    ids = corpus.template.chunk_ids(tokenizer, tokenizer.encode(text), title)
    return GivenChunk(searched_text(title, text), ids)


def test_neighbours_are_those_of_a_knowledge_base_of_the_passages(make_kb, passages):
    kb = make_kb(encoders=["neighbours"], neighbours=4, chunk_tokens=200)
    kb.add([Document(f"{n}", text, title=title) for n, (title, text) in enumerate(passages)])
    corpus = PassageCorpus("pages", passages, kb.model, kb.template, top_n=4)
    room = kb.config.max_positions - len(kb.template.prefix_ids(kb.model.tokenizer))
    chunks = [given(corpus, *passage) for passage in passages]
    chunk_ids = [kb.chunks.of_document(f"{n}")[0] for n in range(len(passages))]
    for placed, wanted in zip(
        corpus.behind(chunks, room), kb.placed(chunk_ids, "neighbours"), strict=True
    ):
        assert len(placed.neighbours) == 4
        assert [it.tolist() for it in placed.neighbours] == [
            it.tolist() for it in wanted.neighbours
        ]
    assert corpus.about == {
        "from": "corpus", "name": "pages", "passages": 31, "by": "bm25", "top_n": 4,
    }  # fmt: skip


def test_a_passage_is_cut_as_its_chunk_is_and_the_list_ends_where_the_room_does(
    text_model, passages
):
    template = template_named("plain")
    corpus = PassageCorpus("pages", passages, text_model, template, chunk_tokens=3)
    tokenizer = text_model.text_tokenizer()
    ids = [template.chunk_ids(tokenizer, tokenizer.encode(text)[:3], "") for _, text in passages]
    [placed] = corpus.behind([given(corpus, "", passages[4][1])], 1000)
    assert {it.tobytes() for it in placed.neighbours} <= {it.tobytes() for it in ids}
    room = len(placed.ids) + sum(map(len, placed.neighbours[:2]))
    [less] = corpus.behind([given(corpus, "", passages[4][1])], room)
    assert len(less.neighbours) == 2
    [own] = PassageCorpus("one", passages[:1], text_model, template).behind(
        [given(corpus, *passages[0])], 1000
    )
    assert own.neighbours == ()


@pytest.mark.parametrize("size", [None, 40])
def test_a_passage_under_another_number_is_the_same(text_model, size):
    """Also where the longer number pushes its last words out."""
    template = template_named("plain")
    words = ("salt wells of the valley north", "salt wells of the hills south")
    bodies = tuple(("", f"Passage {n}:{text} and tea bricks") for n, text in enumerate(words, 1))
    corpus = PassageCorpus("p", bodies, text_model, template, size, r"Passage \d+:")
    tokenizer = text_model.text_tokenizer()
    ids = tokenizer.encode(f"Passage 111:{words[0]} and tea bricks")[:size]
    chunk = GivenChunk(tokenizer.decode(ids), template.chunk_ids(tokenizer, ids, ""))
    [placed] = corpus.behind([chunk], 1000)
    [other] = placed.neighbours
    expected = template.chunk_ids(tokenizer, tokenizer.encode(bodies[1][1])[:size], "")
    assert other.tolist() == expected.tolist()


def test_passages_may_be_token_ids(text_model):
    template = template_named("plain")
    encode = text_model.text_tokenizer().encode
    bodies = tuple(("", encode(text)) for text in ("amber birch", "amber cedar", "delta ember"))
    corpus = PassageCorpus("ids", bodies, text_model, template)
    [placed] = corpus.behind([given(corpus, "", "amber birch")], 1000)
    [other] = placed.neighbours
    assert other.tolist() == given(corpus, "", "amber cedar").ids.tolist()
