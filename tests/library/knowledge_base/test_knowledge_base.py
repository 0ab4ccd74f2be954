"""A knowledge base: ingest, resume, replace, search, refuse."""

import dataclasses
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import (
    DocumentError,
    KnowledgeBaseError,
    RequestError,
    StoreError,
    TokenizerError,
)
from jaxrag.library.documents import BadDocument, Document
from jaxrag.library.knowledge_base import KnowledgeBase, ingest
from jaxrag.library.options import KnowledgeBaseOptions
from jaxrag.models.model import random_model
from jaxrag.models.text.prompts import TEMPLATES
from jaxrag.reuse.encode import chunk_encoding, chunk_key, encode_chunks, encode_for_store

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "larch"]


def test_every_chunk_is_found_in_the_store_with_the_kv_of_its_tokens(make_kb, model, text_of):
    kb = make_kb(stored="native")
    report = kb.add([Document("a", text_of(1)), Document("b", text_of(2), title="Bee")])
    assert (report.documents, report.replaced, report.unchanged) == (2, 0, 0)
    assert report.skipped == ()
    assert report.encoded == report.chunks == sum(d.num_chunks for d in kb.documents()) > 6
    assert report.encoded_tokens == report.tokens
    hits = kb.search(" ".join(WORDS), k=100)
    assert len(hits) == report.chunks
    prefix = kb.template.prefix_ids(model.tokenizer)
    for hit in hits:
        ids = kb.template.chunk_ids(model.tokenizer, hit.ids, hit.title)
        key = chunk_key(kb.store.fingerprint, model, "isolated", prefix, ids)
        stored = kb.store.get(key)
        ((_, kv),) = encode_chunks(model, "isolated", prefix, [ids])
        np.testing.assert_allclose(stored, kv, rtol=1e-4, atol=1e-5)
        assert model.tokenizer.decode(hit.ids) == hit.text


def test_hits_say_where_they_come_from(kb, tmp_path, text_of):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "note.md").write_text("# On quartz\n" + text_of(3) + " quartz vein")
    kb.add([tmp_path / "in", text_of(4)])
    hit = kb.search("Where is the quartz vein?", k=1)[0]
    assert (hit.document_id, hit.title) == ("note.md", "On quartz")
    assert hit.file == str(tmp_path / "in" / "note.md")
    assert "quartz vein" in hit.text
    assert hit.chunk_index == kb.documents()[0].num_chunks - 1
    assert hit.score > 0
    assert hit.ids.dtype == np.int32


def test_bad_documents_cost_only_themselves(kb, text_of):
    good = [Document(f"good{n}", text_of(n, 5)) for n in range(99)]
    report = kb.add([*good[:50], BadDocument("bad.txt:3", "malformed"), "  ", *good[50:]])
    assert report.documents == len(kb.documents()) == 99
    assert [bad.source for bad in report.skipped] == ["bad.txt:3", "documents[51]"]


def test_id_given_twice_in_one_run_is_reported(kb):
    report = kb.add([Document("a", "first"), Document("a", "second"), {"text": "x", "id": "b"}])
    assert report.documents == 2
    assert [bad.source for bad in report.skipped] == ["a"]
    assert kb.search("second", k=1) == []


def test_id_of_another_file_is_refused_and_of_a_moved_file_follows(kb, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "readme.txt").write_text(f"{folder} cobalt")
    kb.add([tmp_path / "one"])
    report = kb.add([tmp_path / "two"])
    assert report.documents == 0
    assert "one/readme.txt" in report.skipped[0].reason
    (tmp_path / "one").rename(tmp_path / "moved")
    assert kb.add([tmp_path / "moved"]).documents == 1
    assert kb.documents()[0].file == str(tmp_path / "moved" / "readme.txt")


@pytest.mark.parametrize("documents", ["text", Path("x"), {"text": "x"}, [3], [b"x"], [["x"]]])
def test_what_is_no_list_of_documents_is_refused_before_work(kb, documents, encoded):
    with refused(DocumentError):
        kb.add(documents)
    assert encoded == []


def test_interrupted_run_is_continued(tmp_path, model, monkeypatch, text_of):
    """Killed between two chunks of the second batch: the first batch is there, nothing is lost."""
    monkeypatch.setattr(ingest, "BATCH_TOKENS", 300)
    documents = [Document(str(n), text_of(n)) for n in range(4)]
    yielded = 0

    def dying(*arguments, **options):
        nonlocal yielded
        for item in encode_for_store(*arguments, **options):
            if yielded == 7:
                raise KeyboardInterrupt
            yielded += 1
            yield item

    kb = KnowledgeBase.open(tmp_path, model, template="plain", chunk_tokens=100)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(chunk_encoding, "encode_for_store", dying)
        kb.add(documents)
    kb.close()
    with KnowledgeBase.open(tmp_path, model) as kb:
        committed = kb.documents()
        assert 0 < len(committed) < 4
        assert {hit.document_id for hit in kb.search(" ".join(WORDS), k=100)} == {
            document.id for document in committed
        }
        report = kb.add(documents)
        assert report.documents == 4
        assert report.unchanged == len(committed)
        assert report.encoded == report.chunks - 7


