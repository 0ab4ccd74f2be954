"""Metadata from what files say about themselves: types of texts, and front matter.

Numbers are what JSON writes as numbers, so that 007, 1_000 and +5 stay text (1.50 is 1.5). Dates
stay text: their ISO form is in order by itself.
"""

import dataclasses
import datetime
import functools
import re
import tomllib
from collections.abc import Iterable
from typing import Any, ClassVar

from jaxrag.base.errors import DocumentError
from jaxrag.base.groups import FIELD
from jaxrag.library.documents.left_out import LeftOut

MAX_FRONT_CHARACTERS = 64 << 10  # of front matter

_MOST_NESTED = 32  # the time of the parser grows with the square of it

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")  # whatever has as many digits fits 64 bits
_REAL = re.compile(r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,30})?(?:[eE][-+]?[0-9]{1,2})?")
_BOOLEANS = {"true": True, "false": False}
_PLAIN_LINE = re.compile(r"^([\w .-]{1,80}?)[ \t]*[:=][ \t]+(\S[^\n]*?)[ \t]*$", re.M)
_NAMES_GROUPS = re.compile(rf"^\W*{FIELD}\b", re.M)
_FENCES = {"---": ("---", "..."), "+++": ("+++",)}
_BEGINS_A_MAPPING = re.compile(r"\s*(?:#[^\n]*\n\s*)*['\"]?[\w .$-]+['\"]?:(?:\s|$)")


@dataclasses.dataclass
class Column:
    """What all values of a column have in common, seen one after another."""

    integers: bool = True
    reals: bool = True
    booleans: bool = True
    filled: bool = False

    def see(self, text: str) -> None:
        """One more value; an empty one says nothing."""
        text = text.strip()
        if not text:
            return
        self.filled = True
        self.integers = self.integers and _INTEGER.fullmatch(text) is not None
        self.reals = self.reals and _REAL.fullmatch(text) is not None
        self.booleans = self.booleans and text.lower() in _BOOLEANS

    def value(self, text: str) -> str | int | float | bool | None:
        """A value of the column in its type; None for an empty one where that is not text."""
        if not self.filled or not (self.integers or self.reals or self.booleans):
            return text
        text = text.strip()
        if not text:
            return None
        if self.booleans:
            return _BOOLEANS[text.lower()]
        return int(text) if self.integers else float(text)


def typed(text: str) -> str | int | float | bool | None:
    """One text alone, in the type that it spells."""
    column = Column()
    column.see(text)
    return column.value(text)


def front_matter(text: str, left_out: LeftOut) -> tuple[dict[str, Any], str]:
    """The front matter of a Markdown text, and the text without it.

    YAML between lines of ``---`` (the last may be ``...``), or TOML between lines of ``+++``, on
    the first line. What begins so and holds no key, or sentences behind capitals, is a rule and
    text: ({}, text). Of YAML or TOML that cannot be parsed the lines of ``key: value`` are taken
    as they stand, and ``left_out`` says so.

    Raises DocumentError for front matter that is longer than MAX_FRONT_CHARACTERS, refers to
    itself (YAML's anchors), or names groups and cannot be parsed.
    """
    fence, _, rest = text.partition("\n")
    ends = _FENCES.get(fence.rstrip())
    if ends is None:
        return {}, text
    head, after = _until(rest, ends)
    if head is None or after is None:
        return {}, text
    if ends[0] == "---" and not _BEGINS_A_MAPPING.match(head):
        return ({}, after) if not head.strip() else ({}, text)
    try:
        values = _yaml(head) if ends[0] == "---" else tomllib.loads(head)
    except (ValueError, RecursionError):
        if _NAMES_GROUPS.search(head):  # who may read it must not be guessed
            raise DocumentError("its front matter has groups and is not YAML; repair it") from None
        left_out.add("front matters read line by line")
        values = {found[1]: typed(found[2]) for found in _PLAIN_LINE.finditer(head)}
    if ends[0] == "---" and values and all(_is_sentence(*pair) for pair in values.items()):
        return {}, text
    return {name: _plain(value) for name, value in values.items()}, after


def _until(text: str, ends: Iterable[str]) -> tuple[str | None, str | None]:
    """What precedes and follows the first line that is one of these."""
    place = 0
    while place < len(text):
        end = text.find("\n", place)
        end = len(text) if end < 0 else end
        if text[place:end].rstrip() in ends:
            if place > MAX_FRONT_CHARACTERS:
                raise DocumentError(
                    f"its front matter holds {place} characters; expected at most "
                    f"{MAX_FRONT_CHARACTERS}: shorten it"
                )
            return text[:place], text[end + 1 :]
        place = end + 1
    return None, None


def _yaml(text: str) -> dict[str, Any]:
    import yaml  # only who reads front matter waits for it

    try:
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):  # as far as it may go, and no further
            if isinstance(event, yaml.AliasEvent):
                raise DocumentError("its front matter has an alias (*); write the value out")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_NESTED:
                raise DocumentError(
                    f"its front matter nests more than {_MOST_NESTED} deep; write it flatter"
                )
        values = yaml.load(text, _loader())
    except yaml.YAMLError:
        raise ValueError from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError
    return values


@functools.cache
def _loader() -> Any:
    """YAML's safe loader with the types of ``typed``, where ``no`` and 12:30 are text."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}

    for tag, pattern, first in (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("int", _INTEGER.pattern, "-0123456789"),
        ("float", _REAL.pattern, "-0123456789"),
    ):
        Loader.add_implicit_resolver(
            f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$"), list(first)
        )
    return Loader


def _is_sentence(key: str, value: Any) -> bool:
    """Whether it is the beginning of a text, as in "Note: closed on Sundays."."""
    return key[:1].isupper() and isinstance(value, str) and value.rstrip()[-1:] in tuple(".!?")


def _plain(value: Any) -> Any:
    """A value as JSON has it; dates and times as ISO text."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value
