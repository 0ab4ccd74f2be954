"""How far work is: a bar is for terminals, lines are for logs."""

import itertools
import sys
import types

import pytest

from jaxrag.models.text import progress
from jaxrag.models.text.progress import followed, progress_bar


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


def test_items_are_followed(clock, capsys):
    assert list(followed(range(100), "ask", "question")) == list(range(100))
    assert "100/100" in capsys.readouterr().err.splitlines()[-1]
    assert list(followed("ab", "ask", "question", shown=False)) == ["a", "b"]
    assert capsys.readouterr().err == ""


def test_what_was_done_before_counts(clock, capsys):
    with progress_bar(1000, "train", "step", done=800) as bar:
        for _ in range(200):
            bar.update()
    assert "1000/1000" in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def notebook(monkeypatch):
    """As in a notebook: a shell with a kernel, widgets, and what tqdm would draw on them."""
    drawn = types.ModuleType("tqdm.notebook")
    drawn.tqdm = lambda **kwargs: ("widget", kwargs["desc"], kwargs["total"])
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "tqdm.notebook", drawn)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "ipywidgets")
    return shell


def test_a_notebook_gets_a_widget(notebook):
    assert progress_bar(3, "eval", "answer") == ("widget", "eval", 3)


@pytest.mark.parametrize("lacks", ["widgets", "kernel", "shell"])
def test_a_notebook_that_can_show_none_gets_lines(notebook, monkeypatch, clock, capsys, lacks):
    if lacks == "widgets":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    elif lacks == "kernel":
        notebook.kernel = None
    else:
        monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: None)
    assert "1000/1000" in ended(capsys, 1000).splitlines()[-1]
