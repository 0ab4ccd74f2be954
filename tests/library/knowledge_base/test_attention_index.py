"""Indexes that long chunks are stored with: made at ingest, counted, checked, freed, searched."""

import dataclasses
import json

import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, KnowledgeBaseError
from jaxrag.engine.engine import engine_of
from jaxrag.kv.store.record import SCALE
from jaxrag.library.documents import Document
from jaxrag.models.model import random_model
from jaxrag.reuse.attention_index.document import Indexing, indexing_from, is_indexed
from jaxrag.reuse.attention_index.spec import Exact, ProjectedGraph, QueryLists
from jaxrag.reuse.decode import Retrieval
from jaxrag.reuse.decode.stored import StoredIndexes
from jaxrag.serve.generate import generate

# Every key is in some list, and all lists are scanned: what is found is exact.
EXHAUSTIVE = (
    "lists:clusters=3,cap=200,knn=200,probes=3,exact_below=64,min_queries=1,queries=40,reach=200"
)
TRAINED = ProjectedGraph(degree=8, knn=20, ef=280, exact_below=100, min_queries=1)
RULE = Retrieval(k=6, sink=4, recent=8, index=TRAINED, queries=32)  # would be trained
SHORT = Document("short", "basalt")


@pytest.fixture
def indexed_kb(make_kb):
    return make_kb(attention_index=EXHAUSTIVE)


@pytest.fixture
def long(text_of):
    return Document("long", text_of(1, 40)[:140])  # a chunk of 100 tokens, and one of 42


def indexed_keys(kb):
    return [record.key for record in kb.store.records() if is_indexed(record)]


def ask(kb, rule, question="amber birch?", tokens=6):
    return generate(question, kb=kb, k=2, max_new_tokens=tokens, decode=rule)


def test_long_chunks_are_stored_with_indexes_that_questions_search(indexed_kb, long):
    kb = indexed_kb
    report = kb.add([long, SHORT])
    assert report.encoded == report.chunks
    keys = indexed_keys(kb)
    lengths = [record.tokens for record in kb.store.records()]
    assert len(keys) == sum(tokens >= 64 for tokens in lengths) and len(keys) < len(lengths)
    stats = kb.stats()["attention_index"]
    aux = [a.nbytes for r in kb.store.records() for name, a in r.aux.items() if name != SCALE]
    assert stats == {
        "kind": "lists", "from_tokens": 64, "chunks": len(keys), "bytes": sum(aux),
    }  # fmt: skip
    answer = ask(kb, RULE)
    assert answer.counts["encoded"] == 0
    assert answer.indexes["stored"] > 0 and answer.indexes["trained"] == 0
    assert answer.token_ids == ask(kb, "flat:k=6,sink=4,recent=8").token_ids
    assert [note for note in answer.notes if "frees no device memory" not in note] == []


def test_another_process_finds_them(indexed_kb, make_kb, long, config, model):
    """A model object of its own, as in a new process: nothing is encoded, and nothing is built."""
    indexed_kb.add([long, SHORT])
    first = ask(indexed_kb, RULE)
    indexed_kb.close()
    again = type(indexed_kb).open(
        indexed_kb.path, random_model(config, tokenizer=model.tokenizer), mode="r"
    )
    with again as kb:
        assert kb.indexing == indexing_from(EXHAUSTIVE)
        second = ask(kb, RULE)
    assert second.token_ids == first.token_ids and second.indexes == first.indexes
    assert second.counts["encoded"] == 0 and second.indexes["trained"] == 0
    assert second.indexes["stored"] > 0


def test_removed_chunks_take_their_indexes_along(indexed_kb, long):
    kb = indexed_kb
    kb.add([long, SHORT])
    assert indexed_keys(kb)
    kb.remove(["long"])
    freed = kb.gc(grace_seconds=0)
    assert freed.nbytes > kb.store.layout.nbytes(100)
    assert indexed_keys(kb) == []
    assert kb.stats()["attention_index"]["chunks"] == 0
    assert not [path for path in (kb.path / "kv").rglob("attention_index*")]


def test_verify_reads_them_and_makes_them_again(indexed_kb, long):
    kb = indexed_kb
    kb.add([long])
    keys, before = indexed_keys(kb), ask(kb, RULE)
    engine_of(kb.model).runner.host_search.documents = StoredIndexes()  # it keeps what was read
    path = next((kb.path / "kv").rglob("aux/attention_index_1/c/0"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert kb.verify().damaged == (keys[0],)
    engine_of(kb.model).forget()
    found = ask(kb, dataclasses.replace(RULE, index=Exact("float32")))  # it does not fail
    assert found.token_ids == before.token_ids
    assert any("a stored index is not used" in note for note in found.notes)
    report = kb.verify(repair=True)
    assert (report.repaired, report.damaged, report.unindexed) == (1, (), ())
    assert indexed_keys(kb) == keys
    assert ask(kb, RULE).indexes["trained"] == 0


def test_a_knowledge_base_may_begin_to_keep_them(make_kb, long):
    kb = make_kb()
    kb.add([long, SHORT])
    assert kb.indexing is None and kb.stats()["attention_index"] is None
    assert kb.verify().unindexed == ()
    kb.close()
    kb = make_kb(attention_index=EXHAUSTIVE)
    (key,) = kb.verify().unindexed
    assert kb.add([long, SHORT]).encoded == 1
    assert indexed_keys(kb) == [key] and kb.verify().unindexed == ()
    kb.store.delete([key])
    kb.add([long])
    assert indexed_keys(kb) == [key]


def test_repair_makes_them_too(make_kb, long):
    make_kb().add([long])
    kb = make_kb(attention_index=EXHAUSTIVE)
    chunks = kb.stats()["chunks"]
    report = kb.verify(repair=True)
    assert (report.ok, report.repaired, report.unindexed) == (chunks - 1, 1, ())
    assert len(indexed_keys(kb)) == 1


def test_a_chunk_that_a_question_encodes_gets_them(indexed_kb, long):
    kb = indexed_kb
    kb.add([long])
    keys = indexed_keys(kb)
    kb.store.delete(keys)
    engine_of(kb.model).forget()
    answer = ask(kb, RULE)
    assert answer.counts["encoded"] > 0
    assert indexed_keys(kb) == keys
    assert answer.indexes["trained"] == 0 and answer.indexes["stored"] > 0


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("ivf", "kind='ivf'"),
        ("tree", "kind='tree'"),
        ("lists:reach=0", "reach=0"),
        ("lists:ef=3", "'ef'"),
        ("lists:logarithmic=3", "logarithmic=3"),
        ("lists:queries=100", "min_queries=1024"),
    ],
)
def test_bad_settings_are_one_line(make_kb, value, named):
    with refused(ConfigError, named):
        make_kb(attention_index=value)


def test_a_setting_comes_as_text_or_table_and_is_remembered():
    made = indexing_from("lists:clusters=64,reach=99,logarithmic=true")
    assert made == Indexing(QueryLists(clusters=64), reach=99, logarithmic=True)
    assert indexing_from(made) is made
    assert indexing_from(json.loads(json.dumps(made.to_table()))) == made
    assert made.covers(32768) and not made.covers(32767)


def test_another_setting_is_refused(make_kb, indexed_kb):
    indexed_kb.close()
    with refused(KnowledgeBaseError, "attention_index"):
        make_kb(attention_index="lists")
    with refused(KnowledgeBaseError):
        make_kb("other", attention_index="lists", encoders=["neighbours"])
    make_kb(attention_index=EXHAUSTIVE)
    make_kb()
