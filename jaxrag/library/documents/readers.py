"""Which reader reads which kind of file."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jaxrag.base.errors import DocumentError
from jaxrag.base.installed import installs
from jaxrag.library.documents.delimited import read_table
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.epub import read_epub
from jaxrag.library.documents.files import File, FileReader, ReadOptions
from jaxrag.library.documents.html import read_html
from jaxrag.library.documents.mail import read_mail
from jaxrag.library.documents.markup import read_org, read_rst
from jaxrag.library.documents.pdf import read_pdf
from jaxrag.library.documents.records import read_json, read_json_lines
from jaxrag.library.documents.sheets import read_xlsx
from jaxrag.library.documents.slides import read_pptx
from jaxrag.library.documents.text import read_notebook, read_text
from jaxrag.library.documents.word import read_docx

_READERS: dict[str, FileReader] = {
    ".txt": read_text,
    ".text": read_text,
    ".log": read_text,
    ".md": read_text,
    ".markdown": read_text,
    ".mdx": read_text,
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".csv": read_table,
    ".tsv": read_table,
    ".html": read_html,
    ".htm": read_html,
    ".pdf": read_pdf,
    ".docx": read_docx,
    ".pptx": read_pptx,
    ".xlsx": read_xlsx,
    ".epub": read_epub,
    ".rst": read_rst,
    ".org": read_org,
    ".ipynb": read_notebook,
    ".eml": read_mail,
}
# Packages that a reader imports and only the extra "documents" brings.
_NEEDS = {
    ".pdf": "pypdfium2",
    ".docx": "docx",
    ".pptx": "pptx",
    ".xlsx": "openpyxl",
    ".rst": "docutils",
    ".org": "orgparse",
}
_RECORDS = (".jsonl", ".json", ".csv", ".tsv")  # of many documents, each with an id of its own
# Their parsers build trees, or are programs of others: they run in a process of their own.
_APART = (
    ".json", ".html", ".htm", ".pdf", ".docx", ".pptx", ".xlsx", ".epub", ".rst", ".org", ".ipynb",
    ".eml",
)  # fmt: skip
_FIXES = {
    ".xls": "save it as .xlsx",
    ".xlsm": "save it as .xlsx",
    ".xlsb": "save it as .xlsx",
    ".ods": "save it as .xlsx",
    ".ppt": "save it as .pptx",
    ".pptm": "save it as .pptx",
    ".odp": "save it as .pptx",
    ".doc": "save it as .docx",
    ".docm": "save it as .docx",
    ".odt": "save it as .docx",
    ".mobi": "convert it to .epub",
    ".azw3": "convert it to .epub",
    ".tex": "convert it, as with `pandoc FILE -o FILE.md`",
}
# Pictures, sound, archives and programs: no text is expected of them.
_NO_TEXT = (
    "png jpg jpeg gif bmp tif tiff webp ico heic svg psd mp3 wav ogg flac m4a mp4 mov avi mkv webm "
    "zip gz bz2 xz zst 7z rar tar tgz iso dmg exe dll so dylib o a class jar whl pyc "
    "ttf otf woff woff2 bin npy npz safetensors sqlite db"
)
_WITHOUT_TEXT = frozenset(_NO_TEXT.split())


def is_of_records(filename: str) -> bool:
    """Whether a file of that name holds many documents, each with an id of its own."""
    return filename.lower().endswith(_RECORDS)


def is_without_text(filename: str) -> bool:
    """Whether a file of that name holds no text by its nature, as a picture does."""
    return filename.lower().rpartition(".")[2] in _WITHOUT_TEXT


def is_parsed_apart(filename: str) -> bool:
    """Whether a file of that name is to be parsed in a process of its own."""
    return filename.lower().endswith(_APART)


def read_open(
    stream: BinaryIO,
    filename: str | Path,
    name: str,
    options: ReadOptions | None = None,
    reported: str | None = None,
) -> Iterator[Document | BadDocument]:
    """The documents of an open file that has another name than where it lies.

    Args:
      stream: its bytes, from the first.
      filename: says what kind of file it is and titles its document.
      name: what its document is called, as ``read_paths`` calls it by its path.
      reported: the ``file`` of its documents.

    Whatever cannot be read comes as a BadDocument.
    """
    file = File(Path(filename), name, options or ReadOptions(), reported)
    reader = _READERS.get(file.suffix)
    if reader is None:
        fix = _FIXES.get(file.suffix, "convert it")
        yield file.bad(f"file type {file.suffix!r} is not one of {', '.join(_READERS)}; {fix}")
        return
    needed = _NEEDS.get(file.suffix)
    if needed is not None and importlib.util.find_spec(needed) is None:
        yield file.bad(f"{needed} is not installed; {installs('documents')} does it")
        return
    try:
        yield from reader(stream, file)
    except DocumentError as error:
        yield file.bad(error)
    except OSError as error:
        yield file.bad(f"cannot be read ({error.strerror or error})")
