"""Laws 2 to 5, 8, 12, 13 and 16 through the engine, over methods, decode rules and families."""

import dataclasses
import itertools
import math

import numpy as np
from matrix import (
    ALL_METHODS,
    ALL_RULES,
    FEW,
    METHODS,
    RULES,
    USUAL,
    cases,
    pairs,
    triples,
)

from jaxrag.reuse.decode import DECODE_RULES
from jaxrag.reuse.encode import ENCODERS
from jaxrag.reuse.select import SELECTORS, CacheCraft, FirstK, NoTokens

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
REUSING = [name for name, it in ALL_METHODS.items() if it.encoder]
SELECTING = [name for name in REUSING if ALL_METHODS[name].recomputes]
DENSE = ["dense"]


@cases()
def test_laws_2_and_8_answers_are_those_of_forwards_without_a_cache(bench, method, rule, family):
    """Greedy, step for step, where the rule leaves nothing out; else the first and no other."""
    it, answers, made = bench(family), bench(family).answers(method, rule), ALL_METHODS[method]
    full, expected = it.packed(answers), [it.mixed(made, answers)]
    alike = made.chunk_attention is None
    if made.encoder == "isolated" and not made.recomputes and alike:
        expected.append(it.packed(answers, made.positions))
    for at, (prompt, answer) in enumerate(zip(it.prompts, answers, strict=True)):
        whole = made.encoder is None or (made.misses == "encode" and all(exact(made, prompt)))
        whole &= alike
        assert not (whole and answer.chosen)  # law 3: a chunk that is exact where it stands
        assert_count(made, prompt, answer)
        for logits in (*(by[at] for by in expected), *([full[at]] if whole else [])):
            if rule == "dense" or prompt.num_tokens + len(answer.tokens) <= FEW:
                answer.follows(logits)
            else:
                np.testing.assert_allclose(answer.logits, logits[0], **CLOSE)
                assert np.abs(answer.logprobs - answer.by(logits)).max() > 1e-3


def exact(method, prompt):
    """Of each chunk whether its stored KV is what full attention computes."""
    return method.exact(len(prompt.prefix), len(prompt.chunks))


def assert_count(method, prompt, answer):
    """As many tokens were chosen as the ratio says, or each chunk's share."""
    if not method.recomputes:
        assert answer.chosen is None
        return
    settled = [
        is_exact or not pages
        for is_exact, (_, pages) in zip(exact(method, prompt), answer.parts, strict=True)
    ]
    lengths = [len(it) for it in prompt.chunks]
    free = [n for n, it in zip(lengths, settled, strict=True) if not it]
    ratio, selector = method.recompute_ratio, method.selector
    if isinstance(selector, CacheCraft):
        assert bool(free) <= len(answer.chosen) <= sum(free)
        return
    if isinstance(selector, FirstK):
        count = sum(min(selector.k, n) for n in free)
    else:
        count = min(math.ceil(sum(lengths) * (ratio or 1)), sum(free))
    assert len(answer.chosen) == count
    assert not np.repeat(settled, lengths)[answer.chosen].any()


@cases(SELECTING, DENSE)
def test_law_3_ratio_1_is_full_attention(bench, method, rule, family):
    """Also computed in place, and chosen by a selector that is asked and may take all."""
    it, made = bench(family), ALL_METHODS[method]
    missing = dataclasses.replace(made, misses="in_place")
    several = [(made.with_ratio(1), None), (missing, [it.new_store()])]
    if made.selector.name != "all":
        several.append((made.with_ratio(0.9999), None))
    for asked, stores in several:
        answers = it.serve(asked, stores=stores)
        for prompt, answer, logits in zip(it.prompts, answers, it.packed(answers), strict=True):
            answer.follows(logits)
            if asked.misses == "encode":
                free = [not it for it in exact(made, prompt)]
                assert len(answer.chosen) == sum(itertools.compress(map(len, prompt.chunks), free))
    bare = dataclasses.replace(it.prompts[0], chunks=())
    [answer] = answers = it.serve(made, [bare], tokens=1)
    answer.follows(*it.packed(answers, prompts=[bare]))


