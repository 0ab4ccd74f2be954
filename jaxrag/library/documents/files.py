"""What every reader of files works with: the file, the options, bytes within bounds, text.

Files that are zip archives of XML are unpacked within bounds, and nothing but their text.
"""

import codecs
import contextlib
import dataclasses
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.left_out import LeftOut

MAX_FILE_BYTES = 256 << 20  # of a file that is read as a whole
MAX_LINE_BYTES = 64 << 20  # of a file that is read line by line
MAX_TEXT_CHARACTERS = 64 << 20  # of the text that a file is unpacked to
MAX_TAGS = 4 << 20  # of markup that is parsed as a whole: its tree takes far more than its bytes
MAX_VALUES = 4 << 20  # objects and lists in JSON that is parsed as a whole
MAX_CELLS = 256 << 10  # of a row of a table
BETWEEN_PAGES = "\n\n"

_MOST_BAD = 5  # characters of text, for one that is not decoded
_WIDE = re.compile(r"(?i)gb|big5|.*(?:jis|euc|cp9|2022|utf)")  # of several bytes a character
_HIGH = bytes(range(0x80, 0x100))
_BINARY = re.compile(r"[\0-\x06\x0e-\x19]")
# Who names the left one means the right one, as browsers read it.
_MEANT = {
    "iso-8859-1": "cp1252",
    "latin1": "cp1252",
    "us-ascii": "cp1252",
    "ascii": "cp1252",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "ks_c_5601-1987": "cp949",
    "euc-kr": "cp949",
    "utf-16": "utf-8",
}
_NO_MEMORY = 2  # XML_ERR_NO_MEMORY of libxml2
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
MAX_PART_BYTES = 64 << 20  # of one part once it is unpacked
MAX_UNPACKED_BYTES = 128 << 20  # of all of them

_PIECE = 1 << 16  # bytes that are unpacked at a time
_OLE = b"\xd0\xcf\x11\xe0"  # how Office stores what needs a password, and stored all until 2007


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """How files are read.

    Attributes:
      encoding: of text files without a byte order mark that are not UTF-8, or of all of them where
        it has several bytes a character; None: for .html what the page declares.
      text_field: the key or column that holds the text of a record; None is "text", and in tables
        the first of "text", "content" and "body" that is there, or all columns.
      follow_links: read what links inside a folder name outside of it, and links to folders.

    Raises DocumentError for an encoding that does not exist.
    """

    encoding: str | None = None
    text_field: str | None = None
    follow_links: bool = False

    def __post_init__(self) -> None:
        if self.encoding is not None and not is_encoding(self.encoding):
            raise DocumentError(
                f"encoding {self.encoding!r} is unknown; expected one such as utf-8, gb18030, "
                "big5, shift_jis or cp1252"
            )


@dataclasses.dataclass(frozen=True)
class File:
    """A file that is being read, and the name its document gets."""

    path: Path
    name: str
    options: ReadOptions
    reported: str | None = None  # what hits report as its path
    left_out: LeftOut = dataclasses.field(default_factory=LeftOut, compare=False)

    @property
    def suffix(self) -> str:
        """The kind of file, in lower case, with its dot."""
        return self.path.suffix.lower()

    def bad(self, reason: object, where: str = "") -> BadDocument:
        """The file, or one place in it, as a BadDocument."""
        return BadDocument(f"{self.path}{where}", str(reason))

    def document(
        self,
        text: str,
        title: str = "",
        metadata: Mapping[str, Any] = {},
        pages: tuple[int, ...] = (),
        *,
        empty: str = "holds no text; leave the file out",
    ) -> Document:
        """The file as one document, titled by its name where it has no title.

        Its metadata name what was ``left_out``. Raises DocumentError for one without text, which
        says ``empty``.
        """
        if not text.strip():
            raise DocumentError(empty)
        title = title or self.path.stem
        known = {**metadata, **self.left_out.metadata()}
        return Document(self.name, text, title, self.reported, known, pages)


FileReader = Callable[[BinaryIO, File], Iterator[Document | BadDocument]]


def is_encoding(name: str) -> bool:
    """Whether Python can decode text from it and encode text to it."""
    try:
        return "\n".encode(name).decode(name) == "\n"
    except (LookupError, ValueError, TypeError):
        return False


def read_bytes(stream: BinaryIO, limit: int = MAX_FILE_BYTES) -> bytes:
    """All bytes of a file; DocumentError when there are more than ``limit``, which are not read."""
    size = stream.seek(0, io.SEEK_END)
    if size > limit:
        raise DocumentError(f"is larger than {limit >> 20} MiB; split the file")
    stream.seek(0)
    return stream.read(size)


def require_few_tags(markup: bytes) -> None:
    """DocumentError where XML or HTML holds more than MAX_TAGS tags."""
    if markup.count(b"<") > MAX_TAGS:
        raise DocumentError(f"holds more than {MAX_TAGS >> 20} Mi tags; split the file")


def parse_json(text: str, expected: str) -> Any:
    """JSON that is parsed as a whole; DocumentError for what is none or holds too many values."""
    if text.count("{") + text.count("[") > MAX_VALUES:
        raise DocumentError(
            f"holds more than {MAX_VALUES >> 20} Mi objects and lists; split it into JSON lines"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"not JSON ({error}); expected {expected}") from None


def require_short(characters: int) -> None:
    """DocumentError where a file is unpacked to more than MAX_TEXT_CHARACTERS."""
    if characters > MAX_TEXT_CHARACTERS:
        raise DocumentError(f"holds more than {MAX_TEXT_CHARACTERS >> 20} Mi characters; split it")


