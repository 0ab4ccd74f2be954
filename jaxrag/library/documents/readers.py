"""Which reader reads which kind of file: one line of ``_TABLE`` each."""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Reader:
    """How files of one kind are read.

    Attributes:
      read: gives the documents of an open file.
      suffixes: that their names end with, in small letters.
      needs: a package that it imports and only the extra "documents" brings; "": none.
      apart: its parser builds trees, or is a program of others: it runs in a process of its own.
      records: such a file holds many documents, each with an id of its own.
    """

    read: FileReader
    suffixes: tuple[str, ...]
    needs: str = ""
    apart: bool = False
    records: bool = False


_TABLE = (
    Reader(read_text, (".txt", ".text", ".log", ".md", ".markdown", ".mdx")),
    Reader(read_json_lines, (".jsonl",), records=True),
    Reader(read_json, (".json",), apart=True, records=True),
    Reader(read_table, (".csv", ".tsv"), records=True),
    Reader(read_html, (".html", ".htm"), apart=True),
    Reader(read_pdf, (".pdf",), needs="pypdfium2", apart=True),
    Reader(read_docx, (".docx",), needs="docx", apart=True),
    Reader(read_pptx, (".pptx",), needs="pptx", apart=True),
    Reader(read_xlsx, (".xlsx",), needs="openpyxl", apart=True),
    Reader(read_epub, (".epub",), apart=True),
    Reader(read_rst, (".rst",), needs="docutils", apart=True),
    Reader(read_org, (".org",), needs="orgparse", apart=True),
    Reader(read_notebook, (".ipynb",), apart=True),
    Reader(read_mail, (".eml",), apart=True),
)
READERS = {suffix: reader for reader in _TABLE for suffix in reader.suffixes}
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
    reader = READERS.get(Path(filename).suffix.lower())
    return reader is not None and reader.records


def is_without_text(filename: str) -> bool:
    """Whether a file of that name holds no text by its nature, as a picture does."""
    return filename.lower().rpartition(".")[2] in _WITHOUT_TEXT


def is_parsed_apart(filename: str) -> bool:
    """Whether a file of that name is to be parsed in a process of its own."""
    reader = READERS.get(Path(filename).suffix.lower())
    return reader is not None and reader.apart


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
    reader = READERS.get(file.suffix)
    if reader is None:
        fix = _FIXES.get(file.suffix, "convert it")
        yield file.bad(f"file type {file.suffix!r} is not one of {', '.join(READERS)}; {fix}")
        return
    if reader.needs and importlib.util.find_spec(reader.needs) is None:
        yield file.bad(f"{reader.needs} is not installed; {installs('documents')} does it")
        return
    try:
        yield from reader.read(stream, file)
    except DocumentError as error:
        yield file.bad(error)
    except OSError as error:
        yield file.bad(f"cannot be read ({error.strerror or error})")
