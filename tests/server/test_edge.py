"""What comes before a request is known is bounded: heads, connections, bodies on their way."""

import contextlib
import json
import logging
import os
import resource
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusal import refused
from serving import until

from jaxrag.base.errors import ConfigError
from jaxrag.server.errors import Problem
from jaxrag.server.http import connections
from jaxrag.server.settings import ServerSettings
from jaxrag.server.state.bodies import Bodies

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "checkpoints/synthetic-0.8m/dual"
HEAD = b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\n"
LONG = 20.0  # seconds in which what must happen happens
MIB = 1 << 20


@pytest.fixture
def serve(start, served_model):
    """``serve(**settings)``: a server without a knowledge base."""
    return lambda **settings: start(served_model, {}, **settings)


def connect(server, sent=b""):
    """A connection that has sent these bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), LONG)
    client.sendall(sent)
    return client


def read(client):
    """What comes until the server closes: the status of each answer, and the last one's body."""
    with client:
        data = b""
        while piece := client.recv(1 << 16):
            data += piece
    answers = data.split(b"HTTP/1.1 ")[1:]
    statuses = [int(answer[:3]) for answer in answers]
    return statuses, json.loads(answers[-1].partition(b"\r\n\r\n")[2]) if answers else None


def code_of(client):
    """Status and code of the one error that is answered."""
    (status,), body = read(client)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in body["error"]["message"]
    return status, body["error"]["code"]


# Heads


def send_all(client, piece, count):
    """Send a piece so often, or until the server reads no more."""
    for _ in range(count):
        try:
            client.sendall(piece)
        except OSError:
            return


@pytest.mark.parametrize(
    ("begun", "piece"),
    [
        (b"GET /health HTTP/1.1\r\nx: ", b"a"),
        (b"GET /health HTTP/1.1\r\n", b"x: a\r\n"),
        (b"GET /", b"a"),
        (b"", b"\r\n"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"x: a\r\n"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"a"),
    ],
    ids=["value", "headers", "path", "blank lines", "trailers", "chunk extension"],
)
def test_a_head_without_end_is_cut(server, begun, piece):
    most = server.state.settings.max_head_bytes
    client = connect(server, begun)
    send_all(client, piece * (4096 // len(piece)), 4 * most // 4096)
    assert code_of(client) == (431, "head_too_large")
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 431)])
def test_a_head_may_have_so_many_bytes(serve, more, status):
    with serve(max_head_bytes=1000) as server:
        begun, end = b"GET /health HTTP/1.1\r\nconnection: close\r\nx: ", b"\r\n\r\n"
        padding = b"a" * (1000 - len(begun) - len(end) + more)
        statuses, _ = read(connect(server, begun + padding + end))
        assert statuses == [status]


def test_a_body_is_no_head(serve):
    """Of many pieces, each with a line of its own, that are larger together than a head may be."""
    with serve(max_head_bytes=500) as server:
        text = json.dumps({"prompt": "Tondorf " * 500}).encode()
        chunks = b"".join(b"%x\r\n%c\r\n" % (1, byte) for byte in text) + b"0\r\n\r\n"
        sent = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks
        assert read(connect(server, sent))[0] == [200]


def test_requests_behind_each_other_have_heads_of_their_own(serve):
    with serve(max_head_bytes=300) as server:
        one = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
        last = one.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        assert read(connect(server, one * 20 + last))[0] == [200] * 21


def test_so_many_requests_may_wait_behind_each_other(serve, caplog):
    caplog.set_level(logging.INFO, "jaxrag.server")
    with serve() as server:
        client = connect(server, b"GET /nowhere HTTP/1.1\r\n\r\n" * 1000)
        with contextlib.suppress(OSError):
            read(client)
        assert server.client.get("/health").status_code == 200
        until(lambda: not server.state.requests)
    assert sum(it.message == "http" for it in caplog.records) < 100


@pytest.mark.parametrize(
    "sent", [b"a\r\n\r\n", b"GET / HTTP/1.1\r\nx\r\n\r\n", b"\x16\x03\x01", b"a\r\n" * 20_000]
)
def test_what_is_no_request_is_400(server, sent):
    assert code_of(connect(server, sent)) == (400, "malformed_request")


def test_what_is_being_answered_ends_where_its_client_sends_no_sense(serve, caplog):
    """A head without end behind a request, and trailers without end of the request itself."""
    with serve() as server:
        trailers = HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: a\r\n" * 10_000
        behind = HEAD + b"content-length: 2\r\n\r\n{}" + b"GET /" + b"a" * 40_000
        for sent in (trailers, behind):
            client = connect(server)
            send_all(client, sent, 1)
            with contextlib.suppress(OSError):
                read(client)
        until(lambda: not server.state.requests)
    assert not [it for it in caplog.records if it.exc_info]


@pytest.mark.parametrize("sent", [b"", b"GET", b"\r\n", HEAD])
def test_a_head_that_does_not_end_times_out(serve, sent):
    with serve(head_seconds=0.2) as server:
        assert code_of(connect(server, sent)) == (408, "request_timeout")
        assert server.client.get("/health").status_code == 200


