"""A server from its start to its end: warm-up, drain, signals, and what keeps it from starting."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from refusal import refused
from serving import until

from jaxrag.cli import PROGRAM, main
from jaxrag.cli.command import parse
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.server.http.loading import while_loading
from jaxrag.server.http.run import bind, url_of
from jaxrag.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "checkpoints/synthetic-0.8m/dual"
CHAT = "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "Which animal does Kora Felell keep?"}],
    "k": 3,
    "ignore_eos": True,
    "temperature": 50.0,
    "seed": 1,
}


def read(client, body, first, told):
    """Read a stream to its end; ``first`` is set at its first event."""
    with client.stream("POST", CHAT, json=body | {"stream": True}) as answer:
        for line in answer.iter_lines():
            if line:
                told.append(line)
                first.set()


def test_it_is_alive_while_its_model_is_loaded():
    """Requests are to come again; what comes as the model is there waits for the server."""
    with contextlib.closing(bind(ServerSettings(port=0))) as bound:
        with httpx.Client(base_url=url_of(bound), timeout=60) as client:
            with while_loading(bound):
                assert client.get("/health").json() == {"status": "ok", "phase": "loading"}
                for answer in (client.get("/ready"), client.post(CHAT, json=BODY)):
                    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
                    assert "being loaded" in answer.json()["error"]["message"]
            with while_loading(bound):
                assert client.get("/health").status_code == 200
        with socket.create_connection(bound.getsockname()) as kept:
            kept.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            accepted, _ = bound.accept()
            with accepted:
                assert accepted.recv(64).startswith(b"GET /health")


def in_background(server, body):
    """A stream that is being read: its thread and its lines."""
    first, told = threading.Event(), []

    def run():
        with httpx.Client(base_url=server.url, timeout=60) as client:
            read(client, body, first, told)

    thread = threading.Thread(target=run)
    thread.start()
    assert first.wait(300)
    return thread, told


def test_what_runs_completes_while_nothing_new_is_taken(served_model, village, start, held):
    with start(served_model, {"village": village}, drain_seconds=30.0) as server:
        server.chat()
        thread, told = in_background(server, BODY | {"max_tokens": 100})
        with held(server.state):  # in the middle of it
            assert told[-1] != "data: [DONE]"
            server.end()
            until(lambda: server.state.phase == "draining")
            refused = server.chat()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert server.client.get("/ready").status_code == 503
        thread.join(30)
    assert told[-1] == "data: [DONE]"
    assert len(told) > 50


def test_any_request_that_runs_is_waited_for(served_model, village, start):
    """One of another endpoint, whose body is still on its way."""
    with start(served_model, {"village": village}, drain_seconds=30.0) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = b'{"prompt": "Tondorf"}'
        head = f"POST /tokenize HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port)), 20) as client:
            client.sendall(head.encode() + body[:5])
            until(lambda: server.state.requests)
            server.end()
            until(lambda: server.state.phase == "draining")
            time.sleep(0.2)
            client.sendall(body[5:])
            answer = client.recv(1000)
    assert answer.startswith(b"HTTP/1.1 200")


def test_what_runs_for_too_long_is_told_that_the_server_ends(served_model, village, start, held):
    settings = {"drain_seconds": 0.2, "hold_seconds": 0.0}
    with start(served_model, {"village": village}, **settings) as server:
        server.chat()
        whole = []
        with held(server.state):
            stream, told = in_background(server, BODY)
            waiting = threading.Thread(target=lambda: whole.append(server.chat()))
            waiting.start()
            until(lambda: server.state.limits.waiting == 2)
            server.end()
            stream.join(20)
            waiting.join(20)
    assert json.loads(told[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert whole[0].status_code == 503
    assert int(whole[0].headers["retry-after"]) >= 1


def test_told_twice_it_waits_for_nobody(served_model, village, start, held):
    settings = {"drain_seconds": 600.0, "hold_seconds": 0.0}
    with start(served_model, {"village": village}, **settings) as server:
        server.chat()
        with held(server.state):
            stream, told = in_background(server, BODY)
            server.end()
            server.end()
            stream.join(20)
    assert "error" in told[-1]


def test_answers_do_not_wait_for_acknowledgements():
    """asyncio turns Nagle's algorithm off for sockets that it knows as TCP by their protocol."""
    with bind(ServerSettings(port=0)) as bound:
        assert bound.proto == socket.IPPROTO_TCP


