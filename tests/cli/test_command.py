"""Commands: options of fields and of TOML, what is shown, read, given back, and refused."""

import dataclasses
import os
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
from jaxrag.cli.command import command, fields, flag, from_fields, given_fields, parse, values


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


TRIP = command(
    "trip", print, "go there", "trip --to Ure", fields(Trip), flag("--json", "as JSON"),
    values("--with", "NAME", "who comes", greedy=True), basic="to rows json",
)  # fmt: skip


def read(*words):
    return parse(TRIP, words)


def test_what_is_not_given_is_the_default_of_the_field():
    assert from_fields(Trip, read("--to", "Ure")) == Trip("Ure")


def test_every_kind_of_value_is_read():
    assert from_fields(Trip, read(*EVERY.split()), made="there") == Trip(
        "Ure", 3, "fast", (1024, 7), (0.0, 0.5), ("x", "y"), ("a", "b,c"), 1 << 20, 120.0, 1.0,
        Path("d"), loud=True, cold=False, made="there",
    )  # fmt: skip


def test_help_says_each_default_once(capsys):
    with pytest.raises(SystemExit, match="0"):
        read("--help-all")
    shown = " ".join(capsys.readouterr().out.split())
    for line in (
        "--to PLACE where to ", "--rows N of seats (8)", "--pace [slow|fast] how (as the road is)",
        "--tokens N,... sizes (512,4096)", "--shares R,... of it ", "--names NAME,... (a,b)",
        "--stop PLACE on the way ", "--memory SIZE at most (4GiB)", "--wait TIME at most (90m)",
        "--full FULL of 100 % (0.95)", "--loud say more", "--no-cold leave the cold out",
    ):  # fmt: skip
        assert line in shown
    assert "made" not in shown
    with pytest.raises(SystemExit, match="0"):
        read("--help")
    short = capsys.readouterr().out
    assert "--rows" in short and "--pace" not in short and "12 more options: --help-all" in short


@pytest.mark.parametrize(("words", "level"), [((), "3"), (("-v",), None)])
def test_what_xla_logs_is_heard_where_that_is_asked(monkeypatch, words, level):
    monkeypatch.setattr(os, "environ", {})
    read("--to", "Ure", *words)
    assert os.environ.get("TF_CPP_MIN_LOG_LEVEL") == level


def test_some_fields_and_other_defaults():
    some = command("some", print, "x", None, fields(Trip, only=("rows", "pace"), but=("pace",),
                                                    defaults={"rows": 3}))  # fmt: skip
    args = parse(some, [])
    assert args.rows == 3 and not hasattr(args, "pace")


def test_what_was_given_is_told_from_defaults():
    args = read("--to", "Ure", "--no-cold", "--rows", "8", "--stop", "a")
    assert given_fields(Trip, args) == {"to": "Ure", "cold": False, "rows": 8, "stops": ("a",)}


def test_one_option_takes_several_words():
    args = read("--with", "a", "b", "--to", "x", "--with=c", "--json")
    assert (getattr(args, "with"), args.to, args.json) == (("a", "b", "c"), "x", True)


def test_a_file_says_what_the_words_do_not(tmp_path):
    file = tmp_path / "trip.toml"
    file.write_text(
        'to = "Ure"\nrows = 3\nno_cold = true\nloud = false\nstop = ["a", "b,c"]\n'
        'tokens = [7, 8]\nmemory = "1MiB"\nfull = 1\npace = "fast"\n'
    )
    args = read("--config", str(file), "--rows", "5")
    assert from_fields(Trip, args) == Trip(
        "Ure", 5, "fast", (7, 8), stops=("a", "b,c"), memory=1 << 20, full=1.0, cold=False
    )
    assert "memory" in args.given and "loud" not in args.given


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("row = 3", "unknown key 'row'; did you mean 'rows'?"),
        ("qqq = 3", "unknown key 'qqq'; there are to, rows, "),
        ("rows = 8.5", "'8.5' is not a valid integer"),
        ('loud = "yes"', "loud = 'yes': expected true or false"),
        ("rows = true", "rows = True: expected a value"),
        ('tokens = "1kB"', "expected a number of tokens"),
        ('pace = "no"', "'no' is not one of 'slow', 'fast'"),
    ],
)
def test_what_a_file_must_not_say(tmp_path, capsys, text, told):
    file = tmp_path / "trip.toml"
    file.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        read("--to", "x", "--config", str(file))
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "Missing option '--to'"),
        (("--to", "x", "--row", "3"), "No such option '--row'. (Did you mean one of: '--rows'"),
        (("--to", "x", "--pace", "no"), "'no' is not one of 'slow', 'fast'"),
        (("--to", "x", "--tokens", "1kB"), "expected a number of tokens, as 4096 or 4k"),
        (("--to", "x", "--shares", "a"), "'a': expected numbers such as 0,0.15,1.0"),
        (("--to", "x", "--rows", "many"), "Invalid value for '--rows': 'many' is not a valid int"),
    ],
)
def test_what_is_none_of_them_is_bad_usage(capsys, words, told):
    with pytest.raises(SystemExit, match="2"):
        read(*words)
    err = capsys.readouterr().err
    assert err.startswith("trip: error: ") and told in err and err.count("\n") == 1


def test_a_type_that_no_text_is_read_as_is_refused():
    wrong = dataclasses.make_dataclass("Wrong", [("a", dict, option(None))])
    with pytest.raises(TypeError, match="a: no text is read as .*dict.*name a parser"):
        fields(wrong)


@pytest.mark.parametrize(
    ("text", "parse", "value"),
    [
        ("90s", parse_seconds, 90), ("7d", parse_seconds, 604800), ("0s", parse_seconds, 0),
        ("200MB", parse_bytes, 200_000_000), ("64MiB", parse_bytes, 1 << 26),
        ("3kB", parse_bytes, 3000), ("7B", parse_bytes, 7), ("512,4096", parse_counts, (512, 4096)),
        ("17", parse_count, 17), ("8,16", parse_integers, (8, 16)),
        ("0,0.15", parse_numbers, (0, 0.15)), ("0,0.5,1", parse_ratios, (0, 0.5, 1)),
    ],
)  # fmt: skip
def test_what_is_read_is_written_again(text, parse, value):
    assert parse(text) == value and written(value, parse) == text


@pytest.mark.parametrize("words", ["--help", "serve --help", "eval own --help-all"])
def test_help_reads_nothing_heavy(words):
    """--help and --version take a tenth of a second because of this."""
    code = "import contextlib, sys; from jaxrag.cli import main\n"
    code += f"with contextlib.suppress(SystemExit): main({words.split()})\n"
    code += "print({'jax', 'numpy', 'tqdm', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
