"""Every rule against slow attention in float64, written from the papers' equations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.config import RopeConfig, YarnScaling
from jaxrag.base.rotary import attention_factor, frequencies
from jaxrag.base.types import HIDDEN, Partial
from jaxrag.kv.cache import PAGE, PagePool
from jaxrag.models.attention import merge
from jaxrag.models.rope import rope_table
from jaxrag.reuse.attention_index import Exact, build
from jaxrag.reuse.decode import (
    Dense,
    Flat,
    HostSearch,
    InfLLM,
    Quest,
    Retrieval,
    SnapKV,
    StaticWindow,
    TopN,
    View,
    order_of,
)
from jaxrag.reuse.decode.retrieval import Indexed

CHUNKS = ((0, 21), (21, 40), (61, 7), (68, 30))  # position and tokens of each, in pages of its own
PROMPT = 98  # positions 0..97; then generated tokens in pages of the request
NEW = 9
# q and k are multiplied by a factor, and that over a part of the head only.
YARN = RopeConfig(5_000.0, 6, False, YarnScaling(4.0, 64, 32.0, 1.0, 1.5, True))
ROPES = pytest.mark.parametrize("rope", [None, YARN], ids=["", "yarn"])


@dataclasses.dataclass
class SelectionInput:
    """One row of a pool, and what it holds by position in float64."""

    view: View
    keys: np.ndarray  # [P, K, H] before rotation
    values: np.ndarray  # [P, K, H]
    q: np.ndarray  # [N, H] before rotation
    slot: np.ndarray  # [P] of each position
    rope: object

    @property
    def newest(self):
        return PROMPT + NEW - 1

    def turned(self, x, at):
        """x [..., H] rotated to position ``at``."""
        angle = at * frequencies(self.rope)
        half = self.rope.rotary_dim // 2
        a, b = x[..., :half], x[..., half : 2 * half]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), -1)

    def placed(self, x, at):
        """The same, as a query or key first gets its position: with YaRN's factor."""
        factor = np.where(np.arange(x.shape[-1]) < self.rope.rotary_dim, self.factor, 1.0)
        return self.turned(x * factor, at)

    @property
    def factor(self):
        return attention_factor(self.rope)

    def scores(self, head, positions, at=None, query_at=None):
        q = self.placed(self.q[head], self.newest if query_at is None else query_at)
        places = positions if at is None else at
        kv = head // 3
        keys = [self.placed(self.keys[p, kv], a) for p, a in zip(positions, places, strict=True)]
        return np.array([q @ key for key in keys]) * len(q) ** -0.5

    def attend(self, head, positions, at=None, query_at=None):
        """(out, lse) over a set of positions."""
        if not len(positions):
            return np.zeros(self.q.shape[1]), -np.inf
        s = self.scores(head, positions, at, query_at)
        w = np.exp(s - s.max())
        return w @ self.values[positions, head // 3] / w.sum(), s.max() + np.log(w.sum())


def scene(tiny_config, dtype="float32", stretch=1.0, seed=0, rope=None):
    config = tiny_config(dtype=dtype, **({} if rope is None else {"rope": rope}))
    rng = np.random.default_rng(seed)
    total = PROMPT + NEW
    keys = rng.normal(size=(total, 2, 10)) + 0.5
    values = rng.normal(size=(total, 2, 10))
    q = rng.normal(size=(6, 10)) * stretch
    made = SelectionInput(None, keys, values, q, np.zeros(total, int), config.rope)
    free = list(rng.permutation(40))
    pages, offsets, slot_position = [], [], []
    k_pool = np.full((40, PAGE, 2, 10), np.nan)
    v_pool = np.full((40, PAGE, 2, 10), np.nan)
    for at, tokens, offset in (*((a, n, a) for a, n in CHUNKS), (PROMPT, NEW, 0)):
        for first in range(0, tokens, PAGE):
            page = int(free.pop())
            pages.append(page)
            offsets.append(offset)
            row = np.full(PAGE, HIDDEN)
            for place in range(min(PAGE, tokens - first)):
                p = at + first + place
                k_pool[page, place] = made.placed(keys[p], p - offset)
                v_pool[page, place] = values[p]
                row[place] = p
                made.slot[p] = len(slot_position) * PAGE + place
            slot_position.append(row)
    pages, offsets = np.array(pages, np.int32)[None], np.array(offsets, np.int32)[None]
    slots = np.concatenate(slot_position).astype(np.int32)[None]
    if dtype != "float32":  # the oracle reads what the pool holds
        assert made.factor == 1
        k_pool = np.asarray(jnp.asarray(k_pool, dtype), np.float64)
        v_pool = np.asarray(jnp.asarray(v_pool, dtype), np.float64)
        made.q = np.asarray(jnp.asarray(q, dtype), np.float64)
        for p in range(total):
            m, place = divmod(made.slot[p], PAGE)
            made.values[p] = v_pool[pages[0, m], place]
            made.keys[p] = made.turned(k_pool[pages[0, m], place], offsets[0, m] - p)
    order = order_of(slots, np.array([total]), np.array([slots.shape[1]]))
    made.view = View(
        config,
        rope_table(config.rope, 256),
        PagePool(k=jnp.asarray(k_pool, dtype), v=jnp.asarray(v_pool, dtype)),
        jnp.asarray(pages),
        jnp.asarray(offsets),
        jnp.asarray(slots),
        jnp.asarray(order),
        jnp.array([total - 1], jnp.int32),
        jnp.asarray(made.q[None], dtype),
    )
    return made


def run(scene, rule, queries=None, positions=None, layer=5, sinks=None):
    """(out [N, H], lse [N]) of the rule, prepared as at the end of the prompt."""
    view = scene.view
    before = jnp.where(view.slot_position < PROMPT, view.slot_position, HIDDEN)
    prompt = dataclasses.replace(
        view, q=None, slot_position=before, position=jnp.array([PROMPT - 1], jnp.int32),
        sink_logits=None if sinks is None else jnp.asarray(sinks),
    )  # fmt: skip
    if queries is None:
        queries, positions = np.zeros((0, 6, 10)), np.zeros(0, np.int32)
    dtype = view.config.dtype
    bank = jnp.asarray(queries[None], dtype), jnp.asarray(positions[None], jnp.int32)
    state = rule.prepare(prompt, *bank, NEW)
    if isinstance(rule, Quest):  # as if every generated token had been put into its box
        state = rule.prepare(view, *bank, NEW)
    part, _ = rule.attend(view, jnp.int32(layer), state)
    assert part.out.dtype == part.lse.dtype == jnp.float32
    return np.asarray(part.out[0, 0]), np.asarray(part.lse[0, 0])


def compare(scene, found, expected, **close):
    close = close or {"rtol": 2e-4, "atol": 2e-5}
    for head in range(6):
        out, lse = expected(head)
        np.testing.assert_allclose(found[0][head], out, **close)
        np.testing.assert_allclose(found[1][head], lse, **close)


def window(scene, sink, recent):
    end = scene.newest + 1
    return sorted(set(range(min(sink, end))) | set(range(max(0, end - recent), end)))


@pytest.mark.parametrize("stretch", [1.0, 90.0], ids=["", "scores beyond 100"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_static_window(tiny_config, stretch, dtype):
    made = scene(tiny_config, dtype, stretch)
    if stretch > 1:
        assert max(made.scores(h, range(PROMPT)).max() for h in range(6)) > 100
    found = run(made, StaticWindow(sink=5, recent=20))
    close = {"rtol": 2e-4, "atol": 2e-4} if stretch == 1 else {"rtol": 2e-3, "atol": 2e-3}
    compare(made, found, lambda h: made.attend(h, window(made, 5, 20)), **close)


@ROPES
def test_static_window_at_cache_positions(tiny_config, rope):
    made = scene(tiny_config, rope=rope)
    kept = window(made, 5, 20)
    assert len(kept) == 25
    found = run(made, StaticWindow(sink=5, recent=20, positions="cache"))
    compare(made, found, lambda h: made.attend(h, kept, range(25), 24))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense(tiny_config, dtype):
    made = scene(tiny_config, dtype)
    close = {} if dtype == "float32" else {"rtol": 3e-2, "atol": 3e-2}
    everything = range(made.newest + 1)
    compare(made, run(made, Dense()), lambda h: made.attend(h, list(everything)), **close)


@ROPES
@pytest.mark.parametrize("stretch", [1.0, 90.0], ids=["", "scores beyond 100"])
def test_flat(tiny_config, stretch, rope):
    made = scene(tiny_config, stretch=stretch, rope=rope)
    rule = Flat(k=7, sink=5, recent=20)

    def expected(head):
        inside = window(made, 5, 20)
        rest = [p for p in range(made.newest + 1) if p not in inside]
        best = np.argsort(-made.scores(head, rest))[:7]
        return made.attend(head, inside + [rest[i] for i in best])

    compare(made, run(made, rule), expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("renormalise", [False, True])
def test_topn(tiny_config, renormalise):
    made = scene(tiny_config)

    def expected(head):
        everything = list(range(made.newest + 1))
        s = made.scores(head, everything)
        softmax = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
        top = np.argsort(-softmax)[:11]
        lse = s.max() + np.log(np.exp(s - s.max()).sum())
        out = softmax[top] @ made.values[top, head // 3]
        return made.attend(head, top) if renormalise else (out, lse)

    compare(made, run(made, TopN(11, 2, renormalise)), expected)
    everything = list(range(made.newest + 1))
    first = run(made, TopN(11, 2, renormalise), layer=1)
    compare(made, first, lambda h: made.attend(h, everything))


@ROPES
def test_quest(tiny_config, rope):
    made = scene(tiny_config, rope=rope)
    view = made.view

    def expected(head):
        bounds = []
        for m in range(view.pages.shape[1]):
            seen = np.asarray(view.slot_position[0, m * PAGE : (m + 1) * PAGE]) <= made.newest
            keys = np.asarray(view.pool.k[view.pages[0, m], :, head // 3], np.float64)[seen]
            q = made.placed(made.q[head], made.newest - int(view.offsets[0, m]))
            bounds.append(np.maximum(q * keys.min(0), q * keys.max(0)).sum())
        bounds[made.slot[made.newest] // PAGE] = np.inf
        pages = set(np.argsort(-np.array(bounds))[:3].tolist())
        return made.attend(
            head, [p for p in range(made.newest + 1) if made.slot[p] // PAGE in pages]
        )

    compare(made, run(made, Quest(budget=3 * PAGE + 5, dense_layers=1)), expected)


def last_queries(made, count, seed=3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 6, 10)) * 2, np.arange(PROMPT - count, PROMPT)


@ROPES
@pytest.mark.parametrize("kernel", [3, 5])
def test_snapkv(tiny_config, kernel, rope):
    made = scene(tiny_config, rope=rope)
    queries, positions = last_queries(made, 6)
    start, sinks = PROMPT - 6, None
    if kernel == 3:  # some queries look at little else than a sink, and count as little
        sinks = np.linspace(2, 12, 6)
    if kernel == 5:  # they look at the window's own first token, which must not count
        for query, at in zip(queries, positions, strict=True):
            query[:] = 3 * made.turned(np.repeat(made.keys[start], 3, axis=0), start - at)

    def votes(head):
        total = np.zeros(PROMPT)
        for q, at in zip(queries[:, head], positions, strict=True):
            keys = [made.placed(made.keys[p, head // 3], p) for p in range(at + 1)]
            s = np.array([made.placed(q, at) @ key for key in keys]) * 10**-0.5
            sink = 0 if sinks is None else np.exp(sinks[head] - s.max())
            total[: at + 1] += np.exp(s - s.max()) / (np.exp(s - s.max()).sum() + sink)
        return total

    def expected(head):
        padded = np.pad(votes(head)[:start], kernel // 2)
        pooled = [padded[i : i + kernel].sum() / kernel for i in range(start)]
        chosen = np.argsort(-np.array(pooled), kind="stable")[:14]
        return made.attend(head, [*chosen, *range(start, made.newest + 1)])

    if kernel == 5:
        assert all(votes(h)[start] > 10 * votes(h)[start - 2 : start].max() for h in range(6))
    rule = SnapKV(capacity=20, window=6, kernel=kernel)
    compare(made, run(made, rule, queries, positions, sinks=sinks), expected)
    if sinks is not None:
        others = run(made, rule, queries, positions)[1]
        assert any(abs(others[head] - expected(head)[1]) > 1e-3 for head in range(6))


@pytest.mark.parametrize("scheme", ["original", "cache"])
def test_infllm(tiny_config, scheme):
    made = scene(tiny_config)
    queries, _ = last_queries(made, 6)
    positions = np.array([9, 30, 31, 44, 90, 97])  # nobody asks from 20 behind 50, say
    sink, recent, block, blocks, reps = 3, 20, 8, 3, 2
    rule = InfLLM(block, blocks, reps, sink, recent, 6, scheme)
    edge = made.newest - recent  # the last one outside the window
    starts = range(sink, made.newest + 1, block)
    representatives = {}
    for start in starts:
        for kv in range(2):
            scores = {}
            for p in range(start, min(start + block, PROMPT)):
                behind = [i for i, at in enumerate(positions) if p < at <= p + recent]
                behind = behind or [i for i, at in enumerate(positions) if p < at]
                q = queries[behind, 3 * kv : 3 * kv + 3].sum(1)
                scores[p] = np.mean(q @ made.keys[p, kv]) if behind else 0.0
            best = sorted(scores, key=lambda p: -scores[p])[:reps]
            representatives[start, kv] = best

    def place(p):
        return edge if scheme == "cache" and p <= edge else p

    def relevance(start):
        if start + block - 1 > edge:
            return np.inf if start <= edge else -np.inf
        total = 0.0
        for head in range(6):
            some = representatives[start, head // 3]
            total += made.scores(head, some, [place(p) for p in some]).mean()
        return total

    best = sorted(starts, key=lambda s: -relevance(s))[:blocks]
    tokens = {p for s in best for p in range(s, s + block) if p <= edge}
    tokens = sorted(tokens | set(window(made, sink, recent)))

    def expected(head):
        return made.attend(head, tokens, [place(p) for p in tokens])

    compare(made, run(made, rule, queries, positions), expected)


@ROPES
def test_retrieval_finds_what_flat_finds(tiny_config, rope):
    """With an exact index, found keys and the tail behind them are the top k of all the rest."""
    made = scene(tiny_config, rope=rope)
    rule = Retrieval(k=7, sink=5, recent=20, index=Exact("float32"))
    host = HostSearch(measure=True)
    number = host.admit()
    end = PROMPT + 1 - rule.recent
    keys = np.stack([made.placed(made.keys[p], p) for p in range(5, end)], axis=1)
    for _ in range(2):
        made_of = [build(head.astype(np.float32), None, rule.index) for head in keys]
        host.add_layer(number, [host.open(number, made_of, keys, np.arange(5, end))])
    tail = jnp.asarray(end + np.arange(NEW), jnp.int32)[None, None, None]
    state = Indexed(numbers=jnp.array([number], jnp.int32), tail=tail)
    view = dataclasses.replace(made.view, host=host)
    part, _ = jax.jit(lambda layer: rule.attend(view, layer, state))(jnp.int32(1))
    found = np.asarray(part.out[0, 0]), np.asarray(part.lse[0, 0])
    flat = run(made, Flat(k=7, sink=5, recent=20))
    np.testing.assert_allclose(found[0], flat[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], flat[1], rtol=1e-6)
    account = host.account_of([number])
    assert account.searches == 6 and account.scanned == 6 * (end - 5)
    assert account.found == account.wanted == 6 * 7
    assert account.keys == 2 * 2 * (end - 5)
    assert account.index_bytes >= account.keys * 10 * 4
    host.release([number])


def test_law_7_any_split_merges_to_one_softmax(tiny_config, rng):
    """Partials over any split merge to the softmax over the whole set, scores beyond 100 too."""
    made = scene(tiny_config, stretch=90.0)
    positions = rng.permutation(made.newest + 1)
    for cuts in ((40,), (1, 2, 90), (0, 50, 50)):
        parts = []
        for some in np.split(positions, cuts):
            pad = (0, len(positions) - len(some))  # one shape compiles once
            where = jnp.asarray(np.pad(some, pad), jnp.int32)[None, None, None]
            counts = jnp.asarray(np.pad(np.ones(len(some), bool), pad))[None, None, None]
            parts.append(made.view.attend_at(where, counts))
        whole = merge(parts)
        found = np.asarray(whole.out[0, 0]), np.asarray(whole.lse[0, 0])
        compare(made, found, lambda h: made.attend(h, sorted(positions)), rtol=2e-3, atol=2e-4)


def test_the_empty_set(tiny_config):
    """No key: out = 0, lse = -inf, and nothing is added to another part."""
    made = scene(tiny_config)
    where = jnp.arange(4, dtype=jnp.int32)[None, None, None]
    empty = made.view.attend_at(where, jnp.zeros(where.shape, bool))
    assert (np.asarray(empty.out) == 0).all() and np.isneginf(empty.lse).all()
    some = made.view.attend_at(where, jnp.ones(where.shape, bool))
    both = merge([some, empty, Partial(out=jnp.full_like(some.out, jnp.nan), lse=empty.lse)])
    np.testing.assert_array_equal(both.out, some.out)


def test_padding_rows_see_nothing(tiny_config):
    made = scene(tiny_config)
    view = dataclasses.replace(made.view, position=jnp.array([-1], jnp.int32))
    for rule in (StaticWindow(4, 8), Flat(4, 4, 8), TopN(4, 0), TopN(4, 0, True)):
        part, _ = rule.attend(view, jnp.int32(1), None)
        assert (np.asarray(part.out) == 0).all() and np.isneginf(part.lse).all()
