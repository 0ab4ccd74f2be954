"""Every way to be refused, over a real server; and what errors of the project are called."""

import asyncio
import json
import threading
import time

import pytest
from serving import until
from starlette.requests import ClientDisconnect

from jaxrag.base import errors
from jaxrag.engine.admission import SchedulerSettings
from jaxrag.engine.state import EngineSettings
from jaxrag.server.errors import problem_of

TOOL = {"type": "function", "function": {"name": "f"}}
CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Which animal does Kora Felell keep?"}]


def told(answer):
    """The error of an answer, which has the form of OpenAI's."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    message = body["error"]["message"]
    assert message and "\n" not in message
    return body["error"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "list of objects"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages", "one of system, user"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "not of the"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "x"}]}, "messages", "not of the"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "type text",
        ),
        (
            {"messages": [{"role": "user", "content": "Who is xyzzy?"}]},
            "messages",
            "not in this model's vocabulary",
        ),
        ({"n": 2, "best_of": 3}, "best_of", "expected n, which is 2"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function="),
        ({"tools": {}, "tool_choice": "none"}, "tools", "expected a list"),
        ({"tools": [TOOL], "model": "synthetic@village"}, "tools", "name the model alone"),
        ({"tools": [TOOL]}, "tools", "need a model with a chat template"),
        ({"response_format": {"type": "json_object"}}, "response_format", "spells any text"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json", "expected one of them"),
        ({"guided_json": {}, "ignore_eos": True}, "ignore_eos", "leave one out"),
        ({"guided_choice": [1]}, "guided_choice", "guided_choice[0]=1: expected a text"),
        ({"guided_regex": "a" * 70_000}, "response_format", "at most 65536"),
        ({"guided_grammar": "start: a"}, "guided_grammar", "does not do that"),
        ({"structured_outputs": {"lark": "a"}}, "structured_outputs", "json, regex, choice"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "token ids from 0 to"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias", "at most 1024"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most max_tokens, which is 8"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"where": {"year": {"$near": 1}}}, "where", "$near"),
        ({"documents": "x"}, "documents", "expected a list"),
        ({"documents": [" "]}, "documents", "empty"),
        ({"neighbours": "all"}, "neighbours", "expected one of corpus, prompt"),
        ({"method": "magic"}, "method", "offers turborag"),
        ({"method": "configs/methods/fusionrag_final.toml"}, "method", "offers turborag"),
        ({"decode": "magic"}, "decode", "offers dense"),
        ({"method": "turborag", "recompute_ratio": 3}, "recompute_ratio", "0 to 1"),
        ({"prefix_cache": True}, "prefix_cache", "--allow-history-dependent"),
        ({"misses": "in_place"}, "misses", "--allow-history-dependent"),
        ({"earlier_turns": "all"}, "earlier_turns", "exact, blocks"),
        ({"search_mode": "magic"}, "search_mode", "expected one of bm25, vector, hybrid"),
        ({"unanswerable": "guess"}, "unanswerable", "expected one of abstain, ask"),
        ({"documents": ["x"], "min_score": 1.0}, "min_score", "about a knowledge base"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"knowledge_base": "village", "documents": ["x"]}, "documents", "not kept there"),
        ({"model": "synthetic@village", "blocks": ["x"]}, "blocks", "not kept there"),
        (
            {"model": "synthetic@village", "knowledge_base": "x"},
            "knowledge_base",
            "different knowledge bases",
        ),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
def test_what_is_wrong_is_400_and_names_the_field(server, body, param, words):
    answer = server.client.post(CHAT, json={"messages": ASKED, **body})
    error = told(answer)
    assert answer.status_code == 400, error
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]


@pytest.mark.parametrize(
    "harmless",
    [
        {"n": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "top_logprobs": 0},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"user": "me", "store": True, "metadata": {"a": "b"}, "nobody_knows_this": [1, {}]},
        {"max_tokens": None, "temperature": None, "stop": None, "seed": None, "documents": None},
    ],
)
def test_what_asks_for_nothing_is_let_through(server, harmless):
    answer = server.chat(**harmless)
    assert answer.status_code == 200
    unknown = sorted(harmless.keys() & {"user", "store", "metadata", "nobody_knows_this"})
    noted = [it for it in answer.json()["jaxrag"]["notes"] if it.startswith("unknown fields")]
    assert len(noted) == bool(unknown) and all(name in noted[0] for name in unknown)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_400_with_openais_code(server, stream):
    for body in (
        {"documents": ["File 18: Giso Berow lives in Tondorf. " * 150]},
        {"max_tokens": 1020},
    ):
        answer = server.chat(stream=stream, **body)
        assert answer.status_code == 400
        error = told(answer)
        assert error["code"] == "context_length_exceeded"
        assert "the model's context is 1024" in error["message"]


def test_a_page_of_another_origin_may_not_ask(served_model, village, start):
    allowed = "https://chat.example"
    with start(served_model, {"village": village}, origins=(allowed,)) as server:
        for origin, status in (
            (None, 200),
            (server.url, 200),
            (allowed, 200),
            ("https://other.example", 403),
            ("http://127.0.0.1:1", 403),
            ("null", 403),
        ):
            headers = {} if origin is None else {"origin": origin}
            answer = server.client.post("/tokenize", content=b'{"prompt": "x"}', headers=headers)
            assert answer.status_code == status, origin
            if status == 403:
                assert told(answer)["code"] == "permission_denied"
            shared = answer.headers.get("access-control-allow-origin")
            assert shared == (allowed if origin == allowed else None)


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("gpt-4", "model_not_found"),
        ("synthetic@nowhere", "not_found"),
        ("other@village", "model_not_found"),
    ],
)
def test_what_is_not_there_is_404(server, model, code):
    answer = server.chat(model=model)
    assert (answer.status_code, told(answer)["code"]) == (404, code)
    answer = server.client.get(f"/v1/models/{model}")
    assert (answer.status_code, told(answer)["code"]) == (404, "model_not_found")


def test_paths_and_verbs_that_nobody_knows(server):
    answer = server.client.get("/v1/batches")
    assert (answer.status_code, told(answer)["code"]) == (404, "not_found")
    answer = server.client.get(CHAT)
    assert (answer.status_code, told(answer)["code"]) == (405, "method_not_allowed")
    assert "GET /v1/chat/completions" in told(answer)["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'"text"',
        b'{"messages": NaN}',
        b'{"k": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"model": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
    ],
    ids=lambda content: repr(content[:20]),
)
def test_what_is_no_json_is_400(server, content):
    headers = {"content-type": "application/json"}
    answer = server.client.post(CHAT, content=content, headers=headers)
    assert (answer.status_code, told(answer)["type"]) == (400, "invalid_request_error")


def test_too_many_that_wait_are_429_with_a_time(served_model, village, start, held):
    with start(served_model, {"village": village}, max_waiting=1) as server:
        server.chat()
        with held(server.state):
            waiting = threading.Thread(target=server.chat)
            waiting.start()
            until(lambda: server.state.limits.waiting)
            for stream in (False, True):
                answer = server.chat(stream=stream)
                error = told(answer)
                assert answer.status_code == 429
                assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
                assert 1 <= int(answer.headers["retry-after"]) <= 120
                assert 1000 <= int(answer.headers["retry-after-ms"]) <= 120_000
        waiting.join(20)
        assert server.chat().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_time_that_is_over_is_504_and_not_tried_again(server, held, idle, stream):
    with held(server.state):
        waiting = []
        ask = {"timeout": 0.2, "stream": stream}
        thread = threading.Thread(target=lambda: waiting.append(server.chat(**ask)))
        thread.start()
        until(lambda: server.state.limits.waiting)
        time.sleep(0.3)
    thread.join(20)
    [answer] = waiting
    assert (answer.status_code, told(answer)["code"]) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    idle(server.state)


def test_time_that_is_over_in_a_stream_is_an_error_event(served_model, village, start, held):
    with start(served_model, {"village": village}, hold_seconds=0.0) as server:
        server.chat()
        with held(server.state):
            waiting = []
            ask = {"timeout": 0.2, "stream": True}
            thread = threading.Thread(target=lambda: waiting.append(server.chat(**ask)))
            thread.start()
            until(lambda: server.state.limits.waiting)
            time.sleep(0.3)
        thread.join(20)
    assert waiting[0].status_code == 200
    last = waiting[0].text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


def test_storage_that_does_not_answer_is_503(server, monkeypatch):
    def down(*_, **__):
        raise errors.StoreError("s3://bucket: cannot be read; try again")

    monkeypatch.setattr(server.state.knowledge_bases["village"], "search", down)
    answer = server.chat()
    assert (answer.status_code, told(answer)["code"]) == (503, "unavailable")
    assert int(answer.headers["retry-after"]) >= 1


def test_the_bounds_of_the_engine_itself_are_429_too(served_model, village, start, held, idle):
    engine = EngineSettings(scheduler=SchedulerSettings(max_waiting=1))
    with start(served_model, {"village": village}, engine=engine) as server:
        server.chat()
        answers = []
        with held(server.state):
            asking = [
                threading.Thread(target=lambda: answers.append(server.chat())) for _ in range(3)
            ]
            for one in asking:
                one.start()
            until(lambda: sum(it.where == "waiting" for it in list(server.state.asking)) == 3)
        for one in asking:
            one.join(20)
        refused = [it for it in answers if it.status_code == 429]
        assert sorted(it.status_code for it in answers) == [200, 429, 429]
        assert all(1 <= int(it.headers["retry-after"]) <= 120 for it in refused)
        idle(server.state)


@pytest.mark.parametrize("phase", ["starting", "draining"])
def test_a_server_that_starts_or_ends_is_503(served_model, village, start, phase):
    with start(served_model, {"village": village}) as server:
        server.state.phase = phase
        asked = (server.chat(), server.chat(stream=True))
        if phase == "starting":  # they wait for what they need, and no longer
            assert [it.status_code for it in asked] == [200, 200]
            asked = ()
        for answer in (server.client.get("/ready"), *asked):
            assert (answer.status_code, told(answer)["code"]) == (503, phase)
            assert int(answer.headers["retry-after"]) >= 1
        assert server.client.get("/health").json()["phase"] == phase
        server.state.phase = "ready"


@pytest.mark.parametrize(
    ("error", "status", "type", "code", "headers"),
    [
        (errors.RequestError("k=0: no"), 400, "invalid_request_error", None, ()),
        (errors.ConfigError("x"), 400, "invalid_request_error", None, ()),
        (errors.TokenizerError("x"), 400, "invalid_request_error", None, ()),
        (errors.KnowledgeBaseError("x"), 400, "invalid_request_error", None, ()),
        (errors.ContextExceeded("x"), 400, "invalid_request_error", "context_length_exceeded", ()),
        (errors.DocumentError("x"), 400, "invalid_request_error", "invalid_document", ()),
        (errors.Overloaded("x"), 429, "rate_limit_error", "overloaded", ("retry-after",)),
        (
            errors.DeadlineExceeded("x"), 504, "timeout_error", "deadline_exceeded",
            ("x-should-retry",),
        ),
        (errors.EngineError("x"), 500, "server_error", "engine_error", ("x-should-retry",)),
        (errors.StoreError("x"), 503, "server_error", "unavailable", ("retry-after",)),
        (errors.RetrievalError("x"), 503, "server_error", "unavailable", ("retry-after",)),
        (errors.EmbedderError("x"), 500, "server_error", "internal_error", ("x-should-retry",)),
        (errors.Cancelled("x"), 503, "server_error", "cancelled", ("retry-after",)),
        (ClientDisconnect(), 499, "client_error", "client_left", ()),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)  # fmt: skip
def test_errors_of_the_project_have_their_status(error, status, type, code, headers):
    problem = problem_of(error)
    assert (problem.status, problem.type, problem.code) == (status, type, code)
    assert set(headers) <= set(problem.headers)
    assert problem.status not in (408, 409, 422), "clients try those again"


def test_an_error_that_nobody_foresaw_is_logged_and_not_told(server, caplog, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("of an inner part")

    monkeypatch.setattr(server.state.engine, "add", broken)
    answer = server.chat()
    assert (answer.status_code, told(answer)["code"]) == (500, "internal_error")
    assert "inner part" not in answer.text
    assert [it.exc_info[0] for it in caplog.records if it.exc_info] == [ZeroDivisionError]
    assert not server.state.asking and not server.state.limits.running


@pytest.mark.parametrize("broken", ["result_of", "Answer.push"])
def test_what_fails_when_tokens_come_ends_the_request(server, idle, monkeypatch, broken):
    def fail(*_):
        raise ZeroDivisionError("of a tokenizer")

    monkeypatch.setattr(f"jaxrag.serve.answers.{broken}", fail)
    answer = server.chat()
    assert (answer.status_code, told(answer)["code"]) == (500, "internal_error")
    streamed = server.chat(stream=True)
    assert "internal_error" in streamed.text
    idle(server.state)


def test_who_left_is_no_error_of_the_server(caplog):
    assert problem_of(asyncio.CancelledError()).status == 499
    assert not caplog.records
