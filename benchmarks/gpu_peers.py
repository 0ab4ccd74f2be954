"""What others compute on the scenes of the GPU benchmark: cuDNN, torch, and JAX's own GPU kernels.

A peer gets its arguments in the layout that it wants, made before it is timed: contiguous keys, as
many KV heads as query heads, scaled queries. Keys of a scene are rotated as our bodies read them;
peers get them as they are. One that does not take a scene says why.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from gpu_scenes import TINY, Shape

Arguments = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Peer:
    """One body that is not ours.

    Attributes:
      call: what is timed; None: it does not take the scene.
      prepare: its arguments from those of the scene.
      refused: why it does not take it.
    """

    call: Callable[..., Any] | None = None
    prepare: Callable[..., Arguments] = lambda *arguments: arguments
    refused: str = ""


def dense_peers(shape: Shape, longest: bool) -> Mapping[str, Peer]:
    """Dense causal attention of q, k and v; where it is long without XLA's T x T."""
    found = {
        "dense cudnn": Peer(_of_jax("cudnn")),
        "dense torch sdpa": Peer(_torch_sdpa),
        "dense torch flex": Peer(_torch_flex),
        "dense pallas mha, K and V repeated": Peer(_mha(shape), _repeated),
        "dense pallas mosaic": _mosaic(shape),
    }
    return found if longest else {**found, "dense xla": Peer(_of_jax("xla"))}


def sparse_peers() -> Mapping[str, Peer]:
    """The scene's rows over its keys: of these, only one that takes a mask can."""
    no_rows = "rows of q begin at position 0; it takes no positions, mask or pages"
    return {
        "rows, cudnn with a mask, keys contiguous": Peer(_masked("cudnn"), rows_and_mask),
        "rows, pallas mha": Peer(refused=no_rows + ", nor fewer KV heads than query heads"),
        "rows, pallas mosaic": Peer(refused=no_rows),
        "rows, pallas paged_attention": Peer(refused="one row of q a sequence"),
    }


