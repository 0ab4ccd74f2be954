"""Give hostile models, files and questions to ``jaxrag``, each in a process of its own.

A process that has imported everything is forked for every case. There the command runs with an
address space of 4 GiB beyond what the imports take, and what it took is measured: its processor
time and that of the processes that it started, and the most resident memory beyond the imports,
its own at its highest and that of its children as it was found every 20 ms. The verdict is

- refused: exit code 1 and one line that says what is wrong; what was there before is as it was,
  and there is no new knowledge base;
- left out: exit code 3 and a line for each document that was left out, and a knowledge base with
  the other documents, which ``kb verify`` finds whole;
- done: exit code 0 and no such line;
- another ending, other words, lines, half-written, traceback, died, hang, slow (over 5 s of
  processor time), memory (over 1 GiB): none of which may be.

Files are read with --parse-seconds 3 and --parse-bytes 1GB.

example: python tests/faults/hostile.py --out faults-hostile.json --markdown faults-hostile.md
"""

import argparse
import atexit
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hostile_files
import hostile_models
from bases import as_document, load, make_model
from fault_report import foot, markdown
from hostile_case import Case
from tqdm import tqdm

from jaxrag.cli import main as jaxrag
from jaxrag.cli import run_command
from jaxrag.cli.output import give_out, require_folder
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.machine import describe

