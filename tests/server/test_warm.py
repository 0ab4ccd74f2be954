"""A server is ready once the default request compiles nothing; the rest is compiled behind that."""

import threading
import time

import pytest

from jaxrag.server.state.warm import WarmUp

QUESTION = "Which animal does Kora Felell keep? "
ASKED = {"method": "turborag", "max_new_tokens": 4, "warm_up": True}
LARGE = tuple(f"jit({name})" for name in (
    "_whole_piece", "_layer", "_whole_steps", "_some_layers", "_place",
))  # fmt: skip


def until(found):
    deadline = time.monotonic() + 300
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def held(monkeypatch):
    """What is compiled behind the start waits until it is set."""
    go, rest = threading.Event(), WarmUp.rest
    monkeypatch.setattr(WarmUp, "rest", lambda self: go.wait(300) and rest(self))
    yield go
    go.set()


def test_what_is_left_is_compiled_behind_the_start(start, served_model, village, held):
    with start(served_model, {"village": village}, **ASKED) as server:
        engine = server.state.engine
        until(lambda: server.client.get("/ready").status_code == 200)
        said = server.client.get("/health").json()
        assert said["compiling"]["waiting"] == 0
        assert said["phase"] == "ready" and 0 < said["compiling"]["done"] < said["compiling"]["of"]
        compiled = dict(engine.compiled)
        assert server.chat(QUESTION * 7).json()["usage"]["completion_tokens"]
        assert [compiled.get(it) for it in LARGE] == [engine.compiled.get(it) for it in LARGE]
        held.set()
        until(lambda: "compiling" not in server.client.get("/health").json())
        compiled = dict(engine.compiled)
        for question in ("Who?", QUESTION, QUESTION * 12):
            assert server.chat(question).status_code == 200
        assert [compiled.get(it) for it in LARGE] == [engine.compiled.get(it) for it in LARGE]


def test_who_asks_while_it_starts_waits_and_is_answered(start, served_model, village, monkeypatch):
    go, ready = threading.Event(), WarmUp.ready
    monkeypatch.setattr(WarmUp, "ready", lambda self: go.wait(300) and ready(self))
    with start(served_model, {"village": village}, **ASKED) as server:
        try:
            refused = server.client.get("/ready")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "starting")
            assert server.client.get("/health").json() == {"status": "ok", "phase": "starting"}
            assert server.chat(QUESTION).json()["choices"][0]["message"]["content"] == "falcon"
        finally:
            go.set()
        until(lambda: server.client.get("/ready").status_code == 200)
        assert server.chat(QUESTION).json()["choices"][0]["message"]["content"] == "falcon"


@pytest.mark.parametrize("method", ["cacheblend", "fusionrag"])
def test_nothing_is_left_in_the_pool(start, served_model, village, method):
    with start(served_model, {"village": village}, **ASKED | {"method": method}) as server:
        until(lambda: server.state.phase == "ready" and server.state.compiling is None)
        assert server.state.engine.held() == ([], [])


def test_what_cannot_be_compiled_ahead_is_told_and_serves(
    start, served_model, village, monkeypatch, caplog
):
    def fails(self, request):
        raise ValueError("no room")

    monkeypatch.setattr(WarmUp, "_compile", fails)
    with start(served_model, {"village": village}, **ASKED) as server:
        until(lambda: server.state.phase == "ready" and server.state.compiling is None)
        assert server.chat(QUESTION).status_code == 200
    assert "not compiled ahead: no room" in caplog.text
