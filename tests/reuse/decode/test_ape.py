"""APE: chunks attended to at a temperature and a scale of their own, by numpy from the paper."""

import dataclasses
import functools
import queue

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from jaxrag import generate
from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Request
from jaxrag.kv.cache import ChunkAttention, ChunkPages, PagePool, PageTable
from jaxrag.kv.placement import KVPlacement
from jaxrag.kv.store import MemoryStore, derive
from jaxrag.measure.evals import gate
from jaxrag.models.attention import (
    attend_pool,
    attend_table,
    paged_attention,
    paged_decode_attention,
)
from jaxrag.models.segments import lay_out
from jaxrag.reuse.decode import TopN
from jaxrag.reuse.methods import METHODS, Method, method_named
from jaxrag.reuse.select import FirstK

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
APE = METHODS["ape"]
PLAIN = dataclasses.replace(APE, attention_temperature=1.0, scaling_factor=1.0)
STRONG = dataclasses.replace(APE, attention_temperature=0.4, scaling_factor=0.6)
IN_ORDER = dataclasses.replace(STRONG, positions="reordered")


class Definition:
    """The model and the method in numpy, float64: one row, a mask, and the paper's weights."""

    def __init__(self, model, method):
        self.config, self.method, self.params = model.config, method, model.params

    def wide(self, tree, at=...):
        return {
            field.name: np.asarray(value, np.float64)[at]
            for field in dataclasses.fields(tree)
            if (value := getattr(tree, field.name)) is not None and field.name != "layers"
        }

    def norm(self, x, weight):
        return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.norm_eps)

    def turn(self, x, positions):
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.config.rope.theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        one, two = x[..., :half], x[..., half:]
        return np.concatenate((one * cos - two * sin, two * cos + one * sin), -1)

    def weights(self, scores, see, chunk):
        """[N, T, T] of scores, by rows that attend to chunks as all else, then by those of APE."""
        t, s = self.method.attention_temperature, self.method.scaling_factor
        plain = np.where(see, np.exp(scores), 0)
        inside = see & chunk
        own = np.where(inside, np.exp(scores / t), 0)
        total = own.sum(-1, keepdims=True)
        own = own * np.where(total > 0, total, 1) ** (t * s - 1)
        both = np.where(inside, own, plain)
        return [it / it.sum(-1, keepdims=True) for it in (plain, both)]

    def logits(self, prompt, answer=()):
        """[T, V] of the prompt's final block and an answer."""
        final = np.concatenate((prompt.final, answer)).astype(int)
        lengths = len(prompt.prefix), [len(it) for it in prompt.chunks], len(final)
        alone = lay_out(*lengths, "parallel").positions  # where chunks were encoded
        scheme = self.method.positions
        here, segments = lay_out(*lengths, scheme).positions, lay_out(*lengths).segments
        if scheme == "parallel":  # from the definition: behind the longest chunk
            assert here[-len(final)] == len(prompt.prefix) + max(lengths[1])
        order, last = np.arange(len(here)), segments == 2
        same = segments[:, None] == segments
        see = (order <= order[:, None]) & (same | (segments == 1) | last[:, None])
        params = self.wide(self.params)
        x = params["embed"][np.concatenate((prompt.prefix, *prompt.chunks, final))]
        group = self.config.num_heads // self.config.num_kv_heads
        for at in range(self.config.num_layers):
            p = self.wide(self.params.layers, at)
            h = self.norm(x, p["attn_norm"])
            q, k, v = (np.einsum("td,dnh->tnh", h, p[name]) for name in "qkv")
            scores = [
                np.einsum("tnh,snh->nts", self.turn(q, it), self.turn(k, it).repeat(group, 1))
                for it in (alone, here)
            ]
            scores = np.where(last[:, None], scores[1], scores[0]) * self.config.head_dim**-0.5
            weights = np.where(last[:, None], *self.weights(scores, see, segments > 2)[::-1])
            out = np.einsum("nts,snh->tnh", weights, v.repeat(group, 1))
            x = x + np.einsum("tnh,nhd->td", out, p["o"])
            h = self.norm(x, p["mlp_norm"])
            gated, up = h @ p["gate"], h @ p["up"]
            x = x + (gated / (1 + np.exp(-gated)) * up) @ p["down"]
        head = params.get("lm_head", params["embed"].T)
        return self.norm(x[last], params["final_norm"]) @ head


