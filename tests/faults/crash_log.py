"""What a process tells before it is killed, and what must hold afterwards."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Change = list[tuple[int, int | None]]  # document or chunk, and its new version; None removes it

FRESH = 1_000_000  # versions that one process may hand out, from FRESH times its number


class WrongError(Exception):
    """Something acknowledged is lost, or something wrong is served."""


def require(holds: bool, what: str) -> None:
    """Raise WrongError unless it holds."""
    if not holds:
        raise WrongError(what)


class Log:
    """What a process tells before it dies: each line is whole in the kernel once written."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, kind: str, **fields: Any) -> None:
        """Append an event."""
        os.write(self._fd, json.dumps({"kind": kind, **fields}).encode() + b"\n")


def events(path: Path) -> list[dict[str, Any]]:
    """The events in a log so far; a line that was cut short is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def replay(told: Sequence[dict[str, Any]], state: dict[int, int]) -> Change:
    """Apply acknowledged changes to ``state``; returns the change that was under way."""
    change: Change = []
    for event in told:
        if event["kind"] == "begin":
            change = [(int(item), version) for item, version in event["change"]]
        elif event["kind"] == "done":
            for item, version in change:
                if version is None:
                    state.pop(item, None)
                else:
                    state[item] = version
            change = []
    return change
