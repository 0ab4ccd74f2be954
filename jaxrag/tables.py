"""Frozen dataclasses from the tables of a TOML file, every key and value checked by its annotation.

What an annotation may be: bool, int, float, str, a Literal, another dataclass, ``X | None``,
``tuple[X, ...]``, a fixed tuple such as ``tuple[int, int]``, or ``Mapping[str, X]``.
"""

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrag.config import strict_fields
from jaxrag.errors import ConfigError


def build[T](cls: type[T], values: Any, where: str) -> T:
    """An instance of a dataclass from plain values.

    ``where`` names the table in errors. Raises ConfigError for an unknown or missing key and for a
    value of another type; an int is taken for a float.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}={values!r}: expected a table")
    given = strict_fields(cls, values, where)
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    for field in fields:
        missing = dataclasses.MISSING
        required = field.default is missing and field.default_factory is missing
        if required and field.name not in given:
            raise ConfigError(f"{where}: key {field.name!r} is missing")
    return cls(
        **{name: _value(hints[name], value, f"{where}.{name}") for name, value in given.items()}
    )


def _value(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = [part for part in arguments if part is not type(None)]
        return None if value is None else _value(inner[0], value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise ConfigError(
                f"{where}={value!r}: expected one of {', '.join(map(str, arguments))}"
            )
        return value
    if origin is tuple:
        return _tuple(arguments, value, where)
    if origin is not None:  # Mapping[str, X]
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}={value!r}: expected a table")
        return {name: _value(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return build(kind, value, where)  # type: ignore[arg-type]
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where}={value!r}: expected a value of type {kind.__name__}")
    return value


def _tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{where}={value!r}: expected a list")
    if arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        raise ConfigError(f"{where}={value!r}: expected {len(arguments)} values")
    return tuple(
        _value(kind, item, f"{where}[{index}]")
        for index, (kind, item) in enumerate(zip(arguments, value, strict=True))
    )


def override(values: Mapping[str, Any], assignment: str) -> dict[str, Any]:
    """Values with one key replaced, from ``a.b=c``; a number between dots indexes a list.

    ``c`` is read as TOML, or taken as a string where it is none. Raises ConfigError when there is
    no ``=`` or the path leads through something that holds no keys.
    """
    path, found, text = assignment.partition("=")
    if not found or not path.strip():
        raise ConfigError(f"--set {assignment!r}: expected KEY.KEY=VALUE")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    return dict(_replace(values, path.strip().split("."), value, assignment))


def _replace(values: Any, path: list[str], value: Any, assignment: str) -> Any:
    if not path:
        return value
    key, *rest = path
    if isinstance(values, Mapping):
        return {**values, key: _replace(values.get(key, {}), rest, value, assignment)}
    if isinstance(values, list) and key.isdigit() and int(key) < len(values):
        items = list(values)
        items[int(key)] = _replace(items[int(key)], rest, value, assignment)
        return items
    raise ConfigError(f"--set {assignment!r}: there is no {key!r} to set")


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf of plain nested values under its dotted name."""
    if isinstance(values, Mapping):
        items: Any = values.items()
    elif isinstance(values, (list, tuple)):
        items = enumerate(values)
    else:
        return {prefix: values}
    leaves: dict[str, Any] = {}
    for key, item in items:
        leaves |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return leaves
