"""Misses computed in place, and leading parts that are kept: exactness, pages and the store."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxrag.base.errors import RequestError
from jaxrag.engine.engine import engine_of
from jaxrag.engine.outcome import account
from jaxrag.engine.request import Prompt
from jaxrag.kv.store import MemoryStore, derive
from jaxrag.reuse.methods import METHODS, Method
from jaxrag.reuse.select import (
    QueryGuided,
)

ALWAYS = ("mistral", "glm4")  # windowed; partial and interleaved rotary. The others with the slow
FAMILIES = [
    *ALWAYS,
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("llama", "qwen2", "qwen3", "glm")),
]
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
_salts = itertools.count()


def in_place(**more):
    """Plain reuse that computes misses in place."""
    return Method("tried", "after_prefix", misses="in_place", **more)


def new_store(model):
    """An empty store; its chunks are nobody else's, in the pool neither."""
    fingerprint = derive(model.fingerprint, salt=f"test {next(_salts)}")
    return MemoryStore(fingerprint, model.kv_layout, max_tokens=512)


def run(work, model, store, method, prompt):
    """Logits of the last token, the tokens that were chosen, and the account."""
    [(state, logits)] = work.served(model, method, prompt, stores=[store])
    chosen = [] if state.choice is None else state.choice.tokens.tolist()
    return logits, chosen, account(state)


def put(work, model, store, method, prefix, *chunks):
    """Encode chunks into the store, and let the pool forget them."""
    encode = dataclasses.replace(method, misses="encode", prefix_cache=False)
    prompt = Prompt(prefix, chunks, prefix[:1])
    [(state, _)] = work.served(model, encode, prompt, stores=[store])
    engine_of(model).drop(state.held)


def emptied(model):
    """The allocator of a model's pool, with nothing in it."""

    def empty(runner):
        allocator = runner.cache.allocator
        allocator.free(allocator.allocate(allocator.num_pages, "a test"))
        return allocator

    return engine_of(model).call(empty)


def num_free(model):
    """Pages of the pool that hold nothing, once nothing is in flight."""
    return engine_of(model).call(lambda runner: runner.cache.allocator.num_free)


def hows(rows):
    return [row.how for row in rows]


def test_a_chunk_computed_in_place_is_not_stored_and_not_shared(rng, work, model_of):
    model, prompt, method = model_of(), work.prompt(rng), in_place()
    store = new_store(model)
    free = num_free(model)
    for _ in range(2):
        _, _, rows = run(work, model, store, method, prompt)
        assert hows(rows)[1:] == ["in place"] * 4
        assert {row.why for row in rows[1:]} == {"not in the store"}
    assert len(list(store.keys())) == 1  # the prefix
    assert num_free(model) == free - 1
    encoded, _, rows = run(work, model, store, METHODS["full_reuse"], prompt)
    assert hows(rows)[1:] == ["encoded"] * 4
    again, _, rows = run(work, model, store, method, prompt)
    assert hows(rows) == ["prefix hit", "prefix hit", *["chunk hit"] * 3]
    np.testing.assert_array_equal(again, encoded)


@pytest.mark.parametrize("family", FAMILIES)
def test_leading_parts_are_kept_and_exact(rng, work, model_of, family):
    model, store = model_of(family), new_store(model_of(family))
    method = dataclasses.replace(METHODS["full_attention"], prefix_cache=True)
    one = work.prompt(rng)
    a, b, c, d = one.chunks
    longer = Prompt(one.prefix, (a, b, c, d, *work.ids(rng, 18)), work.ids(rng, 4)[0])
    for prompt, hits in (
        (one, 0),
        (longer, 5),
        (longer, 6),
        (Prompt(one.prefix, (a, c, b), one.final), 2),  # c never stood behind a alone
        (Prompt(one.prefix, (b,), one.final), 1),
        (Prompt(one.prefix[:3], (a,), one.final), 0),
    ):
        logits, _, rows = run(work, model, store, method, prompt)
        np.testing.assert_allclose(logits, work.full_logits(model, prompt), **CLOSE)
        assert hows(rows) == ["prefix hit"] * hits + ["computed"] * (len(rows) - hits)
    assert list(store.keys()) == []


