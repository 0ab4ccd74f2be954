"""Every selector against slow numpy written from the papers' equations."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxrag.base.rotary import attention_factor, frequencies
from jaxrag.engine.request import Prompt
from jaxrag.reuse.select import CacheCraft, KvDeviation, QueryGuided
from jaxrag.reuse.select.cache_craft import cache_fix_overhead

ALWAYS = ("mistral", "glm")  # windowed; partial and interleaved rotary. The others with the slow
FAMILIES = [
    *ALWAYS,
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("llama", "qwen2", "qwen3", "glm4")),
]
LENGTHS = (37, 20, 1, 16)
STARTS = (0, 37, 57, 58, 74)
chunk_of = np.repeat(np.arange(4), LENGTHS)
CLOSE = {"rtol": 2e-4, "atol": 1e-6}


def rotated(x, positions, config):
    """RoPE in float64: x [T, heads, H] at these positions [T]."""
    angle = np.asarray(positions)[:, None, None] * frequencies(config.rope)
    factor, dim = attention_factor(config.rope), config.rope.rotary_dim
    cos, sin = factor * np.cos(angle), factor * np.sin(angle)
    out = x.copy()
    if config.rope.interleaved:
        first, second = slice(0, dim, 2), slice(1, dim, 2)
    else:
        first, second = slice(0, dim // 2), slice(dim // 2, dim)
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def weights(q, k, see):
    """Softmax attention [N, T, S] of rotated q [T, N, H] to k [S, K, H] where ``see`` [T, S]."""
    k = k.repeat(q.shape[1] // k.shape[1], 1)
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(see, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True)


def causal(n, config):
    order = np.arange(n)
    see = order[None] <= order[:, None]
    if config.sliding_window is not None:
        see &= order[:, None] - order[None] < config.sliding_window
    return see


def top(scores, budget, among):
    """The budget's best of these indices, ties to the earlier."""
    return sorted(sorted(among, key=lambda i: (-scores[i], i))[:budget])


@pytest.fixture
def tried(work, model_of, rng, yarn_rope):
    """``tried(family, selector, ratio)``: model, prompt, its scene and what was chosen."""

    def run(family, selector, ratio, encoder="after_prefix", of=lambda *_: None):
        # A window that reaches over every chunk's border, so that all of its tokens deviate.
        changes = {"mistral": {"sliding_window": 24}, "yarn": {"rope": yarn_rope}}.get(family, {})
        family = "llama" if family == "yarn" else family
        model = model_of(family, **changes)
        prompt = dataclasses.replace(work.prompt(rng), question=(2, 6))

        def look(runner, scene):
            choice = selector.select(model, runner.cache, scene)
            return choice.tokens.tolist(), of(model, runner.cache, scene)

        [seen] = work.scene(model, work.method(selector, ratio, encoder), prompt, look=look)
        return model, prompt, *seen

    return run


def scores_of(selector):
    """What the selector scores the chunk tokens of a scene with."""

    def scores(model, cache, scene):
        observed = selector.observe(model, cache, scene)
        return selector.score(dataclasses.replace(scene, observed=observed))

    return scores


VOTERS = {"to_end": slice(2, None), "question": slice(2, 6), "final": slice(None)}  # (2, 6) asks


@pytest.mark.parametrize("family", ["yarn", *FAMILIES])
@pytest.mark.parametrize("place", ["as_cached", "behind"])
def test_query_guided_by_the_question_alone(tried, work, family, place):
    """FusionRAG 3.2: last layer, question alone, a softmax in every chunk, column sums."""
    check_question_alone(tried, work, family, place, "to_end")


@pytest.mark.parametrize("voters", ["question", "final"])
def test_query_guided_counts_the_votes_of_a_span(tried, work, voters):
    check_question_alone(tried, work, "llama", "as_cached", voters)


def check_question_alone(tried, work, family, place, voters):
    """Scores and choice by the equations, of the tokens that vote."""
    selector = QueryGuided(place=place, voters=voters)
    model, prompt, chosen, scores = tried(family, selector, 0.3, of=scores_of(selector))
    config, size = model.config, len(prompt.final)
    _, _, q, _, _ = work.dense(model, Prompt(prompt.final[:0], (), prompt.final), ())
    _, stored, *_ = work.dense(model, prompt, ())
    expected = np.zeros(74)
    for start, end in itertools.pairwise(STARTS):
        k = stored[-1, 0, 5 + start : 5 + end]
        first_key = len(prompt.prefix) if place == "as_cached" else 0
        first_query = 0 if place == "as_cached" else end - start
        w = weights(
            rotated(q[-1], first_query + np.arange(size), config),
            rotated(k, first_key + np.arange(end - start), config),
            np.ones((size, end - start), bool),
        )
        expected[start:end] = w[:, VOTERS[voters]].sum((0, 1))
    np.testing.assert_allclose(scores, expected, **CLOSE)
    count = len(range(size)[VOTERS[voters]])
    assert expected.sum() == pytest.approx(4 * count * config.num_heads)  # chunks weigh the same
    assert chosen == top(expected, 23, range(37, 74))


