"""What is asked one by one, kept line by line, so that a killed run goes on where it was."""

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxrag.library.documents import Shard
from jaxrag.models.text.progress import announce, progress_bar
from jaxrag.serve.answer_files import AnswerFile, settings_path, written_once

ITEMS = ".items.jsonl"  # behind the name of the result's file
_LONG = 120.0  # seconds that are left of a run which says how long it will take

Line = dict[str, Any]  # JSON-able, what became of one item


class HasId(Protocol):
    """What has a name of its own in its run."""

    @property
    def id(self) -> str:
        """By which its line is known."""


def ask_all[Item: HasId](
    ask: Callable[[Item], Line],
    items: Sequence[Item],
    answers: AnswerFile,
    there: Iterable[Line] = (),
    shard: Shard | None = None,
    progress: bool = False,
    unit: str = "question",
) -> list[tuple[Item, Line]]:
    """Items with what was answered and the seconds of it, a line each, written as it comes.

    Args:
      ask: gives the line of an item.
      answers: what it holds is not asked again; closed at the end.
      there: of items that were finished elsewhere.
      shard: of the items, which alone are asked; None: all.
      unit: what an item is called.
    """
    shard = shard or Shard()
    lines = {line["id"]: line for line in there}
    with answers:
        own = [it for at, it in enumerate(items) if shard.holds_line(at)]
        waiting = [it for it in own if it.id not in answers.done and it.id not in lines]
        done = len(own) - len(waiting)
        ended: list[float] = []
        with progress_bar(len(own), "eval", unit, shown=progress, done=done) as bar:
            for item in waiting:
                begun = time.perf_counter()
                line = ask(item)
                ended.append(time.perf_counter())
                answers.write([line | {"seconds": round(ended[-1] - begun, 3)}])
                bar.update()
                if len(ended) == 3:  # the first one compiles programs
                    left = len(waiting) - len(ended)
                    text = _forecast((ended[2] - ended[0]) / 2, left, unit)
                    announce(text, shown=progress and bool(text))
    lines |= {line["id"]: line for line in lines_of(answers.path)}
    return [(item, lines[item.id]) for item in items if item.id in lines]


def _forecast(seconds: float, left: int, unit: str) -> str:
    """How long the rest will take at that pace; "" for a short run."""
    whole = seconds * left
    if whole < _LONG:
        return ""
    shown = f"{whole / 60:.0f} min" if whole < 7200 else f"{whole / 3600:.1f} h"
    return f"{left} {unit}s to go at {seconds:.1f} s each: about {shown}"


def lines_of(path: Path) -> list[Line]:
    """All of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@contextlib.contextmanager
def kept(out: str | None, exchange: Callable[[Any], list[Any]], first: bool) -> Iterator[Path]:
    """Where finished items are kept: beside the result, or for this run alone.

    ``exchange`` and ``first`` are as of ``written_once``.
    """
    if out is not None:
        with written_once(out + ITEMS, exchange, first) as path:
            yield path
        return
    with tempfile.TemporaryDirectory(prefix="jaxrag-") as folder:
        yield Path(folder) / "items.jsonl"


def forget(out: str | None) -> None:
    """Remove what is kept beside a result that is written now."""
    if out is not None:
        for file in (Path(out + ITEMS), settings_path(out + ITEMS)):
            file.unlink(missing_ok=True)
