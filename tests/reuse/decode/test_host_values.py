"""V in host memory (KCache section 3.1): the same answers, fewer bytes, and what is refused."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.base.sharding import make_mesh
from jaxrag.engine.engine import engine_of
from jaxrag.engine.runner import ModelRunner
from jaxrag.kv.cache import PAGE
from jaxrag.kv.cache.host import HostValues, Moved
from jaxrag.kv.placement import KVPlacement
from jaxrag.models.model import random_model
from jaxrag.reuse.decode import Dense, Flat, TopN
from jaxrag.reuse.methods import METHODS
from jaxrag.reuse.select import QueryGuided
from jaxrag.serve.generate import generate

CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def over_cache():
    """FusionRAG in its later variant, which runs the final block over the cache."""
    return dataclasses.replace(METHODS["fusionrag"], selector=QueryGuided(over="cache"))


@pytest.fixture
def far_from(model_of):
    """``far_from(layers)``: the other tests' model, with V of so many layers on the device."""

    def far_from(layers, most=None, **changes):
        placement = KVPlacement("device", layers, most)
        return dataclasses.replace(model_of(), placement=placement, **changes)

    return far_from


@pytest.mark.parametrize(
    ("rule", "method"),
    [
        (TopN(n=8), "turborag"),
        pytest.param(TopN(n=8), "full_attention", marks=pytest.mark.slow),
        pytest.param(TopN(n=8, device_layers=0, renormalise=True), "turborag",
                     marks=pytest.mark.slow),
        pytest.param(TopN(n=8, device_layers=2), "epic", marks=pytest.mark.slow),
        pytest.param(TopN(n=400), "turborag", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_answers_are_those_of_values_on_the_device(
    model_of, far_from, ids, a_prompt, next_logits, rule, method
):
    prompts = [a_prompt(), a_prompt(prefix=5, chunks=(30,), final=4)]
    given = np.stack(ids(5, 5))
    expected = next_logits(model_of(), method, prompts, rule, given)
    ours = next_logits(far_from(rule.device_layers), method, prompts, rule, given)
    np.testing.assert_allclose(ours, expected, **CLOSE)
    np.testing.assert_array_equal(ours.argmax(-1), expected.argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_fusionrag_recomputes_with_values_on_the_host(model_of, far_from, ids, ratio):
    """V of recomputed tokens goes to slots of the request's own, there as on the device."""
    documents = list(ids(60, 40, 50))
    questions = [list(map(int, q)) for q in ids(9, 4)]
    options = {
        "documents": documents,
        "method": "fusionrag",
        "decode": TopN(n=16),
        "recompute_ratio": ratio,
        "max_new_tokens": 12,
    }
    expected, ours = (generate(questions, model=m, **options) for m in (model_of(), far_from(1)))
    assert [out.token_ids for out in ours] == [out.token_ids for out in expected]
    assert all(sum(row.recomputed for row in out.reuse) for out in ours)


@pytest.mark.slow
def test_token_for_token_in_a_small_cache(model_of, far_from, ids):
    """Pages are given to other chunks and requests, on the device and on the host alike."""
    model, far = model_of(), far_from(1, cache_tokens=320)
    for lengths in ((90, 40), (80, 70), (90,), (33, 100)):
        documents, questions = list(ids(*lengths)), [list(map(int, q)) for q in ids(9, 4)]
        options = {"documents": documents, "method": "turborag", "decode": TopN(n=8)}
        expected, ours = (
            generate(questions, model=m, max_new_tokens=7, **options) for m in (model, far)
        )
        assert [out.token_ids for out in ours] == [out.token_ids for out in expected]


def test_bytes_are_those_of_the_formula(far_from):
    for layers in (0, 1, 2):
        model = far_from(layers)
        cache = engine_of(model).runner.cache
        rule = TopN(n=8, device_layers=layers)
        said = rule.bytes(model.config, cache.allocator.num_pages * PAGE)
        assert cache.pool.k.nbytes + cache.pool.v.nbytes == said.device
        assert cache.host.nbytes == said.host


def test_what_the_device_spares_holds_more_tokens(model_of):
    """The default pool: by the bytes of a token on the device, within the ceiling of the host."""
    long = dataclasses.replace(model_of().config, max_positions=1 << 24)
    model = dataclasses.replace(model_of(), config=long, cache_tokens=None)
    tokens = {
        layers: ModelRunner(model.placed(KVPlacement(value_layers=layers))).num_pages * PAGE
        for layers in (None, 0, 1)
    }
    assert long.num_layers == 3
    assert tokens[0] == pytest.approx(2 * tokens[None], abs=PAGE)
    assert tokens[1] == pytest.approx(3 / 2 * tokens[None], abs=PAGE)
    away = 2 * long.num_kv_heads * long.head_dim * 4  # bytes of a token
    bound = dataclasses.replace(model, placement=KVPlacement("device", 1, away * 999))
    assert ModelRunner(bound).num_pages == 999 // PAGE


def test_host_memory_is_given_back(far_from):
    model = far_from(1)
    cache = engine_of(model).runner.cache
    memory, values = weakref.ref(cache.host), cache.values
    del cache
    engine_of(model).runner.forget_cache()
    gc.collect()
    assert memory() is None
    with pytest.raises(RuntimeError):
        values._array()


def test_what_a_layer_writes_and_reads(rng):
    """Beside plain numpy: own tokens are seen, padding is dropped, other layers are untouched."""
    memory = rng.standard_normal((2, 3, 6 * PAGE, 5)).astype(np.float32)
    before = memory.copy()
    values = HostValues(1, memory)
    pages = np.array([[4, 1], [0, 5], [2, 3]], np.int32)
    slots = np.array([[3], [PAGE + 1], [2 * PAGE]], np.int32)  # the last one is beyond the table
    v = rng.standard_normal((3, 1, 3, 5)).astype(np.float32)
    wanted = rng.integers(0, 2 * PAGE, (3, 3, 2, 7)).astype(np.int32)
    expected = before[1].copy()
    expected[:, 4 * PAGE + 3], expected[:, 5 * PAGE + 1] = v[0, 0], v[1, 0]
    arrays = tuple(map(jnp.asarray, (pages, slots, v, wanted)))
    rows = np.asarray(jax.jit(values.rows)(jnp.int32(2), *arrays))
    np.testing.assert_array_equal(memory[1], expected)
    np.testing.assert_array_equal(memory[0], before[0])
    for b, k, g, n in np.ndindex(2, *wanted.shape[1:]):
        slot = wanted[b, k, g, n]
        row = pages[b, slot // PAGE] * PAGE + slot % PAGE
        np.testing.assert_array_equal(rows[b, k, g, n], expected[k, row])


def test_rows_of_the_batch_where_nobody_is_fetch_nothing(rng):
    memory = rng.standard_normal((1, 3, 6 * PAGE, 5)).astype(np.float32)
    values = HostValues(0, memory)
    values.measure = True
    pages = jnp.array([[4, 1], [0, 5], [2, 3]], jnp.int32)
    slots = jnp.array([[3], [2 * PAGE], [0]], jnp.int32)
    v = jnp.ones((3, 1, 3, 5), jnp.float32)
    wanted = rng.integers(0, 2 * PAGE, (3, 3, 2, 7)).astype(np.int32)
    rows = np.asarray(jax.jit(values.rows)(jnp.int32(0), pages, slots, v, jnp.asarray(wanted)))
    for b, k, g, n in np.ndindex(*wanted.shape):
        if b != 1:
            slot = wanted[b, k, g, n]
            row = pages[b, slot // PAGE] * PAGE + slot % PAGE
            np.testing.assert_array_equal(rows[b, k, g, n], memory[0, k, row])
    live = wanted[[0, 2]]
    distinct = sum(len(np.unique(heads)) for row in live for heads in row)
    row_bytes = 5 * 4
    assert values.moved == Moved(2 * 3 * row_bytes, live.size * row_bytes, live.size, distinct, 1)


@pytest.mark.parametrize("questions", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_is_moved_is_counted(far_from, ids, questions):
    """V of what is run goes to the host once; a step brings n rows a query head and layer back."""
    model, n, steps = far_from(1), 8, 6
    config, chunks = model.config, ids(30, 20)
    asked = [list(map(int, ids(9)[0])) for _ in range(questions)]
    options = {"documents": list(chunks), "model": model, "method": "turborag"}
    cache = engine_of(model).runner.cache
    cache.values.measure = True
    far, row_bytes = config.num_layers - 1, config.head_dim * 4
    of_tokens = far * config.num_kv_heads * row_bytes
    generate(asked, decode=TopN(n=n), max_new_tokens=1, **options)
    prefilled = cache.moved
    assert prefilled.rows == 0
    assert prefilled.pushed == of_tokens * 9 * questions
    out = generate(asked, decode=TopN(n=n), max_new_tokens=1 + steps, **options)
    moved = cache.moved - prefilled
    assert all(len(one.token_ids) == 1 + steps for one in out)
    assert moved.rows == far * config.num_heads * n * steps * questions
    assert moved.pushed == of_tokens * (9 + steps) * questions
    assert moved.rows > moved.distinct >= far * config.num_kv_heads * n * steps * questions
    assert moved.brought >= moved.rows * row_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode": Dense()}, "'dense'"),
        ({"decode": Flat(k=4, sink=4, recent=8)}, "'flat'"),
        ({"decode": TopN(n=4, device_layers=2)}, "device_layers=2"),
        ({"decode": TopN(n=4), "method": "cacheblend"}, "'kv_deviation'"),
        (
            {"decode": TopN(n=4), "method": over_cache()},
            "over='question'",
        ),
    ],
)
def test_who_reads_values_on_the_device_is_refused(far_from, ids, options, message):
    model = far_from(1)
    with refused(RequestError, message) as caught:
        generate(ids(5)[0], documents=list(ids(30)), model=model, **options)
    assert "\n" not in str(caught.value)
    assert engine_of(model).runner._cache is None  # before anything is allocated


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (KVPlacement(value_layers=3), "value_layers=3"),
        (KVPlacement(value_layers=-1), "value_layers=-1"),
        (KVPlacement(max_host_bytes=0), "max_host_bytes=0"),
    ],
)
def test_a_model_that_cannot_be(model_of, placement, message):
    with refused(RequestError, message):
        dataclasses.replace(model_of(), placement=placement)


def test_kernels_that_read_values_on_the_device_are_refused(model_of):
    model = model_of()
    config = dataclasses.replace(model.config, kernels="pallas_interpret")
    with refused(ConfigError, "kernels='pallas_interpret'", "value_layers=1", "'xla'"):
        dataclasses.replace(model, config=config, placement=KVPlacement(value_layers=1))
    dataclasses.replace(model, config=config)  # each alone is taken


def test_a_kv_head_in_host_memory_has_one_owner(tiny_config):
    model = random_model(tiny_config(), mesh=make_mesh(1, 1, 4), cache_tokens=1024)
    with refused(RequestError, "2"):
        dataclasses.replace(model, placement=KVPlacement(value_layers=1))


def test_the_ceiling_is_checked_before_allocation(far_from):
    need = 2 * 2048 * 2 * 10 * 4  # layers, tokens, KV heads, dims, bytes
    model = far_from(1, most=need - 1)
    with refused(RequestError, need) as caught:
        _ = engine_of(model).runner.cache
    assert "\n" not in str(caught.value) and engine_of(model).runner._cache is None
    assert engine_of(far_from(1, most=need)).runner.cache.host.nbytes == need
