"""An engine that is stuck: seen from outside, told to whoever waits, and no longer waited for."""

import threading

import pytest

from jaxrag.errors import ConfigError
from jaxrag.server.settings import ServerSettings
from jaxrag.server.stall import STUCK, watchdog

QUESTION = "Which animal does Kora Felell keep?"


@pytest.fixture
def held(server):
    """``held()`` keeps the engine's thread busy until the test is over."""
    go, began = threading.Event(), threading.Event()

    def job(runner):
        began.set()
        assert go.wait(60)

    threads = []

    def hold():
        threads.append(threading.Thread(target=server.state.engine.call, args=(job,)))
        threads[0].start()
        assert began.wait(60)

    was = server.state.settings
    yield hold
    go.set()
    for thread in threads:
        thread.join(60)
    server.state.settings = was
    server.state.phase = "ready"


def impatient(server, stall, **settings):
    server.state.settings = ServerSettings(
        stall_seconds=stall, **{"max_new_tokens": 8, "k": 3, "hold_seconds": 0.01, **settings}
    )


def test_health_is_503_while_the_engine_is_stuck_and_well_afterwards(server, held):
    assert server.client.get("/health").json() == {"status": "ok", "phase": "ready"}
    held()
    impatient(server, 1e-6)
    for path in ("/health", "/ready"):
        answer = server.client.get(path)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_stuck"
        assert "retry-after" in answer.headers
    assert server.chat(QUESTION).status_code == 503
    samples = server.client.get("/metrics").text  # is answered whatever the engine does
    assert "jaxrag_engine_silence_seconds" in samples
    assert server.client.get("/v1/engine").json()["silence_seconds"] > 0
    server.state.phase = "starting"  # it compiles
    assert server.client.get("/health").status_code == 200


def test_an_engine_that_waits_is_not_stuck(server):
    server.chat(QUESTION)
    impatient(server, 1e-9)
    try:
        while server.client.get("/health").status_code != 200:  # its last turn
            pass
    finally:
        server.state.settings = ServerSettings(max_new_tokens=8, k=3)


@pytest.mark.parametrize("stream", [False, True])
def test_who_waits_for_a_stuck_engine_is_told(model_server, stream):
    """``stall_seconds`` is 0.2 there; a stream has begun when the engine gets stuck."""
    go, server = threading.Event(), model_server
    began = threading.Event()

    def job(runner):
        began.set()
        assert go.wait(60)

    thread = threading.Thread(target=server.state.engine.call, args=(job,))
    try:
        thread.start()
        assert began.wait(60)
        server.state.phase = "starting"  # not stuck by what it says
        while not server.state.engine.silence:
            pass
        server.state.phase = "ready"
        answer = server.chat(QUESTION, stream=stream)
    finally:
        go.set()
        thread.join(60)
    if answer.status_code == 200:  # the status was sent before
        last = answer.text.strip().split("\n\n")[-1]
        assert '"engine_error"' in last and "stuck" in last
    else:
        assert answer.status_code in (500, 503)
        assert answer.json()["error"]["code"] in ("engine_error", "engine_stuck")
    while server.client.get("/health").status_code != 200:
        pass
    assert server.chat(QUESTION).status_code == 200
    while any(server.state.engine.standing().requests.values()):
        pass


def test_the_watchdog_ends_the_process(server, held):
    left, over = [], threading.Event()

    def leave(status):
        left.append(status)
        over.set()

    impatient(server, 1e-3, watchdog_seconds=2e-3)
    with watchdog(server.state, leave):
        held()
        assert over.wait(60)
    assert left == [STUCK]


def test_no_watchdog_by_default(server):
    assert server.state.settings.watchdog_seconds is None
    with watchdog(server.state) as thread:
        assert thread is None
    with pytest.raises(ConfigError, match="no less than stall_seconds"):
        ServerSettings(stall_seconds=10.0, watchdog_seconds=5.0)
