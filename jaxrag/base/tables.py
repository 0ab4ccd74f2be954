"""Frozen dataclasses from tables: of TOML or JSON files, or texts such as "flat:k=50".

Every key and value is checked by the annotation of its field, which may be: bool, int, float, str,
a Literal, a dataclass, a union of those with None, ``tuple[X, ...]``, a fixed tuple such as
``tuple[int, int]``, or ``Mapping[str, X]``. A key that may be None may be left out, for TOML has no
word for it; in place of the table of a dataclass may stand an instance.
"""

import dataclasses
import difflib
import re
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrag.base.errors import ConfigError, RequestError

_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
T = typing.TypeVar("T")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file. Raises ConfigError naming the file when missing or malformed."""
    import tomllib  # of Python 3.11, and an engine that only reads a store may run 3.10

    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML ({error})") from None


def table_from(
    value: Any, where: str, tag: str = "name", *, parts: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A table to change, from a table or a text: "flat:k=50" is {name = "flat", k = 50}.

    Numbers, true and false are read as such, all else as text. ``a.b=c`` sets a key of the table
    ``a``.

    Args:
      value: the table or the text.
      where: names it in errors.
      tag: the key of what precedes the colon.
      parts: keys that hold such a table themselves, each with its tag: with {"index": "kind"}
        ``index=lists`` is ``index.kind=lists``.

    Raises:
      ConfigError: neither of them, or a setting without a value.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        raise ConfigError(f"{where}={value!r}: expected a name or a table")
    name, _, rest = value.partition(":")
    table: dict[str, Any] = {tag: name}
    for setting in filter(None, rest.split(",")):
        key, _, text = setting.partition("=")
        if not key or not text:
            raise ConfigError(
                f"{where}: {setting!r} of {value!r}: expected field=value, such as k=50"
            )
        outer, _, inner = key.partition(".")
        inner = inner or (parts or {}).get(outer, "")
        held = table.setdefault(outer, {}) if inner else table
        if not isinstance(held, dict):
            raise ConfigError(f"{where}: {setting!r} of {value!r}: {outer!r} is no table")
        held[inner or key] = _scalar(text)
    return table


def _scalar(text: str) -> bool | int | float | str:
    number = _NUMBER.fullmatch(text)
    if number:
        return float(text) if number[1] else int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def build(cls: type[T], values: Any, where: str, *, keep_ints: bool = False) -> T:
    """An instance of a dataclass from plain values.

    Args:
      cls: the dataclass.
      values: its table.
      where: names the table in errors.
      keep_ints: leave an int that stands for a float as it is, for digests of what was read.

    Raises:
      ConfigError: an unknown or missing key, or a value of another type; an int is taken for a
        float. Also what the class itself raises.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}={values!r}: expected a table")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - set(fields)):
        near = difflib.get_close_matches(str(unknown[0]), fields, 1)
        meant = f"did you mean {near[0]!r}? The" if near else "the"
        raise ConfigError(
            f"{where}: unknown key {unknown[0]!r}; {meant} keys are {', '.join(sorted(fields))}"
        )
    read: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            read[name] = _value(_kind(cls, field), values[name], f"{where}.{name}", keep_ints)
        elif field.default is field.default_factory is dataclasses.MISSING:
            if type(None) not in typing.get_args(_kind(cls, field)):
                raise ConfigError(f"{where}: key {name!r} is missing")
            read[name] = None
    return cls(**read)


def build_named(
    kinds: Mapping[str, type[T]],
    values: Mapping[str, Any],
    where: str,
    tag: str = "name",
    *,
    keep_ints: bool = False,
) -> T:
    """An instance of that of several dataclasses that the key ``tag`` of the table names.

    Raises ConfigError for another name, and as ``build`` does.
    """
    fields = dict(values)
    name = fields.pop(tag, None)
    if not isinstance(name, str) or name not in kinds:
        raise ConfigError(f"{where}: {tag}={name!r}: expected one of {', '.join(kinds)}")
    return build(kinds[name], fields, where, keep_ints=keep_ints)


def _kind(cls: type, field: dataclasses.Field[Any]) -> Any:
    """The annotation of a field. Only one that is written as a text has its names looked up."""
    return typing.get_type_hints(cls)[field.name] if isinstance(field.type, str) else field.type


def _value(kind: Any, value: Any, where: str, keep_ints: bool) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _one_of(arguments, value, where, keep_ints)
    if origin is typing.Literal:
        if value not in arguments:
            raise ConfigError(
                f"{where}={value!r}: expected one of {', '.join(map(str, arguments))}"
            )
        return value
    if origin is tuple:
        return _tuple(arguments, value, where, keep_ints)
    if origin is not None:  # Mapping[str, X]
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}={value!r}: expected a table")
        return {
            name: _value(arguments[1], item, f"{where}.{name}", keep_ints)
            for name, item in value.items()
        }
    if dataclasses.is_dataclass(kind):
        if isinstance(value, typing.cast(type, kind)):
            return value
        return build(kind, value, where, keep_ints=keep_ints)  # type: ignore[arg-type]
    if kind is float and type(value) is int:
        return value if keep_ints else float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where}={value!r}: expected {_WORDS[kind]}")
    return value


def _one_of(arguments: tuple[Any, ...], value: Any, where: str, keep_ints: bool) -> Any:
    """None, where the union allows it; a value of its other kind, or an instance of one of many."""
    kinds = [kind for kind in arguments if kind is not type(None)]
    if value is None and len(kinds) < len(arguments):
        return None
    if len(kinds) == 1:
        return _value(kinds[0], value, where, keep_ints)
    if type(value) not in kinds:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{where}={value!r}: expected one of {names}")
    return value


def _tuple(arguments: tuple[Any, ...], value: Any, where: str, keep_ints: bool) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{where}={value!r}: expected a list")
    if arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        raise ConfigError(f"{where}={value!r}: expected {len(arguments)} values")
    return tuple(
        _value(kind, item, f"{where}[{index}]", keep_ints)
        for index, (kind, item) in enumerate(zip(arguments, value, strict=True))
    )


def require_kind(
    name: str, value: Any, kinds: tuple[type, ...], expected: str, *, optional: bool = True
) -> None:
    """Refuse an argument of another kind, and True for a number: RequestError. None may pass."""
    if value is None and optional:
        return
    flag = isinstance(value, bool) and bool not in kinds
    if flag or not isinstance(value, kinds):
        raise RequestError(f"{name}={reprlib.repr(value)}: expected {expected}")


def override(values: Mapping[str, Any], assignment: str) -> dict[str, Any]:
    """Values with one key replaced, from ``a.b=c``; a number between dots indexes a list.

    ``c`` is read as TOML, or taken as a string where it is none. Raises ConfigError when there is
    no ``=`` or the path leads through something that holds no keys.
    """
    path, found, text = assignment.partition("=")
    if not found or not path.strip():
        raise ConfigError(f"--set {assignment!r}: expected KEY.KEY=VALUE")
    import tomllib

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
