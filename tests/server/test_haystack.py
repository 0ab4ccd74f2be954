"""The example pipeline of Haystack, where that is installed."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_pipeline_answers_from_the_server(server, monkeypatch, capsys):
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    pytest.importorskip("haystack")
    spec = importlib.util.spec_from_file_location("pipeline", EXAMPLES / "haystack_pipeline.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    question = "Which animal does Kora Felell keep?"
    monkeypatch.setattr("sys.argv", ["pipeline", question, "--url", f"{server.url}/v1"])
    module.main()
    assert capsys.readouterr().out == "falcon (113 of 124 tokens from the store)\n"
