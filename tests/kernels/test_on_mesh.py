"""Kernels on several devices: each runs on its rows and KV heads, and the answer stays."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.sharding import attention_axes, make_mesh
from jaxrag.base.types import Tokens
from jaxrag.kv.cache import PagePool
from jaxrag.models.attention import PackedAttend, attend_pool
from jaxrag.models.rope import rope_table
from jaxrag.models.segments import lay_out
from pallas_kernels import Pages, paged_attention, paged_decode_attention, topn_attention

CLOSE = {"rtol": 2e-4, "atol": 2e-5}


def test_axes_are_left_out_where_they_do_not_divide():
    mesh = make_mesh(2, 2, 2)
    assert attention_axes(mesh, 8, 4) == (("data", "fsdp"), "tensor")
    assert attention_axes(mesh, 6, 4) == (None, "tensor")
    assert attention_axes(mesh, 4, 3) == (("data", "fsdp"), None)


def pool_arguments(rng, config):
    """A pool of 12 pages; two rows with 3 pages each, one query a row."""
    shape = (12, 16, config.num_kv_heads, config.head_dim)
    pool = PagePool(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)))
    q = jnp.asarray(rng.normal(size=(2, config.num_heads, config.head_dim)), jnp.float32)
    pages = jnp.asarray(rng.permutation(12)[:6].reshape(2, 3), jnp.int32)
    offsets = jnp.asarray([[0, 16, 32], [7, 7, 40]], jnp.int32)
    slots = np.stack([np.arange(48), np.r_[np.arange(32) + 7, np.arange(16) + 40]])
    position = jnp.asarray([47, 45], jnp.int32)
    table = Pages(pages, offsets, jnp.asarray(slots, jnp.int32))
    return (rope_table(config.rope, 64), pool, q, table, position)


@pytest.mark.parametrize("sizes", [(2, 1, 2), pytest.param((1, 1, 4), marks=pytest.mark.slow)])
def test_paged_ops(rng, tiny_config, sizes):
    """Over rows and KV heads; 2 KV heads over 4 devices are computed by each."""
    config = tiny_config(kernels="pallas_interpret")
    spread = dataclasses.replace(config, kernel_mesh=make_mesh(*sizes))
    arguments = pool_arguments(rng, config)
    top = functools.partial(topn_attention, n=5, renormalise=False)
    for op in (paged_decode_attention, top) if sizes[2] == 2 else (paged_decode_attention,):
        reference = dataclasses.replace(config, kernels="xla")
        expected = attend_pool(op, reference, *arguments)
        found = jax.jit(functools.partial(attend_pool, op, spread))(*arguments)
        for got, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, other, **CLOSE)
            assert len(got.sharding.device_set) == np.prod(sizes)


def test_values_beside_those_of_the_pool(rng, tiny_config):
    """Of one request, as an answer is read once more for its citations."""
    config = tiny_config(kernels="pallas_interpret")
    spread = dataclasses.replace(config, kernel_mesh=make_mesh(2, 1, 2))
    rope, pool, q, table, position = pool_arguments(rng, config)
    table = Pages(*(x[:1] for x in table))
    arguments = (rope, pool, q[None], table, jnp.stack((position[0], position[0] - 5))[None])

    def found(config, beside):
        op = functools.partial(paged_attention, beside=beside)
        return attend_pool(op, config, *arguments)[0]

    beside = jnp.asarray(rng.normal(size=(1, 48, 5)), jnp.float32)
    expected = found(config, beside)
    assert expected.shape == (1, 2, config.num_heads, config.head_dim + 5)
    got = jax.jit(functools.partial(found, spread))(beside)
    np.testing.assert_allclose(got, expected, **CLOSE)


@pytest.mark.slow
def test_packed_rows_and_their_gradient(rng, tiny_config):
    config = tiny_config(kernels="pallas_interpret")
    spread = dataclasses.replace(config, kernel_mesh=make_mesh(2, 1, 2))
    layout = lay_out(3, [9, 5], 4)
    length = len(layout.segments)
    rows = [jnp.broadcast_to(jnp.asarray(x), (2, length)) for x in
            (np.zeros(length, np.int32), layout.positions, layout.segments)]  # fmt: skip
    tokens = Tokens(*rows)
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, length, heads, config.head_dim)), jnp.float32)
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    )
    table = rope_table(config.rope, 64)

    def loss(config, *heads):
        attend = PackedAttend(config, table, prefix_visible=True)
        part, _, _ = attend(jnp.int32(0), None, *heads, tokens, None)
        return (part.out**2).sum() + (part.lse**2).sum()

    grad = jax.value_and_grad(loss, (1, 2, 3))
    expected = grad(dataclasses.replace(config, kernels="xla"), q, k, v)
    found = jax.jit(functools.partial(grad, spread))(q, k, v)
    for got, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, other, rtol=1e-3, atol=1e-4)