def test_a_head_behind_an_answer_times_out(serve):
    with serve(head_seconds=0.2) as server:
        client = connect(server, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.sendall(b"\r\n")
        assert code_of(client) == (408, "request_timeout")


# Connections


def test_where_there_are_too_many_the_oldest_that_says_nothing_goes(serve):
    with serve(max_connections=24) as server:
        silent = [connect(server, HEAD) for _ in range(40)]
        assert server.client.get("/health").status_code == 200
        assert server.post("/tokenize", prompt="Tondorf").status_code == 200
        assert silent[0].recv(1) == b""  # closed
        silent[-1].sendall(b"content-length: 15\r\nconnection: close\r\n\r\n" + b'{"prompt": "a"}')
        assert read(silent[-1])[0] == [200]
        for client in silent[:-1]:
            client.close()


def test_what_is_answered_is_not_closed_for_others(serve):
    """Nor is more answered at once than leaves room for /health."""
    with serve(max_connections=16) as server:
        head = HEAD + b"connection: close\r\ncontent-length: 15\r\n\r\n"
        running = []
        for _ in range(14):
            running.append(connect(server, head))
            until(lambda: server.state.requests == len(running))
        silent = [connect(server) for _ in range(10)]
        assert server.client.get("/health").status_code == 200
        refused = server.post("/tokenize", prompt="Tondorf")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        for client in running:
            client.sendall(b'{"prompt": "a"}')
            assert read(client)[0] == [200]
        for client in silent:
            client.close()
        until(lambda: not server.state.requests)
        assert server.post("/tokenize", prompt="Tondorf").status_code == 200


def test_a_client_that_reads_nothing_is_closed(serve):
    with serve(body_seconds=0.3) as server:
        client = connect(server)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        ask = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
        client.settimeout(1.0)
        with pytest.raises(OSError):  # it is not read either
            while True:
                client.sendall(ask * 1000)
        until(lambda: not server.state.requests)
        client.close()


def test_what_is_closed_is_told_once_a_minute(monkeypatch):
    told = []
    monkeypatch.setattr(connections, "note", lambda event, fields, level: told.append(fields))
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(connections, "time", clock)
    door = connections.Connections(ServerSettings())
    refused = {"message": "socket.accept() out of system resource"}
    for _ in range(1000):
        door.on_error(None, refused)
    assert told == [{"no_descriptor": 1}]
    clock.now += 60.0
    door.count("too_slow")
    assert told[1:] == [{"no_descriptor": 999, "too_slow": 1}]


def test_connections_are_fewer_than_descriptors(monkeypatch):
    free = [100]

    def allowed(what):
        return len(os.listdir("/dev/fd")) + free[0], resource.RLIM_INFINITY

    monkeypatch.setattr(connections.resource, "getrlimit", allowed)
    assert connections.Connections(ServerSettings(max_connections=20)).limit == 20
    assert connections.Connections(ServerSettings(max_connections=512)).limit == 75
    free[0] = 8
    with refused(ConfigError):
        connections.Connections(ServerSettings())


# Bodies


@pytest.mark.parametrize("path", ["/tokenize", "/v1/files", "/v1/chat/completions"])
def test_a_body_that_does_not_come_times_out(serve, path, tmp_path):
    with serve(body_seconds=0.2, data=str(tmp_path)) as server:
        form = b"content-type: multipart/form-data; boundary=x\r\ncontent-length: 100\r\n\r\n"
        head = HEAD.replace(b"/tokenize", path.encode())
        assert code_of(connect(server, head + form + b"--x\r\n")) == (408, "request_timeout")
        assert not list(tmp_path.glob("tenants/*/files/*"))
        until(lambda: not server.state.requests)


def test_a_body_may_take_longer_the_longer_it_is():
    from jaxrag.server.http.checks import allowed_seconds

    assert allowed_seconds(30.0, 0) == 30.0
    assert allowed_seconds(30.0, 16 * MIB) == 30.0 + 256


def test_bodies_are_held_up_to_a_budget(serve):
    settings = {"max_body_bytes": MIB, "max_bodies_bytes": 2 * MIB}
    with serve(**settings) as server:
        head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n"
        text = b'{"prompt": "Tondorf"}'
        half = head % MIB + b" " * (MIB - len(text))
        first, second = connect(server, half), connect(server, half)
        until(lambda: server.state.bodies.held == 2 * (MIB - len(text)))
        assert server.post("/tokenize", prompt="Tondorf").status_code == 200
        refused = server.post("/tokenize", prompt="Tondorf " * 100)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) == 1
        for client in (first, second):
            client.sendall(text)
            assert read(client)[0] == [200]
        until(lambda: server.state.bodies.held == 0)
        assert server.post("/tokenize", prompt="Tondorf " * 100).status_code == 200


def test_a_body_that_nobody_reads_is_cut(serve):
    """Behind its answer so much is dropped as a body may have, and no more."""
    with serve(max_body_bytes=MIB) as server:
        client = connect(server, HEAD.replace(b"/tokenize", b"/nowhere"))
        client.sendall(b"content-length: %d\r\n\r\n" % MIB)
        assert client.recv(12) == b"HTTP/1.1 404"
        endless = connect(server, HEAD.replace(b"/tokenize", b"/nowhere"))
        endless.sendall(b"transfer-encoding: chunked\r\n\r\n")
        piece = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        with endless, pytest.raises(OSError):
            for _ in range(1000):
                endless.sendall(piece)
        client.sendall(bytes(MIB) + b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert read(client)[0] == [200]


def test_every_tenant_has_a_part_of_the_budget():
    bodies = Bodies(100, tenants=4)
    bodies.hold("a", 90)
    bodies.hold("b", 25)  # its part, though no more is left
    with pytest.raises(Problem) as found:
        bodies.hold("b", 1)
    assert (found.value.status, found.value.code) == (429, "overloaded")
    with pytest.raises(Problem):
        bodies.hold("a", 1)
    bodies.release("a", 90)
    bodies.hold("b", 1)
    assert bodies.held == 26
