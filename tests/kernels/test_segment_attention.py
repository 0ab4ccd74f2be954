"""Packed attention against a dense oracle that scores every pair; masks as pictures."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.models.segments import example_ids, lay_out
from pallas_kernels import Rows, segment_attention
from pallas_kernels.visibility import packed_visible

PICTURES = {
    # prefix of 2, chunks of 2 and 2, final block of 2; rows are queries, columns keys
    False: """
        1.......
        11......
        ..1.....
        ..11....
        ....1...
        ....11..
        1111111.
        11111111
    """,
    True: """
        1.......
        11......
        111.....
        1111....
        11..1...
        11..11..
        1111111.
        11111111
    """,
}


def mask_of(segments, examples, prefix_visible):
    order = jnp.arange(segments.shape[-1])
    q_ex = k_ex = None
    if examples is not None:
        q_ex, k_ex = examples[..., :, None], examples[..., None, :]
    return np.asarray(
        packed_visible(
            order[:, None],
            order[None, :],
            segments[..., :, None],
            segments[..., None, :],
            q_ex,
            k_ex,
            prefix_visible,
        )
    )


def dense(q, k, v, mask, scale):
    """softmax(q k^T) v over the visible keys, in float64: out and lse."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) * scale
    scores = np.where(mask[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-1e300)
    weights = np.where(mask[:, None], np.exp(scores - top), 0)
    total = weights.sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnh->btnh", weights / np.where(total > 0, total, 1), v)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top + np.log(total), -np.inf)[..., 0]
    return out, lse.transpose(0, 2, 1)


def heads(rng, batch, length, n, k, h):
    return [jnp.asarray(rng.normal(size=(batch, length, m, h)), jnp.float32) for m in (n, k, k)]


@pytest.mark.parametrize("prefix_visible", [False, True])
def test_mask_is_the_picture(prefix_visible):
    layout = lay_out(2, [2, 2], 2)
    drawn = [[c == "1" for c in line.strip()] for line in PICTURES[prefix_visible].split()]
    mask = mask_of(jnp.asarray(layout.segments), None, prefix_visible)
    assert mask.tolist() == drawn


def test_plain_causal_is_every_token_final():
    layout = lay_out(0, [], 5)
    assert (
        mask_of(jnp.asarray(layout.segments), None, False).tolist()
        == np.tril(np.ones((5, 5), bool)).tolist()
    )


def test_questions_share_documents_and_do_not_see_each_other():
    # one example: prefix, chunk, question 1, question 2; then an empty slot and another example
    segments = jnp.array([1, 3, 2, 2, 2, 2, 0, 1, 3, 2])
    examples = jnp.array(
        [example_ids(0, q) for q in (0, 0, 1, 1, 2, 2)] + [0] + [example_ids(1)] * 3
    )
    picture = """
        1.........
        .1........
        111.......
        1111......
        11..1.....
        11..11....
        ..........
        .......1..
        ........1.
        .......111
    """
    drawn = [[c == "1" for c in line.strip()] for line in picture.split()]
    assert mask_of(segments, examples, False).tolist() == drawn


@pytest.mark.parametrize("prefix_visible", [False, True])
@pytest.mark.parametrize(
    ("lengths", "n", "k", "h"),
    [((5, [7, 3, 9], 6), 6, 2, 10), ((0, [300, 1, 280], 40), 3, 3, 8), ((530, [20], 1), 4, 1, 12)],
)
def test_tiles_equal_dense(rng, lengths, n, k, h, prefix_visible):
    layout = lay_out(*lengths)
    pad = 13  # empty tokens at the end of the second row
    segments = np.stack([np.pad(layout.segments, (0, pad)), np.pad(layout.segments[::1], (0, pad))])
    segments[1, -pad - 4 :] = 0
    positions = np.broadcast_to(np.pad(layout.positions, (0, pad)), segments.shape)
    q, key, v = heads(rng, 2, segments.shape[1], n, k, h)
    out, lse = segment_attention(
        q, key, v, Rows(jnp.asarray(positions), jnp.asarray(segments)),
        scale=0.3, prefix_visible=prefix_visible,
    )  # fmt: skip
    mask = mask_of(jnp.asarray(segments), None, prefix_visible)
    expected, expected_lse = dense(q, key, v, mask, 0.3)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert (np.asarray(out)[1, -pad:] == 0).all()
    assert np.isneginf(np.asarray(lse)[1, -pad:]).all()


@pytest.mark.parametrize("window", [1, 7, 300])
def test_window_and_examples_equal_dense(rng, window):
    length, n, k, h = 600, 4, 2, 6
    segments = np.full((1, length), 2, np.int32)
    segments[0, 410:420] = 0
    examples = np.repeat([[example_ids(0), example_ids(1)]], [350, 250], axis=1)
    positions = np.concatenate((np.arange(350), np.arange(250)))[None].astype(np.int32)
    q, key, v = heads(rng, 1, length, n, k, h)
    out, _ = segment_attention(
        q, key, v, Rows(*(jnp.asarray(x, jnp.int32) for x in (positions, segments, examples))),
        scale=0.4, prefix_visible=False, window=window,
    )  # fmt: skip
    mask = mask_of(jnp.asarray(segments), jnp.asarray(examples), False)
    mask = mask & (positions[:, :, None] - positions[:, None, :] < window)
    np.testing.assert_allclose(out, dense(q, key, v, mask, 0.4)[0], rtol=1e-4, atol=2e-6)


def test_only_tiles_that_can_be_seen_are_visited():
    from pallas_kernels.packed_tiles import classify_tiles
    from pallas_kernels.segment_attention import PACKED_TILE as tile

    # four chunks of one tile each, then a final block of one tile
    segments = np.repeat([[3, 4, 5, 6, 2]], tile, axis=1)
    live, whole = map(np.asarray, classify_tiles(jnp.asarray(segments), None, tile, False))
    assert live.tolist() == [[i == j or i == 4 for j in range(5)] for i in range(5)]
    assert whole.tolist() == [[i == 4 and j < 4 for j in range(5)] for i in range(5)]


def test_never_skips_a_tile_that_is_seen(rng):
    from pallas_kernels.packed_tiles import classify_tiles

    tile, count = 4, 12  # of the longest layout; one shape compiles once
    for trial in range(60):
        prefix = int(rng.integers(0, 9))
        chunks = [int(n) for n in rng.integers(1, 9, rng.integers(1, 5))]
        layout = lay_out(prefix, chunks, int(rng.integers(1, 9)))
        segments = np.pad(layout.segments, (0, count * tile - len(layout.segments)))[None]
        for prefix_visible in (False, True):
            mask = mask_of(jnp.asarray(segments), None, prefix_visible)[0]
            tiles = classify_tiles(jnp.asarray(segments), None, tile, prefix_visible)
            live, whole = map(np.asarray, tiles)
            for i, j in itertools.product(range(count), repeat=2):
                pairs = mask[i * tile : (i + 1) * tile, j * tile : (j + 1) * tile]
                assert live[i, j] or not pairs.any(), (trial, i, j)
                assert pairs.all() or not whole[i, j], (trial, i, j)
