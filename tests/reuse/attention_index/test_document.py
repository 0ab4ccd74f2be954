"""Indexes that a document carries: stored with its KV, used at any position, refused when odd."""

import dataclasses

import numpy as np
import pytest
from index import search_heads
from refusal import refused

from jaxrag.base.config import RopeConfig
from jaxrag.base.errors import ChunkMissing, RequestError, RetrievalError, StoreError
from jaxrag.kv.store import (
    ChunkStore,
    KVLayout,
    MemoryStore,
    Provenance,
    chunk_key,
    content_id,
    context_id,
    fingerprint,
)
from jaxrag.kv.store.ledger import StoredChunk
from jaxrag.reuse.attention_index import ProjectedGraph, QueryLists, open_index, rotated
from jaxrag.reuse.attention_index import document as documents

LAYERS, TOKENS, KV_HEADS, GROUP, DIM = 2, 300, 2, 2, 16
ROPE = RopeConfig(10000.0, DIM, False, None)
LAYOUT = KVLayout(LAYERS, KV_HEADS, DIM, "float32")
MODEL = fingerprint({"test": "documents"})
SPEC = QueryLists(clusters=8, cap=150, knn=30, probes=3, exact_below=0, min_queries=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Document:
    kv: np.ndarray
    queries: np.ndarray  # [L, N, m, H]
    key: str
    record: Provenance

    def layers(self, spec=SPEC):
        return [
            documents.build_layer(kv[0], queries, spec, ROPE, reach=1000)
            for kv, queries in zip(self.kv, self.queries, strict=True)
        ]


@pytest.fixture(scope="module")
def document():
    rng = np.random.default_rng(0)
    ids = np.arange(TOKENS, dtype=np.int32)
    record = Provenance("isolated", content_id("", ids), context_id("isolated", ids[:0]))
    return Document(
        rng.standard_normal(LAYOUT.shape(TOKENS)).astype(np.float32),
        rng.standard_normal((LAYERS, KV_HEADS * GROUP, 64, DIM)).astype(np.float32),
        chunk_key(MODEL, record.content_id, record.context_id),
        record,
    )


@pytest.mark.parametrize(
    "spec",
    [SPEC, ProjectedGraph(degree=8, knn=30, ef=80, exact_below=0, min_queries=1), QueryLists()],
)
def test_a_stored_index_answers_as_the_one_that_was_built(document, spec, tmp_path):
    with_index = document.layers(spec)
    store = ChunkStore.open(tmp_path, MODEL, LAYOUT, mode="rw")
    aux = documents.layer_arrays(with_index)
    store.put(document.key, document.kv, record=document.record, aux=aux)
    again = ChunkStore.open(tmp_path, MODEL, LAYOUT, mode="r")
    (record,) = again.head([document.key])
    assert documents.is_indexed(record)
    indexed = documents.indexes_nbytes(StoredChunk.of(record).aux)
    assert indexed == sum(array.nbytes for array in aux.values())
    for number, built in enumerate(with_index):
        loaded = documents.load_layer(again, document.key, number, ROPE)
        for mine, theirs in zip(built, loaded, strict=True):
            assert theirs.spec == mine.spec
            assert theirs.note == mine.note
            assert theirs.efforts == mine.efforts
            assert theirs.keys.codes.tobytes() == mine.keys.codes.tobytes()
            query = document.queries[0, :GROUP, 5]
            one, other = (search_heads(open_index(index), query, 20) for index in (mine, theirs))
            np.testing.assert_array_equal(one.ids, other.ids)
            np.testing.assert_array_equal(one.scores, other.scores)


def test_queries_less_the_offset_score_as_keys_at_their_positions(document):
    layer = documents.build_layer(document.kv[0, 0], document.queries[0], SPEC, ROPE, reach=1000)
    question = document.queries[0, :GROUP, 7]  # before RoPE, of KV head 0
    for offset, position in ((0, 310), (777, 1200), (4000, 4301)):
        placed = rotated(document.kv[0, 0, :, 0], offset + np.arange(TOKENS), ROPE)
        asked = rotated(question, np.full(GROUP, position), ROPE)
        local = rotated(question, np.full(GROUP, position - offset), ROPE)
        found = search_heads(open_index(layer[0]), local, TOKENS)
        expected = -np.sort(-(asked @ placed.T), axis=1)
        np.testing.assert_allclose(found.scores, expected, atol=1e-4)


def test_an_index_learns_from_queries_behind_the_document(document):
    layer = documents.build_layer(document.kv[0, 0], document.queries[0], SPEC, ROPE, reach=1000)
    for head, index in enumerate(layer):
        placed = rotated(document.kv[0, 0, :, head], np.arange(TOKENS), ROPE)
        np.testing.assert_array_equal(index.keys.decode(), placed[index.rows()])
        assert index.parts == GROUP
    other = documents.build_layer(document.kv[0, 0], document.queries[0], SPEC, ROPE, reach=1)
    assert other[0].wanted.tolist() != layer[0].wanted.tolist()


def test_a_chunk_without_indexes_says_so(document):
    store = MemoryStore(MODEL, LAYOUT)
    with pytest.raises(ChunkMissing):
        documents.load_layer(store, document.key, 0, ROPE)
    assert not documents.is_indexed(store.head([document.key])[0])
    store.put(document.key, document.kv, record=document.record)
    assert not documents.is_indexed(store.head([document.key])[0])
    with refused(StoreError, "'attention_index_0'"):
        documents.load_layer(store, document.key, 0, ROPE)


def test_what_does_not_belong_to_the_document_is_refused(document):
    store = MemoryStore(MODEL, LAYOUT)
    shorter = document.kv[:, :, :200].copy()
    aux = documents.layer_arrays(document.layers())
    store.put(document.key, shorter, record=document.record, aux=aux)
    with refused(RetrievalError, "200"):
        documents.load_layer(store, document.key, 0, ROPE)
    aux = {"attention_index_0": np.zeros(50, np.uint8)}
    store.put(document.key, document.kv, record=document.record, aux=aux, replace=True)
    with refused(RetrievalError, "attention_index_0"):
        documents.load_layer(store, document.key, 0, ROPE)


def test_a_layer_that_cannot_be_indexed(document):
    keys, queries = document.kv[0, 0], document.queries[0]
    with refused(RetrievalError):
        documents.build_layer(keys, queries[:3], SPEC, ROPE, reach=5)
    with refused(RequestError, "300"):
        documents.build_layer(keys, queries, SPEC, ROPE, reach=0)
