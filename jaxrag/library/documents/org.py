"""Reader of .org: the headings, prose, tables and blocks of Emacs' Org mode."""

import re
from collections.abc import Iterator
from typing import BinaryIO

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.blocks import Block, code, heading, item, joined, one_spaced, row
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import File, decode, parsing, read_bytes

_BLOCK = re.compile(r"[ \t]*#\+begin_(\w+)[ \t]*([\w+-]*)", re.I)
_LITERAL = ("src", "example", "export")  # blocks whose lines are no markup
_KEYWORD = re.compile(r"[ \t]*(?:#\+\w|#(?:[ \t]|$)|:[\w-]+:[ \t]*$)")  # comments and drawers too
_ITEM = re.compile(r"[ \t]*(?:[-+]|[ \t]\*|\d+[.)])[ \t]+(?=\S)")
_FIXED = re.compile(r"[ \t]*: ")  # lines that stand as they are
_RULE = re.compile(r"[ \t]*\|[-+|\s]*$")  # of a table


def read_org(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document, titled by ``#+TITLE:`` or else its first heading.

    States, priorities, tags, properties, planned times, comments and keywords are left out; of a
    link its words are kept, and what a block of code holds. Nothing is included or run.
    """
    import orgparse  # only who reads Org waits for it

    text = decode(read_bytes(stream), file.options.encoding)
    with parsing("Org"):
        root = orgparse.loads(text)
        titles = root.get_file_property_list("TITLE")
        blocks: list[Block] = []
        for node in root.env.nodes:
            if not node.is_root():
                blocks.append(heading(node.level, node.heading))
            blocks += _blocks(node.get_body(format="plain"))
    body = joined(blocks)
    if not body:
        raise DocumentError("holds no text; leave the file out")
    title = one_spaced(" ".join(titles)) or next(
        (it[2:] for _, it in blocks if it.startswith("# ")), ""
    )
    yield Document(file.name, body, title or file.path.stem, file.reported)


def _blocks(body: str) -> Iterator[Block]:
    """The blocks below one heading."""
    lines: list[str] = []  # of the paragraph or item under way
    rest = iter(body.split("\n"))
    for line in rest:
        if begun := _BLOCK.match(line):
            kind, language = begun.group(1).lower(), begun.group(2)
            if kind in _LITERAL:
                yield _paragraph(lines)
                yield code("\n".join(_until_end(rest, kind)), language if kind == "src" else "")
        elif not line.strip() or _KEYWORD.match(line):
            yield _paragraph(lines)
        elif line.lstrip().startswith("|"):
            yield _paragraph(lines)
            if not _RULE.match(line):
                yield row(one_spaced(cell) for cell in line.strip().strip("|").split("|"))
        elif _FIXED.match(line):
            yield _paragraph(lines)
            yield "fixed", line.strip().removeprefix(":").strip()
        else:
            if _ITEM.match(line):
                yield _paragraph(lines)
            lines.append(line)
    yield _paragraph(lines)


def _until_end(lines: Iterator[str], kind: str) -> Iterator[str]:
    """The lines of a block; those that would be markup stand there behind a comma."""
    for line in lines:
        if line.strip().lower() == f"#+end_{kind}":
            return
        yield re.sub(r"^(\s*),(?=\*|,|#\+)", r"\1", line)


def _paragraph(lines: list[str]) -> Block:
    """The lines that were gathered, which are then gathered anew."""
    text = " ".join(lines)
    lines.clear()
    found = _ITEM.match(text)
    return item(one_spaced(text[found.end() :])) if found else ("", one_spaced(text))
