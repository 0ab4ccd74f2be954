"""Commands by click: options from fields of dataclasses, help in short and in full, TOML beside.

A command is what it is called, what it runs and its parameters: ``fields`` makes one of every field
that is an option (``base.options``), and ``value``, ``values``, ``flag`` and ``argument`` make
those of a command alone. What was parsed is one namespace, ``Args``, whose ``run`` is the command.
"""

import dataclasses
import difflib
import importlib
import os
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click.core import ParameterSource

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
from jaxrag.models.text.printable import printable

Args = SimpleNamespace  # values by name; ``given``: names of those that were said; ``run``
Parameter = click.Parameter

SUMMARIES = {  # what each command does: `jaxrag --help` reads none of them
    "demo": "ingest the example documents and ask about them, with the model that comes along",
    "ingest": "encode documents into a knowledge base, once",
    "read": "show what is read of files: text, metadata and what was left out; without a model",
    "ask": "answer a question from cached chunks",
    "generate": "answer a file of questions: one JSON line in, one JSON line out",
    "serve": "serve a model and its knowledge bases over HTTP, as OpenAI's clients ask",
    "mcp": "give agents the knowledge bases of a running `jaxrag serve` as tools",
    "plain": "show which passages a server with --plain would find in a request",
    "gate": "compare a method with full attention on recorded requests, passages read as blocks",
    "kb": "look into a knowledge base and keep it in order",
    "check": "say what a model is understood as, what it takes here, and which methods suit",
    "plan": "estimate disks, time to first token and engines of a corpus and its questions",
    "convert": "turn a Hugging Face model into a jaxrag (Orbax) checkpoint, or back; GGUF too",
    "train": "train a model, or fine-tune it to block attention",
    "eval": "measure how well models answer",
    "bench": "measure",
}
_XLA_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # of what is logged: 3, what ends the process
_ALL = "jaxrag.cli.all"  # in the meta of a context: help shows every option
_PARSERS: dict[Any, Callable[[str], Any]] = {
    tuple[int, ...]: parse_integers,
    tuple[float, ...]: parse_numbers,
    tuple[str, ...]: parse_names,
}


class _Parsed(click.ParamType[Any]):
    """Texts that ``parse`` reads, which raises ValueError with what it expected."""

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = "text", parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A text read; a default as it is."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Values(click.Option):
    """An option that may be repeated; a greedy one takes several words at once, too."""

    def __init__(self, flag: str, greedy: bool, **said: Any) -> None:
        super().__init__([flag, said.pop("dest", _name(flag))], multiple=True, **said)
        self.greedy = greedy


def argument(name: str, metavar: str, help: str, *, several: bool = False) -> click.Argument:
    """What stands without an option; ``several``: one or more."""
    return click.Argument([name], metavar=metavar, help=help, nargs=-1 if several else 1,
                          required=True)  # fmt: skip


def flag(name: str, help: str) -> click.Option:
    """An option without a value."""
    return click.Option([name], is_flag=True, help=help)


def value(
    name: str, metavar: str | None, help: str, default: Any = None, *, dest: str | None = None,
    **said: Any,
) -> click.Option:  # fmt: skip
    """An option with a value.

    Args:
      metavar: what stands for the value; None: its choices, or the name in capitals.
      dest: what it is called in ``Args``.
      said: of ``click.Option``; ``type`` may be a function that reads a text.
    """
    if not said.get("required"):
        said["default"] = default
    return click.Option([name, dest or _name(name)], help=help, **_typed(name, metavar, said))


def values(
    name: str, metavar: str, help: str, *, greedy: bool = False, **said: Any
) -> click.Option:
    """An option that is given once for each of several values; ``greedy``: or with all of them."""
    return _Values(name, greedy, help=help, **_typed(name, metavar, said))


def _typed(name: str, metavar: str | None, said: dict[str, Any]) -> dict[str, Any]:
    """The options of click with choices and functions as types of it."""
    kind, choices = said.pop("type", str), said.pop("choices", None)
    if choices is not None:
        return {**said, "type": click.Choice(choices), "metavar": metavar}
    if kind not in (str, int, float):
        kind = _Parsed(kind)
    return {**said, "type": kind, "metavar": metavar or _name(name).upper()}


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def fields(
    cls: type,
    *,
    only: Collection[str] | None = None,
    but: Collection[str] = (),
    defaults: Mapping[str, Any] = {},
) -> list[click.Parameter]:
    """An option for every field that is one, in their order.

    Args:
      only: these fields; None: all of them.
      but: fields that are left out.
      defaults: of fields that have another one here.

    Raises TypeError for a field of a type that no text is read as, and that names no parser.
    """
    found: list[click.Parameter] = []
    for field in dataclasses.fields(cls):
        said = option_of(field)
        if said is None or not said.shown or field.name in but:
            continue
        if only is None or field.name in only:
            found.append(_of_field(field, said, defaults.get(field.name, field.default)))
    return found