@pytest.mark.parametrize("family", ["yarn", *FAMILIES])
def test_query_guided_over_the_cache(tried, work, family):
    selector = QueryGuided(over="cache")
    model, prompt, chosen, scores = tried(family, selector, 0.3, of=scores_of(selector))
    _, stored, q, k, _ = work.dense(model, prompt, ())
    whole = prompt.num_tokens
    keys = k[-1].copy()
    keys[5:79] = stored[-1, 0, 5:79]
    w = weights(
        rotated(q[-1], np.arange(whole), model.config),
        rotated(keys, np.arange(whole), model.config),
        causal(whole, model.config),
    )
    expected = w[:, 2 - len(prompt.final) :, 5:79].sum((0, 1))
    np.testing.assert_allclose(scores, expected, **CLOSE)
    assert chosen == top(expected.astype(np.float32), 23, range(37, 74))


def deviation(part, stored, k, v, layer):
    """FusionRAG equation 7: squared difference of fresh K or V from what is stored, [C]."""
    total = np.zeros(74)
    for token in range(74):
        for name, new in (("k", k), ("v", v)):
            if name in part:
                old = stored[layer, "kv".index(name), 5 + token]
                total[token] += ((new[layer, 5 + token] - old) ** 2).sum()
    return total


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["v", "k", "kv"])
def test_kv_deviation(tried, work, family, part):
    """FusionRAG equations 7 and 8: squared deviation of the second layer's fresh KV."""
    selector = KvDeviation(part=part)
    model, prompt, chosen, deviations = tried(
        family, selector, 0.2, of=scores_of(dataclasses.replace(selector, keep_fresh=False))
    )
    _, stored, _, k, v = work.dense(model, prompt, range(74))
    expected = deviation(part, stored, k, v, 1)
    np.testing.assert_allclose(deviations, expected, rtol=2e-4, atol=1e-9)
    assert (expected[:37] < 1e-9).all()  # behind the prefix as it was encoded: nothing deviates
    assert chosen == top(expected, 15, range(37, 74))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["v", "kv"])
@pytest.mark.parametrize("keep_fresh", [True, False])
def test_kv_deviation_with_gradual_filtering(tried, work, family, part, keep_fresh):
    """The second check sees the first one's tokens fresh, all else as stored; or all of layer 1."""
    selector = KvDeviation(layers=(1, 2), widths=(1.6,), part=part, keep_fresh=keep_fresh)
    model, prompt, chosen, _ = tried(family, selector, 0.2)
    _, stored, _, k, v = work.dense(model, prompt, range(74))
    first = deviation(part, stored, k, v, 1)
    kept = top(first, 24, range(37, 74))
    up_to_the_check = [range(74)] * 2 if keep_fresh else ()
    _, _, _, k, v = work.dense(model, prompt, kept, fresh_layers=up_to_the_check)
    second = deviation(part, stored, k, v, 2)
    assert chosen == top(second, 15, kept)
    assert chosen != top(first, 15, range(37, 74))  # the second look matters


def chunk_attention(work, model, prompt):
    """[C, C] full attention among chunk tokens, the mean of the heads of the first two layers."""
    _, _, q, k, _ = work.dense(model, prompt, range(74))
    whole = prompt.num_tokens
    return np.mean(
        [
            weights(
                rotated(q[layer], np.arange(whole), model.config),
                rotated(k[layer], np.arange(whole), model.config),
                causal(whole, model.config),
            ).mean(0)
            for layer in range(2)
        ],
        axis=0,
    )[5:79, 5:79]


