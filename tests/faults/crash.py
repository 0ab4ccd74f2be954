"""Kill -9 a knowledge base at work, again and again, and look for anything lost or wrong.

Every round starts a process that adds, changes and removes small documents and notes in a log what
the knowledge base has acknowledged. The process is killed at a random moment. Then the knowledge
base is opened again and held against the log:

- a document whose change was acknowledged stands as acknowledged; of the batch under way when the
  kill came either nothing stands or all of it;
- every chunk of every document has its KV, verified, and equal to a fresh encoding of its text;
- every chunk has its vector, a search finds the text that stands and never one that was replaced;
- a chunk that is committed in the store never changes its bytes.

With ``--level store`` the process puts, replaces, deletes and collects chunks of random bits
instead, without a model.

example: python tests/faults/crash.py --rounds 200 --out benchmarks/results/crash.json
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crash_kb import KBExperiment
from crash_log import WrongError, events, replay, require
from crash_store import StoreExperiment
from tqdm import tqdm

from jaxrag.bench.machine import describe
from jaxrag.cli import run_command
from jaxrag.cli.options import add_json, give_out, require_folder

MAX_KILL_SECONDS = 0.5  # after the process has begun to work
EARLY_KILLS = 0.1  # share of the rounds in which it may be killed before it has opened
EARLY_SECONDS = 1.5
START_SECONDS = 120.0

EXPERIMENTS: dict[str, Callable[[Path], KBExperiment | StoreExperiment]] = {
    "kb": KBExperiment,
    "store": StoreExperiment,
}


# The parent.


def run(level: str, rounds: int, seed: int, work: Path) -> dict[str, Any]:
    """So many kills; returns counts, JSON-able. Raises WrongError at the first violation."""
    rng = random.Random(seed)
    start = time.perf_counter()
    experiment = EXPERIMENTS[level](work)
    # One process imports everything once and forks the others, before any thread is started.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["crash_kb", "crash_store"])
    totals: Counter[str] = Counter()
    for number in tqdm(range(1, rounds + 1), desc="kills", disable=None):
        log_path = work / f"log-{number}"
        child = context.Process(
            target=experiment.target, args=(work, log_path, number, experiment.state)
        )
        child.start()
        early = rng.random() < EARLY_KILLS
        if early:
            time.sleep(rng.uniform(0, EARLY_SECONDS))
        else:
            wait_ready(log_path, child)
            time.sleep(rng.uniform(0, MAX_KILL_SECONDS))
        require(child.is_alive(), f"round {number}: the process died by itself")
        child.kill()
        child.join()
        told = events(log_path)
        change = replay(told, experiment.state)
        counts = experiment.check(change)
        totals["kills"] += 1
        totals["killed before it was open"] += not told
        totals["killed during a change"] += bool(change)
        totals["acknowledged"] += sum(event["kind"] == "done" for event in told)
        totals += counts
        log_path.unlink(missing_ok=True)
    return {
        "benchmark": "crash",
        "level": level,
        "rounds": rounds,
        "seed": seed,
        "lost": 0,  # a violation raises
        "wrong": 0,
        "counts": dict(totals),
        "at the end": experiment.finish(),
        "seconds": round(time.perf_counter() - start, 1),
        "machine": describe(),
    }


def wait_ready(log_path: Path, child: Any) -> None:
    """Until the process has opened what it works on."""
    deadline = time.monotonic() + START_SECONDS
    while not events(log_path):
        require(child.is_alive(), "the process died before it was ready; see its error above")
        require(time.monotonic() < deadline, f"the process took over {START_SECONDS:.0f} s to open")
        time.sleep(0.005)


def main() -> int:
    """Run the experiment; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="kills (200)")
    parser.add_argument("--level", choices=tuple(EXPERIMENTS), default="kb")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", metavar="DIR", help="where the files go (temporary files)")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(parser)
    return run_command(measure, parser.parse_args())


def measure(args: argparse.Namespace) -> int:
    """Run one level of the experiment; print the result, indented or on one line."""
    require_folder(args.out)
    with tempfile.TemporaryDirectory(prefix="jaxrag-crash-", dir=args.folder) as name:
        # The processes compile the same few programs: the first one's are kept for all.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(name) / "xla"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        try:
            result = run(args.level, args.rounds, args.seed, Path(name))
        except WrongError as error:
            print(f"crash: {error}", file=sys.stderr)
            return 1
    give_out(args, result, [json.dumps(result, indent=1)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
