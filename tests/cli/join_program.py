"""Joins other processes as every command does: join_program.py SECONDS OPTION..."""

import sys

from jaxrag.base.errors import JaxragError
from jaxrag.cli import options
from jaxrag.cli.command import command, parse

options.MEET_SECONDS = float(sys.argv[1])
program = command("join", options.join, "join", None, options.distributed_options())
try:
    options.join(parse(program, ["--distributed", *sys.argv[2:]]))
except JaxragError as error:
    print(f"jaxrag: error: {error}", file=sys.stderr)
    sys.exit(1)
sys.exit(0)
