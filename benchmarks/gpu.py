"""The GPU kernels on a GPU: first whether their numbers are right, then how fast they are.

Every stage runs in a process of its own with a time limit, so that a kernel that hangs costs its
stage and nothing else; what a stage found is in the result even where another was killed. Shapes
are those of one layer of Llama-3-8B (32 query heads, 8 KV heads, 128 dimensions, bfloat16), pages
of 16 tokens, chunks of 512. Times are medians of synchronised runs of several calls each, over
three sets of queries, after a warm-up; rooflines are measured on the same device.

    correctness  every body against `xla`, at 2k and 32k
    machine      copy bandwidth and peak matrix product: the rooflines
    sparse       15 % and the question's 50 rows over 32k, beside dense causal attention
    decode       one new token a row over 32k, batch 1 and 8
    segment      packed causal attention of 8k tokens, beside cuDNN
    sweep        tilings of the sparse kernel

example: python benchmarks/gpu.py --out benchmarks/results/gpu-h200.json
         python benchmarks/gpu.py --dry-run
         python benchmarks/gpu.py --stage correctness --tiny --impl pallas_interpret
"""

import argparse
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu_scenes import TINY, Shape, decoding, options, packed, paged

SECONDS = {  # of each stage, compilation included; 8 minutes together
    "correctness": 120, "machine": 30, "sparse": 90, "decode": 60, "segment": 60, "sweep": 120,
}  # fmt: skip
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


def stage_correctness(shape: Shape, impl: str) -> dict[str, Any]:
    """Every body against the reference; 0.03 is what bfloat16 allows."""
    import jax

    from pallas_kernels import paged_decode_attention, segment_attention, sparse_attention

    found: dict[str, Any] = {}

    def compare(
        name: str, op: Callable[..., Any], arguments: tuple[Any, ...], **extra: Any
    ) -> None:
        outs = [
            jax.jit(functools.partial(op, **extra, impl=body))(*arguments) for body in ("xla", impl)
        ]
        found[name] = row = difference(outs[1], outs[0])
        row["ok"] = row["out"] < 0.03 and row["lse"] < 0.03 and row["blind_agree"]

    for context in shape.contexts:
        for rows, share in (("recomputed", shape.share), ("question", 0.0)):
            scene = paged(shape, context, share, shape.question, 1, seed=context)
            compare(f"sparse {rows} {context}", sparse_attention, scene.arguments, **options(shape))
        for batch in shape.batches:
            scene = paged(shape, context, 0.0, 1, batch, seed=context + batch)
            arguments = decoding(scene)
            name = f"decode b={batch} {context}"
            compare(name, paged_decode_attention, arguments, **options(shape))
    arguments = packed(shape, shape.packed, seed=1)
    rule = {"scale": shape.dim**-0.5, "prefix_visible": True}
    compare(
        f"segment {shape.packed}", lambda *a, **kw: segment_attention(*a, None, **kw),
        arguments, **rule,
    )  # fmt: skip
    found["ok"] = all(row["ok"] for row in found.values())
    return found


