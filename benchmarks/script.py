"""What the scripts here do alike: options of a dataclass, a run, a result that is printed and kept.

They import this package and each other, are started from a checkout, and are in no wheel.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxrag.cli import run_command
from jaxrag.cli.fields import add_fields, from_fields
from jaxrag.cli.options import add_peer, add_result, peer_of
from jaxrag.cli.output import give_out, require_folder

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class More:
    """Arguments beside those of the dataclass.

    Attributes:
      add: adds them to the parser.
      fields: the fields of the dataclass that they fill, by name.
    """

    add: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    fields: Callable[[argparse.Namespace], dict[str, Any]] = lambda args: {}


PEER = More(add_peer, lambda args: {"peer_python": peer_of(args)})


def indented(result: Result) -> list[str]:
    """The result as JSON, for those without a table."""
    return [json.dumps(result, indent=1)]


def run_script(
    doc: str | None,
    options: type,
    run: Callable[[Any], Result],
    report: Callable[[Result], Iterable[str]] = indented,
    argv: Sequence[str] | None = None,
    *,
    more: More | None = None,
    markdown: Callable[[Result], str] | None = None,
    passed: Callable[[Result], bool] = lambda result: True,
) -> int:
    """Parse the arguments, run, print and write; returns the exit code.

    Args:
      doc: of the script, shown by --help.
      options: the dataclass whose fields are the arguments.
      run: measures; its result is JSON-able.
      report: the lines that are printed without --json.
      argv: the arguments; None: those of the process.
      more: further arguments.
      markdown: the page of --markdown; None: there is no such option.
      passed: exit code 1 where it says False of the result.
    """
    more = more or More()

    def command(args: argparse.Namespace) -> int:
        require_folder(args.out)
        if markdown is not None:
            require_folder(args.markdown, "--markdown")
        result = run(from_fields(options, args, **more.fields(args)))
        give_out(args, result, report(result), markdown)
        return 0 if passed(result) else 1

    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_fields(parser, options)
    more.add(parser)
    add_result(parser, markdown=markdown is not None)
    return run_command(command, parser.parse_args(argv))
