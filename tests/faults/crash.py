"""Kill -9 a knowledge base at work, again and again, and look for anything lost or wrong.

In every round one or two processes work on a knowledge base of one kind and note in logs what it
has acknowledged: they add, change and remove documents, beside one another, collect garbage without
grace, repair damaged chunks, make lost vectors again, export, or pass a gate. All are killed at a
random moment, one round in ten while the knowledge base is being opened. Then it is held against
the logs, and against a second one to which the same changes were made and nothing happened:

- what was acknowledged stands; of a change that was under way each document is as before or after;
- texts, token ids and keys fit one another, and the KV of every chunk is that of a fresh encoding;
- every chunk has its vector, a search finds what stands and nothing that was replaced, and two
  questions get the answers of the second one;
- exports that were cut short go on to what their manifests say, a gate says what it said;
- after a collection without grace no attempt is left without a record, no lock and no stray vector.

The kind "store" puts, replaces, deletes and collects chunks of random bits, without a model.

example: python tests/faults/crash.py --rounds 500 --processes 2 --out faults-crash.json
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bases import load, make_model
from crash_checks import Experiment, object_store
from crash_log import Log, WrongError, events, require
from crash_store import StoreExperiment
from crash_work import KINDS, at_work
from fault_report import foot, markdown

from jaxrag.cli import run_command
from jaxrag.cli.output import give_out, require_folder
from jaxrag.measure.machine import describe
from jaxrag.models.model import Model

NAMES = (*KINDS, "store")
EARLY_KILLS = 0.1  # share of the rounds that are killed while it is being opened
EARLY_SECONDS = 0.02  # after it was told to open
MOST_CHANGES = 6  # acknowledged before the kill, by all processes together
LATE_SECONDS = 0.2  # after the last of these
APART_SECONDS = 0.1  # between two kills of one round, at most
START_SECONDS = 300.0
ACCESS = {  # to the S3 server of the kind "tier"
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Rounds:
    """The rounds of some kinds, in a process of its own."""

    def __init__(self, folder: Path, seed: int, stack: contextlib.ExitStack) -> None:
        """Everything lies in ``folder``."""
        self._folder, self._seed, self._stack = folder, seed, stack
        # One process imports everything once and forks the others, before any thread is started.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["crash_work", "crash_store"])
        self._model: Model | None = None
        self._store: str | None = None
        self._experiments: dict[str, Any] = {}

    def one(self, kind: str, number: int) -> dict[str, Any]:
        """One round: what is noted of it, JSON-able."""
        start = time.perf_counter()
        if kind not in self._experiments:
            self._experiments[kind] = self._made(kind)
        experiment = self._experiments[kind]
        try:
            counts = self._round(experiment, number)
            found = {"counts": dict(counts)}
        except WrongError as error:
            shutil.copytree(experiment.folder, self._folder / f"bad-{kind}-{number}")
            experiment.close()
            del self._experiments[kind]
            found = {"violation": str(error)}
        seconds = round(time.perf_counter() - start, 2)
        return {"of": kind, "number": number, **found, "seconds": seconds}

    def _made(self, kind: str) -> Any:
        folder = self._folder / f"{kind.replace(' ', '-')}-{time.time_ns()}"
        if kind == "store":
            return StoreExperiment(folder)
        if self._model is None:
            self._model = load(self._folder / "model")
        store = None
        if KINDS[kind].remote:
            store = self._stack.enter_context(object_store())
        made = Experiment(kind, folder, self._model, self._folder / "model", store)
        self._stack.callback(made.close)
        return made

    def _round(self, experiment: Any, number: int) -> Counter[str]:
        """Kill what works on it, and check. Raises WrongError."""
        rng = random.Random(f"{self._seed} {number}")
        jobs = experiment.jobs(number, self._seed)
        pipes = [self._context.Pipe(duplex=False) for _ in jobs]
        target = getattr(experiment, "target", at_work)
        children = [
            self._context.Process(target=target, args=(job, pipe[0]))
            for job, pipe in zip(jobs, pipes, strict=True)
        ]
        for child in children:
            child.start()
        try:
            wait(jobs, children, "loaded")
            for _, go in pipes:
                go.send("go")
            early = rng.random() < EARLY_KILLS
            if early:
                time.sleep(rng.uniform(0, EARLY_SECONDS))
            else:
                wait(jobs, children, "ready")
                wait_changes(jobs, children, rng.randint(0, MOST_CHANGES))
                time.sleep(rng.uniform(0, LATE_SECONDS))
            alive = []
            for child in rng.sample(children, len(children)):
                alive.append(child.is_alive())
                child.kill()
                time.sleep(rng.uniform(0, APART_SECONDS))
        finally:
            for child in children:
                child.kill()
                child.join()
            for ends in pipes:
                for end in ends:
                    end.close()
        told = [events(job.log) for job in jobs]
        require(all(alive), f"a process died by itself: {errors_of(told)}")
        counts = experiment.check(told, f"{self._seed} {number}")
        for job in jobs:
            job.log.unlink()
        counts["kills"] += len(children)
        counts["killed while it was opened"] += sum(
            not any(event["kind"] == "ready" for event in one) for one in told
        )
        counts["killed during a change"] += sum(one[-1]["kind"] == "begin" for one in told)
        counts["acknowledged"] += sum(event["kind"] == "done" for one in told for event in one)
        return counts


def wait(jobs: Sequence[Any], children: Sequence[Any], what: str) -> None:
    """Until all have told it. Raises WrongError when one dies or none of it comes."""
    deadline = time.monotonic() + START_SECONDS
    for job, child in zip(jobs, children, strict=True):
        while not any(event["kind"] == what for event in events(job.log)):
            alive = child.is_alive()
            require(alive, f"a process died by itself: {errors_of([events(job.log)])}")
            require(time.monotonic() < deadline, f"not {what} after {START_SECONDS:.0f} s")
            time.sleep(0.005)


def wait_changes(jobs: Sequence[Any], children: Sequence[Any], count: int) -> None:
    """Until so many changes were acknowledged. Raises WrongError as ``wait`` does."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        told = [events(job.log) for job in jobs]
        if sum(event["kind"] == "done" for one in told for event in one) >= count:
            return
        require(all(child.is_alive() for child in children), f"died by itself: {errors_of(told)}")
        require(time.monotonic() < deadline, f"not {count} changes in {START_SECONDS:.0f} s")
        time.sleep(0.01)


