"""Talks and schemas drawn at random: each is served, or refused in one line."""

import json
import random

import pytest

from jaxrag.models.model import load_model

CHAT = "/v1/chat/completions"
TEXTS = (
    "", " ", "\n", "Is it warm?", "<|im_end|>", "<tool_call>", "\u200d", "\ufeff", "a" * 300, "{",
    "[]", "\u0928\u092e\u0938\u094d\u0924\u0947", "\x00", "</think>", "{{ x }}", "{% raise %}",
)  # fmt: skip
ODD = (None, 0, -1, 1.5, True, [], {}, [None], {"type": "text"}, [{"type": "image_url"}], 10**400)
ROLES = ("user", "assistant", "system", "tool", "developer", "function", "", "User", 7, None)
KINDS = ("object", "array", "string", "integer", "number", "boolean", "null", "thing", 3)
KEYWORDS = (
    "minLength",
    "maximum",
    "pattern",
    "format",
    "uniqueItems",
    "not",
    "const",
    "$ref",
    "if",
)


def a_text(rng):
    return rng.choice(TEXTS) if rng.random() < 0.98 else rng.choice(ODD)


def a_call(rng):
    function = {"name": rng.choice(["weather"] * 30 + ["", 4]), "arguments": a_text(rng)}
    call = {"id": a_text(rng), "type": "function", "function": function}
    return call if rng.random() < 0.97 else rng.choice([{}, 1, None])


def a_message(rng):
    content = [{"type": "text", "text": a_text(rng)}] if rng.random() < 0.2 else a_text(rng)
    message = {"role": rng.choice(ROLES[: 6 if rng.random() < 0.98 else 10]), "content": content}
    if rng.random() < 0.3:
        message["tool_calls"] = [a_call(rng) for _ in range(rng.randrange(3))]
    for name in ("tool_call_id", "name", "refusal", "function_call", "reasoning_content"):
        if rng.random() < 0.1:
            message[name] = a_text(rng)
    return message if rng.random() < 0.99 else rng.choice(ODD)


def a_schema(rng, depth=0):
    if depth > 3 or rng.random() < 0.1:
        return rng.choice([True, False, {}, [], None, "x"])
    schema = {"type": rng.choice(KINDS[: rng.choice([7, 9])])}
    if rng.random() < 0.5:
        schema["properties"] = {
            str(a_text(rng))[:40]: a_schema(rng, depth + 1) for _ in range(rng.randrange(4))
        }
    if rng.random() < 0.3:
        schema["items"] = a_schema(rng, depth + 1)
    if rng.random() < 0.3:
        schema[rng.choice(["anyOf", "oneOf", "allOf"])] = [a_schema(rng, depth + 1)] * 2
    if rng.random() < 0.3:
        schema["enum"] = [a_text(rng) for _ in range(rng.randrange(3))]
    for name in KEYWORDS:
        if rng.random() < 0.1:
            schema[name] = a_text(rng)
    return schema


def a_request(rng):
    messages = [a_message(rng) for _ in range(rng.randrange(1, 7))]
    body = {"messages": messages, "max_tokens": 1}
    if rng.random() < 0.3:
        function = {"name": rng.choice(["weather", "", 4]), "parameters": a_schema(rng)}
        body["tools"] = [{"type": "function", "function": function}]
        body["tool_choice"] = rng.choice(["auto", "none", "required", a_text(rng)])
    if rng.random() < 0.3:
        schema = {"name": "it", "schema": a_schema(rng)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    for name in ("stop", "n", "chat_template_kwargs", "logprobs", "stop_token_ids", "min_p"):
        if rng.random() < 0.05:
            body[name] = a_text(rng)
    return body


@pytest.fixture(scope="module")
def tools_serving(start, tools_dir, tmp_path_factory):
    """A server of a model whose template writes tools."""
    data = str(tmp_path_factory.mktemp("data"))
    with start(load_model(tools_dir, cache_tokens=8192), {}, data=data) as running:
        yield running


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_it_is_served_or_refused_in_one_line(tools_serving, count):
    rng, served = random.Random(count), 0
    for number in range(count):
        body = a_request(rng)
        answer = tools_serving.post(CHAT, **body)
        assert answer.status_code in (200, 400), (number, json.dumps(body)[:2000], answer.text)
        if answer.status_code == 400:
            message = answer.json()["error"]["message"]
            assert message and "\n" not in message and "Traceback" not in message
        served += answer.status_code == 200
    assert served > count // 4
