"""What is said while somebody waits for a model or for programs."""

import re
import threading
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
    for name, seconds in (("_LONG", 0.0), ("AFTER", float("inf")), ("_QUIET", float("inf"))):
        monkeypatch.setattr(waiting, name, seconds)
    programs = waiting.Programs()
    programs.took("/jax/other", 1.0)
    assert not programs._watched
    for _ in range(3):
        programs.took(LOWERED, 0.1)
        programs.took(COMPILED, 0.1)
    programs.found(waiting._FOUND)
    monkeypatch.setattr(waiting, "AFTER", 0.0)
    while not programs._told:
        time.sleep(0.001)
    monkeypatch.setattr(waiting, "_QUIET", 0.0)
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
    said, say = threading.Event(), waiting._say
    monkeypatch.setattr(waiting, "_say", lambda text: (say(text), said.set()))
    monkeypatch.setattr(waiting, "AFTER", 0.001)
    with waiting.loading("model"):
        assert said.wait(60)
    assert capsys.readouterr().err == "loading model\n"
    monkeypatch.setattr(waiting, "AFTER", float("inf"))
    with waiting.loading("model"):
        pass
    assert capsys.readouterr().err == ""
