"""Flip single bits of the files of knowledge bases, cut files short, and look what is served.

Knowledge bases of every kind are made, closed and kept. A trial takes a copy, damages one file of
it, opens it with nothing in memory but the model's weights and programs, and asks three questions:
by words, by all that there is, and with reuse. What comes back is held against the answers of the
undamaged one: documents, hits with texts and token ids, answer tokens, sources. The verdict is

- same: the same answers, and nothing told;
- healed: the same answers, and a note on what was damaged;
- told: other rankings by vectors, and a note that says that vectors are lost;
- earlier: of a log that was cut off by a kill, the answers of a state before the last commits, none
  of which was acknowledged;
- refused: an error of jaxrag, in one line;
- WRONG, traceback, hang, died: none of which may be.

After every third trial `jaxrag kb verify --repair` is called, as its command does it, and the
questions are asked again. Then it is

- whole: the same answers as of the undamaged one, or as of that earlier state once it is repaired;
- less: documents are gone which the repair has named, or counted where their names are gone, and
  every text that is left is its document's;
- refused, as above: nothing can be made of what is left, or it is no damage that a repair is for;
- WRONG, traceback, hang, died.

example: python tests/faults/flips.py --flips 5000 --cuts 500 --out faults-flips.json
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bases import BASES, Answers, Base, ask, document_text, fill, forget, load, make_model
from crash_log import Log, events
from fault_report import foot, markdown
from tqdm import tqdm

from jaxrag.base.errors import JaxragError
from jaxrag.cli import run_command
from jaxrag.cli.output import give_out, require_folder
from jaxrag.library.knowledge_base.location import mend_catalog
from jaxrag.measure.machine import describe
from jaxrag.models.model import Model

QUESTIONS = (document_text(3, 0)[:60], document_text(5, 0)[5:70], document_text(4, 0)[:60])
BAD = ("WRONG", "traceback", "hang", "died")
VERDICTS = ("same", "healed", "told", "earlier", "refused", *BAD)
REPAIRS = ("whole", "less", "refused", *BAD)
REPAIRED_EVERY = 3  # trials
NOT_SEARCHED = "the vectors of "  # begins the note of a ranking by less than all vectors
BY_WORDS = 2  # the first of the answers, in which no vector has a part
LOG = "catalog.sqlite-wal"
HANG_SECONDS = 60
WEIGHTS = {
    "catalog": 12,
    "catalog's log": 12,
    "vectors": 6,
    "KV": 3,
    "record": 3,
    "int8 scale": 3,
    "attention index": 3,
}  # of a class of files; 1 of the others
CHANGED = ("sqlite", "-wal", "vectors", "writers")  # in names of what is not written once and kept


def file_class(name: str, base: Base) -> str:
    """What a file of a knowledge base is, by its name in the folder."""
    parts = Path(name).parts
    if parts[0].startswith("catalog.sqlite"):
        return "catalog's log" if parts[0].endswith("-wal") else "catalog"
    if parts[0] == "vectors":
        return f"vectors, {base.options.get('index', 'exact')}"
    if parts[0] == "kv":
        if "aux" in parts and parts[-1] != "zarr.json":
            return "int8 scale" if "scale" in parts else "attention index"
        return {"commit.json": "record", "zarr.json": "zarr.json"}.get(parts[-1], "KV")
    return {"layouts": "layout", "owners": "owner", "writers": "writer"}.get(parts[0], parts[0])


@dataclasses.dataclass(frozen=True)
class Damage:
    """What is done to a knowledge base.

    Attributes:
      base: a key of BASES.
      file: its name in the folder.
      what: the file is.
      place: the byte that is changed, or from which on the file ends.
      bit: 0 to 7, or None for a cut.
    """

    base: str
    file: str
    what: str
    place: int
    bit: int | None

    def do(self, folder: Path) -> None:
        """Damage a copy; the file becomes another one, so that links to it stay as they are."""
        path = folder / self.file
        data = bytearray(path.read_bytes())
        if self.bit is None:
            del data[self.place :]
        else:
            data[self.place] ^= 1 << self.bit
        path.unlink()
        path.write_bytes(data)


def chosen(seed: int, trial: int, cut: bool, bases: Mapping[str, "Made"]) -> Damage:
    """The damage of a trial."""
    rng = random.Random(f"{seed} {trial}")
    made = rng.choice(list(bases.values()))
    weights = [WEIGHTS.get(kind.partition(",")[0], 1) for kind in made.files]
    [kind] = rng.choices(list(made.files), weights)
    file, size = rng.choice(made.files[kind])
    place = rng.randrange(size)
    return Damage(made.name, file, kind, place, None if cut else rng.randrange(8))


class Made:
    """An undamaged knowledge base and its answers.

    Attributes:
      name: of its kind.
      files: those that are not empty, name and size, by what they are.
    """

    def __init__(self, name: str, folder: Path, model: Model) -> None:
        """Make it in ``folder`` and put it aside, and copies in its place for every trial."""
        self.name = name
        self._base = BASES[name]
        self._folder, self._whole = folder / "kb", folder / "whole" / name
        self._model = model
        if not self._whole.exists():
            shutil.rmtree(self._folder, ignore_errors=True)
            fill(self._base, self._folder, model)
            self._whole.parent.mkdir(exist_ok=True)
            self._folder.rename(self._whole)
        self.digest = digest_of(self._whole)
        self.files: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for path in sorted(it for it in self._whole.rglob("*") if it.is_file()):
            name, size = str(path.relative_to(self._whole)), path.stat().st_size
            if size:
                self.files[file_class(name, self._base)].append((name, size))
        self._copy()
        self._right = self._answers()
        self._copy()
        with self._base.open(self._folder, model, "rw") as kb:
            self._texts = {
                entry.id: [(it.start, it.text) for it in kb._catalog.chunks(entry.id)]
                for entry in kb.documents()
            }
        self._copy()
        assert self._answers() == self._right, f"{self.name}: another answer without any damage"
        assert all(self._right[0]), f"{self.name}: an empty answer compares nothing"
        self._earlier, self._mended = self._states() if self._base.unfinished else ([], [])

    def try_out(self, damage: Damage) -> tuple[str, str]:
        """The verdict on a damage, and what was told."""
        self._copy()
        damage.do(self._folder)
        try:
            with alarm(HANG_SECONDS):
                found, told = self._answers()
        except HangError:
            return "hang", f"over {HANG_SECONDS} s"
        except JaxragError as error:
            return ("traceback" if "\n" in str(error) else "refused"), str(error)
        except Exception as error:
            return "traceback", f"{type(error).__name__}: {error}"
        right, before = self._right
        fresh = [note for note in told if note not in before]
        if found == right:
            return ("same" if told == before else "healed"), " / ".join(fresh)
        if damage.file == LOG and found in self._earlier:
            return "earlier", " / ".join(fresh)
        if found[:BY_WORDS] == right[:BY_WORDS] and told_lost(fresh):
            return "told", " / ".join(fresh)
        return "WRONG", f"notes {fresh}, {difference(right, found)}"

    def repair(self) -> tuple[str, str]:
        """Repair what the last trial left, and ask again; the verdict on it, and what was told."""
        try:
            with alarm(HANG_SECONDS):
                return self._repaired()
        except HangError:
            return "hang", f"over {HANG_SECONDS} s"
        except JaxragError as error:
            return ("traceback" if "\n" in str(error) else "refused"), str(error)
        except Exception as error:
            return "traceback", f"{type(error).__name__}: {error}"

    def _repaired(self) -> tuple[str, str]:
        right, _ = self._right
        mended = mend_catalog(self._folder)
        with self._base.open(self._folder, self._model, "rw") as kb:
            rows = kb.verify(repair=True).rows
            texts = {
                entry.id: [(it.start, it.text) for it in kb._catalog.chunks(entry.id)]
                for entry in kb.documents()
            }
        found, _ = self._answers()
        if found == right or found in self._mended:
            return "whole", ""
        named = {*(mended.lost if mended else ()), *(rows.lost if rows else ())}
        counted = bool(mended and mended.nameless != 0) or bool(rows and rows.unnamed)
        gone = self._texts.keys() - texts.keys()
        changed = [it for it in texts if texts[it] != self._texts.get(it)]
        if gone and not changed and (gone <= named or counted):
            return "less", f"{sorted(named)} lost, {mended.nameless if mended else 0} without name"
        return "WRONG", f"after {mended}, {rows}: changed {changed}, {difference(right, found)}"

    def keep(self, folder: Path) -> None:
        """Keep the damaged copy, as the last trial left it."""
        shutil.copytree(self._folder, folder, dirs_exist_ok=True)

    def unchanged(self) -> bool:
        """Whether no trial has changed the undamaged files."""
        return digest_of(self._whole) == self.digest

    def _copy(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(self._whole, self._folder, copy_function=copy_or_link)

    def _states(self) -> tuple[list[list[Any]], list[list[Any]]]:
        """The answers after every commit that the log holds, as it is and once it is repaired."""
        page = int.from_bytes((self._whole / LOG).read_bytes()[8:12])
        size, frame = (self._whole / LOG).stat().st_size, page + 24
        states: list[list[Any]] = []
        repaired: list[list[Any]] = []
        for end in range(32, size + 1, frame):
            self._copy()
            Damage(self.name, LOG, "catalog's log", end, None).do(self._folder)
            found, _ = self._answers()
            if found not in states:
                states.append(found)
                with self._base.open(self._folder, self._model, "rw") as kb:
                    kb.verify(repair=True)
                repaired.append(self._answers()[0])
        assert len(states) > 1, "the log holds no commit"
        return states, repaired

    def _answers(self) -> Answers:
        forget(self._model)
        with self._base.open(self._folder, self._model) as kb:
            return ask(kb, self._base, QUESTIONS)


def told_lost(notes: Sequence[str]) -> bool:
    """Whether notes say that vectors are lost."""
    return any(note.startswith(NOT_SEARCHED) for note in notes)


def copy_or_link(source: str, target: str) -> None:
    """A link to what is never written twice, a copy of the rest."""
    if any(part in source for part in CHANGED):
        shutil.copy(source, target)
    else:
        os.link(source, target)


def digest_of(folder: Path) -> str:
    """Of all names and bytes in a folder."""
    state = hashlib.blake2b()
    for path in sorted(it for it in folder.rglob("*") if it.is_file()):
        state.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return state.hexdigest()


def difference(right: Sequence[Any], found: Sequence[Any]) -> str:
    """Where two lists of answers part."""
    for number, (one, other) in enumerate(zip(right, found, strict=True)):
        if one != other:
            return f"answer {number}: {other!r:.300}, not {one!r:.300}"
    return "no difference"


class HangError(BaseException):
    """Raised in what takes too long."""


@contextlib.contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """Raise HangError in what takes longer."""

    def ring(number: int, frame: Any) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_cut(trial: int, flips: int, cuts: int) -> bool:
    """Whether a trial is a cut: they are spread evenly."""
    return (trial + 1) * cuts // (flips + cuts) > trial * cuts // (flips + cuts)


def run_trials(
    folder: Path, names: Sequence[str], plan: tuple[int, int, int], only: int | None
) -> None:
    """Make the trials that the log does not have yet; ``plan``: flips, cuts and seed."""
    flips, cuts, seed = plan
    if not (folder / "model").exists():
        make_model(folder / "model")
    model = load(folder / "model")
    bases = {name: Made(name, folder, model) for name in names}
    done = {event["trial"] for event in events(folder / "log")}
    log = Log(folder / "log")
    for trial in range(flips + cuts) if only is None else [only]:
        if trial in done and only is None:
            continue
        damage = chosen(seed, trial, is_cut(trial, flips, cuts), bases)
        log.note("begin", trial=trial, **dataclasses.asdict(damage))
        start = time.perf_counter()
        verdict, told = bases[damage.base].try_out(damage)
        repair, after = "", ""
        if verdict in BAD:
            bases[damage.base].keep(folder / f"bad-{trial}")
        elif trial % REPAIRED_EVERY == 0:
            repair, after = bases[damage.base].repair()
        seconds = round(time.perf_counter() - start, 3)
        log.note(
            "end", trial=trial, verdict=verdict, told=told[:700], repair=repair,
            after=after[:700], seconds=seconds,
        )  # fmt: skip
    for made in bases.values():
        assert made.unchanged(), f"{made.name}: a trial changed the undamaged files"


def run(folder: Path, names: Sequence[str], plan: tuple[int, int, int], only: int | None) -> None:
    """Make all trials in a process that is started again when it dies of one."""
    context = multiprocessing.get_context("spawn")
    wanted = plan[0] + plan[1] if only is None else 1
    with tqdm(total=wanted, desc="trials", disable=None) as bar:
        while True:
            began = len(events(folder / "log"))
            process = context.Process(target=run_trials, args=(folder, names, plan, only))
            process.start()
            while process.is_alive():
                process.join(1.0)
                told = events(folder / "log")
                bar.n = sum(event["kind"] == "end" for event in told)
                bar.refresh()
            if process.exitcode == 0:
                return
            told = events(folder / "log")
            if len(told) == began or told[-1]["kind"] != "begin":
                raise RuntimeError("the process of the trials failed; see its error above")
            log = Log(folder / "log")
            died = f"exit code {process.exitcode}"
            log.note(
                "end", trial=told[-1]["trial"], verdict="died", told=died, repair="", after="",
                seconds=0.0,
            )  # fmt: skip
            if only is not None:
                return


def trials_of(told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The trials of a log, each with its damage and its verdict."""
    begun = {event["trial"]: event for event in told if event["kind"] == "begin"}
    return [{**begun[event["trial"]], **event} for event in told if event["kind"] == "end"]


