"""The GPU kernels on a GPU: first whether their numbers are right, then how fast they are.

Every stage runs in a process of its own with a time limit, so that a kernel that hangs costs its
stage and nothing else; what a stage found is in the result even where another was killed. Shapes
are those of one layer of Llama-3-8B (32 query heads, 8 KV heads, 128 dimensions, bfloat16), pages
of 16 tokens, chunks of 512. Times are medians of synchronised runs of several calls each, over
three sets of queries, after a warm-up; rooflines are measured on the same device.

    correctness  every body against `xla`, at 2k and 32k
    law13        tokens of a request alone, in batches of two orders and beside others: equal
    smollm2      SmolLM2's logits and greedy answers beside transformers', by every body
    machine      copy bandwidth and peak matrix product: the rooflines
    bodies       every body of every op on the same scenes: what the defaults are chosen by
    sparse       15 % and the question's 50 rows over 32k, beside dense causal attention
    decode       one new token a row over 32k, batch 1 and 8, beside other decode kernels
    topn         the 128 best keys of 32k, values on the device and in pinned host memory
    segment      packed attention of 8k tokens and its gradient, beside dense causal attention
    llama        Llama-3-8B with random weights: first tokens and decoding, end to end
    serve        its engine under load: law 13 and first tokens over tiers and slow links
    rules        decode rules behind 32k, K and V in host memory where their papers have them
    ingest       chunks a minute behind ten neighbours
    engine       all requests at once: static, inline and asynchronous; links host to device
    mosaic       the sparse rows through the Mosaic body, its numbers first
    mistral      Mistral-7B, as llama
    sweep        tilings of the sparse kernel
    train        configs/train/synthetic-6m.toml, from where the last call stopped
    adapters     SmolLM2 taught to read blocks: packets and LoRA, from where the last call stopped

Beside our bodies stand cuDNN, torch and JAX's own Pallas kernels where they take a scene; where one
does not, its row says why (`gpu_peers.py`).

A command is kept below ten minutes by naming stages: those up to `llama`, then those up to `sweep`,
then `train` and `adapters`, each alone. `smollm2` and `adapters` take what is brought along
(`--real FOLDER`; gpu_real.py says what). `train` keeps its run in a folder of --work and goes on
there when it is called again, stops itself before its limit, and trains several seeds side by side.
Without --stage all but `train` and `adapters` run. With --out the trained weights lie beside the
result, an archive for each seed.

What is missing there is installed from wheels that were brought along (`--wheels FOLDER`;
pallas_kernels/README.md says which). `--keep` writes what the stage `bodies` found for this device
to pallas_kernels/measured.json, from which the package takes its defaults. `--goals` runs nothing:
it puts results together and prints what was to be reached beside what was measured, which every
report ends with, too.

example: python benchmarks/gpu.py --out benchmarks/results/gpu-h200.json
         python benchmarks/gpu.py --dry-run
         python benchmarks/gpu.py --stage correctness --tiny --impl pallas_interpret
         python benchmarks/gpu.py --stage train --seed 0 --seed 1 --seed 2 --out train.json
         python benchmarks/gpu.py --goals first.json second.json train.json
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from gpu_end_to_end import end_to_end
from gpu_engine import stage_engine, stage_law13
from gpu_goals import goal_lines, merged
from gpu_real import WORK, stage_adapters, stage_smollm2
from gpu_scenes import TINY, Shape
from gpu_serve import stage_ingest, stage_rules, stage_serve
from gpu_stages import (
    stage_bodies,
    stage_correctness,
    stage_decode,
    stage_machine,
    stage_mosaic,
    stage_segment,
    stage_sparse,
    stage_sweep,
    stage_topn,
)
from gpu_train import Training, stage_train

SECONDS = {  # of each stage, compilation included; below ten minutes up to `llama` and `sweep`
    "correctness": 80, "law13": 50, "smollm2": 50, "machine": 20, "bodies": 60, "sparse": 60,
    "decode": 45, "topn": 25, "segment": 45, "llama": 105,
    "serve": 120, "rules": 120, "ingest": 60, "engine": 50, "mosaic": 30, "mistral": 95,
    "sweep": 35,
    "train": 540, "adapters": 540,
}  # fmt: skip
SMOLLM2, TRAIN, ADAPTERS = "smollm2", "train", "adapters"
ALONE = (TRAIN, ADAPTERS)  # the stages with commands of their own
MEASURED = Path(__file__).parents[1] / "pallas_kernels" / "measured.json"


class Kept(dict[str, Any]):
    """What a stage found, also in a file, row by row: a stage that is killed leaves its rows."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = Path(path)

    def __setitem__(self, name: str, row: Any) -> None:
        super().__setitem__(name, row)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self), encoding="utf-8")
        os.replace(part, self._path)


