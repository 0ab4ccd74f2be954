"""The `jaxrag` program: one file a command, heavy imports only when a command runs."""

import argparse
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence

from jaxrag.base.errors import JaxragError
from jaxrag.base.installed import __version__
from jaxrag.cli import (
    ask,
    bench,
    check,
    convert,
    demo,
    eval,
    generate,
    ingest,
    kb,
    mcp,
    plain,
    plain_gate,
    plan,
    serve,
    train,
)
from jaxrag.cli.waiting import stop_telling
from jaxrag.models.text.printable import printable

COMMANDS = (
    demo, ingest, ask, generate, serve, mcp, plain, plain_gate, kb, check, plan, convert, train,
    eval, bench,
)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """The parser of the program, with all commands."""
    parser = argparse.ArgumentParser(
        prog="jaxrag",
        description="Retrieval-augmented generation that never prefills a document twice.",
        epilog="example: jaxrag ingest docs/ --kb kb --model MODEL && "
        'jaxrag ask "Who built the bridge?" --kb kb',
    )
    parser.add_argument("--version", action="version", version=f"jaxrag {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 success, 1 a reported error, 2 bad usage."""
    args = make_parser().parse_args(argv)
    return run_command(args.run, args)


def run_command(run: Callable[[argparse.Namespace], int | None], args: argparse.Namespace) -> int:
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