def _of_field(field: "dataclasses.Field[Any]", said: Option, default: Any) -> click.Option:
    kind, name = kind_of(field), flag_of(field)
    required = default is dataclasses.MISSING
    common: dict[str, Any] = {"dest": field.name, "help": _help(said, default)}
    if kind is bool:
        return click.Option([name, field.name], is_flag=True, flag_value=default is not True,
                            default=default, type=bool, help=common["help"])  # fmt: skip
    choices = choices_of(field)
    if said.repeatable:
        kind = typing.get_args(kind)[0]
    parse = said.parse or _PARSERS.get(kind, kind)
    if choices is None and parse not in (str, int, float, Path) and isinstance(parse, type):
        raise TypeError(f"{field.name}: no text is read as {kind}; name a parser")
    make = values if said.repeatable else value
    common |= {"choices": choices, "type": parse, "required": required}
    return make(name, said.metavar, default=None if required else default, **common)  # type: ignore[arg-type]


def _help(said: Option, default: Any) -> str:
    """What it is, then in brackets what it is where it is not given."""
    shown = said.unset
    if shown is None and not (default in (None, "", ()) or default is dataclasses.MISSING):
        shown = None if isinstance(default, bool) else written(default, said.parse)
    return (f"{said.help} ({shown})" if shown is not None else said.help).strip()


def from_fields[T](cls: type[T], args: Args, **others: Any) -> T:
    """The dataclass from what was parsed; ``others`` are values of further fields, or of these.

    Raises what the class itself raises.
    """
    return cls(**{**_found(cls, args), **others})


def given_fields(cls: type, args: Args) -> dict[str, Any]:
    """What was given of the fields, by name."""
    return {name: it for name, it in _found(cls, args).items() if name in args.given}


def _found(cls: type, args: Args) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(cls) if option_of(field) is not None]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


class CliCommand(click.Command):
    """A command; ``command`` makes one.

    Attributes:
      basic: names of the options that the short help shows; None: all of them.
      beside: other commands, called by a word in the place of its argument.
    """

    def __init__(
        self, name: str, run: Callable[[Args], int | None], help: str, example: str | None,
        parameters: list[click.Parameter], basic: str | None, constants: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._run, self._constants = run, constants
        self.beside: dict[str, click.Command] = {}
        self.basic = None if basic is None else {*basic.split(), "config", "help-all", "help"}
        every = click.Option(
            ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all,
            help="show every option",
        )  # fmt: skip
        loud = click.Option(
            ["-v", "--verbose"], is_flag=True, is_eager=True, expose_value=False,
            callback=_hear_xla, help="what XLA logs, too",
        )  # fmt: skip
        config = click.Option(
            ["--config", "toml_file"], metavar="FILE", is_eager=True, expose_value=False,
            callback=_read_config, help="TOML with names of options as keys, such as max_bytes",
        )  # fmt: skip
        own = any("--config" in parameter.opts for parameter in parameters)
        super().__init__(
            name, params=[*parameters, *([] if own else [config]), loud, every], help=help,
            epilog=example and f"example: {example}", callback=self._parsed,
            context_settings={"help_option_names": ["-h", "--help"]},
        )  # fmt: skip

    def _parsed(self, **values: Any) -> Args:
        ctx = click.get_current_context()
        said = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
        given = frozenset(it for it in values if ctx.get_parameter_source(it) in said)
        return Args(**values, **self._constants, given=given, run=self._run)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat a greedy option in front of each of the words behind it."""
        greedy = {it.opts[0] for it in self.params if isinstance(it, _Values) and it.greedy}
        words: list[str] = []
        last = ""
        for word in args:
            if word.startswith("-"):
                last = word if word in greedy else ""
            elif last and words[-1] != last:
                words.append(last)
            words.append(word)
        return super().parse_args(ctx, words)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The basic ones, unless all are asked for; and how many more there are."""
        all_ = ctx.meta.get(_ALL)
        every = (param for param in self.get_params(ctx) if isinstance(param, click.Option))
        options = [one for one in every if all_ or one.name != "verbose"]
        basic = None if all_ else self.basic
        shown = [one for one in options if basic is None or one.opts[-1].lstrip("-") in basic]
        with formatter.section("Options"):
            formatter.write_dl([row for one in shown if (row := one.get_help_record(ctx))])
        if len(shown) < len(options):
            formatter.write_paragraph()
            formatter.write_text(f"{len(options) - len(shown)} more options: --help-all")


def command(
    name: str,
    run: Callable[[Args], int | None],
    help: str,
    example: str | None,
    *parameters: click.Parameter | Sequence[click.Parameter],
    basic: str | None = None,
    **constants: Any,
) -> CliCommand:
    """A command whose help ends with an example.

    Args:
      help: what it does, in small letters.
      parameters: its own, and those of ``fields``.
      basic: names of the options that the short help shows, without dashes; None: all.
      constants: further values of ``Args``.
    """
    flat = [one for it in parameters for one in ([it] if isinstance(it, click.Parameter) else it)]
    said = help[0].upper() + help[1:] + "." * (not help.endswith("."))
    return CliCommand(name, run, said, example, flat, basic, constants)


class CliGroup(click.Group):
    """A command of several; ``group`` makes one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they are shown."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What each of them does."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, it.help or "") for name, it in self.commands.items()])


def group(name: str, help: str, example: str, *commands: click.Command) -> click.Group:
    """A command of several, whose help ends with an example."""
    return CliGroup(
        name, list(commands), help=help[0].upper() + help[1:] + ".", no_args_is_help=False,
        epilog=f"example: {example}", context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip


class CliProgram(CliGroup):
    """The program, which imports a command where it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they are shown."""
        return list(SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """The command of its module. Raises NoSuchCommand."""
        if cmd_name not in SUMMARIES:
            raise click.exceptions.NoSuchCommand(cmd_name, possibilities=SUMMARIES, ctx=ctx)
        module = {"gate": "plain_gate"}.get(cmd_name, cmd_name)
        found: click.Command = importlib.import_module(f"jaxrag.cli.{module}").COMMAND
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """A command, or one beside it, and the words behind."""
        name, chosen, words = super().resolve_command(ctx, args)
        if isinstance(chosen, CliCommand) and words and words[0] in chosen.beside:
            return f"{name} {words[0]}", chosen.beside[words[0]], words[1:]
        return name, chosen, words

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What each of them does."""
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))