def stage_machine(shape: Shape, impl: str) -> dict[str, Any]:
    """The rooflines: bytes/s of a copy, read and write counted, and FLOP/s of a matrix product."""
    import jax
    import jax.numpy as jnp

    tiny = shape is TINY
    size, width = (1 << 20, 256) if tiny else (1 << 30, 8_192)
    x = jnp.zeros((size // 2,), jnp.bfloat16)
    a = jnp.ones((width, width), jnp.bfloat16)
    copy = seconds_of(jax.jit(lambda x: x + 1), [(x,)])
    product = seconds_of(jax.jit(lambda a, b: a @ b), [(a, a)])
    return {"bytes_per_second": 2 * size / copy, "flops_per_second": 2 * width**3 / product}


def stage_sparse(shape: Shape, impl: str) -> dict[str, Any]:
    """Recomputed and question rows over the longest context, and dense causal attention."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import sparse_attention

    context = shape.contexts[-1]
    op = jax.jit(functools.partial(sparse_attention, **options(shape), impl=impl))
    found: dict[str, Any] = {}
    for name, share in (("recomputed", shape.share), ("question", 0.0)):
        scenes = [paged(shape, context, share, shape.question, 1, seed) for seed in range(SETS)]
        seconds = seconds_of(op, [scene.arguments for scene in scenes])
        rate = scenes[0].flops(shape) / seconds
        found[name] = {"seconds": seconds, "flops_per_second": rate}
    key = jax.random.key(0)
    q = jax.random.normal(key, (1, context, shape.heads, shape.dim), jnp.bfloat16)
    k = jax.random.normal(key, (1, context, shape.kv_heads, shape.dim), jnp.bfloat16)
    flops = 2.0 * context * (context + 1) * shape.heads * shape.dim
    for name, call in dense_bodies().items():
        try:
            seconds = seconds_of(call, [(q, k, k)])
        except Exception as error:  # a peer that is not there or refuses is left out, by name
            found[name] = {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            continue
        found[name] = {"seconds": seconds, "flops_per_second": flops / seconds}
    best = min((row["seconds"] for n, row in found.items() if n.startswith("dense")
                and "seconds" in row), default=None)  # fmt: skip
    if best is not None:
        found["times_faster_than_best_dense"] = best / found["recomputed"]["seconds"]
    return found


def dense_bodies() -> Mapping[str, Callable[..., Any]]:
    """Dense causal attention as others compute it."""
    import jax

    def cudnn(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    def torch_sdpa(q: Any, k: Any, v: Any) -> Any:
        import torch

        q, k, v = (torch.from_dlpack(x).transpose(1, 2) for x in (q, k, v))
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.cuda.synchronize()

    return {"dense cudnn": jax.jit(cudnn), "dense torch sdpa": torch_sdpa}


def stage_decode(shape: Shape, impl: str) -> dict[str, Any]:
    """Bytes per second of the KV that a decode step reads."""
    import jax

    from pallas_kernels import paged_decode_attention

    context = shape.contexts[-1]
    op = jax.jit(functools.partial(paged_decode_attention, **options(shape), impl=impl))
    found: dict[str, Any] = {}
    for batch in shape.batches:
        scenes = [paged(shape, context, 0.0, 1, batch, seed) for seed in range(SETS)]
        seconds = seconds_of(op, [decoding(scene) for scene in scenes])
        # All rows share the context's pages: what is read from memory may be less than this.
        read = 4.0 * batch * (context + 1) * shape.kv_heads * shape.dim
        found[f"b={batch}"] = {"seconds": seconds, "bytes_per_second": read / seconds}
    return found


def stage_segment(shape: Shape, impl: str) -> dict[str, Any]:
    """Packed chunks, and one causal row beside cuDNN."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import segment_attention

    op = jax.jit(
        lambda *arguments: segment_attention(
            *arguments, None, scale=shape.dim**-0.5, prefix_visible=True, impl=impl
        )
    )
    sets = [packed(shape, shape.packed, seed) for seed in range(SETS)]
    found: dict[str, Any] = {"chunks": {"seconds": seconds_of(op, sets)}}
    length = sets[0][0].shape[1]
    causal = [(*one[:4], jnp.full_like(one[4], 2)) for one in sets]
    seconds = seconds_of(op, causal)
    flops = 2.0 * length * (length + 1) * shape.heads * shape.dim
    found["causal"] = {"seconds": seconds, "flops_per_second": flops / seconds}
    try:
        seconds = seconds_of(dense_bodies()["dense cudnn"], [one[:3] for one in sets])
        found["dense cudnn"] = {"seconds": seconds, "flops_per_second": flops / seconds}
    except Exception as error:
        found["dense cudnn"] = {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return found


def stage_sweep(shape: Shape, impl: str) -> dict[str, Any]:
    """Seconds of the sparse kernel by tiling; the depth of the pipeline grows at 5 and 8."""
    import jax

    from pallas_kernels.triton.paged import PagedTiling, paged_kernel

    scene = paged(shape, shape.contexts[-1], shape.share, shape.question, 1, seed=0)
    found: dict[str, Any] = {}
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
            found[name] = {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return found


STAGES: dict[str, Callable[[Shape, str], dict[str, Any]]] = {
    "correctness": stage_correctness,
    "machine": stage_machine,
    "sparse": stage_sparse,
    "decode": stage_decode,
    "segment": stage_segment,
    "sweep": stage_sweep,
}


def run_stage(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one stage in a process of its own; killed at its limit, and then that is its result."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stage.json"
        command = [sys.executable, __file__, "--run", name, "--impl", args.impl, "--out", str(out)]
        command += ["--tiny"] if args.tiny else []
        limit = args.seconds or SECONDS[name]
        start = time.perf_counter()
        try:
            done = subprocess.run(command, timeout=limit, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return {"failed": f"killed after {limit} s"}
        if done.returncode or not out.exists():
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            return {"failed": lines[-1][:300]}
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result | {"stage_seconds": round(time.perf_counter() - start, 1)}


def with_fractions(results: dict[str, Any]) -> None:
    """Add to every rate its fraction of the measured roofline."""
    machine = results.get("machine", {})

    def visit(value: Any) -> None:
        if not isinstance(value, dict):
            return
        for rate in ("flops_per_second", "bytes_per_second"):
            if rate in value and rate in machine and value is not machine:
                value["of_roofline"] = value[rate] / machine[rate]
        for inner in value.values():
            visit(inner)

    visit(results)


def markdown(result: Mapping[str, Any]) -> str:
    """The result as a table, one line a measurement."""
    lines = [
        f"{result['machine']['device']}, commit {result['machine']['commit'][:12]}, "
        f"body `{result['impl']}`", "",
        "| stage | what | ms | rate | of roofline |", "|---|---|---:|---:|---:|",
    ]  # fmt: skip
    for stage, rows in result["stages"].items():
        if "failed" in rows:
            lines.append(f"| {stage} | failed: {rows['failed']} | | | |")
            continue
        for name, row in rows.items():
            if not isinstance(row, dict):
                continue
            if "refused" in row:
                lines.append(f"| {stage} | {name}: {row['refused']} | | | |")
            elif "seconds" in row:
                rate = next(
                    (row[r] for r in ("flops_per_second", "bytes_per_second") if r in row), 0
                )
                share = f"{row['of_roofline']:.0%}" if "of_roofline" in row else ""
                shown = f"{rate / 1e12:.3g} T/s" if rate else ""
                lines.append(
                    f"| {stage} | {name} | {row['seconds'] * 1e3:.3f} | {shown} | {share} |"
                )
            elif "ok" in row:
                verdict = "equal" if row["ok"] else "DIFFERS"
                lines.append(f"| {stage} | {name}: {verdict}, out {row['out']:.1e} | | | |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run what is asked for; exit status 1 where a stage failed or a number is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", action="append", choices=STAGES, help="repeatable (all)")
    parser.add_argument("--impl", default="pallas_triton", help="body (pallas_triton)")
    parser.add_argument("--seconds", type=int, metavar="S", help="limit of a stage (its own)")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, to try the script")
    parser.add_argument("--out", metavar="FILE.json", help="also FILE.md beside it")
    parser.add_argument("--dry-run", action="store_true", help="say what would run")
    parser.add_argument("--run", choices=STAGES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = TINY if args.tiny else Shape()
    if args.run:
        result = STAGES[args.run](shape, args.impl)
        Path(args.out).write_text(json.dumps(result), encoding="utf-8")
        return 0
    stages = args.stage or list(STAGES)
    if args.dry_run:
        for name in stages:
            summary = (STAGES[name].__doc__ or "").splitlines()[0]
            print(f"{name}: at most {args.seconds or SECONDS[name]} s. {summary}")
        return 0
    if args.out and not args.out.endswith(".json"):
        parser.error(f"--out {args.out}: expected a name that ends in .json")
    results = {name: run_stage(name, args) for name in stages}
    with_fractions(results)
    from jaxrag.bench.machine import describe

    result = {"machine": describe(), "impl": args.impl, "shape": dataclasses.asdict(shape),
              "stages": results}  # fmt: skip
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        Path(args.out).with_suffix(".md").write_text(markdown(result), encoding="utf-8")
    print(markdown(result), end="")
    wrong = not results.get("correctness", {}).get("ok", True)
    return 1 if wrong or any("failed" in rows for rows in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