def summary(trials: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Any]:
    """Counts by kind of file and of knowledge base, and every trial that went wrong."""
    tables = {}
    for name in ("what", "base"):
        for what, cut in (("flips", False), ("cuts", True)):
            counts: dict[str, Counter[str]] = defaultdict(Counter)
            for trial in trials:
                if (trial["bit"] is None) == cut:
                    counts[trial[name]][trial["verdict"]] += 1
            tables[f"{what} by {name}"] = {
                key: {v: counts[key][v] for v in VERDICTS} for key in sorted(counts)
            }
    repairs: dict[str, Counter[str]] = defaultdict(Counter)
    for trial in trials:
        if trial["repair"]:
            repairs[trial["what"]][trial["repair"]] += 1
    shown = ("trial", "base", "file", "what", "place", "bit", "verdict", "told", "repair", "after")
    bad = [trial for trial in trials if trial["verdict"] in BAD or trial["repair"] in BAD]
    return {
        "benchmark": "faults-flips",
        "seed": seed,
        "flips": sum(trial["bit"] is not None for trial in trials),
        "cuts": sum(trial["bit"] is None for trial in trials),
        "repairs": sum(map(Counter.total, repairs.values())),
        "bad": len(bad),
        **tables,
        "after a repair": {key: {v: repairs[key][v] for v in REPAIRS} for key in sorted(repairs)},
        "bad trials": [{name: trial[name] for name in shown} for trial in bad],
        "seconds": round(sum(trial["seconds"] for trial in trials), 1),
        "machine": describe(),
    }


