"""Encoding that keeps queries: the KV of the plain encoder, and the queries of a prefill."""

import dataclasses

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Prompt, Request
from jaxrag.models.model import random_model
from jaxrag.reuse.attention_index import QueryLists
from jaxrag.reuse.attention_index.document import Indexing, build_arrays
from jaxrag.reuse.decode import SnapKV
from jaxrag.reuse.encode import encode_chunks, encode_for_store
from jaxrag.reuse.encode.with_queries import encode_observed
from jaxrag.reuse.methods import METHODS

INDEXING = Indexing(
    QueryLists(clusters=3, cap=50, knn=20, probes=3, exact_below=40, min_queries=1),
    queries=17,
    reach=100,
)


@pytest.fixture(scope="module")
def model(tiny_config):
    return random_model(tiny_config("qwen3", eos_ids=()), cache_tokens=1024)


@pytest.fixture
def chunks(rng):
    return [rng.integers(3, 101, n).astype(np.int32) for n in (50, 12, 44)]


def queries_of(model, prefix, chunk):
    """Queries [L, N, T, H] of a chunk behind the prefix, from an online prefill of both."""
    prompt = Prompt(prefix[:0], (), np.concatenate((prefix, chunk)))
    rule = SnapKV(capacity=len(chunk), window=len(chunk))  # which asks for queries of the last
    method = dataclasses.replace(METHODS["full_attention"], decode=rule)
    request = Request(prompt, engine_of(model).memory, method, 2)

    def seen(runner, state, there):
        return np.asarray(there.bank.queries), np.asarray(there.bank.positions)

    [(queries, positions)] = inspect_prompts(engine_of(model), [request], seen)
    assert positions[0, len(chunk) - 1] == len(prompt.final) - 1
    return queries[:, 0, : len(chunk)].swapaxes(1, 2)


@pytest.mark.parametrize("num_prefix", [0, 5])
def test_queries_are_those_of_a_prefill(model, chunks, rng, num_prefix):
    prefix = rng.integers(3, 101, num_prefix).astype(np.int32)
    encoder = "after_prefix" if num_prefix else "isolated"
    expected = dict(encode_chunks(model, encoder, prefix, chunks))
    observed = encode_observed(model, prefix, chunks, 17)
    found = {i: (kv, queries) for i, kv, queries, _ in observed}
    assert found.keys() == expected.keys()
    for index, (kv, queries) in found.items():
        np.testing.assert_array_equal(kv, expected[index])
        count, tokens = min(17, len(chunks[index])), len(chunks[index])
        chosen = np.arange(count) * tokens // count
        theirs = queries_of(model, prefix, chunks[index])[:, :, chosen]
        assert queries.shape == theirs.shape
        np.testing.assert_allclose(queries, theirs, rtol=1e-4, atol=1e-5)


def test_long_chunks_get_indexes_and_short_ones_none(model, chunks):
    prefix = chunks[0][:0]
    made = {
        i: (kv, aux)
        for i, kv, aux in encode_for_store(model, "isolated", prefix, chunks, indexing=INDEXING)
    }
    plain = dict(encode_chunks(model, "isolated", prefix, chunks))
    assert sorted(made) == [0, 1, 2]
    assert made[1][1] is None
    for index, (kv, aux) in made.items():
        np.testing.assert_allclose(kv, plain[index], rtol=1e-5, atol=1e-6)
        if aux is not None:
            observed = encode_observed(model, prefix, [chunks[index]], INDEXING.queries)
            ((_, _, queries, keys),) = observed
            np.testing.assert_allclose(keys, kv[:, 0], rtol=1e-5, atol=1e-6)
            again = build_arrays(kv[:, 0], queries, INDEXING, [model.config.rope] * len(kv))
            assert aux.keys() == again.keys() == {f"attention_index_{n}" for n in range(3)}


def test_chunks_behind_neighbours_get_none(model, chunks):
    prefix, others = chunks[0][:4], [[], [], []]
    for encoder in ("neighbours", "neighbours_joint"):
        made = encode_for_store(model, encoder, prefix, chunks, others, indexing=INDEXING)
        assert [aux for _, _, aux in made] == [None] * 3


def test_a_chunk_that_does_not_fit_is_refused(model, chunks):
    with refused(RequestError, "0"):
        list(encode_observed(model, chunks[0][:0], [chunks[0][:0]], 4))
    with refused(RequestError, "0"):
        list(encode_observed(model, chunks[0][:0], [np.resize(chunks[0], 600)], 4))
