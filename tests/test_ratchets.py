"""Numbers of the shape of the source tree that may fall and never rise.

``python scripts/structure.py --json`` names what is counted, and its docstring says how.
"""

import json
from pathlib import Path

import pytest
import structure

from jaxrag.cli import main

ROOT = Path(__file__).parents[1]
MOST = {
    "rooms": 18,
    "arrows between rooms": 86,
    "floors of files, jaxrag": 39,
    "floors within a room": 11,
    "type names with two homes": 0,
    "names in docstrings that do not resolve": 0,
    "long signatures, jaxrag": 7,
}
AT_MOST = {  # of what shrinks and grows with every change
    "code lines": 65_785,
    "code lines, tests": 60_810,
    "code lines, benchmarks": 6_995,
    "benchmark scripts beside the GPU's": 27,
    "fields of one request": 64,
    "objects of one request": 5,
}
MOST_OPTIONS = 52  # that the --help of one command shows


def verdict(row, number, most):
    """What is wrong with a number, "" where it is its maximum."""
    if number > most:
        return f"{row}: {number}, at most {most}: bring it down again"
    return f"{row}: {number}, less than {most}: lower the ratchet to {number}" * (number < most)


@pytest.fixture(scope="module")
def found():
    return structure.measure(ROOT)


@pytest.mark.parametrize("row", MOST)
def test_a_number_is_its_maximum(found, row):
    number = structure.number_of(row, found[row])
    said = verdict(row, number, MOST[row])
    assert not said, f"{said}\n{found[row]}" if number > MOST[row] else said


@pytest.mark.parametrize("row", AT_MOST)
def test_a_number_is_within_its_maximum(found, row):
    assert structure.number_of(row, found[row]) <= AT_MOST[row], found[row]


def test_a_help_shows_few_options(capsys):
    golden = json.loads((ROOT / "tests/goldens/public_names.json").read_text(encoding="utf-8"))
    shown = {}
    for command in golden["commands"]:
        with pytest.raises(SystemExit):
            main([*command.split()[1:], "--help"])
        shown[command] = structure.options_in(capsys.readouterr().out)
    assert sum(map(len, shown.values())) > 100
    many = {name: len(it) for name, it in shown.items() if len(it) > MOST_OPTIONS}
    assert not many, f"at most {MOST_OPTIONS} options in a --help"


@pytest.mark.parametrize(
    ("number", "words"), [(3, ""), (4, "at most 3"), (2, "lower the ratchet to 2")]
)
def test_what_is_said_of_a_number(number, words):
    said = verdict("rooms", number, 3)
    assert words in said
    assert bool(said) == bool(words)
