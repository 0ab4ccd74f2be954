"""What is printed beside answers."""

import pytest

from jaxrag.cli.output import note

TEXT = "the model was loaded with K and V on the device: load_model(..., value_layers=1) frees it"


@pytest.mark.parametrize("terminal", [True, False])
def test_notes_are_broken_for_people_only(monkeypatch, capsys, terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    note(f"{TEXT}, and {'long' * 30} names stay whole\x1b[31m")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("note: the model")
    assert all(len(line) <= 80 or " " not in line for line in lines) == terminal
    assert (len(lines) > 1) == terminal
    assert "\\x1b[31m" in lines[-1]
