"""Attention on the host and the static pattern's, merged: what the rule gives on the device."""

import dataclasses
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.config import RopeConfig, YarnScaling
from jaxrag.base.errors import RequestError, RetrievalError
from jaxrag.base.types import HIDDEN, Partial
from jaxrag.kv.cache import PAGE, PagePool, PageTable
from jaxrag.kv.placement import AWAY
from jaxrag.models.attention import merge
from jaxrag.models.rope import rope_table, scale_rotary
from jaxrag.reuse.attention_index import Exact, Hnsw, ProjectedGraph, QueryLists, build
from jaxrag.reuse.attention_index import Ivf as IvfIndex
from jaxrag.reuse.decode import (
    Dense,
    Flat,
    HostSearch,
    InfLLM,
    IvfRetrieval,
    PromptQueries,
    Prompts,
    Quest,
    Retrieval,
    SnapKV,
    StaticWindow,
    TopN,
    View,
    host_search,
)
from jaxrag.reuse.decode.checks import RecallChecks
from jaxrag.reuse.decode.far import FarAnswer, HostLayer, HostPrompt, scan
from jaxrag.reuse.decode.stored import Carried, Known
from jaxrag.reuse.decode.view import PromptSlots

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
    chunks: list[tuple[int, np.ndarray]]  # first position of each, and the rows it lies in


