"""Metadata filters: which documents a question may find, in SQL.

A filter is a mapping from metadata fields to conditions, all of which must hold::

    {"year": {"$gte": 2019}, "language": ["en", "de"], "draft": {"$ne": True}}

A condition is a value (equal to it), a list (equal to any of its values), or a mapping of
operators to operands, all of which must hold. A field whose value is a list is compared item by
item: one item that fits is enough, and ``$ne`` asks that none is equal. Numbers compare with
numbers and text with text, by code point; true and false are no numbers. None stands for a field
that is absent or null. Fields are those at the top of a document's metadata; one that holds an
object equals nothing.

In place of a field may stand ``$and`` or ``$or`` with a list of filters, of which all or at least
one must hold: ``{"$or": [{"year": 2020}, {"draft": True}]}``.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from jaxrag.base.errors import RequestError

Scalar = str | int | float | bool | None

_METADATA = "documents.metadata"  # JSON objects
_ORDERED = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}
MAX_VALUES = 1000  # of a filter: SQLite bounds the length of a statement
_JOINED = {"$and": "AND", "$or": "OR"}
_MOST_NESTED = 16  # filters inside of filters; SQLite bounds the depth of an expression
OPERATORS = ("$eq", "$ne", "$in", *_ORDERED)
_SHOWN_KINDS = {"integer": "a number", "real": "a number", "true": "true or false",
                "false": "true or false", "text": "text", "array": "an empty list"}  # fmt: skip
_INT64 = range(-(2**63), 2**63)


@dataclasses.dataclass(frozen=True)
class Condition:
    """One operator on one field; ``operands`` holds one value, or those of ``$in``."""

    field: str
    operator: str
    operands: tuple[Scalar, ...]

    @property
    def num_values(self) -> int:
        """How many values it compares with, at least 1."""
        return max(1, len(self.operands))

    def cannot_match(self, kinds: Mapping[str, Mapping[str, int]]) -> str | None:
        """Why no document fits, by the types of what they hold; None where one may."""
        if self.operator == "$ne" or not self.operands or None in self.operands:
            return None
        if self.field not in kinds:
            there = ", ".join(sorted(kinds)) or "no field at all"
            return f"no document has {self.field!r} in its metadata, which has {there}"
        held = kinds[self.field]
        if any(kind in held for operand in self.operands for kind in _json_types(operand)):
            return None
        known = " or ".join(sorted({_SHOWN_KINDS.get(kind, kind) for kind in held}))
        return (
            f"{self.field!r} is {known} in every document that has it, and compared with "
            f"{', '.join(map(repr, self.operands))}: numbers compare with numbers and text with "
            "text; write the operand as the documents have it"
        )

    def sql(self) -> tuple[str, list[Scalar]]:
        """The same as an SQL expression over the documents' metadata, and its parameters."""
        if self.operator == "$ne":
            clause, parameters = self._equal_sql(self.operands[0])
            return f"NOT {clause}", parameters
        if self.operator in _ORDERED:
            return self._exists_sql(_ORDERED[self.operator], self.operands[0])
        clauses, parameters = ["0"], []
        for operand in self.operands:
            clause, more = self._equal_sql(operand)
            clauses.append(clause)
            parameters += more
        return _balanced(clauses, "OR"), parameters

    def _equal_sql(self, operand: Scalar) -> tuple[str, list[Scalar]]:
        clause, parameters = self._exists_sql("IS", operand)
        if operand is not None:
            return clause, parameters
        absent = f"NOT EXISTS (SELECT 1 FROM json_each({_METADATA}) AS field WHERE field.key = ?)"
        return f"({clause} OR {absent})", [*parameters, self.field]

    def _exists_sql(self, symbol: str, operand: Scalar) -> tuple[str, list[Scalar]]:
        # The key is compared as a value: a JSON path would have to quote it, and SQLite's paths
        # cannot quote every name.
        types = ", ".join(f"'{name}'" for name in _json_types(operand))
        # A number with a fraction is read by the same code as the metadata's, to the same bits.
        value = "json_extract(?, '$')" if isinstance(operand, float) else "?"
        bound = json.dumps(operand) if isinstance(operand, float) else operand
        fits = f"{{0}}.type IN ({types}) AND {{0}}.atom {symbol} {value}"
        return (
            f"EXISTS (SELECT 1 FROM json_each({_METADATA}) AS field WHERE field.key = ? AND "
            f"(({fits.format('field')}) OR (field.type = 'array' AND EXISTS (SELECT 1 FROM "
            f"json_each(CASE field.type WHEN 'array' THEN field.value ELSE '[]' END) AS item "
            f"WHERE {fits.format('item')}))))",
            [self.field, bound, bound],
        )


@dataclasses.dataclass(frozen=True)
class Joined:
    """Filters of which all ("$and") or at least one ("$or") must hold; there is at least one."""

    operator: str
    filters: "tuple[Filter, ...]"

    @property
    def num_values(self) -> int:
        """How many values it compares with; a filter without conditions counts, too."""
        return sum(max(1, one.num_values) for one in self.filters)

    def cannot_match(self, kinds: Mapping[str, Mapping[str, int]]) -> str | None:
        """Why no document fits, as ``Condition.cannot_match`` says it."""
        whys = [next(iter(one.cannot_match(kinds)), None) for one in self.filters]
        said = [why for why in whys if why is not None]
        enough = len(whys) if self.operator == "$or" else 1
        return said[0] if len(said) >= enough else None

    def sql(self) -> tuple[str, list[Scalar]]:
        """The same as an SQL expression over the documents' metadata, and its parameters."""
        clauses, parameters = [], []
        for one in self.filters:
            clause, more = one.sql()
            clauses.append(f"({clause})")
            parameters += more
        return _balanced(clauses, _JOINED[self.operator]), parameters


