"""Misses computed in place, and leading parts that are kept: laws 3 and 12, pages and the store."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxrag.base.errors import RequestError
from jaxrag.engine import prefill
from jaxrag.engine.engine import engine_of
from jaxrag.engine.outcome import account
from jaxrag.engine.request import Prompt
from jaxrag.engine.reuse import token_counts
from jaxrag.kv.cache import PagePool
from jaxrag.kv.store import MemoryStore, derive
from jaxrag.models.decoder import unembed
from jaxrag.reuse.methods import METHODS, Method
from jaxrag.reuse.select import (
    AllTokens,
    CacheCraft,
    FirstK,
    KvDeviation,
    NoTokens,
    QueryGuided,
    RandomTokens,
    kv_deviation,
)
from jaxrag.reuse.select.base import best

ALWAYS = ("mistral", "glm4")  # windowed; partial and interleaved rotary. The others with the slow
FAMILIES = [
    *ALWAYS,
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("llama", "qwen2", "qwen3", "glm")),
]
SELECTORS = {
    "none": NoTokens(),
    "random": RandomTokens(seed=3),
    "first_k": FirstK(),
    "kv_deviation": KvDeviation(),
    "gradual": KvDeviation(layers=(1, 2), widths=(1.6,), part="kv"),
    "cache_craft": CacheCraft(),
    "question": QueryGuided(),
    "over_cache": QueryGuided(over="cache"),
}
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
_salts = itertools.count()


def method_with(selector="none", ratio=0.2, encoder="after_prefix", **more):
    chosen = SELECTORS[selector]
    ratio = None if selector == "none" else ratio
    more = {"misses": "in_place", **more}
    return Method("tried", encoder=encoder, selector=chosen, recompute_ratio=ratio, **more)


def new_store(model):
    """An empty store; its chunks are nobody else's, in the pool neither."""
    fingerprint = derive(model.fingerprint, salt=f"test {next(_salts)}")
    return MemoryStore(fingerprint, model.kv_layout, max_tokens=512)


def run(work, model, store, method, prompt):
    """Logits of the last token, the tokens that were chosen, and the account."""
    [(state, logits, _)] = work.served(model, method, prompt, stores=[store])
    chosen = [] if state.choice is None else state.choice.tokens.tolist()
    return logits, chosen, account(state)


def put(work, model, store, method, prefix, *chunks):
    """Encode chunks into the store, and let the pool forget them."""
    encode = dataclasses.replace(method, misses="encode", prefix_cache=False)
    prompt = Prompt(prefix, chunks, prefix[:1])
    [(state, *_)] = work.served(model, encode, prompt, stores=[store])
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


@pytest.mark.parametrize("family", FAMILIES)
def test_law_3_all_chunks_missing_and_computed_in_place_is_full_attention(
    rng, work, model_of, family
):
    model, prompt = model_of(family), work.prompt(rng)
    full = work.full_logits(model, prompt)
    for encoder, prefix in (("after_prefix", prompt.prefix), ("isolated", prompt.prefix[:0])):
        here = dataclasses.replace(prompt, prefix=prefix)
        expected = full if len(prefix) else work.full_logits(model, here)
        logits, _, rows = run(work, model, new_store(model), method_with(encoder=encoder), here)
        np.testing.assert_allclose(logits, expected, **CLOSE)
        assert hows(rows) == ["encoded"] * bool(len(prefix)) + ["in place"] * 4


@pytest.mark.parametrize("name", SELECTORS)
def test_law_3_whatever_the_selector_and_in_small_pieces(rng, work, model_of, name, monkeypatch):
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 32)
    model, prompt = model_of(), work.prompt(rng)
    logits, chosen, rows = run(work, model, new_store(model), method_with(name), prompt)
    np.testing.assert_allclose(logits, work.full_logits(model, prompt), **CLOSE)
    assert chosen == []
    assert token_counts(rows) == {"reused": 0, "recomputed": 0, "encoded": 74}


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize(
    ("family", "stored"),
    [
        ("mistral", (0, 1, 3)),
        pytest.param("llama", (1,), marks=pytest.mark.slow),
        pytest.param("qwen3", (2, 3), marks=pytest.mark.slow),
    ],
)
def test_a_gap_sees_all_that_precedes_it(rng, work, model_of, name, family, stored, monkeypatch):
    """Gaps and chosen tokens are as in a dense forward in which all else stays as stored.

    Or as the checks of CacheBlend left it: fresh up to layer 1, and what they kept up to layer 2.
    """
    kept = []

    def keep(*scores):
        kept.append(best(*scores))
        return kept[-1]

    monkeypatch.setattr(kv_deviation, "best", keep)
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 32)
    model, prompt, method = model_of(family), work.prompt(rng), method_with(name)
    store = new_store(model)
    put(work, model, store, method, prompt.prefix, *(prompt.chunks[i] for i in stored))
    logits, chosen, rows = run(work, model, store, method, prompt)
    missing = [i for i in range(4) if i not in stored]
    of = np.repeat(np.arange(4), [len(chunk) for chunk in prompt.chunks])
    gaps = np.flatnonzero(np.isin(of, missing))
    assert not set(chosen) & set(gaps.tolist())
    assert bool(chosen) == (name != "none")
    fresh = {"kv_deviation": [range(74)] * 2, "gradual": [range(74)] * 2 + kept[:1]}.get(name, ())
    together = sorted({*gaps.tolist(), *chosen})
    hidden, *_ = work.dense(model, prompt, together, fresh_layers=fresh)
    np.testing.assert_allclose(logits, unembed(model.params, hidden[-1]), **CLOSE)
    expected = ["in place" if i in missing else "chunk hit" for i in range(4)]
    if 0 in stored:
        expected[0] = "prefix hit"
    assert hows(rows) == ["prefix hit", *expected]
    assert [row.recomputed for row in rows[1:]] == np.bincount(of[chosen], minlength=4).tolist()


