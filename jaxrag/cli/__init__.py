"""The `jaxrag` program: one file a command, heavy imports only when a command runs."""

import io
import logging
import os
import sys
from collections.abc import Callable, Sequence

import click

from jaxrag.base.errors import JaxragError
from jaxrag.base.installed import __version__
from jaxrag.cli.command import CliProgram, parse
from jaxrag.cli.waiting import stop_telling
from jaxrag.models.text.printable import printable

PROGRAM = CliProgram(
    "jaxrag",
    help="Retrieval-augmented generation that never prefills a document twice.",
    epilog="example: jaxrag ingest docs/ --kb kb --model MODEL && "
    'jaxrag ask "Who built the bridge?" --kb kb',
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
click.version_option(__version__, message="%(prog)s %(version)s")(PROGRAM)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 success, 1 a reported error, 2 bad usage."""
    return run_command(_run, argv)


def _run(argv: Sequence[str] | None) -> int | None:
    args = parse(PROGRAM, argv)
    return args.run(args)  # type: ignore[no-any-return]


def run_command[T](run: Callable[[T], int | None], args: T) -> int:
    """Run a command and report in one line what a user can meet; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # a terminal that knows ASCII only
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        return run(args) or 0
    except JaxragError as error:
        print(f"jaxrag: error: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jaxrag: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as in `jaxrag ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    finally:
        stop_telling()
