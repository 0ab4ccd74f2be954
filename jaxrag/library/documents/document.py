"""One document, or the reason why there is none."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping
from typing import Any

from jaxrag.base.errors import DocumentError
from jaxrag.base.groups import FIELD, MAX_GROUPS, wrong_groups

MAX_TITLE_CHARACTERS = 2_000
_SHOWN = 60  # characters of a text, where it is shown among other things


@dataclasses.dataclass(frozen=True)
class Document:
    """One text under a stable name. Raises DocumentError when it cannot be ingested.

    ``metadata`` must survive JSON unchanged, and its ``groups``, if any, be a list of names;
    ``file`` is the absolute path the text came from; ``pages`` holds the first character of every
    page, the first of them 0, or nothing where there are no pages.
    """

    id: str
    text: str
    title: str = ""
    file: str | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("id", self.id), ("text", self.text), ("title", self.title)):
            if not isinstance(value, str):
                raise DocumentError(f"{name} is a {type(value).__name__}; expected a string")
            _check_characters(name, value)
        if self.file is not None:
            _check_characters("file", self.file)
        if len(self.title) > MAX_TITLE_CHARACTERS:
            raise DocumentError(
                f"title holds {len(self.title)} characters; expected at most "
                f"{MAX_TITLE_CHARACTERS}, for every chunk may repeat it: shorten it"
            )
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
        _check_characters("metadata", json.dumps(self.metadata, ensure_ascii=False))
        if FIELD in self.metadata:
            wrong = wrong_groups(self.metadata[FIELD], 1, MAX_GROUPS)
            if wrong is not None:
                raise DocumentError(f"metadata {FIELD}={wrong}; leave it out for all readers")
        ordered = all(a <= b for a, b in itertools.pairwise((*self.pages, len(self.text))))
        if self.pages and (self.pages[0] != 0 or not ordered):
            raise DocumentError(
                f"pages begin at characters {str(self.pages)[:60]}; expected 0 and then ascending "
                f"numbers up to {len(self.text)}"
            )

    def __repr__(self) -> str:
        """Its name, its length and how it begins, on one line."""
        return f"<Document {self.id!r}, {len(self.text)} characters: {begun(self.text)!r}>"


@dataclasses.dataclass(frozen=True)
class BadDocument:
    """A document that was left out: where it is (``file`` or ``file:line``) and why.

    Both are one line of printable text; whatever else a file name or a parser's message holds is
    escaped.
    """

    source: str
    reason: str

    def __post_init__(self) -> None:
        """Escape what a terminal or JSON could not carry."""
        object.__setattr__(self, "source", _printable(self.source))
        object.__setattr__(self, "reason", _printable(" ".join(self.reason.split())))


def document_from_mapping(
    values: Mapping[str, Any],
    default_id: str | None = None,
    file: str | None = None,
    text_field: str = "text",
) -> Document:
    """A Document from ``{"text", "id"?, "title"?}``; every other key becomes metadata.

    So do the keys of an object under "metadata", in place of that object.
    Without an ``id`` the document takes ``default_id``, or else a name made of its text's hash.
    ``text_field`` is the key that holds the text. Raises DocumentError.
    """
    if text_field not in values:
        keys = ", ".join(sorted(map(str, values)))[:200] or "none"
        raise DocumentError(
            f'the key "{text_field}" is missing (keys: {keys}); name the one that holds the text'
        )
    text = values[text_field]
    name = values.get("id", default_id)
    if name is None:
        name = text_id(text)
    if isinstance(name, int) and not isinstance(name, bool):
        name = _integer_name(name)
    title = values.get("title")
    used = (text_field, "id", "title")
    rest = {key: value for key, value in values.items() if key not in used}
    if isinstance(inner := rest.get("metadata"), Mapping):
        del rest["metadata"]
        if twice := sorted(str(key) for key in inner if key in rest):
            raise DocumentError(
                f'the key "{twice[0]}" stands beside "metadata" and in it; leave one of them out'
            )
        rest |= inner
    return Document(name, text, "" if title is None else title, file, rest)


def begun(text: str) -> str:
    """The beginning of a text, shown on a line with other things."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def text_id(text: str) -> str:
    """The name of a text that was given none: it depends on the text alone."""
    if not isinstance(text, str):
        raise DocumentError(f"text is a {type(text).__name__}; expected a string")
    _check_characters("text", text)
    return "text-" + hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


def _integer_name(number: int) -> str:
    try:
        return str(number)
    except ValueError as error:  # thousands of digits
        raise DocumentError(f"id is no name ({error}); use a shorter one") from None


def _check_characters(name: str, value: str) -> None:
    if "\0" in value:
        raise DocumentError(
            f"{name} holds a NUL at character {value.index(chr(0))}: binary data, not text"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        fix = "its file's name is not UTF-8: rename it" if name == "id" else "repair the text"
        raise DocumentError(
            f"{name} holds half of a surrogate pair at character {error.start}; {fix}"
        ) from None


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
