"""The stages of the GPU benchmark that look at one kernel each."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from gpu_peers import Peer, decode_peers, dense_peers, segment_peers, sparse_peers
from gpu_scenes import TINY, Shape, decoding, options, packed, paged

Found = MutableMapping[str, Any]  # what a stage measured, by name

SETS, RUNS, CALLS = 3, 5, 10


def seconds_of(function: Callable[..., Any], sets: list[tuple[Any, ...]]) -> float:
    """Median seconds of a call, after a warm-up with every set of arguments."""
    import jax

    for arguments in sets:
        jax.block_until_ready(function(*arguments))
    found = []
    for arguments in sets:
        for _ in range(RUNS):
            start = time.perf_counter()
            out = None
            for _ in range(CALLS):
                out = function(*arguments)
            jax.block_until_ready(out)
            found.append((time.perf_counter() - start) / CALLS)
    return statistics.median(found)


def difference(got: Any, expected: Any) -> dict[str, float]:
    """Largest differences of (out, lse), over queries that see something."""
    import numpy as np

    (out, lse), (expected_out, expected_lse) = (
        [np.asarray(x, np.float32) for x in pair] for pair in (got, expected)
    )
    seen = np.isfinite(expected_lse)
    return {
        "out": float(np.abs(out - expected_out)[seen].max(initial=0.0)),
        "lse": float(np.abs(lse - expected_lse)[seen].max(initial=0.0)),
        "blind_agree": bool((np.isfinite(lse) == seen).all()),
    }


def stage_correctness(shape: Shape, impl: str, found: Found) -> None:
    """Every body against the reference; 0.03 is what bfloat16 allows."""
    import jax

    from pallas_kernels import (
        paged_decode_attention,
        segment_attention,
        sparse_attention,
        topn_attention,
    )

    def compare(
        name: str, op: Callable[..., Any], arguments: tuple[Any, ...], **extra: Any
    ) -> None:
        outs = [
            jax.jit(functools.partial(op, **extra, impl=body))(*arguments) for body in ("xla", impl)
        ]
        row = difference(outs[1], outs[0])
        found[name] = row | {
            "ok": row["out"] < 0.03 and row["lse"] < 0.03 and bool(row["blind_agree"])
        }

    for context in shape.contexts:
        for rows, share in (("recomputed", shape.share), ("question", 0.0)):
            scene = paged(shape, context, share, shape.question, 1, seed=context)
            compare(f"sparse {rows} {context}", sparse_attention, scene.arguments, **options(shape))
        for batch in shape.batches:
            scene = paged(shape, context, 0.0, 1, batch, seed=context + batch)
            arguments = decoding(scene)
            name = f"decode b={batch} {context}"
            compare(name, paged_decode_attention, arguments, **options(shape))
            top = {"n": shape.top, "renormalise": False}
            name = f"topn b={batch} {context}"
            compare(name, topn_attention, arguments, **top, **options(shape))
    arguments = packed(shape, shape.packed, seed=1)
    rule = {"scale": shape.dim**-0.5, "prefix_visible": True}
    compare(f"segment {shape.packed}", segment_attention, arguments, **rule)
    found["ok"] = all(row["ok"] for row in found.values())


def stage_bodies(shape: Shape, impl: str, found: Found) -> None:
    """Seconds of every body of every op on the same scenes, and whether its numbers are right.

    What ``pallas_kernels.default_impl`` chooses by, once ``--keep`` has written it. The Mosaic
    body, which may hang, is last.
    """
    import jax

    import pallas_kernels
    from pallas_kernels import BODIES

    tiny = shape is TINY
    for op, bodies in BODIES.items():
        extra: dict[str, Any] = options(shape)
        scenes: dict[str, tuple[Any, ...]] = {}
        if op == "segment_attention":
            extra["prefix_visible"] = True
            scenes[str(shape.packed)] = packed(shape, shape.packed, seed=1)
        else:
            extra |= {"n": shape.top, "renormalise": False} if op == "topn_attention" else {}
            for context in shape.contexts:
                share = shape.share if op == "sparse_attention" else 0.0
                rows = shape.question if op == "sparse_attention" else 1
                scene = paged(shape, context, share, rows, 1, seed=context)
                one = scene.arguments if op == "sparse_attention" else decoding(scene)
                scenes[str(context)] = one
        ordered = sorted(bodies, key=lambda body: body == "pallas_mosaic")
        for body in ordered:
            if (body == "pallas_interpret") != (tiny and body != "xla"):
                continue
            call = jax.jit(functools.partial(getattr(pallas_kernels, op), **extra, impl=body))
            row: dict[str, Any] = {"op": op, "body": body, "ok": True, "scenes": {}}
            try:
                for scene_name, arguments in scenes.items():
                    reference = functools.partial(getattr(pallas_kernels, op), **extra, impl="xla")
                    seen = difference(call(*arguments), jax.jit(reference)(*arguments))
                    right = seen["out"] < 0.03 and seen["lse"] < 0.03 and bool(seen["blind_agree"])
                    row["ok"] = row["ok"] and right
                    row["out"] = max(row.get("out", 0.0), seen["out"])
                    row["scenes"][scene_name] = seconds_of(call, [arguments])
            except Exception as error:
                row |= refusal(error) | {"ok": False}
            row["seconds"] = sum(row["scenes"].values())
            found[f"{op}, {body}"] = row


def stage_machine(shape: Shape, impl: str, found: Found) -> None:
    """The rooflines: bytes/s of a copy, read and write counted, and FLOP/s of a matrix product."""
    import jax
    import jax.numpy as jnp

    tiny = shape is TINY
    size, width = (1 << 20, 256) if tiny else (1 << 30, 8_192)
    x = jnp.zeros((size // 2,), jnp.bfloat16)
    a = jnp.ones((width, width), jnp.bfloat16)
    copy = seconds_of(jax.jit(lambda x: x + 1), [(x,)])
    product = seconds_of(jax.jit(lambda a, b: a @ b), [(a, a)])
    found["bytes_per_second"] = 2 * size / copy
    found["flops_per_second"] = 2 * width**3 / product


def stage_sparse(shape: Shape, impl: str, found: Found) -> None:
    """Recomputed and question rows over the longest context; then peers, dense ones first."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import sparse_attention

    context = shape.contexts[-1]
    op = jax.jit(functools.partial(sparse_attention, **options(shape), impl=impl))
    for name, share in (("recomputed", shape.share), ("question", 0.0)):
        scenes = [paged(shape, context, share, shape.question, 1, seed) for seed in range(SETS)]
        seconds = seconds_of(op, [scene.arguments for scene in scenes])
        rate = scenes[0].flops(shape) / seconds
        found[name] = {"seconds": seconds, "flops_per_second": rate}
    key = jax.random.key(0)
    q = jax.random.normal(key, (1, context, shape.heads, shape.dim), jnp.bfloat16)
    k = jax.random.normal(key, (1, context, shape.kv_heads, shape.dim), jnp.bfloat16)
    flops = 2.0 * context * (context + 1) * shape.heads * shape.dim
    beside(found, dense_peers(shape, longest=True), [(q, k, k)], flops=flops)
    best = min((row["seconds"] for n, row in found.items() if n.startswith("dense")
                and "seconds" in row), default=None)  # fmt: skip
    if best is not None:
        found["times_faster_than_best_dense"] = best / found["recomputed"]["seconds"]
    scene = paged(shape, context, shape.share, shape.question, 1, seed=0)
    beside(found, sparse_peers(), [scene.arguments], flops=scene.flops(shape))


