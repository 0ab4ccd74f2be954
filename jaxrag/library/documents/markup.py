"""Readers of .rst and .org: reStructuredText and Org mode, in Markdown lines."""

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from jaxrag.library.documents.blocks import (
    Block,
    code,
    first_title,
    heading,
    item,
    joined,
    names,
    one_spaced,
    row,
)
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import File, decode_kept, parsing, read_bytes, require_short
from jaxrag.library.documents.html import html_text
from jaxrag.library.documents.text import first_heading

_MAX_LINE = 1 << 20  # characters; docutils would take 10,000
_DIRECTIVE = re.compile(r"^[ \t]*\.\. (?:\|[^|\n]{1,200}\| )?([A-Za-z][\w:.+-]{0,60}?)::", re.M)
_ROLE = re.compile(r":([A-Za-z][\w:.+-]{0,60}):`")
_TARGET = re.compile(r"(?s)(.+?)\s*<[^<>]*>")

# What shows something of elsewhere, or says how pages are made.
_WITHOUT_TEXT = names(
    "raw include literalinclude toctree contents index highlight currentmodule module meta image "
    "graphviz mermaid plot default-role sectionauthor codeauthor tabularcolumns"
)
_OF_CODE = names(
    "code-block sourcecode testcode testoutput testsetup testcleanup doctest ipython prompt "
    "productionlist"
)
_OTHERS = _WITHOUT_TEXT | _OF_CODE | {"class"}  # than docutils takes these for

_ORG_BLOCK = re.compile(r"[ \t]*#\+begin_(\w+)[ \t]*([\w+-]*)", re.I)
_ORG_LITERAL = ("src", "example", "export")  # blocks whose lines are no markup
_ORG_KEYWORD = re.compile(
    r"[ \t]*(?:#\+\w|#(?:[ \t]|$)|:[\w-]+:[ \t]*$)"
)  # comments and drawers too
_ORG_ITEM = re.compile(r"[ \t]*(?:[-+]|[ \t]\*|(\d+[.)]))[ \t]+(?=\S)")
_ORG_FIXED = re.compile(r"[ \t]*: ")  # lines that stand as they are
_ORG_RULE = re.compile(r"[ \t]*\|[-+|\s]*$")  # of a table


