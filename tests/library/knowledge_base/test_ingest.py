"""Ingest as a stream: bounded, resumable, shared by processes, KV before vectors before catalog."""

import time

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, StoreError
from jaxrag.library.documents import Document, Intake, Shard
from jaxrag.library.knowledge_base import KnowledgeBase, ingest, prepare
from jaxrag.library.knowledge_base.ingest import Ingest
from jaxrag.library.knowledge_base.prepare import Preparer
from jaxrag.reuse.encode import encode_chunks

WORDS = ["salt", "well", "brine", "pan", "river", "mule", "bamboo", "bridge", "tea", "keeper"]


def text_of(seed, words=60):
    return " ".join(np.random.default_rng(seed).choice(WORDS, words)) + "."


@pytest.fixture
def kb(tmp_path, text_model):
    with KnowledgeBase.open(
        tmp_path / "kb", text_model, template="plain", chunk_tokens=64, overlap=0
    ) as opened:
        yield opened


class Vectors:
    """Records what is asked of a vector index, and what was durable at that time."""

    def __init__(self, kb):
        self.kb = kb
        self.texts = {}
        self.removed = []
        self.fail = False

    def add(self, chunk_ids, texts):
        if self.fail:
            raise StoreError("the index is full")
        assert len(chunk_ids) == len(texts)
        assert not self.texts.keys() & set(chunk_ids), "an id was used twice"
        assert not set(chunk_ids) & set(self.kb._catalog.chunk_ids().tolist()), "committed too soon"
        stored = len(list(self.kb.store.records()))
        assert stored >= len(set(texts)), "vectors before the KV is durable"
        self.texts.update(zip(chunk_ids, texts, strict=True))

    def remove(self, chunk_ids):
        assert not set(chunk_ids) & set(self.kb._catalog.chunk_ids().tolist()), "removed too soon"
        self.removed += chunk_ids


@pytest.fixture
def vectors(kb):
    return Vectors(kb)


@pytest.fixture
def run(kb, vectors):
    """``run(documents, shard=None)`` with vectors that are watched."""
    encoding = kb._encoding(kb.model)
    preparer = Preparer(encoding, kb.template, kb.chunking, kb.encoders, kb._catalog)
    return lambda documents, shard=(0, 1): Ingest(preparer, vectors).add_documents(
        Intake(documents, Shard(*shard)), False
    )


def test_without_vectors_nothing_is_committed_and_the_kv_is_found_again(kb, run, vectors):
    vectors.fail = True
    with refused(StoreError):
        run([Document("a", text_of(1))])
    assert kb.documents() == []
    vectors.fail = False
    report = run([Document("a", text_of(1))])
    assert (report.documents, report.encoded, report.reused) == (1, 0, report.chunks)


def test_documents_are_read_as_they_are_needed(kb, monkeypatch):
    monkeypatch.setattr(ingest, "BATCH_TOKENS", 200)
    monkeypatch.setattr(prepare, "_AHEAD_CHARACTERS", 1000)
    read, most_ahead = 0, 0
    done = []
    count = Ingest._count_batch

    def watched(self, batch):
        done.extend(batch)
        count(self, batch)

    monkeypatch.setattr(Ingest, "_count_batch", watched)

    def stream():
        nonlocal read, most_ahead
        for seed in range(40):
            read += 1
            most_ahead = max(most_ahead, read - len(done))
            yield Document(str(seed), text_of(seed))

    assert kb.add(stream()).documents == 40
    assert most_ahead < 12


def test_no_document_is_committed_before_its_kv_is_stored(kb, monkeypatch):
    store, commit = kb.store._put, kb._catalog.put

    def slow(*arguments):
        time.sleep(0.2)
        return store(*arguments)

    def watched(entries):
        keys = [key for entry in entries for key in entry.keys["isolated"]]
        assert keys
        assert None not in kb.store.head(keys), "committed too soon"
        return commit(entries)

    monkeypatch.setattr(kb.store, "_put", slow)
    monkeypatch.setattr(kb._catalog, "put", watched)
    assert kb.add([Document("a", text_of(1)), Document("b", text_of(2))]).documents == 2


def test_chunk_that_is_still_being_put_is_not_encoded_again(kb, monkeypatch):
    monkeypatch.setattr(ingest, "BATCH_TOKENS", 1)
    report = kb.add([Document(str(n), "the same text") for n in range(5)])
    assert (report.chunks, report.encoded, report.reused) == (5, 1, 4)


def test_reused_chunk_that_was_swept_before_the_commit_is_encoded_again(kb, monkeypatch):
    report = kb.add([Document("a", "the salt well")])
    (key,) = kb._catalog.keys("a")["isolated"]
    put = kb._catalog.put

    def sweep_then_put(entries):
        kb.store.delete([key])
        return put(entries)

    monkeypatch.setattr(kb._catalog, "put", sweep_then_put)
    report = kb.add([Document("b", "the salt well")])
    assert report.reused == 1
    assert kb.store.head([key])[0] is not None


def test_failed_put_commits_nothing_of_its_batch(kb, monkeypatch):
    def failing(*_, **__):
        raise StoreError("disk full")

    kb.add([Document("before", "text")])  # the template's prefix is there
    monkeypatch.setattr(kb.store, "_put", failing)
    with refused(StoreError):
        kb.add([Document("a", text_of(1))])
    assert [document.id for document in kb.documents()] == ["before"]


def test_shards_together_are_the_whole(tmp_path, text_model):
    documents = [Document(f"d{n}", text_of(n)) for n in range(9)]
    chunks = []
    with KnowledgeBase.open(tmp_path, text_model, template="plain", chunk_tokens=64) as kb:
        for index in range(3):
            chunks.append(kb.add(documents, shard=(index, 3)).documents)
            assert len(kb.documents()) == sum(chunks)
        assert sum(chunks) == 9
        assert max(chunks) < 9
        assert kb.add(documents).unchanged == 9
        with refused(ConfigError, "'3/3'"):
            kb.add(documents, shard=(3, 3))


def test_pages_and_sections_reach_the_hits(tmp_path, text_model):
    text = "# Wells\n\nSalt is boiled.\n\n# Bridge\n\nBamboo is bound."
    document = Document("a", text, pages=(0, text.index("# Bridge")))
    with KnowledgeBase.open(
        tmp_path, text_model, template="plain", chunk_tokens=64, chunk_by="markdown"
    ) as kb:
        kb.add([document])
        hit = kb.search("bamboo", k=1)[0]
        assert (hit.page, hit.section) == (2, "Bridge")
        assert text[hit.start : hit.end] == hit.text


@pytest.mark.parametrize("lengths", [[5], [300, 20, 2100, 7], [500] * 9, list(range(1, 60))])
def test_rows_give_every_chunk_what_it_gives_alone(text_model, lengths):
    rng = np.random.default_rng(0)
    lengths = [min(n, text_model.config.max_positions) for n in lengths]
    chunks = [rng.integers(5, 500, n).astype(np.int32) for n in lengths]
    found = dict(encode_chunks(text_model, "isolated", np.zeros(0, np.int32), chunks))
    assert sorted(found) == list(range(len(chunks)))
    for index in (0, len(chunks) - 1):
        ((_, alone),) = encode_chunks(
            text_model, "isolated", np.zeros(0, np.int32), [chunks[index]]
        )
        np.testing.assert_allclose(found[index], alone, rtol=1e-4, atol=1e-5)