CASES = (*hostile_models.CASES, *hostile_files.CASES)
MAX_SECONDS = 5.0  # of processor time
MAX_BYTES = 1 << 30  # of memory beyond the imports
MAX_ADDRESSES = 4 << 30  # of address space beyond the imports, most of it never touched
HANG_SECONDS = 60.0  # of the clock
_LOOK_SECONDS = 0.02  # between two looks at the memory of children
MAX_LINE = 1_000  # characters
GOOD = ("refused", "left out", "done")
CODES = {"done": 0, "refused": 1, "left out": 3}
TRACEBACK = 70  # exit code
# Imported by the process that is forked, so that no case waits for them.
PRELOADED = ["hostile", "jaxrag.cli.ingest", "jaxrag.cli.ask", "jaxrag.library.knowledge_base",
             "jaxrag.models.hf", "jaxrag.serve.generate", "jaxrag.library.documents"]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
      case: its name.
      verdict: see above.
      line: the first that it printed on stderr, or why the verdict is what it is.
      seconds: of processor time.
      mib: of memory beyond the imports.
    """

    case: str
    verdict: str
    line: str
    seconds: float
    mib: int


# In the process of a case.


def attempt(arguments: Sequence[str], folder: Path, report: Connection) -> None:
    """Run the command, with its output in files of the folder, and send what it took."""
    os.setsid()
    for number, name in ((1, "stdout"), (2, "stderr")):
        with open(folder / name, "wb") as stream:
            os.dup2(stream.fileno(), number)
    used, base = process_seconds(), status("VmRSS")
    most = status("VmSize") + MAX_ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        code = jaxrag(list(arguments))
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = TRACEBACK
    atexit._run_exitfuncs()  # ends the processes that it started
    sys.stdout.flush()
    sys.stderr.flush()
    report.send((code, process_seconds() - used, max(0, status("VmHWM") - base)))


def status(name: str, process: int | str = "self") -> int:
    """Bytes of a process, as Linux counts them under this name; 0 where it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def children_of(process: int) -> list[int]:
    """The processes that it and its threads have started, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return [*found, *(below for child in found for below in children_of(child))]


def process_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in (own, children))


def is_another(process: int, parent: int | None) -> bool:
    """Whether a process runs another program than its parent, whose memory it has until then."""
    with contextlib.suppress(OSError):
        own = Path(f"/proc/{process}/cmdline").read_bytes()
        return own != Path(f"/proc/{parent}/cmdline").read_bytes()
    return False


# The parent.


class Trials:
    """A folder with a good model and a knowledge base, and prepared processes."""

    def __init__(self, folder: Path) -> None:
        """Make both in the folder, which is empty."""
        self._folder = folder
        make_model(folder / "model")
        with KnowledgeBase.open(folder / "asked", model=load(folder / "model"), template="plain",
                                chunk_tokens=48, overlap=0) as base:  # fmt: skip
            base.add([as_document(number, 0) for number in range(4)])
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def try_out(self, case: Case) -> Outcome:
        """One case, in a folder that is gone afterwards."""
        own = Path(tempfile.mkdtemp(dir=self._folder))
        folder = own / "case"
        folder.mkdir()
        try:
            for name in ("model", "asked"):
                shutil.copytree(self._folder / name, folder / name)
            arguments = case.make(folder)
            before = _files(folder / "asked")
            ended = self._run(arguments, folder)
            if ended is None:
                return Outcome(case.name, "hang", f"over {HANG_SECONDS:g} s", HANG_SECONDS, 0)
            code, seconds, nbytes = ended
            lines = (folder / "stderr").read_text("utf-8", "replace").splitlines()
            verdict, why = judge(case, code, lines, folder)
            if verdict in GOOD and seconds > MAX_SECONDS:
                verdict = "slow"
            if verdict in GOOD and nbytes > MAX_BYTES:
                verdict = "memory"
            if case.ends == "refused" and _files(folder / "asked") != before:
                verdict = "half-written"
            return Outcome(case.name, verdict, why, round(seconds, 2), nbytes >> 20)
        finally:
            shutil.rmtree(own)

    def _run(self, arguments: Sequence[str], folder: Path) -> tuple[int, float, int] | None:
        """Exit code, seconds and bytes; None where it hangs."""
        here, there = self._context.Pipe(duplex=False)
        child = self._context.Process(target=attempt, args=(arguments, folder, there))
        child.start()
        there.close()
        most, deadline = 0, time.monotonic() + HANG_SECONDS
        try:
            while not here.poll(_LOOK_SECONDS):
                if time.monotonic() > deadline:
                    return None
                children = [it for it in children_of(child.pid or 0) if is_another(it, child.pid)]
                most = max(most, sum(status("VmRSS", process) for process in children))
            code, seconds, own = here.recv()
            return code, seconds, own + most
        except EOFError:
            child.join()
            return child.exitcode or 0, 0.0, most
        finally:
            for process in (*children_of(child.pid or 0), child.pid or 0):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            child.join()
            here.close()


_BESIDE = re.compile(r"note:|warning:|loading |about |Compiling for this machine")


def judge(case: Case, code: int, lines: Sequence[str], folder: Path) -> tuple[str, str]:
    """The verdict on how a command ended, and the first line that it printed."""
    shown = [line for line in lines if not _BESIDE.match(line)]
    if case.panics:
        shown = [line for line in shown if line.startswith(("skipped", "jaxrag"))]
    first = shown[0] if shown else ""
    if code < 0:
        return "died", f"signal {-code}"
    if code == TRACEBACK or any(line.startswith("Traceback") for line in lines):
        return "traceback", lines[-1] if lines else ""
    if code != CODES[case.ends]:
        return "another ending", f"exit code {code}: {first}"
    expected = {"done": 0, "refused": 1, "left out": case.lines}[case.ends]
    if len(shown) != expected:
        return "lines", f"{len(shown)}: {first}"
    for line in shown:
        if not re.search(case.says, line):
            return "other words", line
        if not line.isprintable() or len(line) > MAX_LINE:
            return "other words", f"{len(line)} characters: {line[:MAX_LINE]!a}"
    if case.documents or case.ends == "refused":
        why = written(folder / "kb", 0 if case.ends == "refused" else case.documents)
        if why:
            return "half-written", why
    return case.ends, first


def written(folder: Path, documents: int) -> str:
    """What is wrong with a knowledge base that holds so many documents; '' where nothing is."""
    if not documents:
        return f"there is {folder.name}" if folder.exists() else ""
    with KnowledgeBase.open(folder) as base:
        found, report = base.stats()["documents"], base.verify()
    if found != documents:
        return f"{found} documents, expected {documents}"
    return "" if report.ok and not report.damaged else f"verify finds {report}"


def _files(folder: Path) -> set[tuple[str, int]]:
    """The files of a folder but for those that a copy which is opened may touch."""
    return {
        (str(path.relative_to(folder)), path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file()
        and not {"writers", "owners"} & set(path.relative_to(folder).parts)
        and "sqlite" not in path.name
    }


def run(folder: Path, cases: Sequence[Case], at_once: int) -> dict[str, Any]:
    """Try all, so many at once; returns what became of each, JSON-able."""
    begun = time.perf_counter()
    trials = Trials(folder)
    with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
        tried = threads.map(trials.try_out, cases)
        outcomes = list(tqdm(tried, desc="cases", total=len(cases), disable=None))
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    return {
        "benchmark": "faults: hostile input",
        "cases": len(outcomes),
        "bad": sum(count for verdict, count in verdicts.items() if verdict not in GOOD),
        "verdicts": dict(verdicts),
        "limits": {"seconds": MAX_SECONDS, "bytes": MAX_BYTES, "addresses": MAX_ADDRESSES},
        "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
        "seconds": round(time.perf_counter() - begun, 1),
        "machine": describe(),
    }


def table_of(result: dict[str, Any]) -> str:
    """The page of a result, in Markdown."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for outcome in result["outcomes"]:
        groups.setdefault(outcome["case"].partition(":")[0], []).append(outcome)
    rows = [
        [group, len(found), *(sum(one["verdict"] == it for one in found) for it in GOOD),
         sum(one["verdict"] not in GOOD for one in found),
         max(one["seconds"] for one in found), max(one["mib"] for one in found)]
        for group, found in groups.items()
    ]  # fmt: skip
    text = (
        "# Hostile input\n\n"
        f"{result['cases']} cases, {result['bad']} of them bad; at most {MAX_SECONDS:g} s of "
        f"processor time and {MAX_BYTES >> 30} GiB of memory beyond the imports, the parser's "
        "process and the template's included. Files were read with `--parse-seconds 3 "
        "--parse-bytes 1GB`.\n\n"
    )
    text += markdown(["what", "cases", *GOOD, "bad", "most seconds", "most MiB"], rows)
    text += "\nEach, with the first line that was printed:\n\n"
    each = [
        [one["case"], one["verdict"], one["seconds"], one["mib"], _cell(one["line"])]
        for one in result["outcomes"]
    ]
    return text + markdown(["case", "verdict", "seconds", "MiB", "line"], each) + foot(result)


def _cell(line: str) -> str:
    line = re.sub(r"/\S*/case/", "", line)
    return (
        (line if len(line) <= 160 else line[:157] + "...").replace("|", "\\|").replace("<", "\\<")
    )


def measure(args: argparse.Namespace) -> int:
    """Try what was chosen; 1 where one was bad."""
    require_folder(args.out)
    require_folder(args.markdown, "--markdown")
    chosen = [case for case in CASES if re.search(args.only, case.name)]
    with tempfile.TemporaryDirectory(prefix="jaxrag-hostile-", dir=args.folder) as name:
        result = run(Path(name), chosen, args.jobs)
    for one in result["outcomes"]:
        one["line"] = re.sub(r"/\S*/case/", "", one["line"])
        if one["verdict"] not in GOOD:
            print(json.dumps(one), file=sys.stderr)
    give_out(args, result, [table_of(result)], table_of)
    return 1 if result["bad"] else 0


def main() -> int:
    """Try the cases; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases by name (all)")
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="cases at once; none is timed by the clock"
    )
    parser.add_argument("--folder", metavar="DIR", help="where the files go (temporary files)")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    parser.add_argument("--markdown", metavar="FILE", help="also write the tables there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return run_command(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
