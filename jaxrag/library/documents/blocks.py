"""The form that readers of structured files give to text: Markdown lines, and rows of cells.

A block is its kind and its text: "item" of a list, "row" of a table, "" for a heading, a paragraph
or code. Rows stand one a line, and so do items; all else stands apart by empty lines.
"""

from collections.abc import Iterable

Block = tuple[str, str]


def joined(blocks: Iterable[Block]) -> str:
    """The text of all blocks that hold any."""
    pieces: list[str] = []
    before = None
    for kind, text in blocks:
        if not text:
            continue
        if pieces:
            pieces.append("\n" if kind and kind == before else "\n\n")
        pieces.append(text)
        before = kind
    return "".join(pieces)


def first_title(blocks: Iterable[Block]) -> str:
    """The first heading of level 1; '' without one."""
    return next((text[2:] for _, text in blocks if text.startswith("# ")), "")


def heading(level: int, text: str) -> Block:
    """A heading of level 1, 2 and so on; those below 6 are of 6."""
    text = one_spaced(text)
    return "", "#" * min(level, 6) + " " + text if text else ""


def item(text: str) -> Block:
    """An item of a list."""
    return "item", "- " + text if text else ""


def row(cells: Iterable[str]) -> Block:
    """A row of a table, its cells between bars; one cell alone is a paragraph."""
    filled = list(cells)
    some = [cell for cell in filled if cell]
    return ("row", " | ".join(filled)) if len(some) > 1 else ("", "".join(some))


def code(text: str, language: str = "") -> Block:
    """Lines that stand as they were written."""
    text = text.strip("\n")
    return "", f"```{language}\n{text}\n```" if text.strip() else ""


def names(text: str) -> frozenset[str]:
    """The words of a text: tags, directives."""
    return frozenset(text.split())


def one_spaced(text: str) -> str:
    """On one line, with one space between words."""
    return " ".join(text.split())