def errors_of(told: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """What processes told of their end."""
    found = [event["told"] for one in told for event in one if event["kind"] == "error"]
    return "; ".join(found) or "it told nothing"


def run_rounds(folder: Path, kinds: Sequence[str], plan: tuple[int, int, float], log: Path) -> None:
    """Make rounds, kind by kind in turn; ``plan``: rounds of each kind, seed, last second."""
    rounds, seed, deadline = plan
    done = Counter(event["of"] for event in events(log))
    writer = Log(log)
    with contextlib.ExitStack() as stack:
        all_rounds = Rounds(folder, seed, stack)
        for turn in range(rounds):
            for kind in kinds:
                if turn < done[kind] or time.time() > deadline:
                    continue
                number = turn * len(NAMES) + NAMES.index(kind) + 1
                writer.note("round", **all_rounds.one(kind, number))


def run(
    folder: Path, kinds: Sequence[str], plan: tuple[int, int, float], processes: int
) -> list[dict[str, Any]]:
    """All rounds, of kinds that several processes share out; returns what is noted of each."""
    if not (folder / "model").exists():
        make_model(folder / "model")
    context = multiprocessing.get_context("spawn")
    parts = [kinds[i::processes] for i in range(processes)]
    logs = [folder / f"rounds-{i}-of-{processes}" for i in range(processes)]
    workers = [
        context.Process(target=run_rounds, args=(folder, part, plan, log))
        for part, log in zip(parts, logs, strict=True)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError("a process of the rounds failed; see its error above")
    return [one for log in logs for one in events(log)]


COLUMNS = ("kills", "killed while it was opened", "killed during a change", "acknowledged",
           "documents", "chunks", "equal answers")  # fmt: skip


def summary(rounds: Sequence[Mapping[str, Any]], seed: int, seconds: float) -> dict[str, Any]:
    """Counts by kind, and every violation."""
    kinds: dict[str, Counter[str]] = {name: Counter() for name in NAMES}
    for one in rounds:
        counts = kinds[one["of"]]
        counts["rounds"] += 1
        counts["violations"] += "violation" in one
        counts.update(one.get("counts", {}))
    return {
        "benchmark": "faults-crash",
        "seed": seed,
        "rounds": len(rounds),
        "violations": sum("violation" in one for one in rounds),
        "kinds": {name: dict(counts) for name, counts in kinds.items() if counts},
        "violated": [one for one in rounds if "violation" in one],
        "seconds of rounds": round(sum(one["seconds"] for one in rounds), 1),
        "seconds": round(seconds, 1),
        "machine": describe(),
    }


def table_of(result: Mapping[str, Any]) -> str:
    """The result as a page."""
    columns = ("rounds", *COLUMNS, "violations")
    rows = [
        [name, *(c.get(column, 0) for column in columns)] for name, c in result["kinds"].items()
    ]
    rows.append(["all", *(sum(row[i] for row in rows) for i in range(1, len(columns) + 1))])
    others = Counter[str]()
    for counts in result["kinds"].values():
        others.update({name: n for name, n in counts.items() if name not in columns})
    rest = "; ".join(f"{name} {n:,}" for name, n in sorted(others.items()) if n)
    return (
        f"# Killed processes\n\n`tests/faults/crash.py`, seed {result['seed']}: kill -9 at random "
        "moments, and after every round all checks of that file.\n\n"
        + markdown(["kind", *columns], rows)
        + f"\nBeside these: {rest}.\n"
        + foot(result)
    )


def measure(args: argparse.Namespace) -> int:
    """Run the rounds; print what was found; 1 where something was lost or wrong."""
    require_folder(args.out)
    require_folder(args.markdown, "--markdown")
    start = time.time()
    each = math.ceil(args.rounds / len(args.kinds))
    with contextlib.ExitStack() as stack:
        folder = Path(
            args.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxrag-crash-"))
        ).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ |= ACCESS
        # The processes compile the same few programs: the first one's are kept for all.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "xla"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        plan = (each, args.seed, start + args.minutes * 60 if args.minutes else math.inf)
        rounds = run(folder, args.kinds, plan, args.processes)
    result = summary(rounds, args.seed, time.time() - start)
    for bad in result["violated"]:
        print(json.dumps(bad), file=sys.stderr)
        again = f"--kinds {bad['of']!r} --rounds {each} --seed {args.seed}"
        print(f"kept if --folder was given; again: {sys.argv[0]} {again}", file=sys.stderr)
    give_out(args, result, [table_of(result)], table_of)
    return 1 if result["violations"] else 0


def main() -> int:
    """Run the rounds; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=500, metavar="N", help="of all kinds together (500)"
    )
    parser.add_argument("--kinds", nargs="+", choices=NAMES, default=NAMES, metavar="KIND",
                        help=f"some of {', '.join(NAMES)} (all)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that share them (1)")
    parser.add_argument("--minutes", type=float, metavar="T", help="begin no round after these")
    parser.add_argument(
        "--folder", metavar="DIR", help="where the files go; a run goes on there (temporary files)"
    )
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    parser.add_argument("--markdown", metavar="FILE", help="also write the table there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return run_command(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
