"""What a request may bring: refused before any work, and none of that on the event loop."""

import asyncio
import json
import threading

import numpy as np
import pytest

from jaxrag.base.errors import DeadlineExceeded, EngineError
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.server.answers import asking as asking_module
from jaxrag.server.answers import tokenize
from jaxrag.server.answers.asking import Asking, Inbox
from jaxrag.server.errors import ClientLeft, Problem
from jaxrag.server.fields import MOST_TEXTS
from jaxrag.server.state import entry

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
ASKED = [{"role": "user", "content": "Which animal does Kora Felell keep?"}]
NUMBERS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "max_completion_tokens",
    "min_tokens", "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logprobs", "top_logprobs", "priority", "timeout", "k", "min_score", "recompute_ratio",
)  # fmt: skip
BOUNDS = (-1, 0, 2**31, 2**63, 2**64, 10**400, 1e308, -1e308, 1e-308)


def short(tokenizer, text, special=False):
    """In place of ``Tokenizer.encode``: of the template's own words, and of nothing longer."""
    assert len(text) < 100
    return np.zeros(1, np.int32)


def refused(answer, param, *words):
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    message = error["message"]
    assert "\n" not in message and len(message) < 300
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_breaks_the_engine(server, restarts, name):
    before = restarts(server)
    for warm in ({}, {"temperature": 1.0}):
        for value in BOUNDS:
            body = {"messages": ASKED, "k": 1, "max_tokens": 1, **warm, name: value}
            answer = server.client.post(CHAT, content=json.dumps(body))
            too_late = name == "timeout" and answer.status_code == 504
            assert answer.status_code in (200, 400) or too_late, (value, answer.text)
            if answer.status_code == 400:
                param = answer.json()["error"]["param"]
                assert param in (name, name.replace("completion_", ""))  # one name of both
                refused(answer, param)
    assert restarts(server) == before


@pytest.mark.parametrize(
    ("name", "entry"),
    [("messages", ASKED[0]), ("documents", "a"), ("documents", {"text": "a"}), ("blocks", "a")],
    ids=["messages", "documents", "objects", "blocks"],
)
def test_more_texts_than_anybody_sends_are_refused_unread(server, monkeypatch, name, entry):
    monkeypatch.setattr(Tokenizer, "encode", short)
    monkeypatch.setattr(Tokenizer, "encode_with_offsets", None)
    body = {"messages": ASKED, name: [entry] * (MOST_TEXTS + 1)}
    refused(server.post(CHAT, **body), name, "at most 4096 entries")


