"""Hostile input ends in one line, within limits: some cases of ``hostile.py``, which has all."""

import hostile
import pytest
from hostile_case import Case

SHORT = (
    "model: layers 10^9",
    "model: header of depth 200,000",
    "model: weights NaN",
    "model: index that names /etc/passwd",
    "model: template of 10^10 letters",
    "docx: no archive",
    "html: 100,000 deep",
    "json lines: lists 200,000 deep",
    "names: a FIFO",
    "where: 20,000 deep",
)
BY_NAME = {case.name: case for case in hostile.CASES}


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return hostile.Trials(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("name", SHORT)
def test_a_hostile_input_ends_in_one_line(trials, name):
    outcome = trials.try_out(BY_NAME[name])
    assert outcome.verdict == BY_NAME[name].ends, outcome


def test_names_are_one_each_and_there_are_enough():
    assert len(BY_NAME) == len(hostile.CASES)
    assert sum(name.startswith("model: ") for name in BY_NAME) >= 65


def ending(code, lines, folder, **how):
    case = Case("a: case", lambda folder: [], **{"ends": "refused", "says": "why", **how})
    return hostile.judge(case, code, lines, folder)[0]


def test_what_is_bad(tmp_path):
    assert ending(1, ["error: why"], tmp_path) == "refused"
    assert ending(1, ["error: why", "more"], tmp_path) == "lines"
    assert ending(1, ["error: else"], tmp_path) == "other words"
    assert ending(1, ["why " + "x" * 2_000], tmp_path) == "other words"
    assert ending(1, ["why \x1b[31m"], tmp_path) == "other words"
    assert ending(0, [], tmp_path) == "another ending"
    assert ending(-11, [], tmp_path) == "died"
    assert ending(hostile.TRACEBACK, ["Traceback", "why"], tmp_path) == "traceback"
    (tmp_path / "kb").mkdir()
    assert ending(1, ["error: why"], tmp_path) == "half-written"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - set(SHORT)))
def test_all_others(trials, name):
    outcome = trials.try_out(BY_NAME[name])
    assert outcome.verdict == BY_NAME[name].ends, outcome
