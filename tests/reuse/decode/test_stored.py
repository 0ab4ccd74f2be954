"""Indexes that chunks were stored with: used wherever the chunks stand, and by nobody else."""

import dataclasses

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.config import RopeConfig
from jaxrag.base.errors import RequestError, RetrievalError
from jaxrag.engine.engine import engine_of
from jaxrag.models.model import random_model
from jaxrag.reuse.attention_index import Exact, ProjectedGraph, QueryLists
from jaxrag.reuse.attention_index.document import Indexing
from jaxrag.reuse.decode import Flat, IvfRetrieval, Retrieval, stored
from jaxrag.reuse.encode import chunk_key, encode_for_store, provenance

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
# Every key is in some list, and all lists are scanned: nothing is missed.
LISTS = QueryLists(clusters=4, cap=500, knn=500, probes=4, exact_below=50, min_queries=1)
EXHAUSTIVE = Indexing(LISTS, queries=40, reach=300)
# Would be trained on the prompt's queries where no stored index is used.
TRAINED = ProjectedGraph(degree=8, knn=20, ef=280, exact_below=50, min_queries=1)
RULE = Retrieval(k=6, sink=4, recent=30, index=TRAINED, queries=32)
FLAT = Flat(k=6, sink=4, recent=30)
KINDS = {"more_ropes": (RopeConfig(70.0, 10, False, None),), "rope_layers": (1, 0, 1)}
LENGTHS = (70, 9, 64)  # the second one is too short for an index


@pytest.fixture(scope="module")
def make_model(tiny_config):
    """Models of their own: other tests use the same random chunks, without indexes."""

    def make(family="llama", **changes):
        config = tiny_config(family, eos_ids=(), **changes)
        return random_model(config, cache_tokens=2048)

    return make


@pytest.fixture
def model(make_model):
    return make_model()


@pytest.fixture
def prompt(a_prompt):
    """Part of the first chunk is in the sink, part of the last one in the window."""
    return a_prompt(prefix=2, chunks=LENGTHS, final=11)


@pytest.fixture
def given(ids):
    return ids(7)[0][None]


def put(model, prompt, indexing=EXHAUSTIVE, damage=False):
    """Store the chunks of a prompt, indexed; the keys of those that have indexes."""
    keys = []
    made = encode_for_store(model, "isolated", prompt.prefix, prompt.chunks, indexing=indexing)
    for index, kv, aux in made:
        origin = (model, "isolated", prompt.prefix, prompt.chunks[index])
        key = chunk_key(engine_of(model).memory.fingerprint, *origin)
        if aux is not None and damage:
            aux = {name: np.zeros(8, np.uint8) for name in aux}
        engine_of(model).memory.put(key, kv, record=provenance(*origin), aux=aux)
        keys += [key] if aux is not None else []
    return keys


def test_an_exhaustive_index_answers_as_exact_search_does(
    model, prompt, given, next_logits, accounts
):
    """At two positions, in a request that has more than its indexed chunks."""
    assert len(put(model, prompt)) == 2
    ours = next_logits(model, "turborag", [prompt], RULE, given)
    (account,) = accounts
    assert (account.trained, account.notes) == (0, ())
    per_token = model.config.num_layers * model.config.num_kv_heads
    assert account.stored == per_token * (70 + 64)
    end = 2 + sum(LENGTHS) + 11 + 1 - RULE.recent  # the first position that the window holds
    rest = end - RULE.sink - (2 + 70 - RULE.sink) - (end - 2 - 70 - 9)
    assert account.keys == account.stored + per_token * rest
    np.testing.assert_allclose(ours, next_logits(model, "turborag", [prompt], FLAT, given), **CLOSE)
    other = dataclasses.replace(prompt, chunks=prompt.chunks[::-1])  # elsewhere in the prompt
    ours = next_logits(model, "turborag", [other], RULE, given)
    np.testing.assert_allclose(ours, next_logits(model, "turborag", [other], FLAT, given), **CLOSE)
    assert [account.trained for account in accounts] == [0, 0]


def test_without_a_stored_index_one_is_trained(model, prompt, given, next_logits, accounts):
    """What the test above would see if nothing was used."""
    put(model, prompt, indexing=None)
    next_logits(model, "turborag", [prompt], RULE, given)
    assert accounts[-1].stored == 0
    assert accounts[-1].trained == model.config.num_layers * model.config.num_kv_heads
    put_again = dataclasses.replace(RULE, stored=False)
    engine_of(model).memory.delete(list(engine_of(model).memory.keys()))
    engine_of(model).forget()
    put(model, prompt)
    for rule in (put_again, IvfRetrieval(k=6, sink=4, recent=30)):
        next_logits(model, "turborag", [prompt], rule, given)
        assert accounts[-1].stored == 0