@pytest.mark.parametrize("encoder", ["after_prefix", "isolated"])
def test_law_3_ratio_1_with_gaps_is_full_attention(rng, work, model_of, encoder):
    model, prompt = model_of(), work.prompt(rng)
    for selector, ratio in ((QueryGuided(), 1), (AllTokens(), None)):
        store = new_store(model)
        method = method_with("question", 1, encoder)
        method = dataclasses.replace(method, selector=selector, recompute_ratio=ratio)
        put(work, model, store, method, prompt.prefix, prompt.chunks[0], prompt.chunks[3])
        logits, _, _ = run(work, model, store, method, prompt)
        np.testing.assert_allclose(logits, work.full_logits(model, prompt), **CLOSE)


def test_a_chunk_computed_in_place_is_not_stored_and_not_shared(rng, work, model_of):
    model, prompt, method = model_of(), work.prompt(rng), method_with()
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("gradual", "cache_craft") else ())
        for name in SELECTORS
    ],
)
def test_law_12_a_batch_with_gaps_is_one_at_a_time(rng, work, model_of, name):
    model, method, store = model_of(), method_with(name, 0.3), new_store(model_of())
    prompts = [work.prompt(rng, chunks=sizes) for sizes in ((37, 20, 16), (9,), (5, 40))]
    prompts.append(dataclasses.replace(prompts[0], final=work.ids(rng, 21)[0]))
    put(work, model, store, method, prompts[0].prefix, prompts[0].chunks[1])
    alone = [run(work, model, store, method, prompt)[0] for prompt in prompts]
    served = work.served(model, method, *prompts, stores=[store] * 4, tokens=16)
    pages = [page for state, *_ in served for page in state.own]
    assert len(set(pages)) == len(pages)
    for (_, together, _), expected in zip(served, alone, strict=True):
        np.testing.assert_allclose(together, expected, **CLOSE)


@pytest.mark.parametrize("name", SELECTORS)
def test_slots_of_gaps_may_hold_nan(rng, work, model_of, name):
    """Nothing reads the slots of a gap before they are computed."""
    model, prompt, method = model_of(), work.prompt(rng), method_with(name)
    store = new_store(model)
    put(work, model, store, method, prompt.prefix, prompt.chunks[1], prompt.chunks[3])
    expected, chosen, _ = run(work, model, store, method, prompt)

    def poison(runner, state):
        cache, layers = runner.cache, np.arange(model.config.num_layers)[:, None]
        rows = (layers * cache.allocator.num_pages + np.array(state.own)).ravel()
        pool = cache.pool
        cache._pool = PagePool(k=pool.k.at[rows].set(np.nan), v=pool.v.at[rows].set(np.nan))

    with work.selecting(before=poison):
        logits, again, _ = run(work, model, store, method, prompt)
    engine_of(model).forget()
    assert again == chosen
    np.testing.assert_array_equal(logits, expected)


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
        for (_, logits, _), prompt in zip(served, (one, other), strict=True):
            np.testing.assert_allclose(logits, work.full_logits(model, prompt), **CLOSE)
        assert num_free(model) == allocator.num_pages - (1 + 3 + 2 + 1 + 1)
        first, second = ([part.resident for part in state.parts] for state, *_ in served)
        assert second == (first if hits else second)  # law 5: both on the same pages
        assert None not in second and (None in first) == (not hits)
    assert emptied(model).num_free == allocator.num_pages
    assert hows(run(work, model, store, method, one)[2]) == ["computed"] * 5


def test_gaps_behind_exact_parts_are_kept_and_others_are_not(rng, work, model_of):
    model, store = model_of(), new_store(model_of())
    method = method_with(prefix_cache=True)
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
    method = method_with(prefix_cache=True)
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
        rows = run(work, model, store, method_with(prefix_cache=True), prompt)[2]
        assert hows(rows)[1:] == ["in place"] * 4


def test_another_salt_shares_no_leading_part(rng, work, model_of):
    model, prompt = model_of(), work.prompt(rng)
    method = dataclasses.replace(METHODS["full_attention"], prefix_cache=True)
    for _ in range(2):
        assert hows(run(work, model, new_store(model), method, prompt)[2]) == ["computed"] * 5


def test_a_failure_gives_everything_back(rng, work, model_of):
    model, store = model_of(), new_store(model_of())
    prompt = work.prompt(rng, chunks=(100, 90, 80))
    method = method_with(prefix_cache=True)
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
