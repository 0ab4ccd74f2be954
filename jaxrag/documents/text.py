"""Readers of .txt and .md."""

import re
from collections.abc import Iterator
from typing import BinaryIO

from jaxrag.documents.document import BadDocument, Document
from jaxrag.documents.files import File, decode, read_bytes

_HEADING = re.compile(r"^# (.*)$", re.MULTILINE)  # linear in the text: no part can share another's


def read_text(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: the whole file, titled by its name or, in Markdown, its first heading."""
    text = decode(read_bytes(stream), file.options.encoding)
    title = first_heading(text) if file.suffix == ".md" else ""
    yield Document(file.name, text, title or file.path.stem, file.reported)


def first_heading(text: str) -> str:
    """The first level-1 heading of a Markdown text that says something, or ''."""
    headings = (found.group(1).lstrip(" ").rstrip(" #") for found in _HEADING.finditer(text))
    return next(filter(None, headings), "")
