"""Laws 3 to 5 for every selector on every family, through few compiled programs.

Requests come in pairs whose prompts share chunks, and the longest run of new tokens of a pair has
always the same padded length, whatever is chosen: one prefill a family serves all of these tests.
"""

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest

from jaxrag.engine import direct, prefill
from jaxrag.engine.direct import map_request, unmap
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.store import MemoryStore, derive
from jaxrag.reuse.methods import METHODS, Method
from jaxrag.reuse.select import (
    AllTokens,
    CacheCraft,
    FirstK,
    KvDeviation,
    NoTokens,
    QueryGuided,
    RandomTokens,
)
from jaxrag.serve.generate import generate

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "glm", "glm4")
SELECTORS = {
    "none": NoTokens(),
    "all": AllTokens(),
    "random": RandomTokens(seed=3),
    "first_k": FirstK(),
    "kv_deviation": KvDeviation(),
    "gradual": KvDeviation(layers=(1, 2), widths=(1.5,), part="kv"),
    "cache_craft": CacheCraft(),
    "question": QueryGuided(),
    "behind": QueryGuided(place="behind"),
    "over_cache": QueryGuided(over="cache"),
}
CHOOSING = [name for name in SELECTORS if name not in ("none", "all")]
ALWAYS = ("mistral", "glm4")  # windowed; partial and interleaved rotary. The others with the slow
EVERY_FAMILY = [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in FAMILIES
]
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
_salts = itertools.count()


def method_with(name, ratio=None, encoder="isolated"):
    """A method with a selector; ``ratio`` is read by those that take any."""
    if name in ("none", "all") and ratio:
        ratio = None
    return Method("tried", encoder=encoder, selector=SELECTORS[name], recompute_ratio=ratio)


def pair(rng, work, prefix=5):
    """Two prompts: chunks a, b, c, and chunks c, b. At most 32 and at least 17 tokens are new."""
    start, a, b, c = work.ids(rng, prefix, 11, 8, 5)
    one, two = work.ids(rng, 7, 19)
    return Prompt(start, (a, b, c), one), Prompt(start, (c, b), two)


def new_store(model):
    """An empty store whose chunks are nobody else's, in the pool neither."""
    fingerprint = derive(model.fingerprint, salt=f"every family {next(_salts)}")
    return MemoryStore(fingerprint, model.kv_layout, max_tokens=512)


@contextlib.contextmanager
def mapped(model, method, *prompts, stores=None):
    """Requests in the pool, each from its own store or all from the model's."""
    parts = []
    runner = engine_of(model).call(lambda runner: runner)  # nothing is in flight any more
    try:
        for prompt, store in zip(
            prompts, stores or [engine_of(model).memory] * len(prompts), strict=True
        ):
            parts.append(map_request(runner, Request(prompt, store, method, 1), 0))
        yield parts
    finally:
        for part in parts:
            unmap(runner, part)


def run(model, method, *prompts, stores=None):
    """Logits after each prompt [B, V], and the tokens that each recomputed (None: nothing)."""
    with mapped(model, method, *prompts, stores=stores) as parts:
        logits, _ = direct.prefill(engine_of(model).runner, parts)
        chosen = [None if p.choice is None else p.choice.tokens.tolist() for p in parts]
        return np.asarray(logits)[: len(prompts)], chosen


def full(model, *prompts):
    """Full attention's logits after each prompt, by a forward without a cache: [B, V]."""
    ids = np.zeros((len(prompts), 40), np.int32)
    lengths = [prompt.num_tokens for prompt in prompts]
    for row, prompt in enumerate(prompts):
        ids[row, : lengths[row]] = np.concatenate((prompt.prefix, *prompt.chunks, prompt.final))
    segments = np.where(np.arange(40) < np.array(lengths)[:, None], 2, 0).astype(np.int32)
    logits = np.asarray(model.logits(ids, segments=segments))
    return logits[np.arange(len(prompts)), np.array(lengths) - 1]