@pytest.fixture
def model(model_of):
    return model_of("llama")


@pytest.fixture
def prompt(a_prompt):
    return a_prompt(prefix=5, chunks=(14, 33, 1, 9), final=20)


@pytest.fixture
def store(model, request):
    """Its chunks are no other test's, in the pool neither."""
    return MemoryStore(derive(model.fingerprint, salt=request.node.name), model.kv_layout)


def logits_of(model, request):
    """[V] after the prompt."""
    [found] = inspect_prompts(
        engine_of(model), [request], lambda runner, state, there: np.asarray(there.logits)[0]
    )
    return found


def forced(model, request, answer):
    """[len(answer) + 1, V] as the gate and ``eval near`` measure them."""
    [found], _ = gate.forced_along(model, request, [answer])
    return found


def answers(model, requests):
    """Token ids and log-probabilities of requests that are asked together."""
    news, engine = queue.SimpleQueue(), engine_of(model)
    numbers = engine.add_all([(request, news.put) for request in requests])
    found, left = {number: ([], []) for number in numbers}, set(numbers)
    while left:
        progress = news.get()
        if progress.error is not None:
            raise progress.error
        ids, chances = found[progress.number]
        ids.extend(progress.new)
        chances.extend(progress.logprobs)
        left -= {progress.number} if progress.last else set()
    return [found[number] for number in numbers]


@pytest.mark.parametrize("method", [APE, STRONG, IN_ORDER], ids=["ape", "strong", "in_order"])
def test_by_numpy_question_and_answer_attend_as_the_paper_says(model, prompt, store, method):
    """Prefill, decoding, and what the gate measures; it is far from plain reuse."""
    request = Request(prompt, store, method, 8, watched=True)
    oracle = Definition(model, method)
    first = oracle.logits(prompt)[-1]
    np.testing.assert_allclose(logits_of(model, request), first, **CLOSE)
    [(ids, chances)] = answers(model, [request])
    logits = oracle.logits(prompt, ids[:-1])[len(prompt.final) - 1 :]
    assert ids == logits.argmax(-1).tolist() and len(ids) == 8
    each = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(chances, each[np.arange(8), ids], **CLOSE)
    np.testing.assert_allclose(forced(model, request, ids[:-1]), logits, **CLOSE)
    other = dataclasses.replace(method, attention_temperature=1.0, scaling_factor=1.0)
    plain = logits_of(model, dataclasses.replace(request, method=other))
    assert np.abs(plain - first).max() > 1e-3


@pytest.mark.parametrize("positions", ["parallel", "reordered"])
def test_with_both_constants_at_1_it_is_plain_reuse(model, prompt, store, positions):
    """In every bit; and full_reuse where positions are in order."""
    made = dataclasses.replace(PLAIN, positions=positions)
    plain = Method("plain", "after_prefix", positions=positions)
    assert made.chunk_attention is None and made.settings == plain.settings | {"name": "ape"}
    own, other = (Request(prompt, store, it, 8) for it in (made, plain))
    np.testing.assert_array_equal(logits_of(model, own), logits_of(model, other))
    assert answers(model, [own]) == answers(model, [other])
    if positions == "reordered":
        assert dataclasses.replace(plain, name="full_reuse") == METHODS["full_reuse"]