def test_a_batch_keeps_one_copy_and_gives_every_page_back(rng, work, model_of):
    model, store = model_of(), new_store(model_of())
    method = dataclasses.replace(METHODS["full_attention"], prefix_cache=True)
    one = work.prompt(rng)
    other = dataclasses.replace(one, final=work.ids(rng, 12)[0])
    allocator = emptied(model)
    for hits in (False, True):
        served = work.served(model, method, one, other, stores=[store] * 2)
        for (_, logits), prompt in zip(served, (one, other), strict=True):
            np.testing.assert_allclose(logits, work.full_logits(model, prompt), **CLOSE)
        assert num_free(model) == allocator.num_pages - (1 + 3 + 2 + 1 + 1)
        first, second = ([part.resident for part in state.parts] for state, _ in served)
        assert second == (first if hits else second)  # law 5: both on the same pages
        assert None not in second and (None in first) == (not hits)
    assert emptied(model).num_free == allocator.num_pages
    assert hows(run(work, model, store, method, one)[2]) == ["computed"] * 5


def test_gaps_behind_exact_parts_are_kept_and_others_are_not(rng, work, model_of):
    model, store = model_of(), new_store(model_of())
    method = in_place(prefix_cache=True)
    prompt = work.prompt(rng)
    put(work, model, store, method, prompt.prefix, prompt.chunks[2])
    first, _, rows = run(work, model, store, method, prompt)
    assert hows(rows)[1:] == ["in place", "in place", "chunk hit", "in place"]
    again, _, rows = run(work, model, store, method, prompt)
    assert hows(rows) == [*["prefix hit"] * 3, "chunk hit", "in place"]
    assert [row.where for row in rows] == ["pool"] * 4 + [None]
    np.testing.assert_allclose(again, first, **CLOSE)
    recompute = dataclasses.replace(method, selector=QueryGuided(), recompute_ratio=1)
    logits, chosen, rows = run(work, model, store, recompute, prompt)
    assert chosen == [57]  # the one token of the only chunk that is neither exact nor computed
    np.testing.assert_allclose(logits, work.full_logits(model, prompt), **CLOSE)


def test_what_was_computed_behind_inexact_chunks_is_not_kept_as_exact(rng, work, model_of):
    """Full attention afterwards, on the same store: computed, then from what that kept."""
    model, store, prompt = model_of(), new_store(model_of()), work.prompt(rng)
    method = in_place(prefix_cache=True)
    put(work, model, store, method, prompt.prefix, prompt.chunks[2])
    for _ in range(2):
        assert hows(run(work, model, store, method, prompt)[2])[3:] == ["chunk hit", "in place"]
    full = dataclasses.replace(METHODS["full_attention"], prefix_cache=True)
    for hits in (0, 5):
        logits, _, rows = run(work, model, store, full, prompt)
        assert hows(rows) == ["prefix hit"] * hits + ["computed"] * (5 - hits)
        np.testing.assert_allclose(logits, work.full_logits(model, prompt), **CLOSE)


def test_nothing_is_kept_behind_rounded_kv(rng, work, model_of):
    model, prompt = model_of(), work.prompt(rng)
    layout = dataclasses.replace(model.kv_layout, stored="int8")
    fingerprint = derive(model.fingerprint, "int8", f"test {next(_salts)}")
    store = MemoryStore(fingerprint, layout, max_tokens=512)
    for _ in range(2):
        rows = run(work, model, store, in_place(prefix_cache=True), prompt)[2]
        assert hows(rows)[1:] == ["in place"] * 4


def test_another_salt_shares_no_leading_part(rng, work, model_of):
    model, prompt = model_of(), work.prompt(rng)
    method = dataclasses.replace(METHODS["full_attention"], prefix_cache=True)
    for _ in range(2):
        assert hows(run(work, model, new_store(model), method, prompt)[2]) == ["computed"] * 5


def test_a_failure_gives_everything_back(rng, work, model_of):
    model, store = model_of(), new_store(model_of())
    prompt = work.prompt(rng, chunks=(100, 90, 80))
    method = in_place(prefix_cache=True)
    put(work, model, store, method, prompt.prefix, prompt.chunks[1])
    emptied(model)

    def fails(runner, state):
        raise RequestError("a test")

    with work.selecting(before=fails), pytest.raises(RequestError, match="a test"):
        run(work, model, store, method, prompt)
    allocator = emptied(model)
    assert allocator.num_free == allocator.num_pages


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Method("x", "isolated", misses="skip"), "expected one of encode, in_place"),
        (lambda: Method("x", None, misses="in_place"), "no chunk is missed"),
        (
            lambda: Method("x", "isolated", positions="composite", misses="in_place"),
            "composite positions overlap",
        ),
        (
            lambda: Method("x", "isolated", positions="composite", prefix_cache=True),
            "composite positions overlap",
        ),
    ],
)
def test_settings_without_a_meaning_are_refused(make, words):
    with pytest.raises(RequestError, match=words):
        make()
