"""Clients that leave, read slowly or wait: requests end with them, and pages come back."""

import asyncio
import contextlib
import json
import socket
import time

import httpx
import pytest
from serving import until
from starlette.requests import Request

from jaxrag.serve.answers import Piece
from jaxrag.serve.conversation import conversation_of
from jaxrag.server.answers.answering import respond
from jaxrag.server.answers.asking import Inbox, SlowReader
from jaxrag.server.answers.sse import EventStream
from jaxrag.server.answers.visit import Visit
from jaxrag.server.answers.writers import ChatWriter
from jaxrag.server.errors import Problem
from jaxrag.server.fields import Generation
from jaxrag.server.state.entry import Call

CHAT = "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "Which animal does Kora Felell keep?"}],
    "k": 3,
    "ignore_eos": True,
    "max_tokens": 800,
    "temperature": 50.0,  # every token is a word
}


def ended(state):
    """How the requests to the model ended, as they end."""
    seen = []
    state.observers.append(seen.append)
    return seen


def test_a_stream_that_is_left_is_aborted(server, idle):
    seen = ended(server.state)
    with server.client.stream("POST", CHAT, json=BODY | {"stream": True}) as answer:
        lines = answer.iter_lines()
        told = [next(lines) for _ in range(6)]
    assert sum(line.startswith("data: ") for line in told) == 3
    idle(server.state)
    until(lambda: seen)
    [one] = seen
    assert (one.ended, one.status, one.stream) == ("cancelled", 499, True)
    assert one.first_seconds is not None and not one.results


def test_a_whole_answer_that_is_not_waited_for_is_aborted(server, idle):
    cancelled = server.state.engine._core.state.scheduler.ended["cancelled"]
    seen = ended(server.state)
    with sent(server, BODY):
        until(lambda: [it.where for it in list(server.state.asking)] == ["decode"])
    until(lambda: seen)
    idle(server.state)
    assert (seen[0].ended, seen[0].stream) == ("cancelled", False)
    assert server.state.engine._core.state.scheduler.ended["cancelled"] == cancelled + 1


@contextlib.contextmanager
def sent(server, body, options=()):
    """A chat on a socket of its own, which is closed at the end of the block."""
    content = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        for option in options:
            client.setsockopt(*option)
        client.connect((host, int(port)))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        yield


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_waiting_is_forgotten(server, held, idle, stream):
    seen = ended(server.state)
    with held(server.state):
        hasty = httpx.Client(base_url=server.url, timeout=0.3)
        with hasty, pytest.raises(httpx.ReadTimeout):
            hasty.post(CHAT, json=BODY | {"stream": stream})
        until(lambda: seen)
        assert not server.state.asking and not server.state.limits.running
    idle(server.state)
    assert (seen[0].ended, seen[0].first_seconds) == ("cancelled", None)


def test_a_stream_that_waits_says_where_it_stands_while_that_changes(
    served_model, village, start, held
):
    settings = {"hold_seconds": 0.0, "keepalive_seconds": 0.05}
    with start(served_model, {"village": village}, **settings) as server:
        server.chat()
        body = BODY | {"stream": True, "max_tokens": 2}
        with held(server.state):
            stream = server.client.stream("POST", CHAT, json=body)
            lines = stream.__enter__().iter_lines()
            said = [next(line for line in lines if line.startswith(":"))]
            time.sleep(0.4)  # eight times what is between two comments of one that moves
        said += [line for line in lines if line]
        stream.__exit__(None, None, None)
    assert said[0] == ": waiting"
    assert [line for line in said[1:] if line == ": waiting"] == []
    assert said[-1] == "data: [DONE]"


def test_a_reader_that_is_too_far_behind_is_cut_off():
    """It is written to until its socket takes no more, and its news are not kept for ever."""
    told = []

    async def stuck():
        inbox = Inbox(3)
        blocked = asyncio.Event()
        closed = asyncio.Event()

        async def events():
            try:
                while True:
                    _, item = await inbox.next()
                    yield item.text.encode()
            finally:
                closed.set()

        async def send(message):
            if message["type"] == "http.response.body":
                blocked.set()
                await asyncio.Event().wait()

        async def receive():
            await asyncio.Event().wait()

        def end(error):
            told.append(error)

        stream = EventStream(events(), end, inbox.cut)
        task = asyncio.ensure_future(stream({"type": "http"}, receive, send))
        inbox.put(0, Piece("x", [1], [0.0]))
        await asyncio.wait_for(blocked.wait(), 10)
        for _ in range(4):
            assert not inbox.cut.is_set()
            inbox.put(0, Piece("x", [1], [0.0]))
        assert inbox.cut.is_set() and not len(inbox)
        await asyncio.wait_for(task, 10)
        assert closed.is_set()

    asyncio.run(stuck())
    assert isinstance(told[0], SlowReader)


def test_a_prompt_ends_with_its_request_though_nobody_began_to_read(server, held, idle):
    """The generator of a stream that was never begun does not clean up; its visit does."""

    async def never_read():
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "app": server.app}
        visit = Visit(Request(scope))
        visit.call = Call(visit.call.request, server.state.access(visit.call.request))
        fields = Generation.read(BODY | {"stream": True})
        talk = conversation_of(BODY["messages"], wire=True)
        visit.knowledge_base = "village"
        response = await respond(visit, fields, [talk], ChatWriter(visit, fields))
        assert isinstance(response, EventStream) and len(server.state.asking) == 1

        async def receive():
            return {"type": "http.disconnect"}

        async def send(message):
            await asyncio.Event().wait()

        await response(scope, receive, send)
        assert not server.state.asking

    asyncio.run(never_read())
    idle(server.state)


@pytest.mark.parametrize("begun", [True, False])
def test_a_stream_that_fails_ends_with_its_error(begun):
    sent = []
    problem = Problem(500, "it broke", type="server_error", code="engine_error")

    async def failing():
        async def events():
            if begun:
                yield b"data: 1\n\n"
            raise problem

        async def send(message):
            sent.append(message)

        async def receive():
            await asyncio.Event().wait()

        def end(error):
            return error

        await EventStream(events(), end, asyncio.Event())({"type": "http"}, receive, send)

    asyncio.run(failing())
    assert [it["type"] for it in sent] == ["http.response.start"] + ["http.response.body"] * (
        1 + begun
    )
    last = sent[-1]
    assert last["more_body"] is False
    told = json.loads(last["body"].removeprefix(b"data: "))
    assert told == {
        "error": {
            "message": "it broke", "type": "server_error", "param": None, "code": "engine_error"
        }
    }  # fmt: skip