def table_of(result: Mapping[str, Any]) -> str:
    """The result as a page."""
    text = (
        f"# Flipped bits and cut files\n\n`tests/faults/flips.py`, seed {result['seed']}: "
        f"{result['flips']:,} single bits flipped and {result['cuts']:,} files cut short, each in "
        "a copy of an undamaged knowledge base that is opened cold and asked three questions; and "
        f"{result['repairs']:,} of these were repaired and asked again. {result['bad']} of them "
        "were answered wrong without a note, ended in a traceback, hung or killed the process. "
        "What the verdicts mean is said in the file.\n"
    )
    for title, name, verdicts in (
        ("Flips by file", "flips by what", VERDICTS),
        ("Cuts by file", "cuts by what", VERDICTS),
        ("Flips by knowledge base", "flips by base", VERDICTS),
        ("Cuts by knowledge base", "cuts by base", VERDICTS),
        ("After a repair, by file that was damaged", "after a repair", REPAIRS),
    ):
        rows = [[key, sum(c.values()), *c.values()] for key, c in result[name].items()]
        total = [sum(row[i] for row in rows) for i in range(1, len(verdicts) + 2)]
        head = ["knowledge base" if "base" in name else "file", "all", *verdicts]
        text += f"\n{title}:\n\n" + markdown(head, [*rows, ["all", *total]])
    return text + foot(result)