@pytest.mark.parametrize(("op", "count"), [(paged_attention, 3), (paged_decode_attention, 1)])
@pytest.mark.parametrize("constants", [(1.0, 1.0), (0.5, 0.8)])
def test_the_merged_parts_are_the_weights_of_all_keys(model, rng, op, count, constants):
    """At 1 and 1 those of one softmax; rows that see no chunk, or nothing, as well."""
    config, rope = model.config, model.rope(64)
    shape = (4, 16, config.num_kv_heads, config.head_dim)
    pool = PagePool(*rng.normal(size=(2, *shape)).astype(np.float32))
    q = rng.normal(size=(2, count, config.num_heads, config.head_dim)).astype(np.float32)
    slots = np.arange(32, dtype=np.int32)
    where = np.stack((slots, np.where(slots < 20, slots, 2**31 - 1)))
    pages = np.array([[2, 0], [3, 1]], np.int32)
    held = np.array([[False, True], [False, False]])
    position = np.array([np.arange(18, 18 + count), [-1] * count], np.int32)
    how = ChunkAttention(*constants)
    one = op is paged_decode_attention
    queries, at = (q[:, 0], position[:, 0]) if one else (q, position)
    found = []
    for chunks in (ChunkPages(held, how), None):
        table = PageTable(pages, np.zeros_like(pages), where, chunks)
        pool, queries, table, at = jax.tree.map(jnp.asarray, (pool, queries, table, at))

        def attend(op, where, pool=pool, queries=queries, at=at):
            return attend_pool(op, config, rope, pool, queries, where, at)

        attended = attend_table(attend, op, table, jnp.asarray(pages))
        found.append([np.asarray(it) for it in attended])
    (out, lse), (plain, plain_lse) = found
    assert np.isneginf(lse[1]).all() and not out[1].any()
    if constants == (1.0, 1.0):
        np.testing.assert_allclose(out, plain, **CLOSE)
        np.testing.assert_allclose(lse, plain_lse, **CLOSE)
    else:
        assert np.abs(out[0] - plain[0]).max() > 1e-2


def test_shares_that_citations_rest_on_are_those_of_the_weights(model, rng):
    """Columns beside the values are mixed as these are: the share of every slot."""
    config, rope = model.config, model.rope(64)
    shape = (2, 16, config.num_kv_heads, config.head_dim)
    pool = PagePool(*jnp.asarray(rng.normal(size=(2, *shape)), jnp.float32))
    q = jnp.asarray(rng.normal(size=(1, 1, config.num_heads, config.head_dim)), jnp.float32)
    pages, slots = jnp.array([[1, 0]], jnp.int32), jnp.arange(32, dtype=jnp.int32)[None]
    op = functools.partial(paged_attention, beside=jnp.eye(32)[None], out_dtype=jnp.float32)
    at, found = jnp.array([[31]], jnp.int32), []
    for chunks in (None, ChunkPages(jnp.array([[False, True]]), ChunkAttention(0.5, 0.8))):
        table = PageTable(pages, jnp.zeros_like(pages), slots, chunks)

        def attend(op, where):
            return attend_pool(op, config, rope, pool, q, where, at)

        out, lse = attend_table(attend, op, table, pages)
        found.append((np.asarray(out[0, 0, :, config.head_dim :]), np.asarray(lse[0, 0])))
    (plain, lse), (shares, _) = found
    scores = np.log(plain.astype(float)) + lse[:, None]
    own = np.where(np.arange(32) < 16, 0, np.exp(scores / 0.5))
    own *= own.sum(-1, keepdims=True) ** (0.5 * 0.8 - 1)
    weights = np.where(np.arange(32) < 16, np.exp(scores), own)
    np.testing.assert_allclose(shares, weights / weights.sum(-1, keepdims=True), rtol=1e-4)


