"""What is said of documents: attributes that clients send, and the files that they come from."""

import functools
import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator

from jaxrag.base.groups import FIELD, MAX_GROUPS, wrong_groups
from jaxrag.server.errors import invalid

_MOST_ATTRIBUTES = 16
_KEY_CHARACTERS = 64
_VALUE_CHARACTERS = 512
_INTEGERS = range(-(2**63), 2**63)  # of attributes; more than a filter compares with
_OF_FILE = re.compile(r"file-[0-9a-f]{24}")


def _checked(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Names and plain values. Raises Problem 400."""
    if len(given) > _MOST_ATTRIBUTES:
        raise invalid(f"{name} has {len(given)} keys: expected at most {_MOST_ATTRIBUTES}", name)
    for key, value in given.items():
        if name == "attributes" and key == FIELD:
            wrong = wrong_groups(value, 1, MAX_GROUPS)
            if wrong is not None:
                raise invalid(f"{name}: {key}={wrong}", name)
        elif not 0 < len(key) <= _KEY_CHARACTERS or key.startswith("$") or not _is_plain(value):
            raise invalid(
                f"{name}: {key[:80]!r}: expected a name of at most {_KEY_CHARACTERS} characters "
                f"and a text of at most {_VALUE_CHARACTERS}, an integer of at most 64 bits, "
                "another number, true or false",
                name,
            )
    return given


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _VALUE_CHARACTERS
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and value in _INTEGERS


Attributes = Annotated[dict[str, Any], AfterValidator(functools.partial(_checked, "attributes"))]
Metadata = Annotated[dict[str, Any], AfterValidator(functools.partial(_checked, "metadata"))]


def is_upload(document_id: str) -> bool:
    """Did an upload bring this document?"""
    return _OF_FILE.match(document_id) is not None


def file_id_of(document_id: str) -> str:
    """The file of a document: an uploaded one, or what its knowledge base calls it."""
    of_file = _OF_FILE.match(document_id)
    return of_file[0] if of_file else document_id