@pytest.mark.slow
def test_keys_that_were_computed_again_are_found_where_they_are_now(
    model, prompt, given, next_logits, accounts
):
    """EPIC recomputes the first tokens of each chunk: the index still holds their old keys."""
    put(model, prompt)
    ours = next_logits(model, "epic", [prompt], RULE, given)
    assert 0 < accounts[-1].stored < accounts[-1].keys
    expected = next_logits(model, "epic", [prompt], FLAT, given)
    np.testing.assert_allclose(ours, expected, **CLOSE)
    plain = next_logits(model, "turborag", [prompt], FLAT, given)
    assert np.abs(ours - plain).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [("glm4", {}), ("qwen2", {}), ("llama", KINDS)],
    ids=["glm4", "qwen2", "kinds"],
)
def test_other_rotations_and_other_prompts(
    make_model, prompt, a_prompt, ids, next_logits, accounts, family, changes
):
    model = make_model(family, **changes)
    put(model, prompt)
    other = dataclasses.replace(a_prompt(final=5), chunks=prompt.chunks[2:])
    given = np.stack(ids(4, 4))
    ours = next_logits(model, "turborag", [prompt, other], RULE, given)
    assert all(account.stored and account.trained == 0 for account in accounts)
    expected = next_logits(model, "turborag", [prompt, other], FLAT, given)
    np.testing.assert_allclose(ours, expected, **CLOSE)


@pytest.mark.slow
def test_a_stored_graph_finds_nearly_all(model, prompt, given, next_logits, accounts):
    graph = ProjectedGraph(degree=16, knn=24, ef=60, exact_below=50, min_queries=1)
    put(model, prompt, Indexing(graph, queries=60, reach=60))
    host = engine_of(model).runner.host_search
    host.measure = True
    try:
        next_logits(model, "turborag", [prompt], RULE, given)
    finally:
        host.measure = False
    (account,) = accounts
    assert account.trained == 0 and account.wanted == account.searches * RULE.k
    assert account.found / account.wanted > 0.9


def test_a_damaged_index_is_a_note_and_not_an_answer(model, prompt, given, next_logits, accounts):
    put(model, prompt, damage=True)
    exact = dataclasses.replace(RULE, index=Exact("float32"))
    ours = next_logits(model, "turborag", [prompt], exact, given)
    (account,) = accounts
    assert account.stored == 0
    assert len(account.notes) == 2
    assert all("attention_index_0 is damaged" in note for note in account.notes)
    np.testing.assert_allclose(ours, next_logits(model, "turborag", [prompt], FLAT, given), **CLOSE)


def test_open_indexes_are_kept_and_leave_with_their_chunk(
    model, prompt, given, next_logits, accounts, monkeypatch
):
    keys = put(model, prompt)
    host, read = engine_of(model).runner.host_search, []
    load = stored.load_layer

    def counted(store, key, layer, rope, share):
        read.append(key)
        return load(store, key, layer, rope, share=share)

    monkeypatch.setattr(stored, "load_layer", counted)

    def ask():
        read.clear()
        next_logits(model, "turborag", [prompt], RULE, given)
        return set(read), accounts[-1].stored > 0

    assert ask() == (set(keys), True)
    assert ask() == (set(), True)
    host.documents = stored.StoredIndexes(kept_bytes=0)
    ask()
    assert ask() == (set(keys), True)
    host.documents = stored.StoredIndexes()
    ask()
    engine_of(model).memory.delete(keys)  # their KV is still in the pool
    assert ask() == (set(), False)
    assert not host.documents._open


def test_the_ceiling_counts_stored_indexes(model, prompt, given, next_logits):
    put(model, prompt)
    keys = model.config.num_layers * (70 + 64) * model.config.num_kv_heads * 10 * 4
    rule = dataclasses.replace(RULE, max_host_bytes=keys)
    with refused(RequestError, keys) as caught:
        next_logits(model, "turborag", [prompt], rule, given)
    assert "\n" not in str(caught.value)
    roomy = dataclasses.replace(RULE, max_host_bytes=100 * keys)
    assert np.isfinite(next_logits(model, "turborag", [prompt], roomy, given)).all()


@pytest.mark.parametrize("damaged", [False, True])
def test_indexes_of_a_layer_come_without_keys(model, prompt, damaged):
    """And are read once, until the chunk is stored anew or leaves the store."""
    key, _ = put(model, prompt, damage=damaged)
    store, config = engine_of(model).memory, model.config
    chunk = stored.Carried(store, key, 2, np.arange(70))
    indexes = stored.StoredIndexes()
    if damaged:
        with refused(RetrievalError):
            indexes.known(chunk, config)
        return
    known = indexes.known(chunk, config)
    assert known is indexes.known(chunk, config)
    assert 0 < known.tables < known.nbytes == known.tables + 3 * 2 * 70 * 10 * 4
    layer = indexes.open_layer(chunk, known, 1, config)
    assert indexes.open_layer(chunk, known, 1, config) is layer
    whole = indexes.open(chunk, known, config)[1]
    for bare, searcher in zip(layer, whole, strict=True):
        assert len(bare) == 0 and len(searcher) == 70
        np.testing.assert_array_equal(bare.wanted, searcher.index.wanted)
        assert bare.efforts == searcher.index.efforts
    store.delete([key])
    assert indexes.known(chunk, config) is None
    assert not indexes._open


def test_a_stored_graph_is_searched_over_keys_of_its_own(model, prompt):
    graph = ProjectedGraph(degree=16, knn=24, ef=60, exact_below=50, min_queries=1)
    key, _ = put(model, prompt, Indexing(graph, queries=60, reach=60))
    chunk = stored.Carried(engine_of(model).memory, key, 2, np.arange(70))
    indexes = stored.StoredIndexes()
    known = indexes.known(chunk, model.config)
    assert known.tables == known.nbytes
    searchers = indexes.open_layer(chunk, known, 0, model.config)
    assert [len(searcher) for searcher in searchers] == [70, 70]
