"""The tables of evidence: cells that the program takes, one command that goes on."""

import subprocess

import evidence
import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError
from jaxrag.cli import PROGRAM
from jaxrag.cli.command import from_fields, parse
from jaxrag.measure.evals.datasets.options import DatasetOptions
from jaxrag.measure.evals.options import LongOptions

CELLS = evidence.cells_of()


def test_the_main_cells_come_first():
    tables = [cell.table for cell in CELLS]
    assert tables == sorted(tables, key=list(dict.fromkeys(tables)).index) and tables[0] == "main"
    assert len({cell.name for cell in CELLS}) == len(CELLS)


@pytest.mark.parametrize("cell", CELLS, ids=[cell.name for cell in CELLS])
def test_the_program_takes_every_cell(cell, tmp_path):
    args = parse(PROGRAM, evidence.command_of(cell, "MODEL", tmp_path, tmp_path, 2))
    assert args.dtype == "float32"
    if cell.suite:
        options = from_fields(LongOptions, args, suite=cell.suite, model=args.model)
        assert options.questions == 2 and options.methods == cell.methods
        assert options.resolved[0].decode.name == "dense" and len(options.resolved) > 1
        return
    options = from_fields(DatasetOptions, args, name=args.name, model=args.model, out=args.out)
    assert options.controls and options.number == 2 and options.methods == cell.methods
    assert options.methods[0] == "full_attention"


def test_an_unknown_key_is_refused(tmp_path):
    path = tmp_path / "cells.toml"
    path.write_text(
        '[methods]\na = ["turborag"]\n[[cell]]\nname = "x"\ntable = "t"\nmethods = "a"\n'
        'dataset = "musique"\ndata = "d"\nnum = 3\nsees = 1\n'
    )
    with refused(ConfigError, "sees"):
        evidence.cells_of(path)


class Ran:
    """A process that takes so many hours."""

    def __init__(self, hours, clock):
        self.hours, self.clock, self.ended = hours, clock, False

    def wait(self, seconds=None):
        if seconds is not None and seconds < 3600 * self.hours and not self.ended:
            raise subprocess.TimeoutExpired("jaxrag", seconds)
        self.clock[0] += 3600 * self.hours
        return 0

    def terminate(self):
        self.ended = True


@pytest.mark.parametrize(("hours", "begun", "code"), [("9", 4, 0), ("2.5", 3, 1)])
def test_it_stops_when_the_time_is_over(tmp_path, monkeypatch, capsys, hours, begun, code):
    clock, ran = [0.0], []

    def start(command, cwd):
        ran.append(Ran(1, clock))
        return ran[-1]

    monkeypatch.setattr(evidence.subprocess, "Popen", start)
    monkeypatch.setattr(evidence.time, "monotonic", lambda: clock[0])
    asked = ["evidence", "--model", "M", "--data", "D", "--out", str(tmp_path), "--num", "4"]
    monkeypatch.setattr("sys.argv", [*asked, "--table", "main", "--hours", hours])
    assert evidence.main() == code
    assert len(ran) == begun and ran[-1].ended == bool(code)
    assert ("the time is over" in capsys.readouterr().out) == bool(code)
