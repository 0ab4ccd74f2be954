"""Fields of dataclasses that the command line fills: what is said of them, and how a text is read.

A setting is written once, in the dataclass that holds it: name, type and default are the field's,
and ``option`` adds what only people need, and its check. ``cli.command`` makes one
of the program of it, by click, which nothing here imports.
Modules with such a dataclass import nothing heavy, for every `--help` reads them.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

_KEY = "option"  # of a field's metadata
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DECIMAL = {"kB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
_BINARY = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
_BYTES = {"B": 1} | _DECIMAL | _BINARY


@dataclasses.dataclass(frozen=True)
class Option:
    """What the command line says of a field beside its name, type and default.

    Attributes:
      help: a few words, the default not among them.
      metavar: the name of the value.
      unset: what the default means, where the value itself says too little.
      parse: reads a text, and raises ValueError with what it expected; None: by the type of the
        field.
      choices: the texts that are taken; None: those of a Literal, else any.
      flag: its name, dashes in front; None: that of the field, with --no- where it is True.
      repeatable: given once for each value of a tuple, and not once with all of them.
      shown: whether the command line has it.
      check: refuses a value, by the name of the field; see ``check_fields``.
    """

    help: str
    metavar: str | None = None
    unset: str | None = None
    parse: Callable[[str], Any] | None = None
    choices: tuple[str, ...] | None = None
    flag: str | None = None
    repeatable: bool = False
    shown: bool = True
    check: Callable[[str, Any], None] | None = None


def option(default: Any, help: str = "", metavar: str | None = None, **said: Any) -> Any:
    """A field of a dataclass that is an option; ``said`` is of ``Option``.

    Without a default (``dataclasses.MISSING``) it must be given.
    """
    return dataclasses.field(default=default, metadata={_KEY: Option(help, metavar, **said)})


def option_of(field: "dataclasses.Field[Any]") -> Option | None:
    """What ``option`` said of a field; None for one that is no option."""
    found = field.metadata.get(_KEY)
    return found if isinstance(found, Option) else None


def flag_of(field: "dataclasses.Field[Any]") -> str:
    """What the option of a field is called, dashes in front; for errors that name it, too."""
    said = option_of(field)
    if said is not None and said.flag is not None:
        return said.flag
    return f"--{'no-' * (field.default is True)}{field.name.replace('_', '-')}"


def flags_of(cls: type) -> dict[str, str]:
    """The options of a dataclass by the names of its fields."""
    return {field.name: flag_of(field) for field in dataclasses.fields(cls)}


def check_fields(instance: Any) -> None:
    """Have every option of a dataclass checked. Raises what its check raises."""
    for field in dataclasses.fields(instance):
        said = option_of(field)
        if said is not None and said.check is not None:
            said.check(field.name, getattr(instance, field.name))


def kind_of(field: "dataclasses.Field[Any]") -> Any:
    """The type of a field, X of X | None; str where the annotation is in quotes.

    Those name objects that are too heavy to import here, and what people write for them is a text.
    """
    kind: Any = field.type
    if isinstance(kind, str):
        return str
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        (kind,) = (one for one in typing.get_args(kind) if one is not types.NoneType)
    return kind


def choices_of(field: "dataclasses.Field[Any]") -> tuple[str, ...] | None:
    """The texts that an option takes; None: any."""
    said, kind = option_of(field), kind_of(field)
    if said is not None and said.choices is not None:
        return said.choices
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else None


def parse_seconds(text: str) -> float:
    """90s, 30m, 1h or 7d as seconds."""
    return _scaled(text, _SECONDS, "a time such as 30m or 1h")


def parse_bytes(text: str) -> int:
    """200MB, 1.5GB or 64MiB as bytes."""
    return round(_scaled(text, _BYTES, "a size such as 200MB or 64GiB"))


def parse_count(text: str) -> int:
    """4096 or 4k (1024 times as many; also M) as a number of tokens."""
    match = re.fullmatch(r"([0-9]+)([kKM]?)", text)
    if match is None:
        raise ValueError(f"{text!r}: expected a number of tokens, as 4096 or 4k")
    return int(match[1]) * {"": 1, "k": 1024, "K": 1024, "M": 1024**2}[match[2]]


def parse_counts(text: str) -> tuple[int, ...]:
    """Several of them, such as 512,4k."""
    return tuple(map(parse_count, filter(None, text.split(","))))


def parse_integers(text: str) -> tuple[int, ...]:
    """Integers such as 8,16,32; none of an empty text."""
    parts = [part for part in text.split(",") if part]
    if not all(re.fullmatch(r"[0-9]+", part) for part in parts):
        raise ValueError(f"{text!r}: expected integers such as 8,16,32")
    return tuple(map(int, parts))


def parse_numbers(text: str) -> tuple[float, ...]:
    """Numbers such as 0,0.15,1.0."""
    try:
        return tuple(map(float, filter(None, text.split(","))))
    except ValueError:
        raise ValueError(f"{text!r}: expected numbers such as 0,0.15,1.0") from None


def parse_ratios(text: str) -> tuple[float, ...]:
    """Shares from 0 to 1 such as 0,0.15,1.0."""
    parts = [part for part in text.split(",") if part]
    for part in parts:
        if not re.fullmatch(r"0*(0?\.[0-9]+|0|1(\.0*)?)", part):
            raise ValueError(f"{text!r}: {part!r} is no number from 0 to 1, such as 0.15")
    return tuple(map(float, parts))


def parse_names(text: str) -> tuple[str, ...]:
    """Names such as a,b,c."""
    return tuple(filter(None, text.split(",")))


def written(value: Any, parse: Callable[[str], Any] | None) -> str:
    """A value as the text that ``parse`` would read."""
    if parse is parse_seconds:
        return _in_units(value, _SECONDS)
    if parse is parse_bytes:
        return _in_units(value, _BYTES)
    if isinstance(value, tuple):
        return ",".join(written(item, None) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _scaled(text: str, units: Mapping[str, int], expected: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]+)", text)
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r}: expected {expected}; the units are {', '.join(units)}")
    return float(match[1]) * units[match[2]]


def _in_units(value: float, units: Mapping[str, int]) -> str:
    """In the largest unit of which it is a whole number."""
    whole = {size: unit for unit, size in units.items() if value >= size and value % size == 0}
    size = max(whole, default=1)
    return f"{value / size:g}{whole.get(size, next(iter(units)))}"
