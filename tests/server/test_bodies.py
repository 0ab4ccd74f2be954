"""Bodies that nobody would send: refused or served, and the server is as well as before.

After every body it is healthy, has restarted no engine, and holds little more memory and files.
"""

import gc
import json
import os
import re
import time
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

FIELDS = (
    "blocks", "decode", "documents", "earlier_turns", "echo", "ignore_eos", "k", "knowledge_base",
    "logprobs", "max_completion_tokens", "max_tokens", "messages", "method", "min_tokens", "misses",
    "model", "n", "prefix_cache", "priority", "prompt", "query", "recompute_ratio",
    "response_format", "return_text", "seed", "stop", "stream", "stream_options", "temperature",
    "timeout", "tokens", "content", "top_k", "top_logprobs", "top_p", "where", "input", "file",
    "purpose", "name", "attributes", "filters", "encoding_format", "keys", "question", "tier",
    "search_mode", "min_score", "unanswerable", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "best_of", "metadata", "file_ids", "files", "max_num_results",
    "dimensions", "chunking_strategy", "instructions", "include", "tools", "tool_choice", "store",
    "previous_response_id", "max_output_tokens", "logit_bias", "guided_json", "guided_regex",
    "guided_choice", "structured_outputs", "parallel_tool_calls", "text", "cite",
)  # fmt: skip
TEXT = st.text(max_size=8) | st.sampled_from(
    ["", " ", "Tondorf", "village", "synthetic", "synthetic@", "@village", "user", "\x00", "\u2028"]
)
LONG = st.sampled_from(["x" * 70_000, "Tondorf " * 40_000, "\u00e9" * 300_000])
NUMBER = st.sampled_from(
    [-1, 0, 1, 2, 3, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400,
     0.5, -0.5, 1e-308, 1e308, -1e308]
)  # fmt: skip
MANY = st.sampled_from(
    [
        ["a"] * 5_000,
        [5] * 5_000,
        [{"text": "a"}] * 5_000,
        [{"role": "user", "content": "a"}] * 5_000,
    ]
)
KEYS = [
    "role", "content", "text", "type", "id", "$gt", "function", "name", "parameters", "arguments",
    "tool_calls", "call_id", "output", "json_schema", "schema", "format", "json", "regex",
]  # fmt: skip
LEAF = st.none() | st.booleans() | NUMBER | TEXT
VALUE = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=6,
)
ANY = VALUE | VALUE | NUMBER | LONG | MANY
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "x"]), "content": VALUE}
)
MORE_FILES = 32  # connections of the client, files that a request opens
MORE_BYTES = 1 << 30  # with the programs that new shapes compile
GOOD = {"messages": [{"role": "user", "content": "Tondorf"}], "prompt": "Tondorf", "k": 1}


@pytest.fixture(scope="module")
def paths(server):
    """Every path that takes a body."""
    app = server.app
    taken = [it.path for it in app.routes if "POST" in (getattr(it, "methods", None) or ())]
    return sorted(taken)


@st.composite
def bodies(draw):
    """Bytes that may be JSON, of fields that there are, with values that they may not have."""
    kind = draw(st.sampled_from(["fields", "fields", "fields", "value", "bytes", "deep"]))
    if kind == "deep":
        depth, name = draw(st.sampled_from([50, 900, 100_000])), draw(st.sampled_from(FIELDS))
        return f'{{"{name}": {"[" * depth}{"]" * depth}}}'.encode()
    if kind == "bytes":
        return draw(st.binary(max_size=60))
    if kind == "value":
        return json.dumps(draw(ANY)).encode()
    body = dict(GOOD) if draw(st.booleans()) else {}
    body |= draw(st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=3))
    if draw(st.booleans()):
        body["messages"] = draw(st.lists(MESSAGE, max_size=3))
    return json.dumps(body).encode()


def send(server, path, content):
    headers = {"content-type": "application/json"}
    answer = server.client.post(path, content=content, headers=headers)
    assert answer.status_code in (200, 400, 404, 405, 413, 504), (path, content, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    elif answer.headers["content-type"].startswith("text/event-stream"):
        last = answer.text.split("\n\n")[-2]
        assert last == "data: [DONE]" or "deadline_exceeded" in last


class Watch:
    """What is looked at beside the answers.

    Attributes:
      longest: seconds that /health took at most.
    """

    def __init__(self, server, restarts):
        self._server, self._restarts = server, restarts
        self._before = restarts(server)
        self._files, self._bytes = open_files(), resident_bytes()
        self.longest = 0.0

    def look(self, *sent):
        """After a request."""
        begun = time.monotonic()
        assert self._server.client.get("/health").status_code == 200, sent
        self.longest = max(self.longest, time.monotonic() - begun)
        assert self._restarts(self._server) == self._before, sent
        assert open_files() <= self._files + MORE_FILES, sent
        assert resident_bytes() <= self._bytes + MORE_BYTES, sent


def open_files():
    return len(os.listdir("/proc/self/fd"))


def resident_bytes():
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])


@pytest.fixture
def fuzz(server, paths, restarts, idle, record_property):
    """``fuzz(count, runs)``: so many bodies a run, each to some path; the longest /health is told.

    A run keeps what it made, 250 kB a body, until it ends.
    """

    def run(count, runs=1):
        watch = Watch(server, restarts)

        @hypothesis.settings(max_examples=count)
        @hypothesis.given(path=st.sampled_from(paths), content=bodies())
        @hypothesis.example("/v1/chat/completions", json.dumps(GOOD | {"top_k": 2**40}).encode())
        @hypothesis.example("/v1/completions", json.dumps(GOOD | {"temperature": 1e308}).encode())
        def one(path, content):
            send(server, path, content)
            watch.look(path, content[:300])

        for number in range(runs):
            hypothesis.seed(number)(one)()
            gc.collect()
        idle(server.state)
        record_property("longest /health, seconds", round(watch.longest, 3))
        print(f"{count * runs} bodies, longest /health {watch.longest:.3f} s")

    return run


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux counts files and memory so")
def test_no_body_makes_the_server_fail(fuzz):
    fuzz(40)


@pytest.mark.slow  # an hour
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux counts files and memory so")
def test_no_body_of_very_many_makes_the_server_fail(fuzz):
    fuzz(500, runs=80)


def test_the_server_serves_on(server, idle):
    assert server.chat().status_code == 200
    idle(server.state)