Stage = Callable[[Shape, str, MutableMapping[str, Any]], None]
STAGES: dict[str, Stage] = {  # all but the three above
    "correctness": stage_correctness,
    "law13": stage_law13,
    "machine": stage_machine,
    "bodies": stage_bodies,
    "sparse": stage_sparse,
    "decode": stage_decode,
    "topn": stage_topn,
    "segment": stage_segment,
    "llama": functools.partial(end_to_end, "llama-3-8b"),
    "serve": stage_serve,
    "rules": stage_rules,
    "ingest": stage_ingest,
    "engine": stage_engine,
    "mosaic": stage_mosaic,
    "mistral": functools.partial(end_to_end, "mistral-7b"),
    "sweep": stage_sweep,
}


def run_stage(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one stage in a process of its own; where it fails or is killed, what it had found.

    `train` has a process for each seed, all at the same time.
    """
    if name != TRAIN:
        return run_process(name, args, [])
    seeds = args.seed or [0]
    also: list[list[str]] = [["--seed", str(seed), "--work", args.work] for seed in seeds]
    for more in also:
        more += ["--steps", str(args.steps)] if args.steps else []
        more += [word for setting in args.set for word in ("--set", setting)]
    with concurrent.futures.ThreadPoolExecutor(len(seeds)) as pool:
        found = list(pool.map(functools.partial(run_process, name, args), also))
    named = {
        f"seed {seed}, {row}": value
        for seed, rows in zip(seeds, found, strict=True)
        for row, value in rows.items()
        if row != "failed"
    }
    failed = "; ".join(rows["failed"] for rows in found if "failed" in rows)
    return named | ({"failed": failed} if failed else {})


def run_process(name: str, args: argparse.Namespace, also: list[str]) -> dict[str, Any]:
    """One process of a stage, with further arguments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stage.json"
        limit = args.seconds or SECONDS[name]
        command = [sys.executable, __file__, "--run", name, "--impl", args.impl, "--out", str(out)]
        command += ["--seconds", str(limit), *also, *(["--tiny"] if args.tiny else [])]
        command += ["--real", args.real] if args.real else []
        start = time.perf_counter()
        failed = ""
        try:
            # Unfiltered, so that the last line of a failure is its message.
            env = {**os.environ, "JAX_TRACEBACK_FILTERING": "off"}
            if name == TRAIN:  # several share the device
                env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
            done = subprocess.run(command, timeout=limit, capture_output=True, text=True, env=env)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
                failed = lines[-1][:300]
        except subprocess.TimeoutExpired:
            failed = f"killed after {limit} s"
        result: dict[str, Any] = {"stage_seconds": round(time.perf_counter() - start, 1)}
        if out.exists():
            result |= json.loads(out.read_text(encoding="utf-8"))
        return result | ({"failed": failed} if failed else {})


def run_here(args: argparse.Namespace, shape: Shape) -> None:
    """What such a process does."""
    found, real = Kept(args.out), Path(args.real or "")
    if args.run == SMOLLM2:
        stage_smollm2(real, args.impl, found)
    elif args.run == ADAPTERS:
        stage_adapters(real, float(args.seconds), args.tiny, found)
    if args.run in (SMOLLM2, ADAPTERS):
        return
    if args.run != TRAIN:
        STAGES[args.run](shape, args.impl, found)
        return
    training = Training(
        Path(args.work), args.seed[0], args.steps, float(args.seconds), tuple(args.set)
    )
    stage_train(training, args.tiny, found)


def keep_weights(args: argparse.Namespace, stages: Sequence[str]) -> list[Path]:
    """Archives of what was trained, beside the result: weights or adapters, log and evaluation."""
    asked = []
    for seed in (args.seed or [0]) * (TRAIN in stages):
        names = ("model", "results.json", "metrics.jsonl", "run.json")
        asked.append((f"train-{seed}", Training(Path(args.work), seed).folder, names))
    if ADAPTERS in stages:  # of whose checkpoint `jaxrag train --resume` exports the weights
        names = ("run/checkpoints", "run/metrics.jsonl", "run/run.json", "packets.safetensors",
                 "near-adapters.json", "near-packets.json")  # fmt: skip
        asked.append((ADAPTERS, WORK, names))
    written = []
    for name, folder, names in asked:
        path = Path(args.out).with_suffix(f".{name}.tar.gz")
        there = [it for it in names if (folder / it).exists()]
        if names[0] in there:
            with tarfile.open(path, "w:gz") as archive:
                for it in there:
                    archive.add(folder / it, f"{name}/{it}")
            written.append(path)
    return written


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


def kept(rows: Mapping[str, Any], commit: str, versions: Mapping[str, Any]) -> dict[str, Any]:
    """What ``pallas_kernels.default_impl`` reads of a device, from the stage `bodies`."""
    found: dict[str, Any] = {"commit": commit, "versions": dict(versions)}
    for row in rows.values():
        if isinstance(row, dict) and "body" in row:
            ops = found.setdefault(row["op"], {})
            ops[row["body"]] = {"ok": row["ok"], "seconds": row["scenes"]}
    return found


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
        for name, row in rows.items():
            if not isinstance(row, dict):
                continue
            if "refused" in row:
                lines.append(f"| {stage} | {name}: {row['refused']} | | | |")
            elif "seconds" in row:
                share = f"{row['of_roofline']:.0%}" if "of_roofline" in row else ""
                said = "" if row.get("ok", True) else ": DIFFERS"
                lines.append(
                    f"| {stage} | {name}{said} | {row['seconds'] * 1e3:.3f} | {rate_of(row)} "
                    f"| {share} |"
                )
            elif "share" in row:
                lines.append(f"| {stage} | {name}: {row['share']:.1%} | | | |")
            elif "ok" in row:
                verdict = "equal" if row["ok"] else "DIFFERS"
                lines.append(f"| {stage} | {name}: {verdict}, out {row['out']:.1e} | | | |")
    shape = Shape(**result["shape"])
    return "\n".join([*lines, "", *goal_lines(shape, result["stages"])]) + "\n"


def rate_of(row: Mapping[str, Any]) -> str:
    """The rate of a row, "" where it has none."""
    for rate in ("flops_per_second", "bytes_per_second", "host_bytes_per_second"):
        if rate in row:
            return f"{row[rate] / 1e12:.3g} T/s"
    for rate, unit in (("tokens_per_second", "tokens/s"), ("chunks_per_minute", "chunks/min")):
        if row.get(rate) is not None:
            return f"{row[rate]:.4g} {unit}"
    return ""


def print_goals(paths: list[str]) -> int:
    """Results put together, beside what was to be reached."""
    results = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    try:
        result = merged(results)
    except ValueError as error:
        print(f"--goals: {error}", file=sys.stderr)
        return 2
    with_fractions(result["stages"])
    print(markdown(result), end="")
    return 0


def main() -> int:
    """Run what is asked for; exit status 1 where a stage failed or a number is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stage",
        action="append",
        choices=list(SECONDS),
        help="repeatable (all but train and adapters)",
    )  # fmt: skip
    parser.add_argument("--impl", default="pallas_triton", help="body (pallas_triton)")
    parser.add_argument("--seconds", type=int, metavar="S", help="limit of a stage (its own)")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, to try the script")
    parser.add_argument("--out", metavar="FILE.json", help="also FILE.md beside it")
    parser.add_argument("--keep", action="store_true", help="write pallas_kernels/measured.json")
    parser.add_argument("--wheels", metavar="FOLDER", help="install these first, without a network")
    parser.add_argument("--real", metavar="FOLDER", help="of smollm2 and adapters: what they need")
    parser.add_argument("--dry-run", action="store_true", help="say what would run")
    parser.add_argument(
        "--goals", nargs="+", metavar="FILE.json", help="print these results beside the goals"
    )
    parser.add_argument("--work", default="runs/gpu", metavar="DIR", help="of train (runs/gpu)")
    parser.add_argument(
        "--seed", type=int, action="append", metavar="N", help="of train; repeatable (0)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="of train: stop after step N")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of train"
    )
    parser.add_argument("--run", choices=list(SECONDS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = TINY if args.tiny else Shape()
    if args.goals:
        return print_goals(args.goals)
    if args.run:
        run_here(args, shape)
        return 0
    stages = args.stage or [name for name in SECONDS if name not in ALONE]
    if args.dry_run:
        for name in stages:
            print(f"{name}: at most {args.seconds or SECONDS[name]} s")
        return 0
    if args.out and not args.out.endswith(".json"):
        parser.error(f"--out {args.out}: expected a name that ends in .json")
    if args.wheels:
        wheels = sorted(map(str, Path(args.wheels).glob("*.whl")))
        subprocess.run([sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", *wheels],
                       check=True)  # fmt: skip
    results: dict[str, Any] = {}
    for name in stages:
        results[name] = run_stage(name, args)
        if args.out:  # as far as it came, should the next one take the machine down
            Path(args.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    with_fractions(results)
    from jaxrag.measure.machine import describe

    result = {"machine": describe(), "impl": args.impl, "shape": dataclasses.asdict(shape),
              "stages": results}  # fmt: skip
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        keep_weights(args, stages)
        Path(args.out).with_suffix(".md").write_text(markdown(result), encoding="utf-8")
    if args.keep and "bodies" in results:
        import jax

        measured = json.loads(MEASURED.read_text(encoding="utf-8"))
        machine = result["machine"]
        measured[jax.devices()[0].device_kind] = kept(
            results["bodies"], machine["commit"], {"jax": jax.__version__}
        )
        MEASURED.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    print(markdown(result), end="")
    wrong = any(rows.get("ok") is False for rows in results.values())
    return 1 if wrong or any("failed" in rows for rows in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