def decode_peers(shape: Shape) -> Mapping[str, Peer]:
    """One new row over the context; keys are the context's pages alone."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import decode_attention, paged_attention
    import jax

    tiny = shape is TINY
    scale = shape.dim**-0.5
    # A split of the keys is whole blocks of them.
    splits, block = (2, 16) if tiny else (16, 128)
    gqa = functools.partial(
        decode_attention.gqa, sm_scale=scale, block_k=block, k_splits=splits, interpret=tiny
    )

    def paged(q: Any, k: Any, v: Any, tables: Any, lengths: Any) -> Any:
        return paged_attention.paged_attention(
            q * scale, k, v, tables, lengths, k_splits=splits,
            pages_per_compute_block=1 if tiny else 128 // shape.page, interpret=tiny,
        )  # fmt: skip

    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    return {
        "cudnn, keys contiguous": Peer(
            jax.jit(cudnn), lambda *scene: _with_row(*contiguous(shape, *scene))
        ),
        "pallas gqa, keys contiguous": Peer(jax.jit(gqa), functools.partial(contiguous, shape)),
        "pallas paged_attention, heads first": Peer(
            jax.jit(paged), functools.partial(heads_first, shape)
        ),
        "pallas mha": Peer(refused="as many KV heads as query heads: four times the keys"),
        "pallas mosaic": Peer(refused="rows of q by 128; a step has one"),
    }


def segment_peers() -> Mapping[str, Peer]:
    """Packed chunks under the block mask."""
    return {
        "chunks, cudnn with a mask": Peer(_masked("cudnn"), block_mask),
        "chunks, pallas mha": Peer(
            refused="equal segment ids see each other, so no final block sees the chunks"
        ),
        "chunks, pallas mosaic": Peer(refused="causal or nothing; it takes no segments"),
    }


def _of_jax(implementation: str) -> Callable[..., Any]:
    import jax

    call = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=implementation
    )
    return jax.jit(call)


def _masked(implementation: str) -> Callable[..., Any]:
    import jax

    def call(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)

    return jax.jit(call)


def _torch_sdpa(q: Any, k: Any, v: Any) -> None:
    import torch

    q, k, v = (torch.from_dlpack(x).transpose(1, 2) for x in (q, k, v))
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.cuda.synchronize()


@functools.lru_cache(maxsize=2)
def _compiled_flex(length: int) -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    mask = create_block_mask(causal, None, None, length, length)
    return functools.partial(torch.compile(flex_attention), block_mask=mask, enable_gqa=True)


def _torch_flex(q: Any, k: Any, v: Any) -> None:
    import torch

    q, k, v = (torch.from_dlpack(x).transpose(1, 2) for x in (q, k, v))
    _compiled_flex(q.shape[2])(q, k, v)
    torch.cuda.synchronize()


def _mha(shape: Shape) -> Callable[..., Any]:
    import warnings

    import jax

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha
    tiny = shape is TINY
    sizes = BlockSizes(block_q=32, block_k=32) if tiny else BlockSizes.get_default()
    call = functools.partial(
        mha, segment_ids=None, sm_scale=shape.dim**-0.5, causal=True, block_sizes=sizes,
        interpret=tiny,
    )  # fmt: skip
    return jax.jit(call)


def _repeated(q: Any, k: Any, v: Any) -> Arguments:
    import jax.numpy as jnp

    group = q.shape[2] // k.shape[2]
    return q, jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)


def _mosaic(shape: Shape) -> Peer:
    if shape.dim % 64:
        return Peer(refused=f"heads of a multiple of 64 dimensions, these have {shape.dim}")
    import warnings

    import jax

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.attention_mgpu import TuningConfig, attention
    config = TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=True)
    call = functools.partial(attention, config=config)
    # It has no scale: the queries bring it.
    return Peer(jax.jit(call), lambda q, k, v: (q * shape.dim**-0.5, k, v))


def rows_and_mask(*scene: Any) -> Arguments:
    """q, keys by slot, and [B, 1, T, S] who sees whom: positions up to the row's own."""
    q, pool, table, at, _ = scene
    shape = (q.shape[0], -1, *pool.k.shape[2:])
    k, v = (x[table.pages].reshape(shape) for x in (pool.k, pool.v))
    return q, k, v, table.slot_position[:, None, None, :] <= at[:, None, :, None]


def contiguous(shape: Shape, *scene: Any) -> Arguments:
    """q [B, N, H] and the context's keys and values [B, S, K, H] of a decode scene."""
    q, pool, table, _, _ = scene
    pages = table.pages[:, : _whole_pages(shape, table)]
    wanted = (q.shape[0], -1, *pool.k.shape[2:])
    return q, pool.k[pages].reshape(wanted), pool.v[pages].reshape(wanted)


def heads_first(shape: Shape, *scene: Any) -> Arguments:
    """q, pools [K, pages, page, H], tables [B, pages] and lengths [B] of a decode scene."""
    import jax.numpy as jnp

    q, pool, table, _, _ = scene
    pages = table.pages[:, : _whole_pages(shape, table)]
    k, v = (jnp.moveaxis(x, 2, 0) for x in (pool.k, pool.v))
    lengths = jnp.full(len(pages), pages.shape[1] * shape.page, jnp.int32)
    return q, k, v, pages, lengths


def _whole_pages(shape: Shape, table: Any) -> int:
    """Pages of the context: all but the one of the new token."""
    return int(table.pages.shape[1]) - 1


def _with_row(q: Any, k: Any, v: Any) -> Arguments:
    return q[:, None], k, v


def block_mask(q: Any, k: Any, v: Any, rows: Any) -> Arguments:
    """q, k, v and [1, 1, T, T]: the own segment and the prefix, or all for the final block."""
    import jax.numpy as jnp

    from pallas_kernels.visibility import packed_visible

    order, of = jnp.arange(q.shape[1]), rows.segments
    see = packed_visible(
        order[:, None], order, of[:, :, None], of[:, None, :], None, None, prefix_visible=True
    )
    return q, k, v, see[:, None]
