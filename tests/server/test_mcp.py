"""The knowledge bases of a server as tools, by the official client of the protocol."""

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
import time

import httpx2
import pytest
from mcp import Client, StdioServerParameters
from serving import key_file

from jaxrag.base.errors import RequestError
from jaxrag.cli import main
from jaxrag.server import mcp

ANIMAL = "Which animal does Kora Felell keep?"


def called(server, name, **arguments):
    """The text of a tool's answer, and whether it is an error."""

    async def ask():
        async with Client(server) as client:
            told = await client.call_tool(name, arguments)
            return "".join(it.text for it in told.content), bool(told.is_error)

    return asyncio.run(ask())


def tools_of(server):
    async def ask():
        async with Client(server) as client:
            return (await client.list_tools()).tools

    return asyncio.run(ask())


@contextlib.contextmanager
def listening(url, **settings):
    """Streamable HTTP on a free port, by the program's own way; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "jaxrag", "mcp", "--url", url, "--listen", f"127.0.0.1:{port}",
        *settings.get("more", ()),
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.terminate()


@pytest.fixture
def tools(server):
    return mcp.make_server(server.url)


def test_tools_say_what_they_do(tools):
    found = {it.name: it for it in tools_of(tools)}
    assert found.keys() == {"search", "ask", "list"}
    assert all(it.annotations.read_only_hint and it.description for it in found.values())
    assert found["search"].input_schema["properties"]["max_results"]["maximum"] == mcp.MOST_FOUND
    assert "context" not in found["ask"].input_schema["properties"]


def test_passages_are_found(tools):
    text, failed = called(tools, "search", question=ANIMAL, max_results=2)
    assert not failed and text.startswith("[1] ") and "falcon" in text
    assert "[2] " in text and "[3] " not in text


def test_a_question_is_answered_from_passages(tools):
    text, failed = called(tools, "ask", question=ANIMAL, knowledge_base="village")
    assert not failed and text.startswith("falcon\n\nRead for it:\n[1] ")
    assert "/" not in text
    animal = "Which animal does Radia Dalell keep?"
    text, failed = called(tools, "ask", question=animal, knowledge_base="village")
    said, *read = text.split("\n")
    cited = re.fullmatch(r"rabbit \[(\d+)\]", said)
    assert not failed and cited
    [passage] = [it for it in read if it.startswith(f"[{cited[1]}] ")]
    assert "rabbit" in passage


def test_a_server_that_cannot_cite_answers(monkeypatch, tools):
    def refuse(model):
        raise RequestError("cite: not here")

    monkeypatch.setattr("jaxrag.serve.questions.check_cited", refuse)
    text, failed = called(tools, "ask", question=ANIMAL, knowledge_base="village")
    assert not failed and text.startswith("falcon\n\nRead for it:")


def test_what_there_is_is_listed(tools):
    bases, _ = called(tools, "list")
    assert bases.startswith("village: ") and bases.endswith("documents")
    documents, _ = called(tools, "list", knowledge_base="village")
    assert "kora-felell" in documents


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("search", {"question": ANIMAL, "knowledge_base": "other"}, "there are village"),
        ("search", {"question": ANIMAL, "max_results": 51}, "less than or equal to 50"),
        ("search", {"question": ""}, "at least 1 character"),
        ("ask", {"question": "Who is xyzzy?"}, "not in this model's vocabulary"),
        ("add", {"title": "x", "text": "y"}, "Unknown tool"),
    ],
)
def test_what_is_wrong_is_told_in_words(tools, name, arguments, words):
    try:
        text, failed = called(tools, name, **arguments)
    except Exception as error:  # the protocol's own refusal
        text, failed = str(error), True
    assert failed and words.lower() in text.lower()


def test_a_server_that_is_down_is_named():
    text, failed = called(mcp.make_server("http://127.0.0.1:9"), "list")
    assert failed and "does not answer" in text and "jaxrag serve" in text


def test_the_program_serves_an_agent(server):
    told = StdioServerParameters(
        command=sys.executable, args=["-m", "jaxrag", "mcp", "--url", server.url]
    )
    text, failed = called(told, "ask", question=ANIMAL)
    assert not failed and text.startswith("falcon")


def test_callers_bring_their_keys(start, served_model, village, tmp_path):
    keys = key_file(tmp_path / "keys.toml", {"right": 'read = ["village"]'})
    with start(served_model, {"village": village}, keys=keys) as running:
        with listening(running.url) as url:
            headers = {"authorization": "Bearer right"}
            for sent, expected in ((headers, False), ({}, True)):
                text, failed = asked_over(url, sent)
                assert failed == expected, text
        assert not called(mcp.make_server(running.url, key="right"), "list")[1]
        assert called(mcp.make_server(running.url, key="sk-wrong"), "list")[1]


def asked_over(url, headers):
    from mcp.client.streamable_http import streamable_http_client

    async def ask():
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            told = await client.call_tool("list", {})
            return "".join(it.text for it in told.content), bool(told.is_error)

    return asyncio.run(ask())


def test_pages_of_other_sites_are_refused(server):
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    accept = {"accept": "application/json, text/event-stream"}
    with listening(server.url, more=("--allowed-host", "tools.test")) as url:
        for changed, status in (
            ({"host": "evil.test"}, 403),
            ({"host": "127.0.0.1:1.evil.test"}, 403),
            ({"origin": f"{url.removesuffix('/mcp')}.evil.test"}, 403),
            ({"origin": "http://evil.test"}, 403),
        ):
            assert httpx2.post(url, json=body, headers=accept | changed).status_code == status
        assert (
            httpx2.post(url, json=body, headers=accept | {"host": "tools.test"}).status_code < 421
        )


def test_documents_are_added_and_found(start, served_model, tmp_path):
    with start(served_model, {}, data=str(tmp_path / "data")) as running:
        made = running.post("/v1/vector_stores", name="notes").json()
        tools = mcp.make_server(running.url, writes=True)
        assert {it.name for it in tools_of(tools)} == {"search", "ask", "list", "add"}
        text = "File 18: Kora Felell keeps a falcon."
        told, failed = called(tools, "add", title="../Kora & co", text=text)
        assert not failed and made["id"] in told
        found, _ = called(tools, "search", question=ANIMAL)
        assert "falcon" in found and ".." not in found
        refused, failed = called(mcp.make_server(running.url), "search", question=ANIMAL,
                                 knowledge_base=made["id"])  # fmt: skip
        assert not failed and "falcon" in refused
        running.state.library.registry.expire_store(made["id"])
        for base in ("notes", None):  # one that has expired is none to ask
            told, failed = called(tools, "search", question=ANIMAL, knowledge_base=base)
            assert failed and "there are none" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "localhost"], "expected http://HOST:PORT"),
        (["--listen", "8001"], "expected HOST:PORT"),
        (["--allowed-host", "x"], "needs --listen"),
    ],
)
def test_bad_arguments_are_refused(arguments, words, capsys):
    assert main(["mcp", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_a_key_is_no_argument():
    """Arguments are shown to everybody on a machine."""
    with pytest.raises(SystemExit):
        main(["mcp", "--key", "secret"])


def test_half_a_head_is_closed(server):
    with listening(server.url) as url:
        host, port = url.removeprefix("http://").removesuffix("/mcp").split(":")
        with socket.create_connection((host, int(port)), 60) as half:
            half.sendall(b"GET /mcp HTTP/1.1\r\nx: " + b"a" * (1 << 20))
            assert half.recv(1 << 16).startswith(b"HTTP/1.1 431")
