"""Lines of a log: what is in them, and what must never be."""

import asyncio
import io
import json
import logging
import sys
import types

import pytest

from jaxrag.base.errors import RequestError
from jaxrag.engine.progress import MOMENTS
from jaxrag.server.http.logs import AccessLog, Lines, logging_requests, note, pattern_of
from jaxrag.server.settings import ServerSettings

SECRET = "Giso-Berow-keeps-a-secret"


@pytest.fixture
def written(server):
    """What a server logs as JSON while the test runs."""
    stream = io.StringIO()
    was = server.state.settings
    server.state.settings = ServerSettings(log_format="json")
    try:
        with logging_requests(server.state, stream):
            yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    finally:
        server.state.settings = was


def test_a_chat_leaves_its_tokens_and_times_under_its_id(server, written):
    answer = server.client.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Which animal does Kora Felell keep?"}]},
        headers={"x-request-id": "mine-7"},
    )
    assert answer.headers["x-request-id"] == "mine-7"
    usage = answer.json()["usage"]
    server.client.get("/health")
    answered, http = written()
    assert answered["event"] == "answered" and http["event"] == "http"
    assert answered["request_id"] == http["request_id"] == "mine-7"
    assert answered["prompt_tokens"] == usage["prompt_tokens"]
    assert answered["completion_tokens"] == usage["completion_tokens"]
    assert sum(answered["tokens_from"].values()) == usage["prompt_tokens"]
    assert (answered["outcome"], answered["status"], http["status"]) == ("finished", 200, 200)
    assert http["path"] == "/v1/chat/completions" and http["http_method"] == "POST"
    assert answered["seconds"] >= sum(answered["phases"].values()) > 0
    moments = list(answered["moments"].values())
    assert moments == sorted(moments) and moments[-1] - moments[0] <= answered["seconds"] + 1e-6
    assert set(MOMENTS) - {"read", "staged", "stepped"} < set(answered["moments"])


def test_nothing_that_a_client_wrote_is_logged(server, written):
    key = {"authorization": f"Bearer {SECRET}"}
    chats = [
        {"documents": [SECRET, f"Kora Felell keeps a {SECRET}."]},
        {"model": SECRET},
        {"method": SECRET},
        {"where": {SECRET: 1}},
        {"knowledge_base": SECRET},
        {"stream": True, "stop": [SECRET]},
        {"temperature": SECRET},
    ]
    for fields in chats:
        body = {"messages": [{"role": "user", "content": f"Who keeps {SECRET}?"}], **fields}
        server.client.post("/v1/chat/completions", json=body, headers=key)
    server.client.post("/v1/chat/completions", content=f'{{"{SECRET}"', headers=key)
    for path in (f"/v1/models/{SECRET}", f"/{SECRET}", f"/health?{SECRET}=1"):
        server.client.get(path, headers=key)
    lines = written()
    assert len(lines) >= 2 * len(chats) + 3
    assert SECRET not in json.dumps(lines)
    assert {"/v1/models/{name}", "(none)"} <= {it["path"] for it in lines if it["event"] == "http"}


def record(error, name="jaxrag.server"):
    try:
        raise error
    except type(error):
        return logging.LogRecord(name, logging.ERROR, "", 1, "it failed", (), sys.exc_info())


def test_an_error_of_the_server_is_told_without_its_text():
    line = json.loads(Lines("json").format(record(RequestError(SECRET))))
    assert line["error_type"] == "RequestError" and SECRET not in json.dumps(line)
    assert any("test_logs.py" in it and it.endswith("record") for it in line["at"])
    told = Lines("text").format(record(RuntimeError("out of\nmemory"), "jaxrag"))
    assert 'error="out of memory"' in told and "\n" not in told


def test_text_is_one_line_whatever_is_in_it(caplog):
    with caplog.at_level(logging.INFO, logger="jaxrag.server"):
        note("answered", {"a": "x y", "b": "line\nend", "c": 0.25, "d": None, "e": "", "f": 'q"='})
    line = Lines("text").format(caplog.records[0])
    assert line.split(" event=answered ")[1] == (
        'a="x y" b="line\\nend" c=0.25 d=null e="" f="q\\"="'
    )


def test_the_pattern_of_a_path():
    scope = {"path": "/v1/files/a/content", "path_params": {"file": "a"}, "endpoint": None}
    assert pattern_of(scope) == "/v1/files/{file}/content"
    assert pattern_of({"path": "/v1/files/a/content"}) == "(none)"


def test_what_was_answered_to_nobody_and_what_failed(caplog):
    async def nothing(scope, receive, send):
        pass

    async def fails(scope, receive, send):
        raise RuntimeError(SECRET)

    async def answers(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})

    scope = {"type": "http", "path": "/x", "method": "GET", "headers": []}
    state = types.SimpleNamespace(requests=0)
    with caplog.at_level(logging.INFO, logger="jaxrag.server"):
        for app in (nothing, answers):
            asyncio.run(AccessLog(app, state)(dict(scope), None, sent))
        with pytest.raises(RuntimeError):
            asyncio.run(AccessLog(fails, state)(dict(scope), None, sent))
    assert [record.fields["status"] for record in caplog.records] == [499, 204, 500]
    assert state.requests == 0
    assert SECRET not in "".join(Lines("text").format(record) for record in caplog.records)


async def sent(message):
    pass
