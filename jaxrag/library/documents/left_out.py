"""What a reader left out of a file: counted by kind, with its places, and kept in the metadata."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

LEFT_OUT = "left_out"  # the field of metadata: [{"what": ..., "count": ..., "where": ...}, ...]
_PLACES = 5  # that are named


@dataclasses.dataclass
class LeftOut:
    """What was left out so far."""

    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    places: dict[str, list[str | int]] = dataclasses.field(default_factory=dict)

    def add(self, what: str, place: str | int | None = None, count: int = 1) -> None:
        """Count things of one kind; a place that is a number is a page or slide."""
        if not count:
            return
        self.counts[what] = self.counts.get(what, 0) + count
        places = self.places.setdefault(what, [])
        if place is not None and place not in places[-1:]:
            places.append(place)

    def metadata(self) -> dict[str, Any]:
        """The field of metadata, where anything was left out."""
        found = [
            {"what": what, "count": count, "where": _named(self.places[what])}
            for what, count in self.counts.items()
        ]
        return {LEFT_OUT: found} if found else {}


def left_out_of(metadata: Mapping[str, Any]) -> list[str]:
    """A line for each kind of what was left out of a document, by its metadata."""
    found = metadata.get(LEFT_OUT)
    lines = []
    for entry in found if isinstance(found, list) else []:
        if isinstance(entry, dict) and {"what", "count", "where"} <= entry.keys():
            where = f" ({entry['where']})" if entry["where"] else ""
            what = entry["what"] if entry["count"] != 1 else _one_of(entry["what"])
            lines.append(f"{entry['count']} {what}{where}")
    return lines


def _one_of(what: str) -> str:
    """The words for many things, for one: their first plural is made singular."""
    plural = next((word for word in what.split() if word.endswith("s")), "")
    return what.replace(plural, re.sub(r"(?<=[xh])es$|s$", "", re.sub("ies$", "y", plural)), 1)


def _named(places: Sequence[str | int]) -> str:
    """A few of the places; neighbouring numbers as "2 to 10"."""
    runs: list[str] = []
    numbers = itertools.count()
    for _, group in itertools.groupby(
        places, lambda it: it - next(numbers) if isinstance(it, int) else it
    ):
        first, *others = group
        runs.append(f"{first} to {others[-1]}" if others else str(first))
    more = f" and {len(runs) - _PLACES} more" if len(runs) > _PLACES else ""
    return ", ".join(runs[:_PLACES]) + more
