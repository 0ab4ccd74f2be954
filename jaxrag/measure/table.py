"""Tables of results: rows of text under a title, and the same as Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """A title and rows of cells, the first of them the heading.

    ``names`` says how many columns of text stand before the columns of numbers.
    """

    title: str
    rows: list[list[str]]
    names: int = 1

    def markdown(self) -> str:
        """The rows under the title as a sentence."""
        title = f"{self.title[0].upper()}{self.title[1:]}."
        return f"{title}\n\n{markdown_rows(self.rows, self.names)}\n"


def markdown_rows(rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """Rows, the first of them the heading, with ``names`` columns of text, as a Markdown table."""
    head, *others = rows
    rule = ["---"] * names + ["---:"] * (len(head) - names)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *others))


def page(tables: Iterable[Table]) -> str:
    """All tables as Markdown, each under its title."""
    return "\n".join(table.markdown() for table in tables)


def shown(estimate: Mapping[str, float] | None, form: str) -> str:
    """95.8 [95.1, 96.4], from fractions."""
    if estimate is None:
        return "undefined"
    value, low, high = (100 * estimate[name] for name in ("value", "low", "high"))
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def percent(estimate: Mapping[str, float] | None) -> str:
    """A share with its interval, in %."""
    return shown(estimate, ".1f")


def points(estimate: Mapping[str, float] | None) -> str:
    """A difference of shares with its interval, in points."""
    return shown(estimate, "+.1f")