def read_rst(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: sections, lists, tables and code as docutils reads them, titled by the first.

    Nothing is included from other files, and nothing is passed on raw. What only Sphinx knows is
    read as far as it is text: the words of a role, the content of a directive. A piece that
    docutils refuses stays as it was written.
    """
    text = decode_kept(read_bytes(stream), file.left_out, file.options.encoding)
    with parsing("reStructuredText"):
        page = _page(text)
        require_short(len(page))  # substitutions may say a thing many times
        body = html_text(page, file.left_out)[1]
    yield file.document(body, first_heading(body))


def _page(text: str) -> str:
    """What docutils reads, as a web page that shows nothing of other files."""
    import docutils.core  # only who reads reStructuredText waits for it
    from docutils import nodes

    _know(text)
    settings = {
        "_disable_config": True, "doctitle_xform": False, "docinfo_xform": False,
        "file_insertion_enabled": False, "raw_enabled": False, "halt_level": 5, "report_level": 5,
        "warning_stream": False, "line_length_limit": _MAX_LINE, "syntax_highlight": "none",
        "input_encoding": "unicode", "output_encoding": "unicode", "stylesheet_path": "",
        "initial_header_level": 1, "embed_stylesheet": False,
    }  # fmt: skip
    tree = docutils.core.publish_doctree(text, settings_overrides=settings)
    for message in list(tree.findall(nodes.system_message)):  # keeps what was refused
        message.parent.replace(message, list(message.findall(nodes.literal_block)))
    for picture in list(tree.findall(nodes.image)):
        picture.parent.replace(picture, nodes.inline("", picture.get("alt", "")))
    for dropped in list(tree.findall(lambda it: isinstance(it, nodes.raw | nodes.decoration))):
        dropped.parent.remove(dropped)
    return str(
        docutils.core.publish_from_doctree(tree, writer="html5", settings_overrides=settings)
    )


def _know(text: str) -> None:
    """Have docutils take the directives and roles of a text that it does not know by itself."""
    from docutils.parsers.rst import directives, roles
    from docutils.parsers.rst.languages import en

    for name in {role.lower() for role in _DIRECTIVE.findall(text)}:
        if name in _OTHERS or name not in en.directives:
            directives.register_directive(name, _directive(name))
    for name in {role.lower() for role in _ROLE.findall(text)}:
        if name not in en.roles:
            roles.register_local_role(name, _role)
    roles.register_local_role("raw", _role)


def _directive(name: str) -> Any:
    from docutils import nodes
    from docutils.parsers.rst import Directive

    class Unknown(Directive):
        optional_arguments = 1
        final_argument_whitespace = True
        has_content = True
        option_spec = _AnyOption(any=str)

        def run(self) -> list[Any]:
            if name in _WITHOUT_TEXT:
                return []
            argument = self.arguments[0] if self.arguments else ""
            if name in _OF_CODE:
                lines = "\n".join(self.content)
                return [nodes.literal_block(lines, lines, classes=argument.split())]
            made = nodes.container()
            if argument:
                made += nodes.paragraph("", "", *self.state.inline_text(argument, self.lineno)[0])
            self.state.nested_parse(self.content, self.content_offset, made)
            return [made]

    return Unknown


class _AnyOption(dict[str, Any]):
    """Options of any name and value."""

    def __missing__(self, name: str) -> Any:
        return str


def _role(
    name: str, rawtext: str, text: str, lineno: int, inliner: Any, options: Any = None,
    content: Any = None,
) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """The words of a role, without the target behind them in angle brackets."""
    from docutils import nodes, utils

    shown = utils.unescape(text)
    found = _TARGET.fullmatch(shown)
    return [nodes.inline(rawtext, found.group(1) if found else shown.lstrip("~!"))], []


def read_org(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document, titled by ``#+TITLE:`` or else its first heading.

    States, priorities, tags, properties, planned times, comments and keywords are left out; of a
    link its words are kept, and what a block of code holds. Nothing is included or run.
    """
    import orgparse  # only who reads Org waits for it

    text = decode_kept(read_bytes(stream), file.left_out, file.options.encoding)
    with parsing("Org"):
        root = orgparse.loads(text)
        titles = root.get_file_property_list("TITLE")
        blocks: list[Block] = []
        for node in root.env.nodes:
            if not node.is_root():
                blocks.append(heading(node.level, node.heading))
            blocks += _org_blocks(node.get_body(format="plain"))
    yield file.document(joined(blocks), one_spaced(" ".join(titles)) or first_title(blocks))


def _org_blocks(body: str) -> Iterator[Block]:
    """The blocks below one heading."""
    lines: list[str] = []  # of the paragraph or item under way
    rest = iter(body.split("\n"))
    for line in rest:
        if begun := _ORG_BLOCK.match(line):
            kind, language = begun.group(1).lower(), begun.group(2)
            if kind in _ORG_LITERAL:
                yield _paragraph(lines)
                yield code("\n".join(_until_end(rest, kind)), language if kind == "src" else "")
        elif not line.strip() or _ORG_KEYWORD.match(line):
            yield _paragraph(lines)
        elif line.lstrip().startswith("|"):
            yield _paragraph(lines)
            if not _ORG_RULE.match(line):
                yield row(one_spaced(cell) for cell in line.strip().strip("|").split("|"))
        elif _ORG_FIXED.match(line):
            yield _paragraph(lines)
            yield "fixed", line.strip().removeprefix(":").strip()
        else:
            if _ORG_ITEM.match(line):
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
    match = _ORG_ITEM.match(text)
    if match and match[1]:
        return "item", one_spaced(text)  # under the number that it shows
    return item(one_spaced(text[match.end() :])) if match else ("", one_spaced(text))
