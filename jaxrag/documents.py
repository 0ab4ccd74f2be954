"""Documents: what a knowledge base is made of, and the readers of .txt, .md and .jsonl files.

A ``Document`` that exists is good: its constructor refuses text that could not be chunked, stored
or found again. The readers turn a refusal into a ``BadDocument``, so that one bad file or line
never costs the others.
"""

import codecs
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrag.errors import DocumentError


@dataclasses.dataclass(frozen=True)
class Document:
    """One text under a stable name. Raises DocumentError when it cannot be ingested.

    ``metadata`` must survive JSON unchanged; ``file`` is the absolute path the text came from.
    """

    id: str
    text: str
    title: str = ""
    file: str | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse an empty id, empty or binary text, and metadata that is not JSON."""
        for name, value in (("id", self.id), ("text", self.text), ("title", self.title)):
            if not isinstance(value, str):
                raise DocumentError(f"{name} is a {type(value).__name__}; expected a string")
            _check_characters(name, value)
        if not self.id.strip():
            raise DocumentError("id is empty; expected a stable name for the document")
        if not self.text.strip():
            raise DocumentError("the text is empty or white space only; leave the document out")
        try:
            same = json.loads(json.dumps(self.metadata, allow_nan=False)) == self.metadata
        except (TypeError, ValueError, RecursionError) as error:
            raise DocumentError(f"metadata is not JSON ({error}); use plain values") from None
        if not same or not isinstance(self.metadata, dict):
            raise DocumentError("metadata is not JSON; use a dict with string keys, lists, numbers")


@dataclasses.dataclass(frozen=True)
class BadDocument:
    """A document that was left out: where it stands (``file`` or ``file:line``) and why."""

    source: str
    reason: str


def document_from_mapping(
    values: Mapping[str, Any], default_id: str | None = None, file: str | None = None
) -> Document:
    """A Document from ``{"text", "id"?, "title"?}``; every other key becomes metadata.

    Without an ``id`` the document takes ``default_id``, or else a name made of its text's hash.
    Raises DocumentError.
    """
    if "text" not in values:
        keys = ", ".join(sorted(map(str, values))) or "none"
        raise DocumentError(f'the key "text" is missing (keys: {keys})')
    text = values["text"]
    name = values.get("id", default_id)
    if name is None:
        name = text_id(text)
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    title = values.get("title")
    rest = {key: value for key, value in values.items() if key not in ("text", "id", "title")}
    return Document(name, text, "" if title is None else title, file, rest)


def text_id(text: str) -> str:
    """The name of a text that was given none: it depends on the text alone."""
    if not isinstance(text, str):
        raise DocumentError(f"text is a {type(text).__name__}; expected a string")
    _check_characters("text", text)
    return "text-" + hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


def read_paths(paths: Iterable[str | Path]) -> Iterator[Document | BadDocument]:
    """Read files and folders (recursively, sorted, hidden entries left out), document by document.

    ``.txt`` and ``.md`` hold one document each; ``.jsonl`` one JSON object with a ``"text"`` per
    line. A document's id is its path relative to the folder that was named (its file name where a
    file was named), for a line of ``.jsonl`` its ``"id"`` or else ``path:line``. Whatever cannot be
    read comes as a BadDocument in its place. Raises DocumentError at once for a path that does not
    exist.
    """
    if isinstance(paths, str | Path):
        raise DocumentError(f"{str(paths)!r} is one path; expected a list of paths")
    named = [Path(path) for path in paths]
    for path in named:
        if not path.exists():
            raise DocumentError(f"{path}: no such file or folder")
    return _read_all(named)


def _read_all(named: Iterable[Path]) -> Iterator[Document | BadDocument]:
    for path in named:
        if not path.is_dir():
            yield from _read_file(path, path.name)
            continue
        for entry in _walk(path):
            if isinstance(entry, BadDocument):
                yield entry
            else:
                yield from _read_file(entry, entry.relative_to(path).as_posix())


def _walk(folder: Path) -> Iterator[Path | BadDocument]:
    """The files under ``folder``, in sorted order; links to folders are reported, not followed."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        yield BadDocument(str(folder), f"cannot be listed ({error.strerror})")
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            yield entry
        elif entry.is_symlink():
            yield BadDocument(str(entry), "is a link to a folder; name that folder instead")
        else:
            yield from _walk(entry)


def _read_file(path: Path, name: str) -> Iterator[Document | BadDocument]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        kinds = ", ".join(_READERS)
        yield BadDocument(str(path), f"file type {path.suffix!r} is not one of {kinds}; convert it")
    elif not path.is_file():
        yield BadDocument(str(path), "is not a regular file")
    else:
        try:
            yield from reader(path, name)
        except OSError as error:
            yield BadDocument(str(path), f"cannot be read ({error.strerror})")


def _read_text(path: Path, name: str) -> Iterator[Document | BadDocument]:
    try:
        text = _decode(path.read_bytes())
        title = _heading(text) if path.suffix.lower() == ".md" else ""
        yield Document(name, text, title or path.stem, str(path.resolve()))
    except DocumentError as error:
        yield BadDocument(str(path), str(error))


def _read_json_lines(path: Path, name: str) -> Iterator[Document | BadDocument]:
    file = str(path.resolve())
    empty = True
    with path.open("rb") as lines:
        if lines.peek(2).startswith(_UTF16):
            yield BadDocument(str(path), "is UTF-16, but JSON lines are UTF-8; convert the file")
            return
        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            empty = False
            try:
                yield document_from_mapping(_json_object(_decode(raw)), f"{name}:{number}", file)
            except DocumentError as error:
                yield BadDocument(f"{path}:{number}", str(error))
    if empty:
        yield BadDocument(str(path), "holds no JSON lines; leave the file out")


def _json_object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"not JSON ({error}); expected one object per line") from None
    if not isinstance(value, dict):
        raise DocumentError(f'holds a {type(value).__name__}; expected {{"text": "..."}}')
    return value


_READERS: dict[str, Callable[[Path, str], Iterator[Document | BadDocument]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_json_lines,
}
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def _decode(data: bytes) -> str:
    """Strict UTF-8 (a byte order mark is dropped), or UTF-16 with one; line ends become LF."""
    encoding = "utf-16" if data.startswith(_UTF16) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"byte {error.start} is not {encoding.removesuffix('-sig').upper()}; "
            "save the file as UTF-8"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _check_characters(name: str, value: str) -> None:
    if "\0" in value:
        raise DocumentError(
            f"{name} holds a NUL at character {value.index(chr(0))}: binary data, not text"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DocumentError(
            f"{name} holds half of a surrogate pair at character {error.start}; repair the text"
        ) from None


def _heading(text: str) -> str:
    """The first level-1 heading of a Markdown text, or ''."""
    found = re.search(r"^# +(.+?)[ #]*$", text, re.MULTILINE)
    return found.group(1) if found else ""
