"""Stock clients in a Python that has them: JAXRAG_CLIENTS_PYTHON names it.

`pip install openai langchain-openai llama-index-llms-openai-like haystack-ai openai-agents
instructor litellm`. What they send is in goldens/clients, for test_histories.py;
recorded_clients.py writes it.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from jaxrag.models.model import load_model

CLIENTS = Path(__file__).with_name("other_clients.py")
RECORDED = Path(__file__).with_name("recorded_clients.py")
GOLDENS = Path(__file__).parents[1] / "goldens" / "clients"
PYTHON = os.environ.get("JAXRAG_CLIENTS_PYTHON")

pytestmark = pytest.mark.skipif(PYTHON is None, reason="JAXRAG_CLIENTS_PYTHON is not set")


@pytest.fixture(scope="module")
def serving(start, tools_dir):
    with start(load_model(tools_dir, cache_tokens=8192), {}, warm_up=False) as running:
        yield running


@pytest.fixture
def output(serving):
    """``output(script, *before, after)``: what it prints, asking the server between these."""

    def run(script, *before, after=()):
        model = serving.client.get("/v1/models").json()["data"][0]["id"]
        eos = ",".join(map(str, serving.state.model.config.eos_ids))
        quiet = {
            "HAYSTACK_TELEMETRY_ENABLED": "False",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        done = subprocess.run(
            [PYTHON, script, *before, serving.url, model, eos, *after],
            env=os.environ | quiet, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert not done.returncode, done.stderr[-2000:]
        return done.stdout.splitlines()

    return run


@pytest.fixture
def ran(output):
    """``ran(name)``: what came of a client."""
    return lambda name: json.loads(output(CLIENTS, name)[-1])


def test_every_client_comes_through_its_talk(output, tmp_path):
    """And sends what it sent when it was recorded, but for what was answered to it."""
    output(RECORDED, after=[tmp_path])
    for path in sorted(GOLDENS.glob("*.json")):
        was, now = (
            json.loads((it / path.name).read_text())["requests"] for it in (GOLDENS, tmp_path)
        )
        assert len(now) == 5
        assert [it["body"].keys() for it in now] == [it["body"].keys() for it in was], path.name


def test_the_agents_sdk_runs_its_loop(ran):
    for name, told in ran("agents").items():
        assert "ToolCallItem" in told["kinds"] and "ToolCallOutputItem" in told["kinds"], name
        assert told["asked"] and all(isinstance(it, str) for it in told["asked"])
        assert told["turns"] == 2 and isinstance(told["final"], str)


def test_haystack_calls_a_tool_and_answers_in_a_form(ran):
    told = ran("haystack")
    assert told["calls"]
    for name, arguments in told["calls"]:
        assert name == "weather" and arguments.keys() == {"city"}
        assert len(arguments["city"]) <= 8
    assert told["finish"] == "stop" and json.loads(told["answer"]).keys() == {"city"}
