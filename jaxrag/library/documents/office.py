"""Reader of .pdf: its text layer, page by page."""

import collections
import io
import itertools
import unicodedata
from collections.abc import Iterator
from typing import Any, BinaryIO

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import (
    BETWEEN_PAGES,
    File,
    join_pages,
    one_line,
    parsing,
    read_bytes,
    require_short,
)

_FULL_LINE = 0.9  # of the longest line of its page


def read_pdf(stream: BinaryIO, file: File) -> Iterator[Document | BadDocument]:
    """One document with its pages. A page that cannot be read is reported, the others are kept.

    Refused: a file that needs a password, one without a text layer (a scan), one of more than
    MAX_TEXT_CHARACTERS. The parser bounds what a compressed stream may grow to.
    """
    data = read_bytes(stream)
    with parsing("PDF"):
        reader = _open(data)
        num_pages = len(reader.pages)
    texts: list[str] = []
    pictured: list[int] = []
    size = bad = 0
    for number in range(num_pages):
        try:
            text = _clean(reader.pages[number].extract_text())
            pictured += [number] if _has_picture(reader.pages[number]) else []
        except MemoryError:
            raise
        except Exception as error:
            yield file.bad(f"the page cannot be parsed ({one_line(error)})", f", page {number + 1}")
            text = ""
            bad += 1
        texts.append(text)
        size += len(text) + len(BETWEEN_PAGES)
        require_short(size)
    times = collections.Counter(texts)
    for number in pictured:
        if not texts[number]:
            file.left_out.add("pages with pictures and no text", number + 1)
        elif times[texts[number]] > 1:
            what = "pages with pictures and only a text that other pages have"
            file.left_out.add(what, number + 1)
    body, pages = join_pages(texts)
    if body or not bad or bad < num_pages:
        empty = f"no text layer on its {num_pages} pages; run text recognition (OCR) on it first"
        yield file.document(body, _title(reader), pages=pages, empty=empty)


def _has_picture(page: Any) -> bool:
    try:
        drawn = page["/Resources"]["/XObject"].values()
        return any(it.get_object().get("/Subtype") == "/Image" for it in drawn)
    except (KeyError, AttributeError, TypeError):  # none, or not as the format has it
        return False


def _open(data: bytes) -> Any:
    import pypdf  # only who reads PDF waits for it

    reader = pypdf.PdfReader(io.BytesIO(data), strict=False)
    if reader.is_encrypted:
        try:
            opened = bool(reader.decrypt(""))  # files that only restrict printing open so
        except Exception:
            opened = False
        if not opened:
            raise DocumentError("is encrypted; save a copy of it without a password")
    return reader


def _title(reader: Any) -> str:
    try:
        title = reader.metadata.title if reader.metadata else None
    except Exception:
        return ""
    found = " ".join(_clean(title).split()) if isinstance(title, str) else ""
    return "" if found.lower() == "untitled" else found  # what programs write for none


def _clean(text: str) -> str:
    """Text as a broken font map may leave it, without NULs and halves of surrogate pairs.

    Scripts without spaces wrap inside of words: there a line that fills its width goes on with the
    next one.
    """
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    lines = [line.rstrip() for line in whole.replace("\0", "").splitlines()]
    full = _FULL_LINE * max(map(len, lines), default=0)
    out = ""
    for line, following in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        wraps = len(line) >= full and _is_wide(line[-1:]) and _is_wide(following[:1])
        out += line if wraps else line + "\n"
    return out.strip()


def _is_wide(character: str) -> bool:
    """Whether it belongs to a script of wide characters, such as Chinese; not for ''."""
    return character != "" and unicodedata.east_asian_width(character) == "W"
