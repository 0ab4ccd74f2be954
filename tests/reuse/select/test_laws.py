"""Laws 3, 4, 5 and 12 for every selector, on random models of every family, in float32."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxrag.base.sharding import make_mesh
from jaxrag.engine import prefill
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt
from jaxrag.kv.cache import PagePool
from jaxrag.models.decoder import unembed
from jaxrag.models.model import random_model
from jaxrag.reuse.methods import METHODS
from jaxrag.reuse.select import (
    AllTokens,
    CacheCraft,
    FirstK,
    KvDeviation,
    QueryGuided,
    RandomTokens,
    Selector,
    cache_craft,
    kv_deviation,
    query_guided,
)
from jaxrag.serve.generate import generate

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "glm", "glm4")
SELECTORS = {
    "random": RandomTokens(seed=3),
    "first_k": FirstK(),
    "kv_deviation": KvDeviation(),
    "dropped": KvDeviation(keep_fresh=False),
    "gradual": KvDeviation(layers=(1, 2), widths=(1.6,), part="kv"),
    "gradual_dropped": KvDeviation(layers=(1, 2), widths=(1.6,), keep_fresh=False),
    "cache_craft": CacheCraft(),
    "question": QueryGuided(),
    "behind": QueryGuided(place="behind"),
    "over_cache": QueryGuided(over="cache"),
}
REWRITES = ("kv_deviation", "gradual")

CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def some(names, *always):
    """All of these names: by default a test runs for those of ``always``.

    The laws of two more families are in test_every_family.py.
    """
    return [pytest.param(n, marks=() if n in always else pytest.mark.slow) for n in names]


@dataclasses.dataclass(frozen=True)
class Fixed(Selector):
    """These tokens, whatever is asked."""

    tokens: tuple[int, ...] = ()
    name: str = dataclasses.field(default="fixed", init=False)

    def score(self, scene):
        return np.isin(np.arange(scene.num_chunk_tokens), self.tokens)

    def count(self, scene):
        return len(self.tokens)


@pytest.mark.parametrize("family", some(FAMILIES, "llama", "mistral", "glm4"))
@pytest.mark.parametrize("name", [name for name in SELECTORS if name not in REWRITES])
def test_sparse_recompute_is_full_attention_over_mixed_kv(rng, work, model_of, family, name):
    """What a selector chose is computed as a dense forward in which all else stays as stored."""
    model, prompt = model_of(family), work.prompt(rng)
    logits, (chosen,) = work.online(model, work.method(SELECTORS[name], 0.2), prompt)
    assert len(chosen) == (9 if name == "first_k" else 15)
    assert (np.diff(chosen) > 0).all() and chosen[0] >= 37 and chosen[-1] < 74
    hidden, *_ = work.dense(model, prompt, chosen)
    np.testing.assert_allclose(logits[0], unembed(model.params, hidden[-1]), **CLOSE)


@pytest.mark.parametrize("family", some(FAMILIES, "llama"))
@pytest.mark.parametrize("encoder", some(("after_prefix", "isolated"), "isolated"))
@pytest.mark.parametrize("layers", some(((1,), (2,), (1, 2), (1, 3)), (1, 3)))
def test_cacheblend_keeps_what_its_checks_computed(rng, work, model_of, family, encoder, layers):
    """Up to the first check layer everything is fresh, then what each check kept, as it was run.

    The reference recomputes nothing by itself: it is a dense forward with a mask of what is fresh,
    layer by layer.
    """
    window = {"sliding_window": 24} if family == "mistral" else {}  # over the border of a chunk
    model, prompt = model_of(family, num_layers=4, **window), work.prompt(rng)
    widths = (1.6,) * (len(layers) - 1)
    selector = KvDeviation(layers=layers, widths=widths, part="kv")
    logits, (chosen,) = work.online(model, work.method(selector, 0.2, encoder), prompt)
    everything = range(74)
    fresh = [everything] * (layers[0] + 1)
    if len(layers) > 1:
        first = KvDeviation(layers=layers[:1], part="kv", keep_fresh=False)
        kept = work.method(first, 0.32, encoder)  # 1.6 times the budget of 15
        _, (kept,) = work.online(model, kept, prompt)
        assert len(kept) == 24 and set(chosen) < set(kept)
        fresh += [kept] * (layers[1] - layers[0])
    hidden, *_ = work.dense(model, prompt, chosen, encoder, fresh)
    np.testing.assert_allclose(logits[0], unembed(model.params, hidden[-1]), **CLOSE)
    stale, *_ = work.dense(model, prompt, chosen, encoder)
    assert np.abs(unembed(model.params, stale[-1]) - logits[0]).max() > 1e-3


def test_cacheblend_leaves_shared_pages_as_they_are(rng, work, model_of):
    """Fresh KV belongs to one request: others read what is stored, bit for bit, and so does it."""
    model, prompt = model_of(), work.prompt(rng)
    before = work.reuse_logits(model, prompt)
    method = work.method(SELECTORS["kv_deviation"], 0.2)
    one, _ = work.online(model, method, prompt)
    np.testing.assert_array_equal(work.reuse_logits(model, prompt), before)
    again, _ = work.online(model, method, prompt)
    np.testing.assert_array_equal(again, one)


@pytest.mark.parametrize("family", some(FAMILIES, "llama"))
@pytest.mark.parametrize("encoder", ["after_prefix", "isolated"])
def test_law_3_ratio_1_is_full_attention(rng, work, model_of, family, encoder):
    model, prompt = model_of(family), work.prompt(rng)
    full = work.full_logits(model, prompt)
    for selector, ratio in [(s, 1) for s in SELECTORS.values()] + [(AllTokens(), None)]:
        logits, _ = work.online(model, work.method(selector, ratio, encoder), prompt)
        np.testing.assert_allclose(logits[0], full, **CLOSE)


@pytest.mark.parametrize("name", SELECTORS)
def test_law_3_a_selector_that_may_take_everything_does(rng, work, model_of, name):
    """Run on its own, without the shortcut of ratio 1."""
    model, prompt = model_of(), work.prompt(rng)
    selector = SELECTORS[name]

    def select(runner, scene):
        [choice] = selector.select(model, runner.cache, [scene])
        return choice.tokens.tolist()

    [chosen] = work.scene(model, work.method(selector, 1, "isolated"), prompt, look=select)
    assert chosen == list(range(74))


@pytest.mark.parametrize("method", ["fusionrag", "cacheblend", "cache_craft", "epic"])
def test_law_3_tokens_and_logits_through_generate(rng, work, model_of, method):
    model = model_of(eos_ids=())
    documents = [list(map(int, d)) for d in work.ids(rng, 30, 17, 44)]
    question = list(map(int, work.ids(rng, 9)[0]))
    options = {"documents": documents, "model": model, "max_new_tokens": 9}
    method = dataclasses.replace(METHODS[method], encoder="after_prefix", first_encoder=None)
    full = generate(question, method="full_attention", **options)
    one = generate(question, method=method, recompute_ratio=1, **options)
    assert one.token_ids == full.token_ids
    generate(question, method="full_reuse", **options)
    reuse = generate(question, method="full_reuse", **options)
    none = generate(question, method=method, recompute_ratio=0, **options)
    assert none.token_ids == reuse.token_ids
    assert none.counts == reuse.counts == {"reused": 91, "recomputed": 0, "encoded": 0}
    assert none.flops == reuse.flops < one.flops


@pytest.mark.parametrize("name", SELECTORS)
def test_law_3_ratio_0_does_not_run_the_selector(rng, work, model_of, name, monkeypatch):
    model, prompt = model_of(), work.prompt(rng)
    expected = work.reuse_logits(model, prompt)

    def fail(*_):
        raise AssertionError("the selector ran")

    monkeypatch.setattr(type(SELECTORS[name]), "select", fail)
    logits, chosen = work.online(model, work.method(SELECTORS[name], 0), prompt)
    np.testing.assert_array_equal(logits[0], expected)
    assert chosen == [None]


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_law_3_a_single_chunk_is_full_attention_at_any_ratio(rng, work, model_of, name, ratio):
    model = model_of()
    for encoder, prefix in (("after_prefix", 5), ("isolated", 0)):
        prompt = work.prompt(rng, prefix=prefix, chunks=(45,))
        method = work.method(SELECTORS[name], ratio, encoder)
        logits, (chosen,) = work.online(model, method, prompt)
        assert not len(chosen)
        np.testing.assert_allclose(logits[0], work.full_logits(model, prompt), **CLOSE)


@pytest.mark.parametrize("name", [*SELECTORS, "all"])
def test_no_chunks_at_all(rng, work, model_of, name):
    model, prompt = model_of(), work.prompt(rng, chunks=())
    selector, ratio = SELECTORS.get(name, AllTokens()), None if name == "all" else 0.3
    logits, _ = work.online(model, work.method(selector, ratio), prompt)
    np.testing.assert_allclose(logits[0], work.full_logits(model, prompt), **CLOSE)


@pytest.mark.parametrize("name", SELECTORS)
def test_a_single_chunk_that_is_not_exact_is_recomputed(rng, work, model_of, name):
    model, prompt = model_of(), work.prompt(rng, chunks=(45,))
    _, (chosen,) = work.online(model, work.method(SELECTORS[name], 0.2, "isolated"), prompt)
    assert len(chosen) == 9


@pytest.mark.parametrize("family", some(FAMILIES, "llama"))
def test_law_4_a_recomputed_token_never_sees_a_later_one(rng, work, model_of, family):
    """With selection and stored KV fixed, other later tokens leave its K and V bit for bit."""
    model, prompt = model_of(family), work.prompt(rng)
    method = work.method(Fixed(tokens=(3, 38, 40, 50, 57, 73)), 0.5, "isolated")

    def recomputed(change, prompt):
        with work.selecting(after=lambda runner, state: change(state)):
            [(_, _, kv)] = work.served(
                model, method, prompt, look=lambda runner, it: work.pool_kv(runner, it.own[:1])
            )
        return [x[:, 0] for x in kv]

    def nothing(part):
        pass

    def other_question(part):
        part.ids[6:] = 3 + (part.ids[6:] + 5) % 90

    def other_recomputed(part):
        part.ids[3:] = 3 + (part.ids[3:] + 5) % 90

    before = recomputed(nothing, prompt)
    later_chunk = dataclasses.replace(prompt, chunks=(*prompt.chunks[:3], *work.ids(rng, 16)))
    for change, changed, same in (
        (other_question, prompt, 6),
        (other_recomputed, prompt, 3),
        (nothing, later_chunk, 5),  # its last token is the sixth: 73
    ):
        after = recomputed(change, changed)
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one[:, :same], other[:, :same])
            assert np.abs(one[:, same] - other[:, same]).max() > 1e-3


@pytest.mark.parametrize("family", some(FAMILIES, "llama"))
def test_law_5_shared_pages_stay_and_serve_two_selections(rng, work, model_of, family):
    """Two requests at once recompute other tokens of one copy; each gets what it gets alone."""
    model = model_of(family)
    shared, other, one, two = work.ids(rng, 33, 21, 7, 7)
    prefix = work.ids(rng, 4)[0]
    prompts = [
        Prompt(prefix, (other, shared), one),
        Prompt(prefix, (shared, other, shared), two),
    ]
    method = work.method(QueryGuided(over="cache"), 0.3)
    alone = [work.online(model, method, prompt) for prompt in prompts]

    def look(runner, state):
        """K and V of the shared chunk, the second of two or the first of three."""
        return work.pool_kv(runner, state.parts[2 if len(state.parts) == 3 else 1].resident.pages)

    before = []
    with work.selecting(before=lambda runner, it: before.append(look(runner, it))):
        (one, first, after), (two, second, more) = work.served(model, method, *prompts, look=look)
    residents = [one.parts[2].resident, two.parts[1].resident]
    assert residents[0].pages == residents[1].pages
    assert two.parts[3].resident.pages == residents[0].pages
    assert not set(one.own) & set(two.own)
    for old, new in itertools.product(before, (after, more)):
        for x, y in zip(old, new, strict=True):
            np.testing.assert_array_equal(x, y)
    for state, logits, (expected, tokens) in zip((one, two), (first, second), alone, strict=True):
        np.testing.assert_array_equal(state.choice.tokens, tokens[0])
        np.testing.assert_allclose(logits, expected[0], **CLOSE)


@pytest.mark.parametrize("name", SELECTORS)
def test_law_12_a_batch_of_mixed_lengths_is_one_at_a_time(rng, work, model_of, name):
    model = model_of()
    prompts = [
        work.prompt(rng),
        work.prompt(rng, chunks=(12, 60), final=3),
        work.prompt(rng, chunks=()),
        work.prompt(rng, prefix=0, chunks=(9, 8, 7, 6, 5), final=21),
        work.prompt(rng, chunks=(50,)),
    ]
    method = work.method(SELECTORS[name], 0.25)
    together, chosen = work.online(model, method, *prompts)
    for row, prompt in enumerate(prompts):
        logits, (tokens,) = work.online(model, method, prompt)
        np.testing.assert_array_equal(chosen[row], tokens)
        np.testing.assert_allclose(together[row], logits[0], **CLOSE)


@pytest.mark.parametrize("name", SELECTORS)
def test_unused_slots_may_hold_nan(rng, work, model_of, name):
    model, prompt = model_of(), work.prompt(rng)
    method = work.method(SELECTORS[name], 0.3)
    clean, (chosen,) = work.online(model, method, prompt)
    engine_of(model).forget()
    engine_of(model).runner.cache._pool = jax.tree.map(
        lambda x: x * np.nan, engine_of(model).runner.cache.pool
    )
    assert isinstance(engine_of(model).runner.cache.pool, PagePool)
    try:
        poisoned, (again,) = work.online(model, method, prompt)
    finally:
        engine_of(model).forget()
    np.testing.assert_array_equal(chosen, again)
    np.testing.assert_allclose(poisoned, clean, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("name", SELECTORS)
def test_law_11_sharded_equals_one_device(rng, work, tiny_config, name):
    config = tiny_config(vocab_size=104, model_dim=24, mlp_dim=40)
    one = random_model(config, cache_tokens=1024)
    many = random_model(config, mesh=make_mesh(2, 2, 2), cache_tokens=1024)
    prompts = [work.prompt(rng), work.prompt(rng, chunks=(12, 60), final=3)]
    method = work.method(SELECTORS[name], 0.25)
    (logits, chosen), (sharded, again) = (work.online(m, method, *prompts) for m in (one, many))
    for tokens, same in zip(chosen, again, strict=True):
        np.testing.assert_array_equal(tokens, same)
    np.testing.assert_allclose(sharded, logits, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("name", SELECTORS)
def test_bfloat16_agrees_with_float32(rng, work, tiny_config, name):
    """Most of the same tokens are chosen, and what follows differs by rounding only."""
    wide = random_model(tiny_config("qwen3"), cache_tokens=1024)
    narrow = random_model(tiny_config("qwen3", dtype="bfloat16"), cache_tokens=1024)
    narrow.params = jax.tree.map(lambda x: x.astype("bfloat16"), wide.params)
    prompt = work.prompt(rng)
    method = work.method(SELECTORS[name], 0.3)
    (logits, (chosen,)), (rounded, (again,)) = (
        work.online(model, method, prompt) for model in (wide, narrow)
    )
    assert len(again) == len(chosen)
    assert len(set(again) & set(chosen)) > 0.7 * len(chosen)
    assert np.abs(rounded - logits).max() < 0.1 * np.abs(logits).max()


@pytest.mark.slow  # tests/test_laws.py has it for plain reuse
def test_other_requests_of_the_same_bucket_do_not_recompile(rng, work, model_of):
    model = model_of()
    compiled = (
        prefill._prefill_piece,
        kv_deviation._whole_check,
        kv_deviation._sparse_check,
        cache_craft._mean_shares,
        query_guided._received_alone,
        query_guided._received_over_cache,
    )

    def ask(ratio, *lengths, final):
        prompt = work.prompt(rng, chunks=lengths, final=final)
        for selector in SELECTORS.values():
            work.online(model, work.method(selector, ratio), prompt)

    ask(0.2, 100, 90, 80, final=12)
    before = [function._cache_size() for function in compiled]
    ask(0.18, 91, 99, 70, 5, final=9)
    ask(0.22, 60, 70, 130, final=14)
    assert [function._cache_size() for function in compiled] == before
