"""What is said while somebody waits for a model or for programs."""

import re
import time

import pytest

from jaxrag.cli import waiting

LOWERED, COMPILED = waiting._LOWERED, waiting._COMPILED


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(waiting, "AFTER", 0.0)
    monkeypatch.setattr(waiting, "_TURN", 0.001)


def until_over(programs):
    while programs._watched:
        time.sleep(0.001)


def test_programs_are_counted_and_those_of_the_disk_apart(at_once, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "_LONG", 0.0)
    programs = waiting.Programs()
    programs.took("/jax/other", 1.0)
    assert not programs._watched
    for _ in range(3):
        programs.took(LOWERED, 0.1)
        programs.took(COMPILED, 0.1)
    programs.found(waiting._FOUND)
    until_over(programs)
    first, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"making programs ready, 3 so far: .* only once", first)
    assert re.fullmatch(r"3 programs in \d+\.\d s, 2 compiled", last)


def test_nothing_is_said_in_an_answer(at_once, capsys):
    programs = waiting.Programs()
    programs.muted = True
    programs.took(COMPILED, 9.0)
    until_over(programs)
    assert capsys.readouterr().err == ""


def test_a_load_is_said_once_it_takes_long(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "AFTER", 0.001)
    said = ""
    with waiting.loading("model"):
        while not said:
            said = capsys.readouterr().err
    assert said == "loading model\n"
    monkeypatch.setattr(waiting, "AFTER", float("inf"))
    with waiting.loading("model"):
        pass
    assert capsys.readouterr().err == ""
