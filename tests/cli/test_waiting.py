"""What is said while somebody waits for a model or for programs."""

import threading

import pytest

from jaxrag.cli import waiting

LOWERED, COMPILED = waiting._LOWERED, waiting._COMPILED


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(waiting, "AFTER", 0.0)


def until_looked(programs):
    """Until the timer of the last event has run."""
    timer = programs._timer
    if timer is not None:
        timer.join()


def test_programs_that_take_long_are_told_once(at_once, capsys):
    programs = waiting.Programs()
    programs.took("/jax/other", 1.0)
    assert programs._timer is None
    for _ in range(3):
        programs.took(LOWERED, 0.1)
        until_looked(programs)
    said = capsys.readouterr().err
    assert said == "Compiling for this machine (kept for the next start)\n"


def test_programs_are_counted_where_it_is_known_how_many_there_are(at_once, capsys):
    programs = waiting.Programs()
    for done in (1, 1, 2):
        programs.count = lambda done=done: (done, 3)
        programs.took(LOWERED, 0.1)
        until_looked(programs)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"Compiling for this machine, {done} of 3" for done in (1, 2)]


def test_nothing_is_said_of_what_is_ready_soon_or_in_an_answer(at_once, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "_QUIET", -1.0)
    programs = waiting.Programs()
    programs.took(COMPILED, 0.1)
    until_looked(programs)
    programs.muted = True
    programs.took(LOWERED, 9.0)
    until_looked(programs)
    assert capsys.readouterr().err == ""


def test_a_load_is_said_once_it_takes_long(monkeypatch, capsys):
    said, say = threading.Event(), waiting._say
    monkeypatch.setattr(waiting, "_say", lambda text: (say(text), said.set()))
    monkeypatch.setattr(waiting, "AFTER", 0.001)
    with waiting.loading("model"):
        assert said.wait(300)
    assert capsys.readouterr().err == "loading model\n"
    monkeypatch.setattr(waiting, "AFTER", float("inf"))
    with waiting.loading("model"):
        pass
    assert capsys.readouterr().err == ""
