"""The pool goes through the scan over the layers, and the program holds no copy of it."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxrag.base.types import Step
from jaxrag.engine.steps import run_tokens
from jaxrag.kv.cache import PAGE, PagePool, PageTable
from jaxrag.models.decoder import Decoder
from jaxrag.models.rope import RopeTable
from jaxrag.models.spec import init_params

POOL_TOKENS = 1 << 16


def plan_of(config, rows, width, donated=True):
    """XLA's plan of one forward of new tokens [rows, width] against a pool, and its bytes."""

    def numbers(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    shape = (config.num_layers * POOL_TOKENS // PAGE, PAGE, config.num_kv_heads, config.head_dim)
    pool = jax.ShapeDtypeStruct(shape, config.dtype)
    angles = jax.ShapeDtypeStruct((1024, config.rope.rotary_dim // 2), jnp.float32)
    table = PageTable(numbers(rows, 32), numbers(rows, 32), numbers(rows, 32 * PAGE))
    params = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))

    def step(pool, decoder, table, new):
        hidden, pool, _ = run_tokens(decoder, pool, table, new)
        return hidden, pool

    new = Step(*[numbers(rows, width)] * 3)
    decoder = Decoder(params=params, rope=RopeTable(angles, angles), config=config)
    program = jax.jit(step, donate_argnums=(0,) if donated else ())
    lowered = program.lower(PagePool(pool, pool), decoder, table, new)
    size = pool.size * pool.dtype.itemsize
    return lowered.compile().memory_analysis(), size


@pytest.mark.parametrize("width", [1, 48])
def test_the_pool_is_updated_in_place(tiny_config, width):
    plan, one_pool = plan_of(tiny_config(), 2, width)
    assert plan.alias_size_in_bytes >= 2 * one_pool
    assert plan.temp_size_in_bytes < one_pool / 3 / 4  # a quarter of one layer of K


def test_a_copy_would_be_seen(tiny_config):
    """Without donation the plan holds the pools twice."""
    plan, one_pool = plan_of(tiny_config(), 2, 1, donated=False)
    assert plan.alias_size_in_bytes < one_pool
    assert plan.output_size_in_bytes + plan.temp_size_in_bytes >= 2 * one_pool
