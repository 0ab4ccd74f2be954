"""One name per option: what is meant by two commands is called the same, and taken the same way."""

import collections
import re
from pathlib import Path

import click
import pytest

from jaxrag.cli import PROGRAM
from jaxrag.cli.command import CliCommand, commands_of, parse

ROOT = Path(__file__).parents[2]

# What means what: an option with more than one kind of value, and what each is.
TWOFOLD = {
    "--kb": {"DIR": "a knowledge base", "[NAME=]DIR": "several, with names of their own"},
    "--model": {"MODEL": "one", "NAME=DIR": "several", "DIR": "its tokenizer, nothing else"},
    "--out": {"FILE": "the result", "DIR": "a folder: pictures, a run"},
    "--chunks": {"N": "so many", "N|N-M": "fewest and most", "": "one by one"},
    "--neighbours": {"N": "so many of a chunk", "[corpus|prompt]": "where they are found"},
    "--data": {"DIR": "what clients upload", "FILE": "a data set's own"},
    "--requests": {"N": "so many", "FILE": "those recorded in it"},
}
# Words that say so little that different options share them.
SHARED = {"", "none", "of each", "repeatable", "after a warm-up", "at most", "of a request",
          "of the model", "of a step"}  # fmt: skip


def options():
    """Every option: (command, option, what stands for its value, help)."""
    found = []
    for path, command in commands_of(PROGRAM):
        ctx = click.Context(command)
        for it in command.params:
            if isinstance(it, click.Option) and not it.is_eager:
                value = "" if it.is_flag else it.make_metavar(ctx)
                found.append((path, it.opts[-1], value, it.help))
    return found


OPTIONS = options()
USES = collections.defaultdict(lambda: collections.defaultdict(list))
for command, name, value, _ in OPTIONS:
    USES[name][value].append(command)


def test_one_name_takes_one_kind_of_value():
    for name, uses in USES.items():
        assert set(uses) == set(TWOFOLD.get(name, list(uses)[:1])), (name, dict(uses))
    assert set(TWOFOLD) <= set(USES)


def test_one_meaning_has_one_name():
    names = collections.defaultdict(set)
    for _, name, _, text in OPTIONS:
        words = re.sub(r"\(.*", "", text or "").split(";")[0].strip()
        if words not in SHARED and len(words.split()) > 2:
            names[words].add(name)
    assert {words: found for words, found in names.items() if len(found) > 1} == {}


def test_questions_are_a_file_and_their_number_is_called_so():
    assert set(USES["--questions"]) == {"FILE"}
    assert set(USES["--num-questions"]) == {"N"}


@pytest.mark.parametrize(("path", "command"), list(commands_of(PROGRAM)))
def test_short_help_has_at_most_15_options_and_no_name_that_is_none(path, command, capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(PROGRAM, [*path.split()[1:], "--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: {path} ") and "\n  example: " in out
    shown = re.findall(
        r"^  (?:-[hv], )?--([\w-]+)", out.partition("Options:")[2].partition("example:")[0], re.M
    )
    assert len(shown) <= 15
    if isinstance(command, CliCommand):
        assert set(shown) == (command.basic or set(shown))
        with pytest.raises(SystemExit, match="0"):
            parse(PROGRAM, [*path.split()[1:], "--help-all"])
        every = re.findall(r"^  (?:-[hv], )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
        assert {it.opts[-1] for it in command.params if isinstance(it, click.Option)} < set(every)
