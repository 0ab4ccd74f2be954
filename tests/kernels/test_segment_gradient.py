"""The gradient of packed attention against autodiff of a dense one that scores every pair."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrag.base.sharding import make_mesh
from jaxrag.models.segments import example_ids, lay_out
from pallas_kernels import Rows, segment_attention
from pallas_kernels.visibility import packed_visible

SCALE = 0.3


def dense(q, k, v, positions, segments, examples, prefix_visible, window):
    """out and lse as ``segment_attention`` gives them, through a T x T array."""
    order = jnp.arange(q.shape[1])
    q_ex = k_ex = None
    if examples is not None:
        q_ex, k_ex = examples[:, :, None], examples[:, None, :]
    see = packed_visible(
        order[:, None], order, segments[:, :, None], segments[:, None, :], q_ex, k_ex,
        prefix_visible,
    )  # fmt: skip
    if window is not None:
        see &= positions[:, :, None] - positions[:, None, :] < window
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k) * SCALE
    scores = jnp.where(see[:, None], scores, -1e30)
    seen = see.any(-1)
    lse = jnp.where(seen[:, None], jax.nn.logsumexp(scores, axis=-1), -jnp.inf)
    weights = jnp.where(see[:, None], jax.nn.softmax(scores, axis=-1), 0)
    return jnp.einsum("bnts,bsnh->btnh", weights, v), lse.transpose(0, 2, 1)


def pull_back(attend, rows, heads, d_out, d_lse):
    """Gradients of sum(out * d_out) + sum(lse * d_lse) over rows that see something."""
    used = (rows[1] != 0)[..., None]

    def scalar(q, k, v):
        out, lse = attend(q, k, v, *rows)
        return (out.astype(jnp.float32) * d_out).sum() + jnp.where(used, lse * d_lse, 0).sum()

    return jax.jit(jax.grad(scalar, (0, 1, 2)))(*heads)


def ours(prefix_visible, window):
    def attend(q, k, v, positions, segments, examples):
        return segment_attention(
            q, k, v, Rows(positions, segments, examples),
            scale=SCALE, prefix_visible=prefix_visible, window=window,
        )  # fmt: skip

    return attend


def theirs(prefix_visible, window):
    return lambda q, k, v, *rows: dense(q, k, v, *rows, prefix_visible, window)


def prompts(rng, batch, length):
    """Packed rows: prompts of random parts, each with two questions over shared chunks."""
    positions, segments, examples = (np.zeros((batch, length), np.int32) for _ in range(3))
    for row in range(batch):
        at = example = 0
        while True:
            parts = [int(n) for n in rng.integers(1, 40, rng.integers(1, 7))]
            prefix, final = int(rng.integers(0, 9)), int(rng.integers(2, 30))
            layout = lay_out(prefix, parts, final)
            used = len(layout.segments)
            if at + used + final > length - 3:
                break
            for question in (1, 2):
                start = at if question == 1 else at + used
                skip = 0 if question == 1 else used - final
                stop = start + used - skip
                segments[row, start:stop] = layout.segments[skip:]
                positions[row, start:stop] = layout.positions[skip:]
                shared = layout.segments[skip:] != 2
                examples[row, start:stop] = np.where(
                    shared, example_ids(example), example_ids(example, question)
                )
            at, example = at + used + final, example + 1
    return tuple(map(jnp.asarray, (positions, segments, examples)))


def random_heads(rng, shape, n, k, h, dtype=jnp.float32):
    return tuple(jnp.asarray(rng.normal(size=(*shape, m, h)), dtype) for m in (n, k, k))


@pytest.mark.parametrize(
    ("length", "n", "k", "h", "prefix_visible"),
    [
        (300, 6, 2, 10, True),
        (97, 3, 3, 8, False),
        (260, 4, 1, 6, False),
        pytest.param(300, 6, 2, 10, False, marks=pytest.mark.slow),
        pytest.param(97, 3, 3, 8, True, marks=pytest.mark.slow),
        pytest.param(260, 4, 1, 6, True, marks=pytest.mark.slow),
    ],
)
def test_gradient_equals_dense(rng, length, n, k, h, prefix_visible):
    rows = prompts(rng, 2, length)
    heads = random_heads(rng, (2, length), n, k, h)
    d_out = jnp.asarray(rng.normal(size=heads[0].shape), jnp.float32)
    d_lse = jnp.asarray(rng.normal(size=heads[0].shape[:3]), jnp.float32)
    found = pull_back(ours(prefix_visible, None), rows, heads, d_out, d_lse)
    expected = pull_back(theirs(prefix_visible, None), rows, heads, d_out, d_lse)
    for name, a, b in zip("qkv", found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5, err_msg=name)
    empty = np.asarray(rows[1]) == 0
    assert empty.any()
    for gradient in found:
        assert (np.asarray(gradient)[empty] == 0).all()


@pytest.mark.parametrize("window", [pytest.param(1, marks=pytest.mark.slow), 9, 200])
def test_gradient_with_a_window(rng, window):
    length = 280
    segments = np.full((1, length), 2, np.int32)
    segments[0, 170:180] = 0
    examples = np.repeat([[example_ids(0), example_ids(1)]], [150, 130], axis=1)
    positions = np.concatenate((np.arange(150), np.arange(130)))[None]
    rows = tuple(jnp.asarray(x, jnp.int32) for x in (positions, segments, examples))
    heads = random_heads(rng, (1, length), 4, 2, 6)
    d_out = jnp.asarray(rng.normal(size=heads[0].shape), jnp.float32)
    zero = jnp.zeros(heads[0].shape[:3])
    found = pull_back(ours(False, jnp.int32(window)), rows, heads, d_out, zero)
    expected = pull_back(theirs(False, window), rows, heads, d_out, zero)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_tiles_without_a_mask_and_no_examples(rng):
    """Whole tiles (a final block over long chunks) take the branch that compares nothing."""
    layout = lay_out(0, [256, 130], 140)
    length = len(layout.segments)
    rows = (jnp.asarray(layout.positions[None]), jnp.asarray(layout.segments[None]), None)
    heads = random_heads(rng, (1, length), 2, 1, 8)
    d_out = jnp.asarray(rng.normal(size=heads[0].shape), jnp.float32)
    zero = jnp.zeros(heads[0].shape[:3])
    found = pull_back(ours(False, None), rows, heads, d_out, zero)
    expected = pull_back(theirs(False, None), rows, heads, d_out, zero)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_bfloat16_gradient_is_the_float32_one_rounded(rng):
    rows = prompts(rng, 2, 300)
    heads = random_heads(rng, (2, 300), 4, 2, 16, jnp.bfloat16)
    d_out = jnp.asarray(rng.normal(size=heads[0].shape), jnp.float32)
    zero = jnp.zeros(heads[0].shape[:3])
    found = pull_back(ours(False, None), rows, heads, d_out, zero)
    expected = pull_back(theirs(False, None), rows, heads, d_out, zero)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == jnp.bfloat16
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) < 0.01 * np.linalg.norm(b)


def layers(heads, rows, remat):
    """A scan of three attention layers that each feed the next, as ``forward`` has them."""
    q, k, v = heads

    def layer(x, gain):
        out, _ = ours(False, None)(q * gain + x, k, v, *rows)
        return out, None

    out, _ = lax.scan(jax.checkpoint(layer) if remat else layer, q, jnp.array([1.0, 0.7, 1.2]))
    return (out**2).sum()


def test_inside_a_scan_with_rematerialisation(rng):
    rows, heads = prompts(rng, 2, 200), random_heads(rng, (2, 200), 4, 2, 6)
    plain, again = (
        jax.jit(jax.grad(lambda heads, remat=remat: layers(heads, rows, remat)))(heads)
        for remat in (False, True)
    )
    for a, b in zip(plain, again, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_sharded_over_batch_and_heads_equals_one_device(rng):
    rows, heads = prompts(rng, 4, 200), random_heads(rng, (4, 200), 4, 2, 6)
    gradient = jax.jit(jax.grad(lambda heads, rows: layers(heads, rows, False)))
    expected = gradient(heads, rows)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    split = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, "tensor", None))
    batch = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    found = gradient(jax.device_put(heads, split), jax.device_put(rows, batch))
    for a, b in zip(found, expected, strict=True):
        assert a.sharding.is_equivalent_to(split, a.ndim)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_no_array_of_queries_times_keys(rng):
    """Memory is O(T): nothing in the program of the gradient has T x T or more elements a head."""
    length = 4096
    rows = (
        jnp.zeros((1, length), jnp.int32),
        jnp.asarray(lay_out(0, [64] * (length // 64 - 1), 64).segments[None]),
        None,
    )
    heads = tuple(jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32) for _ in range(3))
    program = jax.jit(jax.grad(lambda h: (ours(False, None)(*h, *rows)[0] ** 2).sum()))
    memory = program.lower(heads).compile().memory_analysis()
    assert memory.temp_size_in_bytes < length * length  # a quarter of a float32 T x T array