def measure(args: argparse.Namespace) -> int:
    """Make the trials and print what became of them; 1 where one went wrong."""
    require_folder(args.out)
    require_folder(args.markdown, "--markdown")
    plan = (args.flips, args.cuts, args.seed)
    with contextlib.ExitStack() as stack:
        folder = Path(
            args.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxrag-flips-"))
        ).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        run(folder, args.bases, plan, args.trial)
        trials = trials_of(events(folder / "log"))
        if args.trial is not None:
            trials = [trial for trial in trials if trial["trial"] == args.trial][-1:]
        result = summary(trials, args.seed)
    for bad in result["bad trials"]:
        print(json.dumps(bad), file=sys.stderr)
        again = f"--folder {folder} --flips {args.flips} --cuts {args.cuts} --seed {args.seed}"
        print(f"again: {sys.argv[0]} {again} --trial {bad['trial']}", file=sys.stderr)
    give_out(args, result, [table_of(result)], table_of)
    return 1 if result["bad"] else 0


def main() -> int:
    """Run the trials; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=5000, metavar="N", help="single bits (5000)")
    parser.add_argument("--cuts", type=int, default=500, metavar="N", help="short files (500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bases", nargs="+", choices=tuple(BASES), default=tuple(BASES))
    parser.add_argument("--trial", type=int, metavar="N", help="only this one, once more")
    parser.add_argument(
        "--folder", metavar="DIR", help="where the files go; a run goes on there (temporary files)"
    )
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    parser.add_argument("--markdown", metavar="FILE", help="also write the tables there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return run_command(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