def test_second_encoder_is_added_to_the_documents_that_are_there(tmp_path, model, text_of):
    documents = [Document("a", text_of(1))]
    with KnowledgeBase.open(tmp_path, model, chunk_tokens=100, template="block_attention") as kb:
        first = kb.add(documents)
    with KnowledgeBase.open(tmp_path, model, encoders=["after_prefix"]) as kb:
        assert kb.encoders == ("isolated", "after_prefix")
        second = kb.add(documents)
        assert (second.encoded, second.reused) == (first.chunks, first.chunks)
        assert (second.unchanged, second.replaced) == (1, 0)
        assert kb.stats()["encoders"] == {"isolated": first.chunks, "after_prefix": first.chunks}
        assert kb.add(documents).unchanged == 1
        assert kb.stats()["stored"]["chunks"] == 2 * first.chunks + 1  # the prefix


def test_everything_is_remembered_and_search_needs_no_model(tmp_path, model):
    with KnowledgeBase.open(
        tmp_path / "kb", model, template="block_attention", chunk_tokens=90, overlap=7
    ) as kb:
        kb.add([Document("a", "basalt and gneiss")])
    with KnowledgeBase.open((tmp_path / "kb").as_uri()) as kb:
        assert kb.template == TEMPLATES["block_attention"]
        assert (kb.chunking.chunk_tokens, kb.chunking.overlap) == (90, 7)
        assert kb.model is None
        assert kb.search("gneiss")[0].document_id == "a"
        assert [hit.document_id for hit in kb.search("gneiss", k=2**70)] == ["a"]
        stats = kb.stats()
        assert json.loads(json.dumps(stats)) == stats
        assert (stats["documents"], stats["chunks"]) == (1, 1)
        assert stats["stored"]["chunks"] == 2  # one of them the template's prefix
        assert stats["model_digest"] == model.digest
        with refused(KnowledgeBaseError):
            kb.add(["more"])


def test_foreign_model_tokenizer_template_and_sizes_are_refused(tmp_path, model, config):
    KnowledgeBase.open(tmp_path, model, chunk_tokens=100).close()
    others = {
        "belongs to model": random_model(config, seed=1, tokenizer=model.tokenizer),
        "fingerprint": dataclasses.replace(
            model, config=dataclasses.replace(config, norm_eps=1e-6)
        ),
        "tokenizer": dataclasses.replace(model, tokenizer=None),
    }
    for reason, other in others.items():
        with refused(KnowledgeBaseError, reason):
            KnowledgeBase.open(tmp_path, other)
    for settings in ({"template": "block_attention"}, {"chunk_tokens": 99}, {"overlap": 1}):
        with refused(KnowledgeBaseError):
            KnowledgeBase.open(tmp_path, model, **settings)


def test_what_cannot_be_made_is_refused_and_leaves_nothing(tmp_path, model):
    target = tmp_path / "kb"
    with refused(KnowledgeBaseError):
        KnowledgeBase.open(target)
    with pytest.raises(TokenizerError):
        KnowledgeBase.open(target, dataclasses.replace(model, tokenizer=None))
    with refused(KnowledgeBaseError):
        KnowledgeBase.open(target, model, chunk_tokens=512)
    with refused(RequestError):
        KnowledgeBase.open(target, model, chunk_tokens=50, encoders=["nonsense"])
    with refused(KnowledgeBaseError):
        KnowledgeBase.open("s3://bucket/kb", model)
    assert not target.exists()
    target.write_text("a file")
    with refused(KnowledgeBaseError):
        KnowledgeBase.open(target, model)


def test_title_too_long_for_the_context_skips_the_document(tmp_path, model):
    with KnowledgeBase.open(tmp_path, model, chunk_tokens=100, template="block_attention") as kb:
        report = kb.add([Document("a", "text", title="T" * 600), Document("b", "text")])
        assert report.documents == 1
        assert "context" in report.skipped[0].reason


@pytest.mark.parametrize(("question", "k"), [("", 5), (" \n", 5), (None, 5), ("what", 0)])
def test_bad_search_is_refused(kb, question, k):
    with refused(RequestError):
        kb.search(question, k)


def test_closed_knowledge_base_says_so(kb):
    kb.close()
    with refused(StoreError, "catalog.sqlite"):
        kb.search("basalt")


def test_question_without_words_finds_nothing(kb):
    kb.add(["basalt"])
    assert kb.search("?!") == []


def test_progress_draws_nothing_where_there_is_no_terminal(kb, capfd, text_of):
    kb.add([Document("a", text_of(1))], progress=True)
    assert capfd.readouterr() == ("", "")


def test_opened_for_reading_nothing_changes(tmp_path, model):
    with refused(KnowledgeBaseError):
        KnowledgeBase.open(tmp_path / "kb", model, mode="r")
    assert not (tmp_path / "kb").exists()
    with KnowledgeBase.open(tmp_path / "kb", model, chunk_tokens=100) as kb:
        kb.add([Document("a", "basalt")])
    with refused(KnowledgeBaseError):
        KnowledgeBase.open(tmp_path / "kb", model, encoders=["after_prefix"], mode="r")
    with refused(KnowledgeBaseError):
        KnowledgeBase.open(tmp_path / "kb", model, mode="w")
    with KnowledgeBase.open(tmp_path / "kb", model, mode="r") as kb:
        assert kb.search("basalt")[0].document_id == "a"
        assert not kb.store.writable
        with refused(KnowledgeBaseError):
            kb.add([Document("b", "gneiss")])
        assert kb.encoders == ("isolated",)


def test_an_opening_takes_every_option():
    named = set(inspect.signature(KnowledgeBase.open).parameters)
    options = {field.name for field in dataclasses.fields(KnowledgeBaseOptions)}
    assert named == options | {"path", "model", "retriever", "reranker", "mode"}
