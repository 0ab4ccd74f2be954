"""Groups of readers: which documents name, and which callers belong to.

A document without groups may be read by everybody who may read the knowledge base; one with groups
by those who are in at least one of them, and by callers who are not limited (None).
"""

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrag.base.errors import RequestError

FIELD = "groups"  # of a document's metadata
MAX_GROUPS = 32  # of a document
MAX_OWN = 256  # of a caller

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def wrong_groups(value: Any, least: int, most: int) -> str | None:
    """What is wrong with a list of names, and what is expected; None for a right one."""
    counted = isinstance(value, list | tuple) and least <= len(value) <= most
    if counted and all(isinstance(name, str) and _NAME.fullmatch(name) for name in value):
        return None
    return (
        f"{reprlib.repr(value)}: expected a list of {least} to {most} names, each 1 to 64 letters, "
        "digits, '.', '_' or '-'"
    )


def check_own(name: str, value: Any) -> None:
    """Refuse what is not None or a list of the names that a caller belongs to: RequestError."""
    wrong = None if value is None else wrong_groups(value, 0, MAX_OWN)
    if wrong is not None:
        raise RequestError(f"{name}={wrong}")


def readers_of(metadata: Mapping[str, Any]) -> frozenset[str] | None:
    """The groups that may read a document; None: everybody.

    What earlier versions took for ``groups`` and is no list of names is read by nobody limited.
    """
    value = metadata.get(FIELD)
    if value is None:
        return None
    items = value if isinstance(value, list) else [value]
    return frozenset(item for item in items if isinstance(item, str))


def all_read(readers: frozenset[str] | None, other: frozenset[str] | None) -> bool:
    """Whether everybody who may read a document of ``readers`` may read one of ``other``."""
    return other is None or (readers is not None and readers <= other)


def limited(
    where: Mapping[str, Any] | None, groups: Sequence[str] | None
) -> Mapping[str, Any] | None:
    """A filter with what a caller of these groups may read. Raises RequestError for bad groups."""
    check_own(FIELD, groups)
    if groups is None:
        return where
    own = {FIELD: [None, *groups]}
    return own if where is None else {"$and": [own, where]}