def refusal(error: Exception) -> dict[str, str]:
    """What a measurement that could not be made leaves behind."""
    return {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def beside(
    found: Found, peers: Mapping[str, Peer], scenes: Sequence[tuple[Any, ...]], **work: float
) -> None:
    """Time what others compute of a scene; one that is not there or does not take it says why.

    ``work`` is what a call does, as flops or bytes.
    """
    for name, peer in peers.items():
        if peer.call is None:
            found[name] = {"refused": peer.refused}
            continue
        try:
            seconds = seconds_of(peer.call, [peer.prepare(*scene) for scene in scenes])
        except Exception as error:
            found[name] = refusal(error)
            continue
        rates = {f"{what}_per_second": much / seconds for what, much in work.items()}
        found[name] = {"seconds": seconds, **rates}


def stage_mosaic(shape: Shape, impl: str, found: Found) -> None:
    """The Mosaic body of the sparse op: its numbers at both contexts, then its time."""
    import jax

    from pallas_kernels import sparse_attention

    def call(body: str) -> Callable[..., Any]:
        return jax.jit(functools.partial(sparse_attention, **options(shape), impl=body))

    for context in shape.contexts:
        for rows, share in (("recomputed", shape.share), ("question", 0.0)):
            scene = paged(shape, context, share, shape.question, 1, seed=context)
            got, expected = (call(body)(*scene.arguments) for body in ("pallas_mosaic", "xla"))
            row = difference(got, expected)
            ok = row["out"] < 0.03 and row["lse"] < 0.03 and bool(row["blind_agree"])
            seconds = seconds_of(call("pallas_mosaic"), [scene.arguments])
            found[f"{rows} {context}"] = {
                "seconds": seconds, "flops_per_second": scene.flops(shape) / seconds,
                **row, "ok": ok,
            }  # fmt: skip
    found["ok"] = all(row["ok"] for row in found.values())


def stage_decode(shape: Shape, impl: str, found: Found) -> None:
    """Bytes per second of the KV that a decode step reads; beside it peers over the same pages."""
    import jax

    from pallas_kernels import paged_decode_attention

    context = shape.contexts[-1]
    op = jax.jit(functools.partial(paged_decode_attention, **options(shape), impl=impl))
    for batch in shape.batches:
        scenes = [paged(shape, context, 0.0, 1, batch, seed, apart=True) for seed in range(SETS)]
        seconds = seconds_of(op, [decoding(scene) for scene in scenes])
        read = 4.0 * batch * (context + 1) * shape.kv_heads * shape.dim
        found[f"b={batch}"] = {"seconds": seconds, "bytes_per_second": read / seconds}
        peers = {f"b={batch}, {name}": peer for name, peer in decode_peers(shape).items()}
        beside(found, peers, [decoding(scene) for scene in scenes], bytes=read)


def stage_topn(shape: Shape, impl: str, found: Found) -> None:
    """The best keys of a long context; then with the values in pinned host memory."""
    import jax

    from pallas_kernels import topn_attention

    context = shape.contexts[-1]
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    def call(body: str) -> Callable[..., Any]:
        options_of = {"n": shape.top, "renormalise": False, **options(shape)}
        return jax.jit(functools.partial(topn_attention, **options_of, impl=body))

    for batch in shape.batches:
        scenes = [paged(shape, context, 0.0, 1, batch, seed, apart=True) for seed in range(SETS)]
        sets = [decoding(scene) for scene in scenes]
        seconds = seconds_of(call(impl), sets)
        # K of every key, V of the chosen ones of every query head.
        values = min(shape.top, context) * shape.heads * shape.dim
        read = 2.0 * batch * ((context + 1) * shape.kv_heads * shape.dim + values)
        found[f"b={batch}"] = {"seconds": seconds, "bytes_per_second": read / seconds}
        expected = call(impl)(*sets[0])
        for body in (impl, "jax_triton") if impl == "pallas_triton" else (impl,):
            name = f"b={batch}, V in host memory, {body}"
            try:
                away = [
                    (q, pool._replace(v=jax.device_put(pool.v, host)), *rest)
                    for q, pool, *rest in sets
                ]
                seconds = seconds_of(call(body), away)
                row = difference(call(body)(*away[0]), expected)
                found[name] = {
                    "seconds": seconds,
                    "host_bytes_per_second": 2.0 * batch * values / seconds,
                    **row,
                    "ok": row["out"] < 0.03 and row["lse"] < 0.03 and bool(row["blind_agree"]),
                }
            except Exception as error:
                found[name] = refusal(error)
    found["ok"] = all(row.get("ok", True) for row in found.values())


def stage_segment(shape: Shape, impl: str, found: Found) -> None:
    """Packed chunks and one causal row, both beside peers; then the gradient."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import segment_attention

    op = jax.jit(
        lambda *arguments: segment_attention(
            *arguments, scale=shape.dim**-0.5, prefix_visible=True, impl=impl
        )
    )
    sets = [packed(shape, shape.packed, seed) for seed in range(SETS)]
    found["chunks"] = {"seconds": seconds_of(op, sets)}
    length = sets[0][0].shape[1]
    causal = [
        (*heads, rows._replace(segments=jnp.full_like(rows.segments, 2))) for *heads, rows in sets
    ]
    seconds = seconds_of(op, causal)
    flops = 2.0 * length * (length + 1) * shape.heads * shape.dim
    found["causal"] = {"seconds": seconds, "flops_per_second": flops / seconds}
    beside(found, dense_peers(shape, longest=False), [one[:3] for one in sets], flops=flops)
    beside(found, segment_peers(), sets)

    def loss(q: Any, k: Any, v: Any, rows: Any) -> Any:
        out, _ = segment_attention(
            q, k, v, rows, scale=shape.dim**-0.5, prefix_visible=True, impl=impl
        )
        return out.astype(jnp.float32).sum()

    seconds = seconds_of(jax.jit(jax.grad(loss, (0, 1, 2))), causal)
    # Forward 2 products, backward 5.
    found["causal with gradient"] = {"seconds": seconds, "flops_per_second": 3.5 * flops / seconds}


def stage_sweep(shape: Shape, impl: str, found: Found) -> None:
    """Seconds of the sparse kernel by tiling; the depth of the pipeline grows at 5 and 8."""
    import jax

    from pallas_kernels.triton.paged import PagedTiling, paged_kernel

    scene = paged(shape, shape.contexts[-1], shape.share, shape.question, 1, seed=0)
    for rows, keys, warps, stages in (
        (128, 64, 8, 2), (128, 64, 8, 5), (128, 64, 8, 8), (128, 128, 8, 2), (64, 64, 4, 2),
        (64, 64, 4, 5),
    ):  # fmt: skip
        tiling = PagedTiling(rows, keys, warps, stages)
        op = functools.partial(
            paged_kernel, **options(shape), window=None, tiling=tiling,
            interpret=impl == "pallas_interpret",
        )  # fmt: skip
        name = f"rows={rows} keys={keys} warps={warps} stages={stages}"
        try:
            seconds = seconds_of(jax.jit(op), [scene.arguments])
            found[name] = {"seconds": seconds, "flops_per_second": scene.flops(shape) / seconds}
        except Exception as error:  # a tiling that does not fit the chip is a result
            found[name] = refusal(error)
