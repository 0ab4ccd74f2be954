"""How far work is: a bar is for terminals, lines are for logs."""

import itertools

import pytest

from jaxrag.text import progress
from jaxrag.text.progress import progress_bar


@pytest.fixture
def clock(monkeypatch):
    """Every look at the clock finds a second gone."""
    seconds = itertools.count()
    monkeypatch.setattr("tqdm.std.time", lambda: float(next(seconds)))
    return seconds


def ended(capsys, total, step=1):
    with progress_bar(total, "eval", "answer") as bar:
        for _ in range(0, total, step):
            bar.update(step)
    return capsys.readouterr().err


def test_long_work_in_a_pipe_is_a_few_whole_lines(clock, capsys):
    lines = ended(capsys, 1000).splitlines()
    assert 2 <= len(lines) <= progress._LINES + 2
    assert all(line.startswith("eval:") and "\r" not in line for line in lines)
    assert "1000/1000" in lines[-1]
    assert max(map(len, lines)) <= 80


def test_short_work_in_a_pipe_says_nothing(monkeypatch, capsys):
    monkeypatch.setattr("tqdm.std.time", lambda: 5.0)
    assert ended(capsys, 1000) == ""


def test_nothing_is_shown_where_nothing_was_asked_for(clock, capsys):
    with progress_bar(9, "eval", "answer", shown=False) as bar:
        bar.update(9)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert "\r" in ended(capsys, 10)
