"""OpenAI's Agents SDK and Haystack, in a Python that has them: JAXRAG_CLIENTS_PYTHON names it.

They want another version of openai than LlamaIndex does: `pip install openai-agents haystack-ai`.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from jaxrag.models.model import load_model

CLIENTS = Path(__file__).with_name("other_clients.py")
PYTHON = os.environ.get("JAXRAG_CLIENTS_PYTHON")

pytestmark = pytest.mark.skipif(PYTHON is None, reason="JAXRAG_CLIENTS_PYTHON is not set")


@pytest.fixture(scope="module")
def serving(start, tools_dir):
    with start(load_model(tools_dir, cache_tokens=8192), {}, warm_up=False) as running:
        yield running


@pytest.fixture
def ran(serving):
    """``ran(name)``: what came of a client."""

    def run(name):
        model = serving.client.get("/v1/models").json()["data"][0]["id"]
        eos = ",".join(map(str, serving.state.model.config.eos_ids))
        quiet = {"HAYSTACK_TELEMETRY_ENABLED": "False", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
        done = subprocess.run(
            [PYTHON, CLIENTS, name, serving.url, model, eos],
            env=os.environ | quiet, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert not done.returncode, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


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
