"""Tables of what the suites found."""

from collections.abc import Mapping, Sequence
from typing import Any


def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown, numbers to the right."""
    right = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(head))]
    lines = [head, ["---:" if it else "---" for it in right], *rows]
    return "".join(f"| {' | '.join(map(shown, line))} |\n" for line in lines)


def shown(value: Any) -> str:
    """A cell; large numbers with commas."""
    return f"{value:,}" if isinstance(value, int) else str(value)


def foot(result: Mapping[str, Any]) -> str:
    """Where the numbers of a page are from."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"\n{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {versions}; "
        f"commit {machine['commit'][:12]}, {machine['time'][:10]}; {result['seconds']:,} s.\n"
    )
