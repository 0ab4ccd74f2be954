"""An engine that is stuck: seen from outside, told to whoever waits, and no longer waited for."""

import threading

import jax
import pytest
from refusal import refused
from serving import until

from jaxrag.base.errors import ConfigError
from jaxrag.server.http.health import STUCK, watchdog
from jaxrag.server.settings import ServerSettings

QUESTION = "Which animal does Kora Felell keep?"
STALL = 0.2  # seconds by the engine's clock, which stands until it is moved


class Stuck:
    """A server, and its engine's thread in somebody's hand."""

    def __init__(self, server):
        self.server, self.now = server, [0.0]
        self.go, self._began = threading.Event(), threading.Event()
        server.state.engine._mail._clock = lambda: self.now[0]
        self._thread = threading.Thread(target=server.state.engine.call, args=(self._job,))

    def _job(self, runner):
        self._began.set()
        assert self.go.wait(120)

    def hold(self):
        self._thread.start()
        assert self._began.wait(120)

    def release(self):
        self.go.set()
        self._thread.join(120)


@pytest.fixture(scope="module")
def patient(start, served_model, village):
    settings = {"stall_seconds": STALL, "watchdog_seconds": STALL, "hold_seconds": 0.01}
    with start(served_model, {"village": village}, **settings) as server:
        server.chat(QUESTION)
        yield server


@pytest.fixture
def stuck(patient):
    held = Stuck(patient)
    yield held
    if held._thread.ident is not None:
        held.release()
    while patient.client.get("/health").status_code != 200:
        pass
    patient.state.phase = "ready"
    assert patient.chat(QUESTION).json()["choices"][0]["message"]["content"] == "falcon"


def test_health_is_503_while_the_engine_is_stuck(stuck, patient):
    until(lambda: patient.client.get("/health").json() == {"status": "ok", "phase": "ready"})
    stuck.hold()
    assert patient.client.get("/health").status_code == 200  # not for long enough
    stuck.now[0] = 90.0
    for path in ("/health", "/ready"):
        answer = patient.client.get(path)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_stuck"
        assert "90 s" in answer.json()["error"]["message"]
        assert "retry-after" in answer.headers
    assert patient.chat(QUESTION).status_code == 503
    # These are answered whatever the engine does.
    assert "jaxrag_engine_silence_seconds 90.0" in patient.client.get("/metrics").text
    assert patient.client.get("/v1/engine").json()["silence_seconds"] == 90.0
    patient.state.phase = "starting"  # it compiles
    assert patient.client.get("/health").status_code == 200


def test_compiling_is_not_being_stuck(stuck, patient):
    tracing, go, compiled, end = (threading.Event() for _ in range(4))

    def slow(x):
        tracing.set()
        assert go.wait(120)
        return x + 1

    def job():
        jax.jit(slow)(1.0)
        compiled.set()
        assert end.wait(120)

    thread = threading.Thread(target=patient.state.engine.spare, args=(job,))
    thread.start()
    try:
        assert tracing.wait(120)
        stuck.now[0] = 90.0
        assert patient.client.get("/health").status_code == 200
        assert patient.client.get("/v1/engine").json()["silence_seconds"] == 0
        assert patient.client.get("/health").json()["compiling"] == {
            "done": 0,
            "of": 1,
            "waiting": 0,
        }
        assert "jaxrag_engine_compiling 1.0" in patient.client.get("/metrics").text
        go.set()
        assert compiled.wait(120)
        assert patient.client.get("/health").status_code == 200  # it counts from here
        stuck.now[0] = 180.0
        assert patient.client.get("/health").status_code == 503
    finally:
        go.set()
        end.set()
        thread.join(120)


def test_who_waits_for_a_stuck_engine_is_told(stuck, patient):
    stuck.hold()
    answers = []

    def ask(stream):
        answers.append(patient.chat(QUESTION, stream=stream))

    asking = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for thread in asking:
        thread.start()
    while sum(it._number is not None and not it._over for it in list(patient.state.asking)) < 2:
        pass
    stuck.now[0] = 90.0
    for thread in asking:
        thread.join(120)
    whole, streamed = sorted(answers, key=lambda it: it.status_code, reverse=True)
    assert whole.status_code == 500 and whole.json()["error"]["code"] == "engine_error"
    if streamed.status_code == 200:  # its head was sent before
        assert "stuck" in streamed.text.strip().split("\n\n")[-1]
        assert "[DONE]" not in streamed.text
    stuck.release()
    while any(patient.state.engine.status().requests.values()):
        pass
    assert patient.state.limits.running == 0


def test_the_watchdog_ends_the_process(stuck, patient):
    left, over = [], threading.Event()

    def leave(status):
        left.append(status)
        over.set()

    with watchdog(patient.state, leave):
        stuck.hold()
        stuck.now[0] = 90.0
        assert over.wait(120)
    assert left == [STUCK]


def test_no_watchdog_by_default(server):
    assert server.state.settings.watchdog_seconds is None
    with watchdog(server.state) as thread:
        assert thread is None
    with refused(ConfigError, "stall_seconds"):
        ServerSettings(stall_seconds=10.0, watchdog_seconds=5.0)
