"""KV deviation against a whole prompt's KV, worked out chunk by chunk."""

import numpy as np
import pytest

from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt
from jaxrag.measure.evals.deviation import kv_deviation
from jaxrag.models.model import random_model
from jaxrag.reuse.encode import encode_chunks
from jaxrag.reuse.methods import METHODS, Method
from jaxrag.reuse.select import FirstK


@pytest.fixture(scope="module")
def model(tiny_config):
    return random_model(tiny_config(), cache_tokens=1024)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(3)

    def make(*lengths):
        return tuple(rng.integers(3, 101, n).astype(np.int32) for n in lengths)

    return [Prompt(*make(5), make(17, 20), *make(6)) for _ in range(2)]


def by_hand(model, prompt):
    """[L, 2, C] each: squared difference of chunks encoded alone, squared length of the whole."""
    none, prefix = prompt.prefix[:0], len(prompt.prefix)
    everything = np.concatenate((prompt.prefix, *prompt.chunks))
    ((_, whole),) = encode_chunks(model, "isolated", none, [everything])
    whole = whole[:, :, prefix:].astype(np.float64)
    alone = dict(encode_chunks(model, "isolated", none, prompt.chunks))
    stored = np.concatenate([alone[i] for i in range(len(prompt.chunks))], 2).astype(np.float64)
    return np.square(whole - stored).sum((3, 4)), np.square(whole).sum((3, 4))


def test_deviation_of_reused_chunks_is_that_of_their_stored_kv(model, prompts):
    found = kv_deviation(model, engine_of(model).memory, METHODS["turborag"], prompts)
    both = zip(*(by_hand(model, prompt) for prompt in prompts), strict=True)
    apart, length = (np.concatenate(parts, 2) for parts in both)
    np.testing.assert_allclose(found.squared, apart.mean(2), rtol=1e-3, atol=1e-10)
    np.testing.assert_allclose(found.relative, apart.sum(2) / length.sum(2), rtol=1e-3, atol=1e-10)
    assert (found.relative[1:] > 1e-3).all() and found.squared.shape == (3, 2)
    assert (found.relative[0] < 1e-9).all()  # layer 0 does not depend on the context


@pytest.mark.parametrize("ratio", [None, 1.0])
def test_nothing_deviates_once_everything_is_computed(model, prompts, ratio):
    method = METHODS["full_attention"] if ratio is None else METHODS["epic"].with_ratio(ratio)
    assert kv_deviation(model, engine_of(model).memory, method, prompts).relative.max() < 1e-8


def test_recomputed_tokens_count_with_their_new_kv(model, prompts):
    # The first chunk's tokens see only the prefix and each other: recomputed, they are exact.
    method = Method("half", encoder="isolated", selector=FirstK(17))
    plain = kv_deviation(model, engine_of(model).memory, METHODS["turborag"], prompts)
    found = kv_deviation(model, engine_of(model).memory, method, prompts)
    assert (found.squared[1:] < 0.5 * plain.squared[1:]).all()


def test_pages_are_given_back(model, prompts):
    kv_deviation(model, engine_of(model).memory, METHODS["turborag"], prompts)
    free = engine_of(model).runner.cache.allocator.num_free
    for name in ("full_attention", "turborag"):
        kv_deviation(model, engine_of(model).memory, METHODS[name], prompts)
    assert engine_of(model).runner.cache.allocator.num_free == free
