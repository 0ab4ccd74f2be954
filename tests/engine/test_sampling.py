"""Token choice: greedy, top-k and top-p against a numpy oracle, and independence of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.base.types import EMPTY, FINAL
from jaxrag.engine.sampling import SamplingParams, _most_likely, sample
from jaxrag.engine.steps import SamplingRows
from jaxrag.models.model import random_model
from jaxrag.serve.generate import generate

DRAWS = 4096
jitted = jax.jit(sample)


def choose(logits, temperature=0.0, top_k=0, top_p=1.0, seeds=0, index=0):
    """``sample`` with scalars broadcast over the rows."""
    logits = jnp.asarray(logits, jnp.float32)

    def row(value, dtype):
        return jnp.broadcast_to(jnp.asarray(value, dtype), logits.shape[:1])

    return np.asarray(
        jitted(
            logits,
            row(temperature, jnp.float32),
            row(top_k, jnp.int32),
            row(top_p, jnp.float32),
            row(seeds, jnp.uint32),
            row(index, jnp.int32),
        )
    )


def kept_tokens(logits, temperature, top_k, top_p):
    """Oracle: probabilities [V] after temperature, top-k, top-p; plain Python, float64."""
    probabilities = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    ranking = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        ranking = ranking[:top_k]
    total = sum(probabilities[i] for i in ranking)
    kept, reached = [], 0.0
    for i in ranking:
        if top_p < 1 and reached >= top_p * total:
            break
        kept.append(i)
        reached += probabilities[i]
    out = np.zeros(len(logits))
    out[kept] = probabilities[kept] / reached
    return out


def frequencies(logits, **settings):
    """Relative frequency [V] of each token over DRAWS token indices of one seed."""
    logits = np.asarray(logits, np.float32)
    ids = choose(np.tile(logits, (DRAWS, 1)), seeds=11, index=np.arange(DRAWS), **settings)
    return np.bincount(ids, minlength=len(logits)) / DRAWS


def test_temperature_zero_takes_the_lowest_id_of_the_largest_logits(rng):
    logits = rng.normal(size=(5, 33)).astype(np.float32)
    logits[0, [4, 9]] = 7.0
    ids = choose(logits, top_k=3, top_p=0.4, seeds=np.arange(5))
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, logits.argmax(-1))
    assert ids[0] == 4


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 4, 1.0), (1.3, 0, 0.6), (0.8, 5, 0.7), (2.0, 99, 0.9)],
)
def test_frequencies_follow_the_restricted_softmax(rng, temperature, top_k, top_p):
    logits = (2 * rng.normal(size=12)).astype(np.float32)
    expected = kept_tokens(logits, temperature, top_k, top_p)
    found = frequencies(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    assert not found[expected == 0].any()
    deviation = np.sqrt(expected * (1 - expected) / DRAWS)
    assert (np.abs(found - expected) <= 4.5 * deviation + 1e-12).all()


def test_equal_logits_rank_by_id():
    logits = [0.0, 3.0, 1.0, 3.0, 3.0, 1.0]
    assert set(np.flatnonzero(frequencies(logits, temperature=1.0, top_k=2))) == {1, 3}
    assert set(np.flatnonzero(frequencies(logits, temperature=1.0, top_k=4))) == {1, 2, 3, 4}
    # The three tied tokens hold 0.30 each: p = 0.5 needs two of them, p = 0.25 one.
    assert set(np.flatnonzero(frequencies(logits, temperature=1.0, top_p=0.5))) == {1, 3}
    assert set(np.flatnonzero(frequencies(logits, temperature=1.0, top_p=0.25))) == {1}


def test_top_p_stops_at_the_token_that_reaches_it():
    # Probabilities 1/2, 1/4, 1/8, 1/8 are exact in binary.
    logits = np.log([0.5, 0.25, 0.125, 0.125])
    for top_p, kept in [(1e-6, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.9, 4)]:
        assert (frequencies(logits, temperature=1.0, top_p=top_p) > 0).sum() == kept, top_p


def test_top_p_reached_exactly_needs_no_further_token():
    # Four equal logits hold exactly 1/4 each.
    assert set(np.flatnonzero(frequencies(np.zeros(4), temperature=1.0, top_p=0.5))) == {0, 1}


def test_top_p_counts_within_the_top_k():
    # 0.4 of everything is 2/3 of the two kept by top-k, which reaches 0.6.
    logits = np.log([0.4, 0.2, 0.2, 0.1, 0.1])
    assert set(np.flatnonzero(frequencies(logits, temperature=1.0, top_p=0.6))) == {0, 1}
    assert set(np.flatnonzero(frequencies(logits, temperature=1.0, top_k=2, top_p=0.6))) == {0}


def test_top_p_one_keeps_the_whole_tail():
    # In float32 the running sum is 1 from the first token on: the tail is below its last bit.
    scaled = jnp.asarray([[0.0, -40.0, -30.0, -50.0]], jnp.float32)
    kept = _most_likely(scaled, jnp.asarray([4]), jnp.asarray([1.0], jnp.float32))
    assert np.asarray(kept).all()


def test_a_request_gets_the_same_tokens_in_any_slot_and_batch_size(rng):
    batch = 7
    settings = {
        "temperature": np.array([0, 0.5, 1, 1, 2, 1, 0.9], np.float32),
        "top_k": np.array([0, 3, 0, 8, 0, 0, 5], np.int32),
        "top_p": np.array([1, 1, 0.8, 0.6, 1, 1, 0.95], np.float32),
        "seeds": np.array([0, 1, 2, 2**32 - 1, 4, 4, 6], np.uint32),
        "index": np.array([0, 9, 2, 3, 1000, 1001, 5], np.int32),
    }
    logits = rng.normal(size=(batch, 57)).astype(np.float32)
    together = choose(logits, **settings)
    order = rng.permutation(batch)
    permuted = choose(logits[order], **{name: value[order] for name, value in settings.items()})
    np.testing.assert_array_equal(permuted, together[order])
    for slot in range(batch):
        one = slice(slot, slot + 1)
        alone = choose(logits[one], **{name: value[one] for name, value in settings.items()})
        assert alone[0] == together[slot]


def test_seed_and_token_index_both_change_the_draw():
    flat = np.zeros((64, 1009), np.float32)
    by_index = choose(flat, temperature=1.0, seeds=3, index=np.arange(64))
    by_seed = choose(flat, temperature=1.0, seeds=np.arange(64), index=3)
    assert len(set(by_index)) > 50
    assert len(set(by_seed)) > 50
    np.testing.assert_array_equal(
        by_index, choose(flat, temperature=1.0, seeds=3, index=np.arange(64))
    )


def test_an_answer_draws_each_token_by_its_index(tiny_config, rng):
    """Token i of a sampled answer: the logits of a whole forward, the noise of (seed, i)."""
    model = random_model(tiny_config(eos_ids=()), cache_tokens=256)
    question = [int(token) for token in rng.integers(3, 101, 9)]
    warm = {"temperature": 5.0, "top_k": 60, "top_p": 0.99}
    settings = SamplingParams(seed=7, **warm)
    answer = generate(question, documents=[], model=model, method="full_attention",
                      max_new_tokens=12, sampling=settings).token_ids  # fmt: skip
    whole = np.zeros((1, 32), np.int32)
    whole[0, :21] = [*question, *answer]
    segments = np.where(np.arange(32) < 21, FINAL, EMPTY)[None]
    logits = model.logits(whole, segments=segments)[0, 8:20]
    drawn = choose(logits, seeds=7, index=np.arange(12), **warm)
    assert answer == drawn.tolist()
    assert answer != choose(logits).tolist()  # it is warm enough to leave the greedy answer


def test_extreme_temperatures_stay_finite():
    logits = np.array([[1e4, -1e4, 9.9e3, -np.inf]], np.float32)
    assert choose(logits, temperature=1e-30)[0] == 0
    ids = {int(choose(logits, temperature=1e30, index=i)[0]) for i in range(64)}
    assert ids == {0, 1, 2}


def test_an_all_greedy_batch_neither_sorts_nor_draws():
    rows = (2,)
    jaxpr = jax.make_jaxpr(sample)(
        jnp.zeros((2, 8)),
        jnp.zeros(rows),
        jnp.zeros(rows, jnp.int32),
        jnp.ones(rows),
        jnp.zeros(rows, jnp.uint32),
        jnp.zeros(rows, jnp.int32),
    )
    outside = {equation.primitive.name for equation in jaxpr.eqns}
    assert "cond" in outside
    assert not outside & {"sort", "random_bits", "random_fold_in", "threefry2x32"}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"temperature": -0.1}, "temperature=-0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": -1}, "top_k=-1"),
        ({"temperature": 1e308}, "temperature=1e+308"),
        ({"temperature": 10**400}, "temperature=a"),
        ({"temperature": 1e-300}, "temperature=1e-300"),
        ({"top_k": 2.5}, "top_k=2"),
        ({"top_k": True}, "top_k=True"),
        ({"top_k": 2**31}, "top_k=2147483648"),
        ({"top_k": 2**64}, "top_k=18446744073709551616"),
        ({"top_p": 0.0}, "top_p=0"),
        ({"top_p": 1.1}, "top_p=1"),
        ({"top_p": 1e-300}, "top_p=1e-300"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "seed=4294967296"),
        ({"seed": True}, "seed=True"),
        ({"seed": 10**5000}, "seed=a"),
    ],
)
def test_settings_out_of_range_are_refused(changes, word):
    with refused(RequestError, word) as told:
        SamplingParams(**changes)
    assert len(str(told.value)) < 120


def test_the_bounds_are_what_the_engine_can_hold():
    bounds = [SamplingParams(1e-6, 2**31 - 1, 1e-30, 2**32 - 1), SamplingParams(1e6)]
    rows = SamplingRows.of(bounds)
    assert rows.top_k.tolist() == [2**31 - 1, 0]
    assert rows.seeds.tolist() == [2**32 - 1, 0]
    assert np.isfinite(rows.temperature).all() and (rows.temperature > 0).all()
    logits = jnp.asarray([[-40.0, 40.0, 39.0], [-40.0, 40.0, 39.0]])
    for index in range(8):
        settings = (rows.temperature, rows.top_k, rows.top_p, rows.seeds)
        coldest, hottest = sample(logits, *settings, jnp.full(2, index, jnp.int32))
        assert coldest == 1 and 0 <= hottest < 3


def test_the_default_is_greedy():
    assert SamplingParams() == SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)
