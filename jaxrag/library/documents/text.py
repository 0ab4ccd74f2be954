"""Readers of .txt and .md (with its front matter)."""

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import File, decode, read_bytes
from jaxrag.library.documents.metadata import front_matter

_HEADING = re.compile(r"^# (.*)$", re.MULTILINE)  # linear in the text: no part can share another's


def read_text(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document: the whole file, titled by its name.

    The front matter of Markdown is its metadata, but for a ``title``, which names it; without one
    its first heading does.
    """
    text = decode(read_bytes(stream), file.options.encoding)
    title, metadata = "", dict[str, Any]()
    if file.suffix == ".md":
        metadata, text = front_matter(text)
        if isinstance(metadata.get("title"), str):
            title = metadata.pop("title")
        title = title.strip() or first_heading(text)
    yield Document(file.name, text, title or file.path.stem, file.reported, metadata)


def first_heading(text: str) -> str:
    """The first level-1 heading of a Markdown text that says something, or ''."""
    headings = (found.group(1).lstrip(" ").rstrip(" #") for found in _HEADING.finditer(text))
    return next(filter(None, headings), "")
