"""POST /v1/chat/completions over a real server."""

import json

import pytest


def test_a_chat_answers_from_the_knowledge_base(server):
    answer = server.chat(model="synthetic@village")
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["choices"][0]["message"]["content"] == "falcon"
    assert told["choices"][0]["finish_reason"] == "stop"
    assert told["jaxrag"]["sources"][0]["document_id"] == "kora-felell.md"


def events(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_stream_says_the_same(server):
    whole = server.chat().json()
    told = events(server.chat(stream=True, stream_options={"include_usage": True}))
    assert told[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(it["choices"][0]["delta"].get("content", "") for it in told if it["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert told[-1]["choices"] == []
    assert told[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/v1/models", "/v1/models/synthetic@village"]
)
def test_what_is_there(server, path):
    assert server.client.get(path).status_code == 200
