"""Options from the fields of a dataclass: what is shown, what is read, what is given back."""

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from jaxrag.base.options import (
    option,
    parse_bytes,
    parse_count,
    parse_counts,
    parse_integers,
    parse_numbers,
    parse_ratios,
    parse_seconds,
    written,
)
from jaxrag.cli.fields import add_fields, from_fields, given_fields


@dataclasses.dataclass(frozen=True)
class Trip:
    """Of every kind of field."""

    to: str = option(dataclasses.MISSING, "where to", "PLACE")
    rows: int = option(8, "of seats", "N")
    pace: Literal["slow", "fast"] | None = option(None, "how", unset="as the road is")
    tokens: tuple[int, ...] = option((512, 4096), "sizes", "N,...", parse=parse_counts)
    shares: tuple[float, ...] = option((), "of it", "R,...")
    names: tuple[str, ...] = option(("a", "b"), metavar="NAME,...")
    stops: tuple[str, ...] = option((), "on the way", "PLACE", flag="--stop", repeatable=True)
    memory: int = option(4 << 30, "at most", "SIZE", parse=parse_bytes)
    wait: float = option(5400.0, "at most", "TIME", parse=parse_seconds)
    full: float = option(0.95, "of 100 %")
    folder: Path | None = option(None, "of it", "DIR")
    loud: bool = option(False, "say more")
    cold: bool = option(True, "leave the cold out")
    made: str = "here"


EVERY = """--to Ure --rows 3 --pace fast --tokens 1k,7 --shares 0,0.5 --names x,y --stop a
    --stop b,c --memory 1MiB --wait 2m --full 1 --folder d --loud --no-cold"""


@pytest.fixture
def parse():
    def parsed(*words, **how):
        parser = argparse.ArgumentParser(prog="trip")
        add_fields(parser, Trip, **how)
        return parser.parse_args(words)

    return parsed


def test_what_is_not_given_is_the_default_of_the_field(parse):
    assert from_fields(Trip, parse("--to", "Ure")) == Trip("Ure")


def test_every_kind_of_value_is_read(parse):
    words = EVERY.split()
    assert from_fields(Trip, parse(*words), made="there") == Trip(
        "Ure", 3, "fast", (1024, 7), (0.0, 0.5), ("x", "y"), ("a", "b,c"), 1 << 20, 120.0, 1.0,
        Path("d"), loud=True, cold=False, made="there",
    )  # fmt: skip


def test_help_says_each_default_once(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    shown = " ".join(capsys.readouterr().out.split())
    for line in (
        "--to PLACE where to ", "--rows N of seats (8)", "--pace {slow,fast} how (as the road is)",
        "--tokens N,... sizes (512,4096)", "--shares R,... of it ", "--names NAME,... (a,b)",
        "--stop PLACE on the way ", "--memory SIZE at most (4GiB)", "--wait TIME at most (90m)",
        "--full FULL of 100 % (0.95)", "--loud say more", "--no-cold leave the cold out",
    ):  # fmt: skip
        assert line in shown
    assert "made" not in shown


def test_some_fields_and_other_words_for_a_default(capsys):
    parser = argparse.ArgumentParser()
    add_fields(parser, Trip, only=("rows", "pace", "loud"), but=("loud",), unset={"rows": "few"})
    assert vars(parser.parse_args([])) == {"rows": 8, "pace": None}
    assert "of seats (few)" in parser.format_help()


def test_what_was_given_is_told_from_defaults(parse):
    args = parse("--to", "Ure", "--no-cold", "--rows", "8", "--stop", "a", defaults=False)
    assert given_fields(Trip, args) == {"to": "Ure", "cold": False, "rows": 8, "stops": ("a",)}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "--to"),
        (("--to", "x", "--pace", "no"), "invalid choice: 'no'"),
        (("--to", "x", "--tokens", "1kB"), "expected a number of tokens, as 4096 or 4k"),
        (("--to", "x", "--shares", "a"), "'a': expected numbers such as 0,0.15,1.0"),
        (("--to", "x", "--rows", "many"), "invalid int value: 'many'"),
    ],
)
def test_what_is_none_of_them_is_bad_usage(parse, capsys, words, told):
    with pytest.raises(SystemExit) as leaving:
        parse(*words)
    assert leaving.value.code == 2
    assert told in capsys.readouterr().err


def test_a_type_that_no_text_is_read_as_is_refused():
    wrong = dataclasses.make_dataclass("Wrong", [("a", dict, option(None))])
    with pytest.raises(TypeError, match="a: no text is read as .*dict.*name a parser"):
        add_fields(argparse.ArgumentParser(), wrong)


@pytest.mark.parametrize(
    ("text", "parse"),
    [
        ("90s", parse_seconds), ("7d", parse_seconds), ("0s", parse_seconds),
        ("200MB", parse_bytes), ("64MiB", parse_bytes), ("3kB", parse_bytes), ("7B", parse_bytes),
        ("512,4096", parse_counts), ("17", parse_count), ("8,16", parse_integers),
        ("0,0.15", parse_numbers), ("0,0.5,1", parse_ratios),
    ],
)  # fmt: skip
def test_what_is_written_is_read_again(text, parse):
    assert written(parse(text), parse) == text


def test_help_reads_nothing_heavy():
    """--help and --version take a tenth of a second because of this."""
    code = "import sys; sys.argv = ['jaxrag']; from jaxrag.cli import make_parser; make_parser(); "
    code += "print({'jax', 'numpy', 'tqdm', 'tokenizers', 'tensorstore'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