def refusal(capsys, *words):
    assert main(["serve", *words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jaxrag: error: ") and err.count("\n") == 1
    return err


def test_a_port_that_is_taken_is_named_in_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        err = refusal(capsys, "--model", str(MODEL), "--port", str(port))
    assert f"port {port} on 127.0.0.1" in err and "--port" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--kb", "nowhere"), "nowhere"),
        (("--model", "nowhere"), "nowhere"),
        ((), "pass --kb DIR, or --model DIR"),
        (("--host", "no.such.host.invalid", "--model", str(MODEL)), "no.such.host.invalid"),
        (("--model", str(MODEL), "--method", "magic"), "magic"),
        (("--model", str(MODEL), "--rows", "0"), "rows=0"),
        (("--kb", "a@b=x"), "a@b=x"),
        (("--config", "nowhere.toml"), "nowhere.toml"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(capsys, words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in refusal(capsys, *words, *(() if "--port" in words else ("--port", "0")))


@pytest.mark.parametrize("key", ["prefix_cache = true", 'misses = "in_place"'])
def test_a_method_whose_answers_depend_on_others_has_to_be_allowed(capsys, tmp_path, key):
    path = tmp_path / "own.toml"
    path.write_text(f'name = "own"\nencoder = "isolated"\n{key}\n')
    err = refusal(capsys, "--model", str(MODEL), "--method", str(path), "--port", "0")
    assert "--allow-history-dependent" in err


def test_settings_come_from_a_file_and_flags_go_first(tmp_path):
    from jaxrag.base.errors import ConfigError
    from jaxrag.cli.serve import settings_of

    path = tmp_path / "serve.toml"
    path.write_text(
        'k = 7\nport = 1\nmethods = ["turborag"]\n[model]\npath = "m"\ndtype = "float32"\n'
        '[knowledge_bases]\nlaws = "x"\n[engine]\nprefill_tokens = 256\n'
        "[engine.scheduler]\nmax_bypass = 3\n"
    )
    found = settings_of(arguments("--config", str(path), "--port", "2", "--name", "n"))
    assert (found.k, found.port, found.methods) == (7, 2, ("turborag",))
    assert (found.model.path, found.model.name, found.model.dtype) == ("m", "n", "float32")
    assert found.knowledge_bases == {"laws": "x"}
    assert (found.engine.prefill_tokens, found.engine.scheduler.max_bypass) == (256, 3)
    named = settings_of(arguments("--kb", "here/village", "--kb", "laws=there/kb"))
    assert list(named.knowledge_bases.items()) == [
        ("village", "here/village"),
        ("laws", "there/kb"),
    ]
    path.write_text("speed = 3")
    with refused(ConfigError):
        settings_of(arguments("--config", str(path)))


def test_processes_that_hold_one_model_spread_it_over_all_devices(tmp_path):
    """As ``joined`` says where no flag does; a mesh of the file goes before."""
    from jaxrag.cli.serve import settings_of

    args = arguments("--kb", "kb", "--distributed")
    args.mesh = "1,1,4"
    assert settings_of(args).model.mesh == "1,1,4"
    (path := tmp_path / "serve.toml").write_text('[model]\nmesh = "1,2,2"\n')
    args.config = str(path)
    assert settings_of(args).model.mesh == "1,2,2"


def arguments(*words):
    """What the program's parser makes of words."""
    return parse(PROGRAM, ["serve", *words])


def test_what_the_program_prints_works(server, served_model, village):
    """The question of its command is answered, and its page is there."""
    from jaxrag.cli.serve import banner, question_for

    settings = dataclasses.replace(server.state.settings, questions=())
    with KnowledgeBase.open(village) as kb:
        question = question_for(settings, served_model, {"village": kb})
    shown = banner(server.url, server.state.name, ["village"], question)
    said = re.search(r"curl (\S+) -H '(\S+): (\S+)' -d '(.*)'$", shown)
    answer = httpx.post(said[1], content=said[4], headers={said[2]: said[3]}, timeout=60)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]
    assert httpx.get(re.search(r"its page: (\S+);", shown)[1]).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_the_program_serves_and_ends_with_0(village, signals):
    """SIGTERM while a stream runs: it completes, or with a second one is told to end."""
    command = [sys.executable, "-m", "jaxrag", "serve", "--kb", str(village), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        banner = process.stdout.readline()
        url = next(word for word in banner.split() if word.startswith("http://"))
        assert "dual@village" in banner
        first, told = threading.Event(), []
        with httpx.Client(base_url=url, timeout=60) as client:
            body = BODY | {"max_tokens": 800}
            thread = threading.Thread(target=read, args=(client, body, first, told))
            thread.start()
            assert first.wait(300)
            for _ in range(signals):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.1)
            thread.join(60)
        assert process.wait(300) == 0
    if signals == 1:
        assert told[-1] == "data: [DONE]"
    else:
        assert told[-1] == "data: [DONE]" or "error" in told[-1]