def test_requests_of_other_methods_are_as_alone(model, a_prompt, store):
    """Among two ways of ape, each in rows of its own, and the same bits; cold, then warm."""
    made = [APE, METHODS["full_attention"], STRONG, METHODS["full_reuse"], APE, PLAIN, IN_ORDER]
    prompts = [a_prompt(prefix=4, chunks=(20, 7), final=9) for _ in made]
    shared = prompts[0]
    requests = [
        Request(dataclasses.replace(it, prefix=shared.prefix, chunks=shared.chunks), store,
                method, tokens, rows=4)
        for method, it, tokens in zip(made, prompts, (6, 6, 6, 6, 9, 1, 1), strict=True)
    ]  # fmt: skip
    together = answers(model, requests)
    alone = [answers(model, [request])[0] for request in requests]
    assert together == alone == answers(model, requests)


def test_a_prompt_without_chunks_is_full_attention(model, a_prompt, store):
    bare = a_prompt(chunks=())
    own, full = (Request(bare, store, it, 5) for it in (APE, METHODS["full_attention"]))
    np.testing.assert_allclose(logits_of(model, own), logits_of(model, full), **CLOSE)
    assert answers(model, [own])[0][0] == answers(model, [full])[0][0]


def test_turns_are_computed_and_never_kept(model, a_prompt, store):
    """Where positions are in order; elsewhere a conversation is refused."""
    prompt = a_prompt(chunks=(20, 11, 9)).with_turns([1])
    request = Request(prompt, store, IN_ORDER, 6, keeps=True)
    assert not request.keeps_turns
    assert Request(prompt, store, METHODS["full_reuse"], 6, keeps=True).keeps_turns
    plain = Request(prompt, store, METHODS["full_reuse"], 6, keeps=True)
    [first] = answers(model, [request])
    answers(model, [plain])
    assert answers(model, [request]) == [first]
    with refused(RequestError, "reordered"):
        Request(prompt, store, APE, 6)


def test_generate_takes_it_and_a_file_sets_it(model, rng, tmp_path):
    path = tmp_path / "sharp.toml"
    path.write_text(
        'encoder = "after_prefix"\npositions = "parallel"\n'
        "attention_temperature = 0.4\nscaling_factor = 0.6\n"
    )
    assert method_named(str(path)) == dataclasses.replace(STRONG, name="sharp")
    assert hash(STRONG) != hash(APE)
    documents = [list(map(int, rng.integers(3, 101, n))) for n in (20, 12)]
    asked = {"documents": documents, "model": model, "max_new_tokens": 6}
    results = [generate([5, 6, 7], method=it, **asked) for it in ("ape", APE, str(path))]
    assert results[0].token_ids == results[1].token_ids
    assert [it.method for it in results] == ["ape", "ape", "sharp"]
    assert all(it.counts["recomputed"] == 0 for it in results)
    path.write_text('encoder = "after_prefix"\nattention_temperature = "low"\n')
    with refused(ConfigError, "attention_temperature"):
        method_named(str(path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_temperature": 0.0}, "attention_temperature=0.0"),
        ({"attention_temperature": -0.5}, "above 0"),
        ({"scaling_factor": float("nan")}, "scaling_factor=nan"),
        ({"scaling_factor": float("inf")}, "scaling_factor=inf"),
        ({"decode": TopN()}, "decode='topn'"),
        ({"positions": "reordered", "selector": FirstK()}, "selector='first_k'"),
        ({"positions": "reordered", "misses": "in_place"}, "misses='in_place'"),
        ({"positions": "reordered", "prefix_cache": True}, "prefix_cache"),
        ({"encoder": None}, "encoder=None"),
        ({"selector": FirstK()}, "parallel positions overlap"),
        ({"misses": "in_place"}, "parallel positions overlap"),
    ],
)
def test_what_it_does_not_go_with_is_refused(changes, words):
    with refused(RequestError, words):
        dataclasses.replace(APE, **changes)


def test_models_that_cannot_have_it_are_refused(model_of):
    with refused(RequestError, "sliding window"):
        APE.check(model_of("mistral").config)
    for placement in (KVPlacement(value_layers=1), KVPlacement(kv="host")):
        with refused(RequestError):
            IN_ORDER.check_placement(model_of("llama").config, placement, generates=False)