def fix_overhead(inter, lengths, i, seen, alpha):
    """CFO of chunk i > 0, as the formulas are written; ``inter(i, j)`` sums over their tokens."""
    a = sum(inter(i, j) / (lengths[i] * lengths[j]) for j in range(i))
    b = inter(i, i) / lengths[i] ** 2
    beta = sum(inter(i, j) for j in seen) / sum(inter(i, j) for j in range(i))
    pairs = list(itertools.combinations(seen, 2))
    gamma = sum(x > y for x, y in pairs) / max(len(pairs), 1)
    return alpha / (1 + np.exp(-a / b)) * (1 - beta * (1 - gamma))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ratio", [None, 0.2])
def test_cache_craft(tried, work, family, ratio):
    """CCI, CFO and the tokens that look back the most, from the dense attention of two layers."""
    selector = CacheCraft(alpha=0.5)
    model, prompt, chosen, shares = tried(family, selector, ratio, of=selector.observe)
    attention = chunk_attention(work, model, prompt)
    for i in range(4):
        expected = attention[:, chunk_of == i].sum(1)
        np.testing.assert_allclose(shares[:, i], expected, **CLOSE)

    def inter(i, j):
        return attention[chunk_of == i][:, chunk_of == j].sum()

    wanted = [fix_overhead(inter, LENGTHS, i, (), 0.5) * LENGTHS[i] if i else 0 for i in range(4)]
    if ratio is None:
        counts = [int(np.ceil(w)) for w in wanted]
    else:
        counts = [len([t for t in chosen if chunk_of[t] == i]) for i in range(4)]
        work.assert_shared_out(counts, wanted, (0, *LENGTHS[1:]), 15)
    expected = []
    for i in range(1, 4):
        back = attention[:, chunk_of < i].sum(1).astype(np.float32)
        expected += top(back, counts[i], np.flatnonzero(chunk_of == i))
    assert chosen == expected


def test_cache_craft_counts_what_the_kv_saw(rng):
    """Overlap and order of what a chunk was encoded behind, by the formulas as they are written."""
    lengths = np.array([5, 3, 4, 6])
    shares = rng.random((18, 4)).astype(np.float32)
    seen = ((), (0,), (1, 0), (0, 2, 1))
    got = cache_fix_overhead(shares, lengths, seen, alpha=0.8)
    starts = np.concatenate(([0], np.cumsum(lengths)))

    def inter(i, j):
        return shares[starts[i] : starts[i + 1], j].astype(np.float64).sum()

    assert got[0] == 0
    for i in range(1, 4):
        assert got[i] == pytest.approx(fix_overhead(inter, lengths, i, seen[i], 0.8), rel=1e-6)
    assert got[1] == 0  # it saw all there is, in this order
    assert got[3] < cache_fix_overhead(shares, lengths, ((), (), (), ()), alpha=0.8)[3]


def test_cache_craft_does_not_count_what_now_stands_behind(rng):
    """A chunk that the KV saw and that the prompt has later was no part of this context."""
    lengths = np.array([5, 3, 4])
    shares = rng.random((12, 3)).astype(np.float32)
    got = cache_fix_overhead(shares, lengths, ((), (2, 0), (1, 2)), alpha=0.8)
    expected = cache_fix_overhead(shares, lengths, ((), (0,), (1,)), alpha=0.8)
    np.testing.assert_array_equal(got, expected)


def test_cache_craft_behind_neighbours(work, model_of, rng):
    """Chunks of the prompt that a chunk was encoded behind count as seen, in their order then."""
    model, plain = model_of(), work.prompt(rng)
    a, b, c, _ = plain.chunks
    neighbours = ((b,), (a, *work.ids(rng, 6)), (b, a), (c, b, a))
    prompt = dataclasses.replace(plain, neighbours=neighbours)
    selector = CacheCraft(alpha=0.7)
    method = dataclasses.replace(
        work.method(selector, None, "neighbours"), first_encoder="after_prefix"
    )

    def look(runner, scene):
        return scene.seen, selector.select(model, runner.cache, scene)

    [(seen, choice)] = work.scene(model, method, prompt, look=look)
    assert seen == ((), (0,), (1, 0), (2, 1, 0))
    attention = chunk_attention(work, model, prompt)

    def inter(i, j):
        return attention[chunk_of == i][:, chunk_of == j].sum()

    expected = []
    for i in range(1, 4):
        count = int(np.ceil(fix_overhead(inter, LENGTHS, i, seen[i], 0.7) * LENGTHS[i] - 1e-4))
        back = attention[:, chunk_of < i].sum(1).astype(np.float32)
        expected += top(back, count, np.flatnonzero(chunk_of == i))
    assert not set(expected) & set(range(37, 57))  # chunk b saw all that precedes it
    assert choice.tokens.tolist() == expected
