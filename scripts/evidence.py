"""Tables of quality on the prompts of data sets, cell by cell, as long as there is time.

The cells are those of benchmarks/evidence.toml, each a run of `jaxrag eval dataset`, or of needles
in long prompts, which says how long it will take. The same command goes on where the last one was
stopped or killed.

    python scripts/evidence.py --model MODEL --data DIR --out FOLDER --table main --hours 8
"""

import argparse
import dataclasses
import subprocess
import sys
import time
from pathlib import Path

from jaxrag.base.tables import build, read_toml

ROOT = Path(__file__).resolve().parents[1]
CELLS = ROOT / "benchmarks" / "evidence.toml"


@dataclasses.dataclass(frozen=True)
class EvidenceCell:
    """Questions of a data set, or of a suite of long prompts, put to some methods.

    Attributes:
      name: of its files.
      table: that it is part of.
      methods: names of presets or .toml files.
      num: first questions of the data set; of a suite, those of every task, length and depth.
      dataset: its name; "" for a suite.
      data: the data set's file, below the folder of all of them.
      suite: of `jaxrag eval`, where there is no data set.
      arguments: more of the command.
    """

    name: str
    table: str
    methods: tuple[str, ...]
    num: int
    dataset: str = ""
    data: str = ""
    suite: str = ""
    arguments: tuple[str, ...] = ()


def cells_of(path: Path = CELLS) -> list[EvidenceCell]:
    """The cells of a file in their order; ConfigError for an unknown key."""
    known = read_toml(path)
    return [
        build(EvidenceCell, {**it, "methods": known["methods"][it["methods"]]}, str(path))
        for it in known["cell"]
    ]


def command_of(cell: EvidenceCell, model: str, data: Path, out: Path, num: int) -> list[str]:
    """What is run for it: so many questions, its result below ``out``."""
    what = [
        "dataset", cell.dataset, f"--data={data / cell.data}", "--controls", f"--num={num}",
        *(f"--method={it}" for it in cell.methods),
    ]  # fmt: skip
    if cell.suite:
        what = [cell.suite, f"--methods={','.join(cell.methods)}", f"--num-questions={num}"]
    return [
        "eval", *what, f"--model={model}", "--dtype=float32", *cell.arguments,
        f"--out={out / cell.name}.json", f"--markdown={out / cell.name}.md",
    ]  # fmt: skip


def main() -> int:
    """Run what is not finished; 0 where all is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for flag in ("--model", "--data", "--out"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--table", help="only the cells of this one")
    parser.add_argument("--num", type=int, help="only so many questions of each cell")
    parser.add_argument("--hours", type=float, help="stop then, to go on another time")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    end = None if args.hours is None else time.monotonic() + 3600 * args.hours
    cells = [cell for cell in cells_of() if args.table in (None, cell.table)]
    for cell in cells:
        num = min(args.num or cell.num, cell.num)
        command = command_of(cell, args.model, Path(args.data), out, num)
        process = subprocess.Popen([sys.executable, "-m", "jaxrag", *command], cwd=ROOT)
        try:
            code = process.wait(None if end is None else max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            print(f"{cell.name}: the time is over; the same command goes on here")
            return 1
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
