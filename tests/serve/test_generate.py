"""The public ``generate``: arguments, batches, streams, seeds, sources and the account."""

import copy
import dataclasses
import json

import numpy as np
import pytest
from refusal import refused

from jaxrag import KnowledgeBase, Sampling, generate
from jaxrag.base.errors import ConfigError, RequestError, TokenizerError
from jaxrag.engine.engine import engine_of
from jaxrag.kv.cache import PAGE
from jaxrag.library.documents import Document
from jaxrag.serve.conversation import Source

DOCUMENTS = [
    Document("salt", "The salt wells of Yanjing are worked by hand.", title="Salt"),
    Document("bridge", "A bamboo bridge crosses the river at the wells.", title="Bridge"),
    Document("tea", "Tea bricks were traded for salt and for wool."),
]
QUESTION = "Who works the salt wells?"
WARM = Sampling(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def kb_dir(tmp_path_factory, text_model):
    path = tmp_path_factory.mktemp("kb")
    with KnowledgeBase.open(path, text_model, template="plain", chunk_tokens=64) as kb:
        kb.add(DOCUMENTS)
    return path


@pytest.fixture(scope="module")
def kb(kb_dir, text_model):
    with KnowledgeBase.open(kb_dir, text_model) as opened:
        yield opened


@pytest.fixture(scope="module")
def bare_model(text_model):
    """A model without a tokenizer."""
    return dataclasses.replace(text_model, tokenizer=None)


def num_free(model):
    """Pages of the pool that hold nothing, once nothing is in flight."""
    return engine_of(model).call(lambda runner: runner.cache.allocator.num_free)


def test_result_of_retrieval(kb, text_model):
    result = generate(QUESTION, kb=kb, max_new_tokens=9)
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 9
    assert result.text == text_model.tokenizer.decode(result.token_ids)
    assert result.method == "turborag"
    hits = kb.search(QUESTION, 5)
    assert [s.document_id for s in result.sources] == [hit.document_id for hit in hits]
    text = DOCUMENTS[0].text
    assert result.sources[0] == Source(
        "salt", 0, None, hits[0].score, text, end=len(text), number=1
    )
    tokens = sum(len(kb.template.chunk_ids(text_model.tokenizer, h.ids, h.title)) for h in hits)
    assert result.counts == {"reused": tokens, "recomputed": 0, "encoded": 0}
    timings = result.timings
    assert list(timings) == ["retrieve", "wait", "load", "compile", "prefill", "ttft", "per_token"]
    assert min(value for name, value in timings.items() if name != "compile") > 0
    parts = timings["retrieve"] + timings["wait"] + timings["load"]
    parts += timings["compile"] + timings["prefill"]
    assert timings["ttft"] <= parts + 1e-6  # compiling for later tokens is beyond it
    assert timings["ttft"] >= parts - timings["compile"] - 1e-6
    assert json.loads(json.dumps(result.to_dict())) == result.to_dict()


def test_best_chunk_stands_last_where_the_template_says_so(kb):
    template = dataclasses.replace(kb.template, chunk_order="best_last")
    found = generate(QUESTION, kb=kb, template=template, max_new_tokens=1).sources
    scores = [source.score for source in found]
    assert scores == sorted(scores)
    assert [source.number for source in found] == [*range(len(found), 0, -1)]  # [1] is the best
    assert len(set(scores)) > 1


def test_full_attention_counts_everything_as_recomputed_and_costs_more(kb):
    reuse = generate(QUESTION, kb=kb, max_new_tokens=2)
    full = generate(QUESTION, kb=kb, method="full_attention", max_new_tokens=2)
    assert full.counts == {"reused": 0, "recomputed": reuse.counts["reused"], "encoded": 0}
    assert (reuse.recomputed, full.recomputed) == (0, 1)
    assert isinstance(reuse.flops, int)
    assert 0 < reuse.flops < full.flops


@pytest.mark.parametrize("method", ["cache_craft", "epic"])
def test_a_method_with_a_budget_of_its_own_says_what_share_it_computed(kb, method):
    result = generate(QUESTION, kb=kb, method=method, max_new_tokens=1)
    counts = result.counts
    assert result.to_dict()["recomputed"] == counts["recomputed"] / sum(counts.values())
    again = generate(QUESTION, kb=kb, method=method, max_new_tokens=1)  # nothing to encode now
    assert 0 < again.recomputed < 1


def test_documents_are_chunks_kept_in_memory(text_model):
    documents = ["first one", "second one", "first one"]
    first = generate("one?", documents=documents, model=text_model, max_new_tokens=3)
    again = generate("one?", documents=documents, model=text_model, max_new_tokens=3)
    assert [s.text for s in first.sources] == documents
    assert [s.document_id for s in first.sources] == [f"documents[{i}]" for i in range(3)]
    assert {s.score for s in first.sources} == {None}
    assert first.counts["encoded"] == sum(first.counts.values()) > 0
    assert "2 chunk(s)" in first.notes[-1]  # the prefix may be there from another test
    assert again.counts["encoded"] == 0
    assert again.notes == []
    assert again.token_ids == first.token_ids
    assert again.flops < first.flops


def test_documents_with_a_knowledge_base_are_used_instead_of_retrieval_and_kept(kb):
    result = generate(QUESTION, kb=kb, documents=["wool"], max_new_tokens=1)
    assert [s.document_id for s in result.sources] == ["documents[0]"]
    assert "and stored" in result.notes[0]


@pytest.mark.parametrize("sampling", [None, WARM], ids=["greedy", "sampled"])
def test_a_batch_is_the_questions_one_at_a_time(kb, sampling):
    questions = [QUESTION, "What crosses the river?", "Tea?", "Wool", "What was traded for salt"]
    batch = generate(questions, kb=kb, sampling=sampling, max_new_tokens=10, batch_size=4)
    for question, together in zip(questions, batch, strict=True):
        alone = generate(question, kb=kb, sampling=sampling, max_new_tokens=10)
        assert together.token_ids == alone.token_ids
        assert together.sources == alone.sources
        assert sum(together.counts.values()) == sum(alone.counts.values())


def test_every_question_may_have_its_own_sampling(kb):
    seeds = [Sampling(temperature=1.0, seed=seed) for seed in (1, 2, 1)]
    one, two, three = generate([QUESTION] * 3, kb=kb, sampling=seeds, max_new_tokens=10)
    assert one.token_ids == three.token_ids != two.token_ids
    alone = generate(QUESTION, kb=kb, sampling=seeds[1], max_new_tokens=10)
    assert alone.token_ids == two.token_ids
    greedy, _ = generate([QUESTION] * 2, kb=kb, sampling=[Sampling(), seeds[0]], max_new_tokens=10)
    assert greedy.token_ids == generate(QUESTION, kb=kb, max_new_tokens=10).token_ids


@pytest.mark.parametrize("sampling", [None, WARM], ids=["greedy", "sampled"])
def test_a_stream_is_the_answer_in_pieces(kb, sampling):
    whole = generate(QUESTION, kb=kb, sampling=sampling, max_new_tokens=10)
    stream = generate(QUESTION, kb=kb, sampling=sampling, max_new_tokens=10, stream=True)
    assert stream.result is None
    pieces = list(stream)
    assert len(pieces) > 1
    assert all(pieces)
    assert "".join(pieces) == stream.result.text == whole.text
    assert stream.result.token_ids == whole.token_ids
    assert stream.result.counts == whole.counts


def test_a_stream_that_is_left_gives_its_pages_back(kb, text_model):
    generate(QUESTION, kb=kb, max_new_tokens=1)
    free = num_free(text_model)
    stream = generate(QUESTION, kb=kb, max_new_tokens=400, stream=True)
    pieces = iter(stream)
    next(pieces)
    assert num_free(text_model) < free
    pieces.close()
    del pieces, stream
    assert num_free(text_model) == free


def test_end_of_sequence_ends_the_answer(kb, monkeypatch):
    ids = generate(QUESTION, kb=kb, max_new_tokens=10).token_ids
    tokenizer = copy.copy(kb.model.tokenizer)
    tokenizer.eos_ids = (ids[4],)
    monkeypatch.setattr(kb.model, "tokenizer", tokenizer)
    result = generate(QUESTION, kb=kb, max_new_tokens=10)
    assert result.token_ids == ids[: ids.index(ids[4])]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("kind", [list, tuple, np.array], ids=["list", "tuple", "array"])
def test_token_ids_need_no_tokenizer(bare_model, kind):
    documents = [kind([5, 6, 7]), kind([8])]
    one = generate(kind([9, 10]), documents=documents, model=bare_model, max_new_tokens=3)
    assert (one.text, len(one.token_ids)) == ("", 3)
    assert [s.text for s in one.sources] == ["", ""]
    assert sum(one.counts.values()) == 4
    batch = generate(
        [kind([9, 10]), kind([11])], documents=documents, model=bare_model, max_new_tokens=3
    )
    assert batch[0].token_ids == one.token_ids


def test_a_prompt_larger_than_the_cache_is_refused(bare_model):
    tight = dataclasses.replace(bare_model, cache_tokens=20 * PAGE)
    with refused(RequestError, "320"):
        generate([5] * 300, documents=[[6] * 40], model=tight, max_new_tokens=4)
    assert num_free(tight) == 20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ""),
        ({"documents": ["x"]}, ""),
        ({"documents": []}, ""),
        ({"kb": True, "model": "other"}, ""),
        ({"kb": True, "method": "turborga"}, "full_attention"),
        ({"kb": True, "k": 0}, "k=0"),
        ({"kb": True, "max_new_tokens": 0}, "max_new_tokens=0"),
        ({"kb": True, "batch_size": 0}, "batch_size=0"),
        ({"kb": True, "stop": "word"}, "stop='word'"),
        ({"kb": True, "stop": [""]}, ""),
        ({"kb": True, "documents": ["x", " "]}, "1"),
        ({"kb": True, "documents": ["\ud800"]}, "0"),
        ({"kb": True, "documents": [[600]]}, ""),
        ({"kb": True, "max_new_tokens": 1024}, "1024"),
        ({"kb": True, "documents": ["long " * 600]}, ""),
    ],
)
def test_bad_arguments_are_refused(kb, text_model, bare_model, arguments, words):
    given = {"kb": kb, "other": bare_model}
    arguments = {
        name: given[name if name == "kb" else value] if name in ("kb", "model") else value
        for name, value in arguments.items()
    }
    free = num_free(text_model)
    with refused(RequestError, words):
        generate(QUESTION, **arguments)
    assert num_free(text_model) == free


@pytest.mark.parametrize("question", ["", " \n", "\ud800x", [""], ["fine", ""]])
def test_bad_questions_are_refused(kb, question):
    with refused(RequestError):
        generate(question, kb=kb)
    with refused(RequestError):
        generate(question, kb=kb, documents=["x"])


def test_text_and_token_ids_are_told_apart(kb, bare_model):
    with refused(RequestError):
        generate([5, 6], kb=kb)
    with refused(TokenizerError):
        generate("text", documents=[[5]], model=bare_model)
    with refused(TokenizerError):
        generate([5], documents=["text"], model=bare_model)
    with refused(TokenizerError):
        generate([5], documents=[[5]], model=bare_model, stop=["x"])


def test_knowledge_base_without_a_model_answers_nothing(kb_dir):
    with KnowledgeBase.open(kb_dir) as kb, refused(RequestError):
        generate(QUESTION, kb=kb)


def test_unknown_template_is_refused(kb):
    with refused(ConfigError):
        generate(QUESTION, kb=kb, template="nonsense")
