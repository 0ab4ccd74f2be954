"""Chunks that are encoded together, and what their keys name."""

import numpy as np
import pytest

from jaxrag.models.model import random_model
from jaxrag.reuse.encode import chunk_key, encode_chunks


@pytest.fixture
def model(tiny_config):
    return random_model(tiny_config("glm4"))


@pytest.fixture
def ids(rng):
    """``ids(*lengths)``: random token ids, one array a length."""
    return lambda *lengths: [rng.integers(3, 101, n).astype(np.int32) for n in lengths]


def test_encoders_pack_without_mixing_chunks(model, ids):
    """Chunks that share a packed row get what each gets alone."""
    prefix, *chunks = ids(6, 30, 5, 61, 1, 18)
    for encoder in ("isolated", "after_prefix"):
        together = dict(encode_chunks(model, encoder, prefix, chunks))
        assert sorted(together) == list(range(5))
        for index, chunk in enumerate(chunks):
            ((_, alone),) = encode_chunks(model, encoder, prefix, [chunk])
            assert alone.shape == (3, 2, len(chunk), 2, 10) == together[index].shape
            np.testing.assert_allclose(together[index], alone, rtol=1e-4, atol=2e-5)


def test_keys_name_what_the_chunk_saw(model, ids):
    one, other, chunk = ids(5, 6, 20)
    assert chunk_key(model.fingerprint, model, "isolated", one, chunk) == chunk_key(
        model.fingerprint, model, "isolated", other, chunk
    )
    keys = {
        chunk_key(model.fingerprint, model, "after_prefix", p, chunk) for p in (one, other, one[:0])
    }
    assert len(keys | {chunk_key(model.fingerprint, model, "isolated", one, chunk)}) == 4
