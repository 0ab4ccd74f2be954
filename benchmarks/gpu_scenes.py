"""What the GPU benchmark computes on: layers of a model, paged scenes and packed rows."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer, and how much of it, and of a model of such layers, is asked for."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page: int = 16
    chunk: int = 512
    contexts: tuple[int, ...] = (2_048, 32_768)
    question: int = 50
    share: float = 0.15
    batches: tuple[int, ...] = (1, 8)
    packed: int = 8_192
    top: int = 128
    ttft_contexts: tuple[int, ...] = (512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
    batch_context: int = 8_192
    batches_ttft: tuple[int, ...] = (1, 2, 4, 8)
    answer: int = 128  # tokens behind the context of a batch


TINY = Shape(4, 2, 16, 16, 64, (128,), 5, 0.15, (1, 2), 96, 8, (64,), 64, (1, 2), 7)


@dataclasses.dataclass(frozen=True)
class Scene:
    """Arguments of a paged op, and the pairs of queries and keys that see each other."""

    arguments: tuple[Any, ...]
    pairs: int  # of one query head, all rows of the batch

    def flops(self, shape: Shape) -> float:
        """Of both products, all heads."""
        return 4.0 * self.pairs * shape.heads * shape.dim


def paged(
    shape: Shape,
    context: int,
    share: float,
    question: int,
    batch: int,
    seed: int,
    apart: bool = False,
) -> Scene:
    """Chunks of a context anywhere in the pool; a share computed again, then a question.

    The rows share the context's pages, or each has its own (``apart``).
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels import Pages, Pool, Rotary

    rng = np.random.default_rng(seed)
    again = int(share * context)
    rows = again + question
    shared, own = context // shape.page, -(-rows // shape.page)
    num_pages = shared + own
    of_chunks = shared * (batch if apart else 1)
    keys = jax.random.split(jax.random.key(seed), 3)
    pool_shape = (of_chunks + batch * own, shape.page, shape.kv_heads, shape.dim)
    k, v = (jax.random.normal(key, pool_shape, jnp.bfloat16) for key in keys[:2])
    q = jax.random.normal(keys[2], (batch, rows, shape.heads, shape.dim), jnp.bfloat16)
    hidden = np.iinfo(np.int32).max
    pages = np.zeros((batch, num_pages), np.int32)
    offsets = np.zeros((batch, num_pages), np.int32)
    slots = np.full((batch, num_pages * shape.page), hidden, np.int32)
    at = np.zeros((batch, rows), np.int32)
    for b in range(batch):
        first = b * shared if apart else 0
        pages[b, :shared] = first + rng.permutation(shared)
        pages[b, shared:] = of_chunks + b * own + np.arange(own)
        offsets[b, :shared] = np.arange(shared) * shape.page // shape.chunk * shape.chunk
        computed = np.sort(rng.choice(context, again, replace=False))
        slots[b, :context] = np.arange(context)
        slots[b, computed] = hidden
        at[b] = np.r_[computed, context + np.arange(question)]
        slots[b, context : context + rows] = at[b]
    angle = np.arange(context + rows + 1)[:, None] * 5e5 ** -(
        np.arange(0, shape.dim, 2) / shape.dim
    )
    cos, sin = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    # A query sees every position up to its own exactly once: the old key is hidden.
    pairs = int((at.astype(np.int64) + 1).sum())
    table = Pages(*map(jnp.asarray, (pages, offsets, slots)))
    rotary = Rotary(cos, sin, interleaved=False)
    return Scene((q, Pool(k, v), table, jnp.asarray(at), rotary), pairs)


def options(shape: Shape) -> dict[str, Any]:
    """Keyword arguments of the paged ops."""
    return {"scale": shape.dim**-0.5}


def decoding(scene: Scene) -> tuple[Any, ...]:
    """The scene's last query of every row, as a decode step passes it."""
    q, *pages, at, rotary = scene.arguments
    return (q[:, -1], *pages, at[:, -1], rotary)


def packed(shape: Shape, length: int, seed: int) -> tuple[Any, ...]:
    """q, k, v and one row: a prefix, chunks and a final block."""
    import jax
    import jax.numpy as jnp

    from jaxrag.models.segments import lay_out
    from pallas_kernels import Rows

    chunks = (length - 2 * shape.chunk) // shape.chunk
    layout = lay_out(shape.chunk, [shape.chunk] * max(chunks, 0), 0 if chunks < 0 else shape.chunk)
    segments = jnp.asarray(layout.segments)[None]
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (
        jax.random.normal(key, (1, segments.shape[1], heads, shape.dim), jnp.bfloat16)
        for key, heads in zip(keys, (shape.heads, shape.kv_heads, shape.kv_heads), strict=True)
    )
    return q, k, v, Rows(jnp.asarray(layout.positions)[None], segments)
