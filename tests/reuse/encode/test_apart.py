"""A chunk that is encoded apart has the same KV whatever else is encoded, to the bit."""

import dataclasses

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.measure.zoo import SMALL_LLAMA
from jaxrag.models.model import random_model
from jaxrag.reuse.encode.apart import encode_apart, shape_apart
from jaxrag.reuse.encode.packed import encode_rows

LENGTHS = (7, 30, 31, 33, 45, 46, 61, 64, 64, 70, 90, 97, 128, 150, 250, 300, 520, 17, 60, 29)


@pytest.fixture(scope="module")
def model():
    return random_model(dataclasses.replace(SMALL_LLAMA, num_layers=2), seed=3)


@pytest.fixture
def chunks(rng):
    return [rng.integers(3, 500, n).astype(np.int32) for n in LENGTHS]


@pytest.mark.parametrize("before", [0, 1, 5])
def test_kv_does_not_depend_on_what_else_is_encoded(model, chunks, rng, before):
    prefix = rng.integers(3, 500, before).astype(np.int32)
    together = dict(encode_apart(model, prefix, chunks))
    assert sorted(together) == list(range(len(chunks)))
    for order in (range(len(chunks))[::-1], rng.permutation(len(chunks))[:11]):
        for at, kv in encode_apart(model, prefix, [chunks[i] for i in order]):
            np.testing.assert_array_equal(kv, together[order[at]])
    for index, chunk in enumerate(chunks):
        [(_, kv)] = encode_apart(model, prefix, [chunk])
        np.testing.assert_array_equal(kv, together[index])


def test_kv_is_that_of_packed_rows(model, chunks, rng):
    prefix = rng.integers(3, 500, 5).astype(np.int32)
    packed = dict(encode_rows(model, prefix, chunks))
    for index, kv in encode_apart(model, prefix, chunks):
        assert kv.shape == packed[index].shape
        np.testing.assert_allclose(kv, packed[index], atol=2e-5)


def test_a_program_has_rows_for_short_chunks(model):
    assert [shape_apart(model, n) for n in (1, 32, 33, 64, 65, 128, 129, 512, 513)] == [
        (4, 32), (4, 32), (2, 48), (2, 64), (1, 80), (1, 128), (1, 160), (1, 512), (1, 768),
    ]  # fmt: skip


@pytest.mark.parametrize("length", [0, 10**6])
def test_what_does_not_fit_is_refused(model, length):
    with refused(RequestError, length):
        list(
            encode_apart(model, np.zeros(0, np.int32), [np.ones(n, np.int32) for n in (3, length)])
        )