def case_of(config, chunks=(37, 20, 90, 16), prefix=5, final=19, recomputed=(8, 9, 30), seed=0):
    """Chunks whose keys stand where they stand inside their chunk, and tokens of the request's own.

    Pages lie anywhere in the pool; ``recomputed`` positions are hidden in their chunk's pages.
    """
    rng = np.random.default_rng(seed)
    total = prefix + sum(chunks) + final
    shape = (config.num_layers * 64, PAGE, config.num_kv_heads, config.head_dim)
    pool = PagePool(*(jnp.asarray(rng.standard_normal(shape), config.dtype) for _ in range(2)))
    free = list(rng.permutation(64))
    offsets, slot_position, at, spans = [], [], 0, []
    for length in (prefix, *chunks):
        pages = -(-length // PAGE)
        offsets += [at] * pages
        inside = at + np.arange(pages * PAGE)
        gone = (inside >= at + length) | np.isin(inside, recomputed)
        slot_position += np.where(gone, HIDDEN, inside).tolist()
        spans.append((at, len(slot_position) - pages * PAGE + np.arange(length)))
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
        chunks=[
            (first, (pages[slots // PAGE] * PAGE + slots % PAGE).astype(np.int32))
            for first, slots in spans[1:]
        ],
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


def sinks_of(case, rule):
    """Sink logits [L, N] for a SnapKV of which votes are averaged, else None."""
    shape = (case.config.num_layers, case.config.num_heads)
    averaged = isinstance(rule, SnapKV) and rule.kernel > 1
    return (
        np.linspace(-1, 8, math.prod(shape), dtype=np.float32).reshape(shape) if averaged else None
    )


def on_device(case, rule):
    """``expected(q, position, layer)``: out [K, G, H] and lse [K, G] by the rule's ``attend``."""
    config = case.config
    queries, positions = bank_of(case, rule)
    queries, positions = jnp.asarray(queries[:, None]), jnp.asarray(positions[None])
    host = HostSearch() if rule.searches is not None else None
    state = rule.begin(
        Prompts(
            config,
            case.rope,
            lambda run: run(case.pool),
            PromptSlots(case.table, case.order, np.array([case.position], np.int32)),
            PromptQueries(queries, positions, sinks_of(case, rule)),
            ROOM,
            host and host.admit(),
            host=host,
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
    (queries, positions), sinks = bank_of(case, rule), sinks_of(case, rule)
    return HostPrompt(
        case.config,
        case.layer,
        layer,
        case.position,
        ROOM,
        queries[LAYER],
        positions,
        threads,
        sink_logits=None if sinks is None else sinks[LAYER],
    )


def attended(far, q, position):
    """The host's part of attention of q [K, G, H], in this thread: out and lse."""
    out, lse = np.zeros(q.shape, np.float32), np.full(q.shape[:-1], -np.inf, np.float32)
    todo = list(far.tasks(q, position, FarAnswer(out, lse, []), 1))
    while todo:
        todo += todo.pop()() or ()
    return out, lse


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
        scaled = np.asarray(scale_rotary(jnp.asarray(q), case.rope, config.rope))
        shape = (config.num_kv_heads, config.group_size, config.head_dim)
        if far is None:
            return heads_of(config, window)
        out, lse = attended(far, scaled.reshape(shape), position)
        assert out.dtype == lse.dtype == np.float32
        rest = Partial(
            out=jnp.asarray(out).reshape(window.out.shape),
            lse=jnp.asarray(lse).reshape(window.lse.shape),
        )
        return heads_of(config, merge([window, rest]))

    return ours


def same(case, rule, steps=ROOM, layer=LAYER, close=CLOSE):
    """The two agree at generated tokens, the first and the last ones among them."""
    config = case.config
    expected, ours = on_device(case, rule), on_host(case, rule, layer)
    # Quest's boxes on the device grow token by token; of other rules some steps do.
    every = rule.name == "quest"
    for step in [at for at in range(1, steps + 1) if every or at < 3 or at % 7 == 3]:
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
    IvfRetrieval(k=6, sink=4, recent=8, index=IvfIndex(clusters=8, probes=2, exact_below=0)),
    IvfRetrieval(k=6, sink=4, recent=8, index=Hnsw(storage="float32", ef=40, exact_below=0)),
]
YARN = YarnScaling(4.0, 64, 32.0, 1.0, 1.5, True)


def ids_of(rules):
    """Names that tell them apart."""
    numbers = itertools.count()
    return [f"{rule.name}-{next(numbers)}" for rule in rules]


@pytest.mark.parametrize("rule", RULES, ids=ids_of(RULES))
def test_the_hosts_part_and_the_windows_are_the_rule(tiny_config, rule):
    same(case_of(tiny_config()), rule)


def some_slow(fast):
    """One of each rule; those whose names are not ``fast`` marked slow."""
    slow = pytest.mark.slow
    return [
        pytest.param(rule, id=rule.name, marks=() if rule.name in fast else slow)
        for rule in ONE_OF_EACH
    ]


ONE_OF_EACH = list({rule.name: rule for rule in reversed(RULES)}.values())


@pytest.mark.parametrize("rule", some_slow({"flat", "quest", "infllm"}))
def test_where_half_a_head_turns_in_pairs_and_a_factor_is_on_it(tiny_config, rule):
    rope = RopeConfig(5_000.0, 6, True, YARN)
    config = tiny_config(rope=rope, num_kv_heads=6, attention_scale=0.5)
    same(case_of(config), rule, steps=6)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", some_slow({"dense", "flat", "quest", "infllm"}))
def test_keys_and_values_of_16_bits(tiny_config, rule, dtype):
    # Dense attention on the device rounds weights to the model's dtype, the host does not.
    close = {"rtol": 0.0, "atol": 2e-3} if rule == Dense() else CLOSE
    same(case_of(tiny_config(dtype=dtype)), rule, steps=4, close=close)


@pytest.mark.parametrize("rule", some_slow({"dense", "quest", "retrieval"}))
def test_a_prompt_that_the_static_pattern_covers(tiny_config, rule):
    """Nothing is outside at first; generated tokens leave it, where it does not hold them all."""
    case = case_of(tiny_config(), chunks=(3,), prefix=2, final=2, recomputed=(3,))
    same(case, rule)


def test_a_page_without_a_key_yet_is_bound_by_nothing(tiny_config):
    """It would go before pages whose bounds are negative."""
    rule = Quest(budget=32, dense_layers=0)
    pages = rule.far(prompt_of(case_of(tiny_config()), rule, None))
    q = np.random.default_rng(5).standard_normal((2, 3, 10)).astype(np.float32)
    asked = pages.memory.ask(q, pages._last_boxed + 1)
    members = pages._members
    held = ((members >= 0) & (members <= pages._last_boxed)).any(1)
    assert not held.all()
    for head in range(2):
        bounds = pages._bounds(head, asked[:, head])
        np.testing.assert_array_equal(np.isneginf(bounds), np.broadcast_to(~held, bounds.shape))


class Indexed:
    """Stands for StoredIndexes: lists over the keys of some chunks, as they lie."""

    def __init__(self, case, spec):
        self.case, self.spec, self.opened = case, spec, []

    def known(self, chunk, config):
        if chunk.key == "damaged":
            raise RetrievalError("a saved index is damaged")
        return Known(None, nbytes=90, tables=40) if chunk.key != "bare" else None

    def open_layer(self, chunk, known, layer, config):
        self.opened.append((chunk.key, layer))
        keys = self.case.layer.k[:, chunk.slots]
        asked = self.case.rng.standard_normal((2, 3, 64, 10)).astype(np.float32)
        return [build(*heads, self.spec) for heads in zip(keys, asked, strict=True)]


FOUND = QueryLists(clusters=4, cap=500, knn=37, probes=4, exact_below=0, min_queries=1)


@pytest.mark.parametrize(
    ("spec", "copies"), [(FOUND, 0), (Exact(), 0), (ProjectedGraph(ef=500, **ANY), 1)]
)
def test_indexes_stored_with_chunks_are_searched_where_the_keys_lie(tiny_config, spec, copies):
    """Wherever they stand; keys that were computed again are found where they are now."""
    case = case_of(tiny_config(), chunks=(37, 20, 40, 50), recomputed=(8, 9, 45))
    named = zip(["first", "bare", "third", "damaged"], case.chunks, strict=True)
    carried = [Carried(None, key, first, rows) for key, (first, rows) in named]
    documents = Indexed(case, dataclasses.replace(spec, storage="float32"))
    rule = Retrieval(k=6, sink=7, recent=8, index=ProjectedGraph(**ANY | {"exact_below": 500}))
    with ThreadPoolExecutor(2) as threads:
        prompt = dataclasses.replace(
            prompt_of(case, rule, threads), carried=carried, documents=documents
        )
        far = rule.far(prompt)
        with refused(RequestError, "80"):
            dataclasses.replace(rule, max_host_bytes=79).far(prompt)
        alone = dataclasses.replace(rule, stored=False).far(prompt)
    assert documents.opened == [("first", LAYER), ("third", LAYER)]
    assert far.account.stored == 2 * (37 + 40) and far.account.trained == 0
    assert far.account.notes[0] == "a stored index is not used: a saved index is damaged"
    per_key = far.account.index_bytes / far.account.stored
    assert per_key > 40 if copies else far.account.index_bytes < 2 * 4 * 3 * (500 + 64)
    assert alone.account.stored == 0
    flat = Flat(k=6, sink=7, recent=8).far(prompt)
    for step in range(1, ROOM + 1):
        q = case.rng.standard_normal((2, 3, 10)).astype(np.float32)
        wanted = attended(flat, q, case.position + step)
        for ours in (far, alone):
            for one, other in zip(attended(ours, q, case.position + step), wanted, strict=True):
                np.testing.assert_allclose(one, other, **CLOSE)


def test_what_is_measured_is_recall_of_an_exact_search(tiny_config):
    case = case_of(tiny_config())
    poor = QueryLists(clusters=8, cap=5, knn=5, probes=1, exact_below=0, min_queries=1)
    host = HostSearch(threads=1, measure=True)
    accounts = []
    for index in (Exact(), FOUND, poor):
        rule = Retrieval(k=9, sink=4, recent=8, index=index)
        number = host.admit()
        host.begin(number, [rule.far(prompt_of(case, rule, host.crew))])
        for step in range(1, 5):
            q = case.rng.standard_normal((2, 3, 10)).astype(np.float32)
            host.attend(number, 0, q, case.position + step)
        accounts.append(host.account_of([number]))
    host.close()
    exact, found, missed = accounts
    keys = case.position + 2 - 8 - 4
    assert exact.keys == found.keys == 2 * keys
    assert exact.searches == found.searches == 4 * 6
    assert exact.wanted == exact.found == 4 * 6 * 9 and exact.scanned == 4 * 6 * keys
    assert found.found >= 0.9 * found.wanted
    assert missed.found < 0.5 * missed.wanted and missed.scanned <= 4 * 6 * (5 + 8)


FEW = {"cap": 8, "knn": 8, "clusters": 16, "exact_below": 0, "min_queries": 1}
EFFORTS = {
    "lists": lambda times: QueryLists(probes=2 * times, **FEW),
    "ivf": lambda times: IvfIndex(clusters=16, probes=2 * times, exact_below=0),
    "hnsw": lambda times: Hnsw(storage="float32", ef=10 * times, exact_below=0),
}


@pytest.mark.parametrize("times", [2, 0])
@pytest.mark.parametrize("kind", EFFORTS)
def test_a_head_that_fell_short_is_searched_with_so_much_more_or_scanned(
    tiny_config, kind, times, monkeypatch
):
    """On both sides; 0 is a scan."""
    case = case_of(tiny_config())
    rule = Retrieval(k=9, sink=4, recent=8, index=EFFORTS[kind](1))
    other = dataclasses.replace(rule, index=EFFORTS[kind](2) if times else Exact("float32"))
    steps = [1, 2, 5]
    asked = [case.rng.standard_normal((6, 10)).astype(np.float32) for _ in steps]
    wanted, before = on_device(case, other), on_device(case, rule)
    heads, start = (2, 3), case.position + 1 - 6  # none of the steps is one that is checked
    state = np.zeros(heads, int), np.zeros(heads), np.full(heads, times), np.zeros(heads)
    monkeypatch.setattr(RecallChecks, "of", lambda *_: RecallChecks(start, 0.9, *state))
    sides, changed = (on_device(case, rule), on_host(case, rule)), 0
    for step, q in zip(steps, asked, strict=True):
        position = case.position + step
        out, lse = wanted(q, position)
        changed += np.abs(before(q, position)[1] - lse).max()
        for side in sides:
            for one, expected in zip(side(q, position), (out, lse), strict=True):
                np.testing.assert_allclose(one, expected, **CLOSE)
    assert changed > 1e-3


@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=ids_of(ONE_OF_EACH))
def test_bytes_are_those_of_the_arrays(tiny_config, rule):
    """Beside K, V, rows and offsets, which are the request's."""
    case = case_of(tiny_config())
    with ThreadPoolExecutor(1) as threads:
        far = rule.far(prompt_of(case, rule, threads))
    given = {id(each) for each in vars(case.layer).values()}
    assert far is None or far.account.index_bytes >= bytes_of(far, given)


def bytes_of(thing, seen):
    """Of all arrays that an object of ours holds."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        return thing.nbytes if thing.base is None or id(thing.base) not in seen else 0
    if isinstance(thing, dict):
        return sum(bytes_of(each, seen) for each in thing.values())
    if isinstance(thing, list | tuple):
        return sum(bytes_of(each, seen) for each in thing)
    if type(thing).__module__.startswith("jaxrag"):
        return bytes_of({**vars(thing)}, seen) if hasattr(thing, "__dict__") else 0
    return 0


@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=ids_of(ONE_OF_EACH))
def test_bits_do_not_depend_on_threads_and_company(tiny_config, rule, monkeypatch):
    """Alone on one thread, and in a batch on many."""
    monkeypatch.setattr(scan, "_PART", 1)
    monkeypatch.setattr(host_search, "_SMALL", 0)
    config = tiny_config(num_heads=10)
    case = case_of(config, chunks=(90, 150), final=90)
    shape = (config.num_kv_heads, config.group_size, config.head_dim)
    answers = []
    for threads, rows in ((1, 1), (2, 1), (7, 1), (3, 4)):
        host = HostSearch(threads=threads)
        numbers = [host.admit() for _ in range(rows)]
        for number in numbers:
            host.begin(number, [rule.far(prompt_of(case, rule, host.crew))])
        q = np.random.default_rng(5).standard_normal((1, *shape)).astype(np.float32)
        at = np.full(rows, case.position + 9)
        ticket = host.start(0, np.array(numbers), np.repeat(q, rows, 0), at)
        answers += zip(*host.wait(ticket), strict=True)
        host.close()
    for out, lse in answers[1:]:
        np.testing.assert_array_equal(out, answers[0][0])
        np.testing.assert_array_equal(lse, answers[0][1])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (TopN(), "decode='retrieval'"),
        (StaticWindow(positions="cache"), "'static_window'"),
        (InfLLM(positions="cache"), "'infllm'"),
    ],
)
def test_a_rule_without_a_host_part_says_so(tiny_config, rule, message):
    with refused(RequestError, message) as caught:
        rule.check_placement(tiny_config(), AWAY)
    assert "\n" not in str(caught.value)


def test_a_model_with_sliding_windows_keeps_its_keys_on_the_device(tiny_config):
    for rule in (Dense(), Flat()):
        rule.check_placement(tiny_config(), AWAY)
        with refused(RequestError, "kv='host'"):
            rule.check_placement(tiny_config("mistral"), AWAY)
