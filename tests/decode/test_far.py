"""Attention on the host and the static pattern's, merged: what the rule gives on the device."""

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.attention_index import Hnsw, ProjectedGraph, QueryLists
from jaxrag.attention_index import Ivf as IvfIndex
from jaxrag.cache import PAGE, PagePool, PageTable
from jaxrag.config import RopeConfig, YarnScaling
from jaxrag.decode import (
    Dense,
    Flat,
    HostSearch,
    InfLLM,
    Ivf,
    PromptQueries,
    Prompts,
    Quest,
    Retrieval,
    SnapKV,
    StaticWindow,
    View,
)
from jaxrag.decode.far import HostLayer, HostPrompt
from jaxrag.models.attention import merge
from jaxrag.models.rope import rope_table, scale_rotary
from jaxrag.types import HIDDEN, Partial

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
ROOM = 24
LAYER = 1


@dataclasses.dataclass
class Case:
    """A request in a pool on the device, and the same rows in host memory."""

    config: object
    rope: object
    pool: PagePool
    table: PageTable
    order: np.ndarray
    position: int
    layer: HostLayer
    queries: np.ndarray  # [L, W, N, H] before rotation, of the tokens at
    positions: np.ndarray  # [W]
    rng: np.random.Generator


def case_of(config, chunks=(37, 20, 90, 16), prefix=5, final=19, recomputed=(8, 9, 30), seed=0):
    """Chunks whose keys stand where they stand inside their chunk, and tokens of the request's own.

    Pages lie anywhere in the pool; ``recomputed`` positions are hidden in their chunk's pages.
    """
    rng = np.random.default_rng(seed)
    total = prefix + sum(chunks) + final
    shape = (config.num_layers * 64, PAGE, config.num_kv_heads, config.head_dim)
    pool = PagePool(*(jnp.asarray(rng.standard_normal(shape), config.dtype) for _ in range(2)))
    free = list(rng.permutation(64))
    offsets, slot_position, at = [], [], 0
    for length in (prefix, *chunks):
        pages = -(-length // PAGE)
        offsets += [at] * pages
        inside = at + np.arange(pages * PAGE)
        gone = (inside >= at + length) | np.isin(inside, recomputed)
        slot_position += np.where(gone, HIDDEN, inside).tolist()
        at += length
    own = [*(p for p in recomputed if p < at), *range(at, total + ROOM)]
    pages = -(-len(own) // PAGE)
    offsets += [0] * pages
    slot_position += [*own, *[HIDDEN] * (pages * PAGE - len(own))]
    order = np.zeros(len(slot_position), np.int32)
    slots = np.flatnonzero(np.array(slot_position) != HIDDEN)
    order[np.array(slot_position)[slots]] = slots
    pages = np.array([free.pop() for _ in offsets], np.int32)
    rows = pages[order // PAGE] * PAGE + order % PAGE
    heads = [
        np.asarray(x[LAYER * 64 : (LAYER + 1) * 64])
        .reshape(64 * PAGE, config.num_kv_heads, config.head_dim)
        .swapaxes(0, 1)
        .copy()
        for x in (pool.k, pool.v)
    ]
    size = total + ROOM
    layer = HostLayer(
        *heads,
        rows[:size].astype(np.int32),
        np.array(offsets, np.int32)[order // PAGE][:size],
    )
    strided = np.arange(0, total, 2, dtype=np.int32)
    queries = (config.num_layers, len(strided), config.num_heads, config.head_dim)
    return Case(
        config=config,
        rope=rope_table(config.rope, 512),
        pool=pool,
        table=PageTable(
            pages=jnp.asarray(pages[None]),
            offsets=jnp.asarray(np.array(offsets, np.int32)[None]),
            slot_position=jnp.asarray(np.array(slot_position, np.int32)[None]),
        ),
        order=order[None],
        position=total - 1,
        layer=layer,
        queries=rng.standard_normal(queries).astype(np.float32),
        positions=strided,
        rng=rng,
    )


def bank_of(case, rule):
    """What ``observe`` of the rule keeps of the prompt: queries [L, W, N, H], positions [W]."""
    asked = rule.observe
    if asked is None:
        return case.queries[:, :0], case.positions[:0]
    if asked.which == "last":
        return case.queries[:, -asked.count :], case.positions[-asked.count :]
    kept = np.arange(min(asked.count, len(case.positions)))
    kept = kept * len(case.positions) // len(kept)
    return case.queries[:, kept], case.positions[kept]


def on_device(case, rule):
    """``expected(q, position, layer)``: out [K, G, H] and lse [K, G] by the rule's ``attend``."""
    config = case.config
    queries, positions = bank_of(case, rule)
    host = HostSearch() if rule.searches is not None else None
    numbers = [host.admit()] if host else []
    state = rule.begin(
        Prompts(
            config,
            case.rope,
            lambda run: run(case.pool),
            case.table,
            case.order,
            np.array([case.position], np.int32),
            PromptQueries(jnp.asarray(queries[:, None]), jnp.asarray(positions[None])),
            ROOM,
            numbers,
            [()] * len(numbers),
            host,
        )
    ) if rule.sparse else None  # fmt: skip
    state = jax.tree.map(lambda x: jnp.asarray(x)[LAYER], state)

    @jax.jit
    def attend(pool, q, position, state, layer):
        held = dataclasses.replace(case, pool=pool)
        return rule.attend(view_of(held, q, position, host), layer, state)

    def expected(q, position, layer=LAYER):
        nonlocal state
        part, state = attend(case.pool, q, position, state, jnp.int32(layer))
        return heads_of(config, part)

    return expected


def view_of(case, q, position, host=None):
    pages = case.pool.rows(LAYER, case.table.pages, case.config.num_layers)
    return View(
        case.config,
        case.rope,
        case.pool,
        pages,
        case.table.offsets,
        case.table.slot_position,
        jnp.asarray(case.order),
        jnp.asarray(position, jnp.int32)[None],
        jnp.asarray(q[None]),
        host,
    )


def heads_of(config, part):
    shape = (config.num_kv_heads, config.group_size)
    return (
        np.asarray(part.out).reshape(*shape, config.head_dim),
        np.asarray(part.lse).reshape(shape),
    )


def prompt_of(case, rule, threads, layer=LAYER):
    queries, positions = bank_of(case, rule)
    return HostPrompt(
        case.config,
        case.layer,
        layer,
        case.position,
        ROOM,
        queries[LAYER],
        positions,
        threads,
    )


def on_host(case, rule, layer=LAYER):
    """``ours(q, position)``: the same from the static pattern on the device and the host's part."""
    config = case.config
    with ThreadPoolExecutor(2) as threads:
        far = rule.far(prompt_of(case, rule, threads, layer))

    @jax.jit
    def near(pool, q, position):
        view = view_of(dataclasses.replace(case, pool=pool), q, position)
        return view.attend_at(*view.window(*rule.static_pattern))

    def ours(q, position):
        window = near(case.pool, q, position)
        scaled = np.asarray(scale_rotary(jnp.asarray(q), config.rope))
        shape = (config.num_kv_heads, config.group_size, config.head_dim)
        if far is None:
            return heads_of(config, window)
        out, lse = far.attend(scaled.reshape(shape), position)
        assert out.dtype == lse.dtype == np.float32
        rest = Partial(
            out=jnp.asarray(out).reshape(window.out.shape),
            lse=jnp.asarray(lse).reshape(window.lse.shape),
        )
        return heads_of(config, merge([window, rest]))

    return ours


def same(case, rule, steps=ROOM, layer=LAYER, close=CLOSE):
    """The two agree at every generated token."""
    config = case.config
    expected, ours = on_device(case, rule), on_host(case, rule, layer)
    for step in range(1, steps + 1):
        q = case.rng.standard_normal((config.num_heads, config.head_dim)).astype(np.float32)
        wanted = expected(q, case.position + step, layer)
        for one, other in zip(ours(q, case.position + step), wanted, strict=True):
            np.testing.assert_allclose(one, other, **close)


ANY = {"exact_below": 0, "min_queries": 1, "most_scanned": 1.0}
RULES = [
    Dense(),
    StaticWindow(sink=4, recent=8),
    SnapKV(capacity=20, window=6),
    SnapKV(capacity=300, window=30, kernel=1),
    InfLLM(block=8, blocks=3, representatives=2, sink=4, recent=12),
    InfLLM(block=7, blocks=40, representatives=7, sink=0, recent=3),
    Quest(budget=32, dense_layers=1),
    Quest(budget=512, dense_layers=0),
    Flat(k=6, sink=4, recent=8),
    Flat(k=500, sink=0, recent=1),
    Flat(k=3, sink=40, recent=9),
    Retrieval(k=6, sink=4, recent=8),
    Retrieval(k=9, sink=4, recent=8, index=QueryLists(clusters=4, cap=64, probes=2, **ANY)),
    Retrieval(k=6, sink=4, recent=8, index=QueryLists(storage="float16", clusters=4, **ANY)),
    Retrieval(k=6, sink=4, recent=8, index=QueryLists(share="group", clusters=4, **ANY)),
    Retrieval(k=6, sink=4, recent=8, index=ProjectedGraph(storage="float32", **ANY)),
    Ivf(k=6, sink=4, recent=8, index=IvfIndex(clusters=8, probes=2, exact_below=0)),
    Ivf(k=6, sink=4, recent=8, index=Hnsw(storage="float32", ef=40, exact_below=0)),
]
YARN = YarnScaling(4.0, 64, 32.0, 1.0, 1.5, True)


def ids_of(rules):
    """Names that tell them apart."""
    numbers = itertools.count()
    return [f"{rule.name}-{next(numbers)}" for rule in rules]


@pytest.mark.parametrize("rule", RULES, ids=ids_of(RULES))
def test_the_hosts_part_and_the_windows_are_the_rule(tiny_config, rule):
    same(case_of(tiny_config()), rule)


ONE_OF_EACH = list({rule.name: rule for rule in reversed(RULES)}.values())


@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=ids_of(ONE_OF_EACH))
def test_where_half_a_head_turns_in_pairs_and_a_factor_is_on_it(tiny_config, rule):
    config = tiny_config(rope=RopeConfig(5_000.0, 6, True, YARN), num_kv_heads=6)
    same(case_of(config), rule, steps=6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=ids_of(ONE_OF_EACH))
def test_keys_and_values_of_16_bits(tiny_config, rule, dtype):
    # Dense attention on the device rounds weights to the model's dtype, the host does not.
    close = {"rtol": 0.0, "atol": 2e-3} if rule == Dense() else CLOSE
    same(case_of(tiny_config(dtype=dtype)), rule, steps=4, close=close)


@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=ids_of(ONE_OF_EACH))
def test_a_prompt_that_the_static_pattern_covers(tiny_config, rule):
    """Nothing is outside at first; generated tokens leave it, where it does not hold them all."""
    case = case_of(tiny_config(), chunks=(3,), prefix=2, final=2, recomputed=(3,))
    same(case, rule)
