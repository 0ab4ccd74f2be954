"""Bodies that nobody would send: refused or served, and never a failure of the server."""

import json

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
    "search_mode", "min_score", "unanswerable",
)  # fmt: skip
TEXT = st.text(max_size=8) | st.sampled_from(
    ["", " ", "Tondorf", "village", "synthetic", "synthetic@", "@village", "user", "\x00", "\u2028"]
)
NUMBER = st.sampled_from([-1, 0, 1, 2, 3, 2**31, 2**63, 2**64, 10**30, 0.5, -0.5, 1e300])
LEAF = st.none() | st.booleans() | NUMBER | TEXT
VALUE = st.recursive(
    LEAF,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "type", "id", "$gt"]), inner)
    ),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "x"]), "content": VALUE}
)
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
    kind = draw(st.sampled_from(["fields", "fields", "value", "bytes"]))
    if kind == "bytes":
        return draw(st.binary(max_size=60))
    if kind == "value":
        return json.dumps(draw(VALUE)).encode()
    body = dict(GOOD) if draw(st.booleans()) else {}
    body |= draw(st.dictionaries(st.sampled_from(FIELDS), VALUE, max_size=3))
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


@hypothesis.settings(max_examples=16)
@hypothesis.given(st.data())
def test_no_body_makes_the_server_fail(server, paths, data):
    send(server, data.draw(st.sampled_from(paths)), data.draw(bodies()))


@pytest.mark.slow
@hypothesis.settings(max_examples=200)
@hypothesis.given(content=bodies())
def test_no_body_makes_any_endpoint_fail(server, paths, content):
    for path in paths:
        send(server, path, content)


def test_the_server_serves_on(server, idle):
    assert server.chat().status_code == 200
    idle(server.state)
