"""Laws 3 to 5 for every selector on every family, through few compiled programs.

Requests come in pairs whose prompts share chunks, and the longest run of new tokens of a pair has
always the same padded length, whatever is chosen: one prefill a family serves all of these tests.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxrag.engine.request import Prompt
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


def run(work, model, method, *prompts):
    """Logits after each prompt [B, V], and the tokens that each recomputed (None: nothing)."""
    logits, chosen = work.online(model, method, *prompts)
    return logits, [None if tokens is None else tokens.tolist() for tokens in chosen]


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

    def select(runner, scene):
        [choice] = method.selector.select(model, runner.cache, [scene])
        return choice.tokens.tolist()

    choices = work.scene(model, method, *prompts, look=select)
    assert choices == [list(range(24)), list(range(13))]
    logits, chosen = run(work, model, method, *prompts)
    assert list(map(len, chosen)) == [24, 13]
    np.testing.assert_allclose(logits, full(model, *prompts), **CLOSE)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_law_3_ratio_0_is_plain_reuse(rng, work, model_of, family, name):
    """Bit for bit, and plain reuse is not full attention."""
    model, prompts = model_of(family), pair(rng, work)
    plain, _ = run(work, model, Method("plain", encoder="isolated"), *prompts)
    logits, chosen = run(work, model, method_with(name, 0), *prompts)
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
            logits, chosen = run(work, model, method_with(name, ratio, encoder), *alone)
            assert chosen == ([None, None] if name == "none" else [[], []])
            np.testing.assert_allclose(logits, expected, **CLOSE)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_law_4_later_tokens_change_nothing(rng, work, model_of, family, name):
    """What a selector chose is held fixed, as all stored KV; then each later token is another."""
    model, prompts = model_of(family), pair(rng, work)

    def computed(cut=None):
        """K and V [L, n, K, H] of the tokens that each request runs, others from ``cut`` on."""

        def change(runner, state):
            if cut is not None:
                state.run.ids[cut:] = 3 + (state.run.ids[cut:] + 5) % 90

        def look(runner, state):
            pages = work.pool_kv(runner, state.table.pages)
            return [x.reshape(x.shape[0], -1, *x.shape[3:])[:, state.run.slots] for x in pages]

        with work.selecting(after=change):
            served = work.served(model, method_with(name, 0.4), *prompts, look=look)
        return [kv for *_, both in served for kv in both]

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

    def residents(parts):
        """Pages of chunk b and of chunk c in each request."""
        return [
            [part.parts[1 + at].resident.pages for at in places]
            for part, places in zip(parts, ((1, 2), (1, 0)), strict=True)
        ]

    def look(runner, state):
        """K and V of both shared chunks, which are the last of either prompt."""
        shared = [page for part in state.parts[-2:] for page in part.resident.pages]
        return work.pool_kv(runner, shared)

    before = {}
    with work.selecting(before=lambda runner, it: before.update({len(it.parts): look(runner, it)})):
        served = work.served(model, method, *prompts, look=look)
    first, second = residents([state for state, *_ in served])
    assert first == second
    for state, _, after in served:
        for one, other in zip(before[len(state.parts)], after, strict=True):
            np.testing.assert_array_equal(one, other)
    stores = [new_store(model), new_store(model)]
    separate = work.served(model, method, *prompts, stores=stores)
    first, second = residents([state for state, *_ in separate])
    assert not {*itertools.chain(*first)} & {*itertools.chain(*second)}
    together, apart = ([logits for _, logits, _ in it] for it in (served, separate))
    chosen, again = (
        [[] if state.choice is None else state.choice.tokens.tolist() for state, *_ in it]
        for it in (served, separate)
    )
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