def parse(program: click.Command, argv: Sequence[str] | None) -> Args:
    """What the words say of one of the program's commands, ready to ``run``.

    Prints a line and leaves with SystemExit 2 for what it does not understand, and with 0 behind a
    help text.
    """
    words = None if argv is None else list(argv)
    try:
        parsed = program.main(words, prog_name=program.name, standalone_mode=False)
    except click.UsageError as error:
        path = "jaxrag" if error.ctx is None else error.ctx.command_path
        said = error.format_message().rstrip(".")
        fix = "" if "id you mean" in said else f"; see {path} --help"
        print(f"{path}: error: {printable(said)}{fix}", file=sys.stderr)
        raise SystemExit(2) from None
    if not isinstance(parsed, Args):
        raise SystemExit(parsed or 0)
    return parsed


def exclusive(args: Args, *names: str) -> None:
    """Leave with SystemExit 2 and a line where more than one of these options is given."""
    given = [f"--{name.replace('_', '-')}" for name in names if name in args.given]
    if len(given) > 1:
        print(f"jaxrag: error: {given[0]} with {given[1]}: pass one of them", file=sys.stderr)
        raise SystemExit(2)


def commands_of(program: click.Command, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command below one, and itself, with the words that call it."""
    path = f"{prefix} {program.name}".strip()
    yield path, program
    if isinstance(program, CliCommand):
        for beside in program.beside.values():
            yield from commands_of(beside, path)
    if isinstance(program, click.Group):
        ctx = click.Context(program)
        for name in program.list_commands(ctx):
            found = program.get_command(ctx, name)
            assert found is not None
            yield from commands_of(found, path)


def _show_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _hear_xla(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Its alarms of slow compiling are no news to a user; what fails is raised. Before jax is."""
    if not value:
        os.environ.setdefault(_XLA_LEVEL, "3")


def _read_config(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    from jaxrag.base.tables import read_toml

    if path is not None:
        take_table(ctx, read_toml(Path(path)), f"--config {path}")


def take_table(ctx: click.Context, table: Mapping[str, Any], where: str) -> None:
    """Take the values of a table for what the command line does not say.

    Its keys are names of options, underscores for dashes. Raises UsageError for another key, and
    for a value of another kind.
    """
    known = {_name(param.opts[-1]): param for param in ctx.command.params if param.expose_value}
    taken: dict[str, Any] = {}
    ctx.default_map = taken
    for key, said in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            meant = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
            raise click.UsageError(f"{where}: unknown key {key!r}{meant}", ctx)
        named, several = known[key], isinstance(said, list)
        name = str(named.name)
        switch = isinstance(named, click.Option) and named.is_flag
        if isinstance(said, dict) or switch != isinstance(said, bool):
            expected = "true or false" if switch else "a value"
            raise click.UsageError(f"{where}: {key} = {said!r}: expected {expected}", ctx)
        if isinstance(named, click.Option) and switch:
            taken |= {name: named.flag_value} if said else {}
        elif named.multiple or named.nargs == -1:
            taken[name] = [str(one) for one in (said if several else [said])]
        else:
            taken[name] = ",".join(map(str, said)) if several else str(said)