@dataclasses.dataclass(frozen=True)
class Filter:
    """Conditions that must all hold; without any, every document fits."""

    conditions: tuple[Condition | Joined, ...]

    @property
    def num_values(self) -> int:
        """How many values it compares with."""
        return sum(one.num_values for one in self.conditions)

    @classmethod
    def parse(cls, where: Mapping[str, Any], depth: int = 0) -> Self:
        """Check a ``where`` mapping and take it apart.

        ``depth`` counts the filters that it stands in. Raises RequestError for what is no mapping
        of names to conditions, an unknown operator, or an operand that is not a text, a finite
        number, a boolean or None (or, where a list is meant, a list of these).
        """
        if not isinstance(where, Mapping):
            raise RequestError(
                f"where={where!r}: expected a mapping such as {{'year': 2020}} or "
                "{'year': {'$gte': 2019}}"
            )
        conditions: list[Condition | Joined] = []
        for field, condition in where.items():
            if field in _JOINED:
                conditions.append(cls._joined(field, condition, depth))
                continue
            if not isinstance(field, str) or not _is_whole_text(field):
                raise RequestError(f"where: {field!r} is no field name; expected a text")
            if field.startswith("$"):
                raise RequestError(
                    f"where: {field!r} stands where a field, $and or $or is expected; write "
                    "{'FIELD': {'$gte': 2019}}, all fields must match"
                )
            if isinstance(condition, Mapping):
                if not condition:
                    raise RequestError(
                        f"where: {field!r} has no operator; expected some of {', '.join(OPERATORS)}"
                    )
                conditions += [
                    _condition(field, operator, operand) for operator, operand in condition.items()
                ]
            else:
                operator = "$in" if isinstance(condition, list | tuple) else "$eq"
                conditions.append(_condition(field, operator, condition))
        made = cls(tuple(conditions))
        if made.num_values > MAX_VALUES:
            raise RequestError(
                f"where compares with {made.num_values} values; expected at most {MAX_VALUES}: "
                "give the documents a field in common, or ask several times"
            )
        return made

    @classmethod
    def _joined(cls, operator: str, filters: Any, depth: int) -> Joined:
        if not isinstance(filters, list | tuple) or not filters:
            raise RequestError(
                f"where: {operator} {filters!r}: expected a list of filters such as "
                "[{'year': 2020}, {'draft': True}]"
            )
        if depth >= _MOST_NESTED:
            raise RequestError(
                f"where: {operator} stands in {depth} filters: expected at most {_MOST_NESTED}; "
                "write the filter flatter"
            )
        return Joined(operator, tuple(cls.parse(one, depth + 1) for one in filters))

    def cannot_match(self, kinds: Mapping[str, Mapping[str, int]]) -> list[str]:
        """Why no document fits whose fields hold values of these JSON types; [] where one may.

        ``kinds`` counts documents by field and by name of SQLite's json_each.
        """
        return [why for one in self.conditions if (why := one.cannot_match(kinds))]

    def sql(self) -> tuple[str, list[Scalar]]:
        """An SQL expression over rows of the table documents, and the values of its ``?``."""
        clauses, parameters = ["1"], []
        for condition in self.conditions:
            clause, more = condition.sql()
            clauses.append(clause)
            parameters += more
        return _balanced(clauses, "AND"), parameters


def _balanced(clauses: Sequence[str], word: str) -> str:
    """The clauses in parentheses that nest as little as can be: SQLite's depth is bounded."""
    if len(clauses) == 1:
        return clauses[0]
    half = len(clauses) // 2
    return f"({_balanced(clauses[:half], word)} {word} {_balanced(clauses[half:], word)})"


def _condition(field: str, operator: object, operand: object) -> Condition:
    if operator not in OPERATORS:
        raise RequestError(
            f"where: {field!r} has the operator {operator!r}; expected one of "
            f"{', '.join(OPERATORS)}"
        )
    assert isinstance(operator, str)
    if operator == "$in":
        if not isinstance(operand, Sequence) or isinstance(operand, str):
            raise RequestError(f"where: {field!r} $in {operand!r}: expected a list of values")
        return Condition(field, operator, tuple(_scalar(field, value) for value in operand))
    value = _scalar(field, operand)
    if operator in _ORDERED and (value is None or isinstance(value, bool)):
        raise RequestError(
            f"where: {field!r} {operator} {value!r}: only numbers and texts have an order"
        )
    return Condition(field, operator, (value,))


def _scalar(field: str, value: object) -> Scalar:
    if isinstance(value, str) and _is_whole_text(value):
        return value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value in _INT64:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise RequestError(
        f"where: {field!r} is compared with {value!r}; expected a text, a finite number of at most "
        "64 bits, true, false, null, or a list of these"
    )


def _is_whole_text(text: str) -> bool:
    """Whether SQLite can hold a text whole: no lone surrogates, no NUL characters."""
    return not any("\ud800" <= character <= "\udfff" or not ord(character) for character in text)


def _json_types(operand: Scalar) -> tuple[str, ...]:
    """The names of json_each's types that compare with an operand."""
    if isinstance(operand, bool):
        return ("true",) if operand else ("false",)
    if isinstance(operand, int | float):
        return ("integer", "real")
    return ("text",) if isinstance(operand, str) else ("null",)
