"""Filters as OpenAI writes them, as the ``where`` of a knowledge base.

A comparison is {"type", "key", "value"}, a compound {"type": "and" | "or", "filters": [...]}.
"""

from collections.abc import Mapping
from typing import Any

from jaxrag.library.retrieve.filters import Filter
from jaxrag.server.errors import invalid

_COMPARISONS = ("eq", "ne", "gt", "gte", "lt", "lte", "in")
_COMPOUNDS = ("and", "or")
_TYPES = (*_COMPARISONS, "nin", *_COMPOUNDS)
_MOST = 100  # comparisons and compounds, and values of "in" or "nin"
_DEEPEST = 16  # compounds inside of compounds
_PARAM = "filters"


def where_of(filters: Any) -> dict[str, Any]:
    """The filter of a search. Raises Problem 400 for what is none."""
    where = _where(filters, [0], 0)
    Filter.parse(where)
    return where


def _where(given: Any, count: list[int], depth: int) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise _wrong(given, 'an object such as {"type": "eq", "key": "year", "value": 2020}')
    kind = given.get("type")
    if kind not in _TYPES:
        raise invalid(f"filters: type={kind!r}: expected one of {', '.join(_TYPES)}", _PARAM)
    count[0] += 1
    if count[0] > _MOST or depth > _DEEPEST:
        raise invalid(
            f"filters: expected at most {_MOST} of them and {_DEEPEST} inside of each other", _PARAM
        )
    if kind in _COMPOUNDS:
        inner = given.get("filters")
        if not isinstance(inner, list) or not inner:
            raise _wrong(inner, f'a list of filters in "filters" of {kind!r}')
        return {f"${kind}": [_where(item, count, depth + 1) for item in inner]}
    key, value = given.get("key"), given.get("value")
    if not isinstance(key, str) or key.startswith("$"):
        raise _wrong(key, 'the name of an attribute in "key"')
    if kind in ("in", "nin"):
        if not isinstance(value, list) or len(value) > _MOST:
            raise _wrong(value, f"a list of at most {_MOST} values for {kind!r}")
        if kind == "nin":  # an empty list rules nothing out
            return {"$and": [{key: {"$ne": item}} for item in value]} if value else {}
    return {key: {f"${kind}": value}}


def _wrong(value: Any, expected: str) -> Exception:
    shown = repr(value)
    return invalid(f"filters: {shown[:80]}: expected {expected}", _PARAM)
