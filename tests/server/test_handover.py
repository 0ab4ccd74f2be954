"""A server that another takes over from: no request fails, and each is answered by one of them."""

import contextlib
import dataclasses
import os
import socket
import threading
from pathlib import Path

import httpx
from refusal import refused
from serving import until

from jaxrag.base.errors import ConfigError
from jaxrag.cli import main
from jaxrag.server.http import handover
from jaxrag.server.http.handover import Predecessor, Successors

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
QUESTION = "Which animal does Kora Felell keep?"
LONG = 120.0


def address_of(url):
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


class Clients:
    """Threads that ask without a pause: over connections that stay, and a new one each time.

    Attributes:
      answers: (status, model that answered, text), as they came.
    """

    def __init__(self, url, count=4):
        self.url, self.answers, self._over = url, [], threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number % 2 == 0,)) for number in range(count)
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised):
        self.end()

    def end(self):
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, stays):
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
        with httpx.Client(base_url=self.url, timeout=LONG) as kept:
            while not self._over.wait(0.02):
                try:
                    if stays:
                        answer = kept.post(CHAT, json=body)
                    else:
                        answer = httpx.post(self.url + CHAT, json=body, timeout=LONG)
                    found = answer.json()
                    text = found["choices"][0]["message"]["content"]
                    self.answers.append((answer.status_code, found["model"], text))
                except Exception as error:
                    self.answers.append((0, repr(error), ""))

    def more(self, count=12):
        """Wait for so many more answers."""
        before = len(self.answers)
        until(lambda: len(self.answers) >= before + count)


def test_no_request_fails_and_what_runs_completes(served_model, village, start, held):
    settings = {"drain_seconds": 60.0}
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(start(served_model, {"village": village}, **settings))
        other = dataclasses.replace(served_model)
        clients = stack.enter_context(Clients(old.url))
        clients.more()
        lines = []

        def read():
            body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True,
                    "ignore_eos": True, "temperature": 50.0, "max_tokens": 300}  # fmt: skip
            with httpx.stream("POST", old.url + CHAT, json=body, timeout=LONG) as stream:
                lines.extend(it for it in stream.iter_lines() if it)

        reader = threading.Thread(target=read)
        with held(old.state):
            reader.start()
            until(lambda: any(it.prompt_tokens for it in list(old.state.asking)))
            before = Predecessor(address_of(old.url))
            gone = threading.Event()
            before.ended = gone.set
            named = {"name": "later", **settings}
            stack.callback(before.close)
            new = stack.enter_context(start(other, {"village": village}, before=before, **named))
            assert new.url == old.url
            assert not gone.is_set()  # the old one still answers
        reader.join(LONG)
        assert lines[-1] == "data: [DONE]" and len(lines) > 200
        clients.more()
        assert gone.wait(LONG)
        count = len(clients.answers)
        clients.more()
        assert {(status, text) for status, _, text in clients.answers} == {(200, "falcon")}
        assert {model for _, model, _ in clients.answers[:12]} == {"synthetic@village"}
        assert {model for _, model, _ in clients.answers[count:]} == {"later@village"}
        assert old.state.phase == "draining" and new.state.phase == "ready"


def test_who_does_not_get_ready_changes_nothing(server):
    for _ in range(3):  # one after the other
        before = Predecessor(address_of(server.url))
        assert before.about["pid"] == os.getpid()
        before.close()
        before.bound.close()
        assert server.chat().status_code == 200


def test_where_nobody_listens(capsys):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        kb = ["--kb", str(ROOT / "none")]
        assert main(["serve", *kb, "--port", str(port), "--take-over"]) == 1
    told = capsys.readouterr().err
    assert f"--take-over: no server of this user listens on 127.0.0.1:{port}" in told
    assert told.count("\n") == 1


def test_another_user_gets_no_socket(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as bound:
        waiting = Successors(bound, {}, lambda: None)
        try:
            monkeypatch.setattr(handover, "_same_user", lambda other: False)
            with refused(ConfigError):
                Predecessor(bound.getsockname())
        finally:
            waiting.close()


def test_who_holds_the_name_of_a_hand_over_is_told_of(start, served_model, caplog):
    """It may be another user's: the server serves, and says why nobody can take over from it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    with socket.socket(socket.AF_UNIX) as holding:
        holding.bind(handover._place(address))
        with start(served_model, {}, port=address[1]) as server:
            assert server.client.get("/health").status_code == 200
            with refused(ConfigError, f"127.0.0.1:{address[1]}"):
                Predecessor(address)
    [told] = [it for it in caplog.messages if "no other process can take over" in it]
    assert f"127.0.0.1:{address[1]}" in told and "--port" in told and "\n" not in told