@pytest.mark.parametrize("name", [name for name in SELECTORS if name != "none"])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_law_3_ratio_1_is_full_attention(rng, work, model_of, family, name):
    """Also where the selector is asked itself, which ratio 1 makes needless."""
    model, prompts = model_of(family), pair(rng, work)
    method = method_with(name, 1)
    with mapped(model, method, *prompts) as parts:
        choices = method.selector.select(
            model, engine_of(model).runner.cache, [part.scene for part in parts]
        )
    assert [choice.tokens.tolist() for choice in choices] == [list(range(24)), list(range(13))]
    logits, chosen = run(model, method, *prompts)
    assert list(map(len, chosen)) == [24, 13]
    np.testing.assert_allclose(logits, full(model, *prompts), **CLOSE)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_law_3_ratio_0_is_plain_reuse(rng, work, model_of, family, name):
    """Bit for bit, and plain reuse is not full attention."""
    model, prompts = model_of(family), pair(rng, work)
    plain, _ = run(model, Method("plain", encoder="isolated"), *prompts)
    logits, chosen = run(model, method_with(name, 0), *prompts)
    assert chosen == [None, None]
    np.testing.assert_array_equal(logits, plain)
    assert np.abs(plain - full(model, *prompts)).max() > 1e-2


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_law_3_a_single_chunk_is_full_attention(rng, work, model_of, family, name):
    """Behind the prefix, and alone where there is none, at any ratio."""
    model = model_of(family)
    for encoder, prefix in (("after_prefix", 5), ("isolated", 0)):
        one, two = pair(rng, work, prefix)
        alone = [
            dataclasses.replace(one, chunks=one.chunks[:1]),
            dataclasses.replace(two, chunks=one.chunks[:1]),
        ]
        expected = full(model, *alone)
        for ratio in (0.1, 0.6):
            logits, chosen = run(model, method_with(name, ratio, encoder), *alone)
            assert chosen == ([None, None] if name == "none" else [[], []])
            np.testing.assert_allclose(logits, expected, **CLOSE)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_law_4_later_tokens_change_nothing(rng, work, model_of, family, name):
    """What a selector chose is held fixed, as all stored KV; then each later token is another."""
    model, prompts = model_of(family), pair(rng, work)

    def computed(cut=None):
        """K and V [L, n, K, H] of the tokens that each request runs, others from ``cut`` on."""
        with mapped(model, method_with(name, 0.4), *prompts) as parts:
            prefill.select_tokens(engine_of(model).runner, parts)
            for part in parts if cut is not None else ():
                part.ids[cut:] = 3 + (part.ids[cut:] + 5) % 90
            direct.prefill(engine_of(model).runner, parts)
            layers = (
                np.arange(model.config.num_layers)[:, None]
                * engine_of(model).runner.cache.allocator.num_pages
            )
            found = []
            for part in parts:
                for buffer in (
                    engine_of(model).runner.cache.pool.k,
                    engine_of(model).runner.cache.pool.v,
                ):
                    rows = np.asarray(buffer[layers + np.array(part.table.pages)])
                    flat = rows.reshape(rows.shape[0], -1, *rows.shape[3:])
                    found.append(flat[:, part.slots])
            return found

    before = computed()
    fewest = min(kv.shape[1] for kv in before)
    assert fewest == {"none": 7, "all": 31}.get(name, fewest) >= 7
    for cut in (1, fewest // 2, fewest - 1):
        for kv, other in zip(before, computed(cut), strict=True):
            np.testing.assert_array_equal(kv[:, :cut], other[:, :cut])
            assert np.abs(kv[:, cut] - other[:, cut]).max() > 1e-3


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_law_5_shared_chunks_give_what_separate_copies_give(rng, work, model_of, family, name):
    """Two requests at once, over one copy at different places, and over a copy each."""
    model, prompts, method = model_of(family), pair(rng, work), method_with(name, 0.4)
    layers = (
        np.arange(model.config.num_layers)[:, None]
        * engine_of(model).runner.cache.allocator.num_pages
    )

    def residents(parts):
        """Pages of chunk b and of chunk c in each request."""
        return [
            [part.parts[1 + at].resident.pages for at in places]
            for part, places in zip(parts, ((1, 2), (1, 0)), strict=True)
        ]

    with mapped(model, method, *prompts) as parts:
        first, second = residents(parts)
        assert first == second
        shared = layers + np.array([page for pages in first for page in pages])
        before = [
            np.asarray(x[shared])
            for x in (engine_of(model).runner.cache.pool.k, engine_of(model).runner.cache.pool.v)
        ]
        together, _ = direct.prefill(engine_of(model).runner, parts)
        after = [
            np.asarray(x[shared])
            for x in (engine_of(model).runner.cache.pool.k, engine_of(model).runner.cache.pool.v)
        ]
        chosen = [[] if part.choice is None else part.choice.tokens.tolist() for part in parts]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    stores = [new_store(model), new_store(model)]
    with mapped(model, method, *prompts, stores=stores) as parts:
        first, second = residents(parts)
        assert not {*itertools.chain(*first)} & {*itertools.chain(*second)}
        apart, _ = direct.prefill(engine_of(model).runner, parts)
        again = [[] if part.choice is None else part.choice.tokens.tolist() for part in parts]
    assert chosen == again
    assert [bool(tokens) for tokens in chosen] == [name != "none"] * 2
    np.testing.assert_allclose(together, apart, **CLOSE)


@pytest.mark.parametrize(
    "encoder", [pytest.param("isolated", marks=pytest.mark.slow), "neighbours"]
)
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f == "glm4" else pytest.mark.slow) for f in FAMILIES]
)
def test_law_3_ratio_1_gives_full_attentions_tokens(rng, work, model_of, family, encoder):
    """Every selector through ``generate``, and FusionRAG's own preset."""
    model = model_of(family, eos_ids=())
    documents = [list(map(int, ids)) for ids in work.ids(rng, 11, 8, 5)]
    questions = [list(map(int, ids)) for ids in work.ids(rng, 7, 6)]
    options = {"documents": documents, "model": model, "max_new_tokens": 6}
    expected = [r.token_ids for r in generate(questions, method="full_attention", **options)]
    assert list(map(len, expected)) == [6, 6]
    methods = [method_with(name, 1, encoder) for name in (*CHOOSING, "all")]
    if encoder == "neighbours":
        methods.append(METHODS["fusionrag"].with_ratio(1))
    for method in methods:
        results = generate(questions, method=method, **options)
        assert [result.token_ids for result in results] == expected, method.selector
