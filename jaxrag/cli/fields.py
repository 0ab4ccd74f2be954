"""Arguments of the command line from the fields of a dataclass, and the dataclass from them."""

import argparse
import dataclasses
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from jaxrag.base.options import (
    Option,
    choices_of,
    flag_of,
    kind_of,
    option_of,
    parse_integers,
    parse_names,
    parse_numbers,
    written,
)

Options = argparse._ActionsContainer  # a parser, or a group of one

_PARSERS: dict[Any, Callable[[str], Any]] = {
    str: str,
    int: int,
    float: float,
    Path: Path,
    tuple[int, ...]: parse_integers,
    tuple[float, ...]: parse_numbers,
    tuple[str, ...]: parse_names,
}


def add_fields(
    to: Options,
    cls: type,
    *,
    only: Collection[str] | None = None,
    but: Collection[str] = (),
    group: str | None = None,
    unset: Mapping[str, str] = {},
    defaults: bool = True,
) -> None:
    """An argument for every field that is an option, in their order.

    Args:
      to: the parser, or a group of it.
      only: these fields; None: all of them.
      but: fields that are left out.
      group: those of this heading; None: of any.
      unset: what the default of a field means here.
      defaults: False leaves None where an option is not given, for ``given_fields``; what is shown
        stays the same.

    Raises TypeError for a field of a type that no text is read as, and that names no parser.
    """
    for field in dataclasses.fields(cls):
        said = option_of(field)
        if said is None or not said.shown or (group is not None and said.group != group):
            continue
        if field.name not in but and (only is None or field.name in only):
            said = dataclasses.replace(said, unset=unset.get(field.name, said.unset))
            _add(to, field, said, defaults)


def from_fields[T](cls: type[T], args: argparse.Namespace, **others: Any) -> T:
    """The dataclass from what was parsed; ``others`` are values of further fields, or of these.

    Raises what the class itself raises.
    """
    return cls(**{**_found(cls, args), **others})


def given_fields(cls: type, args: argparse.Namespace) -> dict[str, Any]:
    """What was given of the fields, by name; parsed with ``defaults=False``."""
    return {name: value for name, value in _found(cls, args).items() if value is not None}


def _found(cls: type, args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(cls):
        said = option_of(field)
        if said is not None and hasattr(args, field.name):
            value = getattr(args, field.name)
            found[field.name] = tuple(value) if said.repeatable and value is not None else value
    return found


def _add(to: Options, field: "dataclasses.Field[Any]", said: Option, defaults: bool) -> None:
    flag, kind = flag_of(field), kind_of(field)
    common: dict[str, Any] = {"dest": field.name, "help": _help(field, said)}
    required = field.default is dataclasses.MISSING
    common["default"] = field.default if defaults and not required else None
    if kind is bool:
        to.add_argument(flag, action="store_false" if field.default else "store_true", **common)
        return
    choices = choices_of(field)
    if said.repeatable:
        common["action"] = _Append
        kind = typing.get_args(kind)[0]
    parse = said.parse or (str if choices else _PARSERS.get(kind))
    if parse is None:
        raise TypeError(f"{field.name}: no text is read as {kind}; name a parser")
    to.add_argument(
        flag, type=parse, choices=choices, metavar=said.metavar,
        required=required, **common,
    )  # fmt: skip


class _Append(argparse.Action):
    """Every value that is given, in place of the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add one."""
        earlier = getattr(namespace, self.dest)
        given = () if earlier is self.default else earlier
        setattr(namespace, self.dest, (*given, values))


def _help(field: "dataclasses.Field[Any]", said: Option) -> str:
    """What it is, then in brackets what it is where it is not given."""
    default = said.unset
    shown = field.default not in (None, "", ()) and field.default is not dataclasses.MISSING
    if default is None and shown and not isinstance(field.default, bool):
        default = written(field.default, said.parse)
    text = f"{said.help} ({default})" if default is not None else said.help
    return text.strip().replace("%", "%%")
