"""Joins other processes as every command does: join_program.py SECONDS OPTION..."""

import argparse
import sys

from jaxrag.base.errors import JaxragError
from jaxrag.cli import options

options.MEET_SECONDS = float(sys.argv[1])
parser = argparse.ArgumentParser()
options.add_distributed(parser, "")
try:
    options.join(parser.parse_args(["--distributed", *sys.argv[2:]]))
except JaxragError as error:
    print(f"jaxrag: error: {error}", file=sys.stderr)
    sys.exit(1)
sys.exit(0)
