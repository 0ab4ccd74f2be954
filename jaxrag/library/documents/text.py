"""Readers of plain text, Markdown (with its front matter) and .ipynb (without its outputs)."""

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import File, decode, decode_kept, parse_json, read_bytes
from jaxrag.library.documents.metadata import front_matter

_MARKDOWN = (".md", ".markdown", ".mdx")
_NOTEBOOK = 4  # their format since 2015
# ![alternative text](data:...), [link](data:...), ![of a cell](attachment:...),
# [name]: data:..., <img src="data:...">
_DATA = re.compile(
    r"!?\[([^\[\]\n]{0,500})\]\(\s{0,9}<?(?:attachment:|data:[\w.+-]{1,99}/)[^\s()<>\[\]!]*+>?"
    r"[^)\n]{0,500}\)"
    r"|^[ ]{0,3}\[[^\[\]\n]{1,500}\]:[ ]{0,9}<?data:[\w.+-]{1,99}/\S*+[^\n]{0,500}$"
    r"|<img\b[^<>]{0,500}?\bsrc=[\"']?data:[^\"'<>\s]*+[^<>]{0,500}>",
    re.MULTILINE,
)
_ALT = re.compile(r"""\balt=["']([^"'<>]{0,500})""")
_HEADING = re.compile(r"^# (.*)$", re.MULTILINE)  # linear in the text: no part can share another's


def read_text(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: the whole file, titled by its name.

    The front matter of Markdown is its metadata, but for a ``title``, which names it; without one
    its first heading does.
    """
    text = decode_kept(read_bytes(stream), file.left_out, file.options.encoding)
    title, metadata = "", dict[str, Any]()
    if file.suffix in _MARKDOWN:
        metadata, body = front_matter(text, file.left_out)
        text = _without_data(body if body.strip() else text, file)
        if isinstance(metadata.get("title"), str):
            title = metadata.pop("title")
        title = title.strip() or first_heading(text)
    known = {**metadata, **file.left_out.metadata()}
    yield Document(file.name, text, title or file.path.stem, file.reported, known)


def first_heading(text: str) -> str:
    """The first level-1 heading of a Markdown text that says something, or ''."""
    headings = (found.group(1).lstrip(" ").rstrip(" #") for found in _HEADING.finditer(text))
    return next(filter(None, headings), "")


def read_notebook(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: prose as it is, code between fences; outputs are left out.

    It is titled by the first heading.
    """
    notebook = parse_json(decode(read_bytes(stream)), "a notebook")
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise DocumentError(
            f"is no notebook of format {_NOTEBOOK}; convert it with "
            "`jupyter nbconvert --to notebook`"
        )
    language = _language(notebook.get("metadata"))
    prose, parts = [], []
    for cell in notebook["cells"]:
        kind, source = _cell(cell)
        printed = cell.get("outputs")
        file.left_out.add("outputs", count=len(printed) if isinstance(printed, list) else 0)
        if not source.strip():
            continue
        if kind == "code":
            parts.append(f"```{language}\n{source}\n```")
        else:
            source = _without_data(source, file)
            prose.append(source)
            parts.append(source)
    title = first_heading("\n".join(prose))
    empty = "holds no cell with text; leave the file out"
    yield file.document("\n\n".join(parts), title, empty=empty)


def _without_data(text: str, file: File) -> str:
    """A Markdown text without pictures that stand in it as base64; their alternative text stays."""

    def said(found: re.Match[str]) -> str:
        alt = _ALT.search(found[0])
        return found[1] or (alt[1] if alt else "")

    text, count = _DATA.subn(said, text)
    file.left_out.add("pictures inlined as data", count=count)
    return text


def _cell(cell: Any) -> tuple[str, str]:
    """Kind and text of a cell, whose lines may be listed."""
    source = cell.get("source", "") if isinstance(cell, dict) else None
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        raise DocumentError("has a cell without a text for its source; save the notebook anew")
    return str(cell.get("cell_type")), source.strip("\n")


def _language(metadata: Any) -> str:
    found = metadata.get("language_info") if isinstance(metadata, dict) else None
    name = found.get("name") if isinstance(found, dict) else None
    return name if isinstance(name, str) and name.isalnum() else ""