@pytest.mark.parametrize("name", ["prompt", "echo", "documents", "messages", "ids", "query"])
def test_a_text_that_fits_no_context_is_refused_untokenised(server, monkeypatch, name):
    monkeypatch.setattr(Tokenizer, "encode", short)
    monkeypatch.setattr(Tokenizer, "encode_with_offsets", None)
    text = "falcon keeps " * 5500  # of 65,536 characters
    path, body = {
        "prompt": (COMPLETE, {"prompt": text}),
        "echo": (COMPLETE, {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 0}),
        "documents": (CHAT, {"messages": ASKED, "documents": [text[:40_000], text[:40_000]]}),
        "messages": (CHAT, {"messages": [{"role": "user", "content": text}]}),
        "ids": (CHAT, {"messages": ASKED, "documents": [[5] * 1025]}),
        "query": (CHAT, {"messages": ASKED, "query": text}),
    }[name]
    answer = server.post(path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert "the model's context is 1024 tokens" in error["message"]


@pytest.fixture
def threads_of(monkeypatch):
    """``threads_of(owner, name)``: names of the threads that called a function, as they come."""

    def watch(owner, name):
        seen, real = [], getattr(owner, name)

        def watched(*args, **kwargs):
            seen.append(threading.current_thread().name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)
        return seen

    return watch


def prepared(seen):
    return bool(seen) and all(name.startswith("jaxrag-prepare") for name in seen)


@pytest.mark.parametrize(("path", "text"), [(CHAT, "messages"), (COMPLETE, "prompt")])
def test_a_long_body_is_not_read_on_the_event_loop(server, threads_of, path, text):
    seen = threads_of(entry, "body_of")
    body = {text: ASKED if text == "messages" else "Tondorf", "max_tokens": 1}
    assert server.post(path, **body).status_code == 200
    assert not prepared(seen)
    seen.clear()
    assert server.post(path, **body, user="x" * (300 << 10)).status_code == 200
    assert prepared(seen) and len(seen) == 1


def test_a_long_body_is_read_as_a_short_one_is():
    values = {"a": [{"b": {}, "c": [1, -2, 2**70, 1.5, 1e300]}], "d": None, "e": "ü"}
    padded = json.dumps(values | {"pad": "x" * (300 << 10)}).encode()
    read = entry.body_of(padded)
    assert len(read.pop("pad")) == 300 << 10
    assert read == entry.body_of(json.dumps(values).encode()) == values
    for wrong in (b"NaN", b"9" * 5000):
        with pytest.raises(Problem):
            entry.body_of(b'{"a": %b, "pad": "%b"}' % (wrong, b"x" * (300 << 10)))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETE, {"prompt": "Giso Berow", "max_tokens": 1}),
        (COMPLETE, {"prompt": "Giso Berow", "echo": True, "logprobs": 1, "max_tokens": 0}),
        ("/tokenize", {"prompt": "Giso Berow"}),
    ],
)
def test_nothing_is_tokenised_on_the_event_loop(server, threads_of, path, body):
    seen = threads_of(Tokenizer, "encode")
    assert server.post(path, **body).status_code == 200
    assert prepared(seen)


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "Giso"}), ("/detokenize", {"tokens": [5]})]
)
def test_tokens_are_written_on_the_threads_and_count(server, threads_of, path, body):
    counted = threads_of(server.state.limits, "check_rate")
    written = threads_of(entry, "JSONResponse")
    assert server.post(path, **body).status_code == 200
    assert prepared(written) and len(counted) == 1


def test_tokens_that_are_equal_are_decoded_once(server, threads_of):
    seen = threads_of(Tokenizer, "decode")
    body = {"prompt": "falcon " * 500, "return_token_strs": True}
    assert server.post("/tokenize", **body).json()["count"] == 501
    assert len(seen) == 2


def test_so_much_is_tokenised(server, monkeypatch):
    monkeypatch.setattr(tokenize, "MOST", 5)
    assert server.post("/tokenize", prompt="a b c").status_code == 200
    refused(server.post("/tokenize", prompt="a b c "), "prompt", "6 characters: expected at most 5")
    assert server.post("/detokenize", tokens=[5] * 5).status_code == 200
    refused(server.post("/detokenize", tokens=[5] * 6), "tokens", "6 entries: expected at most 5")


def left(asking):
    asking.close()
    return ClientLeft


def told_to_end(asking):
    asking.fail(EngineError("the server ends"))
    return EngineError


@pytest.mark.parametrize("end", [left, told_to_end, None], ids=["left", "failed", "late"])
def test_a_prompt_is_given_up_once_nobody_wants_it(server, end, monkeypatch):
    began, raised = threading.Event(), []

    def make_ready(state, access, fields, asked, base, check_cancelled):
        began.set()
        try:
            while True:
                check_cancelled()
        except Exception as error:
            raised.append(type(error))
            raise

    async def ask():
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(asking_module, "make_ready", make_ready)
        asking = Asking(server.state, Inbox())
        deadline = 0.0 if end is None else float("inf")
        job = asking.ready(None, None, "", None, server.state.prepare.of(""), deadline)
        ready = asyncio.ensure_future(job)
        await loop.run_in_executor(None, began.wait, 20)
        expected = DeadlineExceeded if end is None else end(asking)
        with pytest.raises(expected):
            await ready
        asking.close()
        return expected

    assert [asyncio.run(ask())] == raised