@cases(SELECTING, DENSE)
def test_law_3_ratio_0_is_plain_reuse(bench, method, rule, family, monkeypatch):
    """Bit for bit and at its price, without a selector; and that is not full attention."""
    it, made = bench(family), dataclasses.replace(ALL_METHODS[method], misses="encode")
    plain = it.serve(dataclasses.replace(made, selector=NoTokens(), recompute_ratio=None))
    own = it.serve(made)
    monkeypatch.delattr(type(made.selector), "score")
    none = it.serve(made.with_ratio(0))
    for at, (answer, expected) in enumerate(zip(none, plain, strict=True)):
        answer.same(expected)
        assert answer.chosen is None and answer.flops == expected.flops <= own[at].flops
    for at in (0, 1):
        assert none[at].flops < own[at].flops
        assert np.abs(none[at].logits - own[at].logits).max() > 1e-3
        assert np.abs(none[at].logits - it.packed(none)[at][0]).max() > 1e-2


@cases(REUSING, DENSE)
def test_law_4_later_tokens_change_nothing(bench, method, rule, family):
    """What a selector chose is held fixed, as all stored KV; then each later token is another."""
    it, made = bench(family), ALL_METHODS[method]

    def computed(cut=None):
        def change(runner, state):
            if cut is not None:
                state.run.ids[cut:] = 3 + (state.run.ids[cut:] + 5) % 90

        def look(runner, state):
            """K and V [L, n, K, H] of the tokens that the request runs."""
            kv = it.pool_kv(runner, state.table.pages)
            return [x.reshape(x.shape[0], -1, *x.shape[3:])[:, state.run.slots] for x in kv]

        served = it.serve(made, it.prompts[:2], after=change, look=look, tokens=1)
        return [kv for answer in served for kv in answer.seen]

    kept = computed()
    fewest = min(kv.shape[1] for kv in kept)
    assert fewest >= 9
    for cut in (1, fewest // 2, fewest - 1):
        for kv, other in zip(kept, computed(cut), strict=True):
            np.testing.assert_array_equal(kv[:, :cut], other[:, :cut])
            assert np.abs(kv[:, cut] - other[:, cut]).max() > 1e-3


@cases([name for name in REUSING if ALL_METHODS[name].misses == "encode"], DENSE)
def test_law_5_shared_chunks_give_what_separate_copies_give(bench, method, rule, family):
    """Over one copy at other places, which stays as it is, and over a copy each."""
    it, made, before = bench(family), ALL_METHODS[method], []

    def second(runner, state):
        """K and V of the chunk that is the second of either prompt."""
        return it.pool_kv(runner, state.parts[2].resident.pages)

    first = it.prompts[:2]
    together = it.serve(made, first, before=lambda *now: before.append(second(*now)), look=second)
    one, other = (dict(answer.parts) for answer in together)
    shared = {key for key in one if key in other}
    assert len(shared) == (1 if made.first_encoder else 2)  # the first chunk's may differ
    assert all(one[key] == other[key] for key in shared)
    for kv in (*before, *(answer.seen for answer in together)):
        for x, y in zip(before[0], kv, strict=True):
            np.testing.assert_array_equal(x, y)
    apart = it.serve(made, first, stores=[it.new_store(), it.new_store()])
    pages = [{x for _, pages in answer.parts for x in pages} for answer in apart]
    assert not pages[0] & pages[1]
    for answer, expected in zip(apart, together, strict=True):
        answer.close(expected)


@cases(ALL_METHODS, ["dense", "flat"])
def test_law_12_a_batch_is_one_at_a_time(bench, method, rule, family):
    """By programs of another number of rows."""
    it = bench(family)
    made = dataclasses.replace(ALL_METHODS[method], decode=ALL_RULES[rule])
    for prompt, answer in zip(it.prompts, it.answers(method, rule), strict=True):
        [alone] = it.serve(made, [prompt], rows=1)
        alone.close(answer)


@cases()
def test_laws_13_and_16_alone_and_from_the_store_is_among_others(bench, method, rule, family):
    """Bit for bit at equal rows, from a pool of which every unused slot holds a NaN."""
    it = bench(family)
    answers = it.answers(method, rule)
    made = dataclasses.replace(ALL_METHODS[method], decode=ALL_RULES[rule])
    it.poison()
    [alone] = it.serve(made, it.prompts[1:2])
    alone.same(answers[1])


def test_a_default_run_has_every_pair_and_all_is_tried():
    rows, tried = triples()
    usual = [it for it in rows if it[0] in METHODS and it[1] in RULES and it[2] in USUAL]
    assert set().union(*map(pairs, usual)) <= set().union(*map(pairs, tried))
    assert {it for it, *_ in tried} == set(ALL_METHODS) and {it for _, it, _ in tried} == set(RULES)
    assert {it.selector.name for it in ALL_METHODS.values()} == set(SELECTORS)
    assert {it.encoder for it in ALL_METHODS.values()} == {None, *ENCODERS}
    assert {it.name for it in RULES.values()} == set(DECODE_RULES)