def marked_encoding(data: bytes) -> str | None:
    """The encoding that a byte order mark states, if there is one."""
    return next((name for mark, name in _MARKS.items() if data.startswith(mark)), None)


def decode(data: bytes, encoding: str | None = None) -> str:
    """Strictly decoded text without its byte order mark; line ends become LF.

    A mark decides, else ``encoding``, else it is UTF-8. Raises DocumentError.
    """
    name = marked_encoding(data) or encoding or "utf-8"
    try:
        text = data.decode(name)
    except UnicodeError as error:
        at = f"byte {error.start}" if isinstance(error, UnicodeDecodeError) else "the text"
        known = name.removesuffix("-sig").upper()
        raise DocumentError(
            f"{at} is not {known}; save the file as UTF-8 or name its encoding"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def decode_kept(data: bytes, left_out: LeftOut, declared: str | None = None) -> str:
    """Text of bytes that may say the wrong encoding, or hold some that are of none.

    A byte order mark decides. Else what is UTF-8 is read so, unless ``declared`` has more than one
    byte a character and fits; then as declared; and what fits nothing as cp1252, or with
    replacement characters, which ``left_out`` counts. Raises DocumentError for what is no text.
    """
    known = _MEANT.get((declared or "").lower(), declared)
    known = known if known and is_encoding(known) else None
    name = marked_encoding(data) or known or "utf-8"
    fits = [name] if marked_encoding(data) else ["utf-8", name]
    for encoding in fits[:: -1 if known and _WIDE.match(known) else 1]:
        with contextlib.suppress(DocumentError):
            return decode(data, encoding)
    text = data.decode(name, "replace")
    bad = text.count("\ufffd")
    whole = len(text) - len(text.encode("ascii", "ignore")) - bad
    if name == "utf-8" and bad > whole:
        text, bad = data.decode("cp1252", "replace"), len(data) - len(data.translate(None, _HIGH))
        left_out.add("bytes not in UTF-8, read as cp1252", count=bad)
    else:
        left_out.add(f"bytes not in {name.upper()}", count=bad)
    if bad * _MOST_BAD > len(text) or _BINARY.search(text):
        return decode(data, name)  # says which byte
    return text.replace("\r\n", "\n").replace("\r", "\n")


def join_pages(texts: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    """The text of all pages, and the first character of each; one without text takes no room."""
    starts = [0]
    for text in texts[:-1]:
        starts.append(starts[-1] + (len(text) + len(BETWEEN_PAGES) if text else 0))
    body = BETWEEN_PAGES.join(text for text in texts if text)
    return body, tuple(min(start, len(body)) for start in starts)


@contextlib.contextmanager
def parsing(kind: str) -> Iterator[None]:
    """Whatever a parser of this kind of file raises comes as a DocumentError of one line.

    Want of memory passes, and so do DocumentErrors.
    """
    try:
        yield
    except (DocumentError, MemoryError):
        raise
    except Exception as error:
        # lxml calls want of memory an unknown error of syntax.
        if type(error).__name__ == "XMLSyntaxError" and getattr(error, "code", None) == _NO_MEMORY:
            raise MemoryError from None
        raise DocumentError(
            f"cannot be parsed as {kind} ({one_line(error)}); save it anew"
        ) from None


def one_line(error: Exception) -> str:
    """What a parser said, with the kind of its error: short, and never empty."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def parts(
    data: bytes,
    kind: str,
    suffixes: tuple[str, ...] = (".xml", ".rels"),
    streamed: tuple[str, ...] = (),
) -> Iterator[tuple[str, bytes]]:
    """The parts of an archive by name; those without one of the suffixes are not unpacked: b"".

    Bounded by what is unpacked in truth, whatever the directory of the archive says. Parts whose
    names begin with one of ``streamed`` are never a tree as a whole, and may have any number of
    tags. Raises DocumentError for what comes to a bound, holds too many tags or is packed in
    another way than files of this kind are, and what ``zipfile`` raises for a broken one.
    """
    if data.startswith(_OLE):
        raise DocumentError(
            f"cannot be parsed as {kind}: it needs a password or has an older format; save it anew "
            "without one"
        )
    left = MAX_UNPACKED_BYTES
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        for path, entry in entries.items():
            name = path.replace("\\", "/")  # as some programs of Windows write it
            if not name.lower().endswith(suffixes):
                yield name, b""
                continue
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise DocumentError(f"{name} is packed in a way that {kind} lacks; save it anew")
            part = _read(archive, entry, min(MAX_PART_BYTES, left))
            left -= len(part)
            if not name.startswith(streamed):
                require_few_tags(part)
            yield name, part


def repacked(found: Iterable[tuple[str, bytes]]) -> bytes:
    """An archive of these parts, for libraries that read one."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as plain:
        for name, part in found:
            plain.writestr(name, part)
    return out.getvalue()


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, limit: int) -> bytes:
    pieces, size = [], 0
    with archive.open(entry) as stream:
        while size <= limit and (piece := stream.read(_PIECE)):
            pieces.append(piece)
            size += len(piece)
    if size > limit:
        raise DocumentError(
            f"{entry.filename} unpacks to more than {MAX_PART_BYTES >> 20} MiB, or all parts to "
            f"more than {MAX_UNPACKED_BYTES >> 20} MiB; split the file"
        )
    return b"".join(pieces)
