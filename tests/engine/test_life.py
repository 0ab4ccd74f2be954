"""The engine's thread: there while something is to be done, gone when not, no hindrance at exit."""

import contextlib
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

from refusal import refused

from jaxrag.base.errors import Cancelled, RequestError
from jaxrag.engine.thread import Mailbox, ask

SHIPPED = Path(__file__).parents[2] / "checkpoints" / "synthetic-0.8m" / "dual"
LEAVES = """
import sys, jaxrag
model = jaxrag.load_model(sys.argv[1])
stream = iter(jaxrag.generate([5, 6, 7], documents=[[8, 9, 10]], model=model,
                              method="full_attention", max_new_tokens=200, stream=True))
import threading
threading.Thread(target=next, args=(stream, None), daemon=True).start()
while model.engine is None or not model.engine._core or not model.engine._core.state.live:
    pass
"""


def engine_threads():
    return [it for it in threading.enumerate() if it.name == "jaxrag-engine"]


def test_the_thread_ends_when_there_is_nothing_to_do(engine_on, asked, alone):
    engine = engine_on()
    request = asked(engine, tokens=4)
    first = alone(engine, [request])
    assert engine_threads()
    deadline = time.monotonic() + 30
    while engine_threads() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not engine_threads()
    assert alone(engine, [request]) == first  # and begins anew


def test_an_interpreter_that_ends_does_not_wait_for_an_answer(tmp_path):
    """Something is being served when the program is over: no crash, no hang, no traceback."""
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES, str(SHIPPED)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_it_says_where_a_request_stands_and_counts_its_turns(engine_on, asked, at_rest):
    engine = engine_on()
    request = asked(engine, tokens=4, watched=True, rows=1)
    seen, done = [], threading.Event()
    assert engine.where(0) is None and engine.iterations == 0

    def sink(progress):
        seen.append([engine.where(number) for number in (0, 1)])
        if progress.last and progress.number == 1:
            done.set()

    engine.add_all([(request, sink)] * 2)
    assert done.wait(300)
    at_rest(engine)
    mine, other = seen[0]
    assert (mine.status, mine.there) == ("decode", mine.chunks) and mine.chunks > 0
    assert other.status == "ready", "its chunks are the other's, and there is one row"
    assert seen[-1] == [None, None] == [engine.where(number) for number in (0, 1)]
    assert engine.iterations >= 6


def test_what_can_never_be_served_is_refused_when_it_is_added(engine_on, asked):
    engine = engine_on(cache_tokens=64)
    with refused(RequestError, "64"):
        engine.add(asked(engine, final=60, tokens=30), print)


def test_who_is_aborted_is_told(engine_on, asked, told):
    engine, client = engine_on(), told()
    engine.abort(12345)  # nobody's number
    number = engine.add(asked(engine, tokens=60), client)
    engine.abort(number)
    while not client.last:
        engine.call(lambda runner: None)
    assert isinstance(client.last[number].error, Cancelled)
    assert str(client.last[number].error) == f"request {number} was aborted"


def test_an_interrupt_inside_a_condition_locks_nobody_out(monkeypatch):
    """A Condition's ``__enter__`` is Python: Ctrl-C may fall between its lock and its return."""
    served, enter = [], threading.Condition.__enter__

    def serve(mail):
        while events := mail.first():
            for event in events:
                event()

    mail = Mailbox("test", serve)
    ask(mail.post, lambda: served.append(0))  # the thread runs

    def interrupted(condition):
        enter(condition)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return True

    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "__enter__", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            mail.post(lambda: served.append(1))
    other = threading.Thread(target=ask, args=(mail.post, lambda: served.append(2)), daemon=True)
    other.start()
    other.join(20)
    assert not other.is_alive() and served == [0, 1, 2]


def test_what_is_posted_as_the_interpreter_ends_wakes_no_abandoned_engine(engine_on, asked, caplog):
    engine, last = engine_on(), queue.SimpleQueue()
    mail = engine._mail

    def sink(progress):
        if progress.last:
            last.put(progress.error)
        elif not mail.closed:
            mail.post(lambda: None)
            mail.closed = True  # as at exit, while steps are in flight

    engine.add(asked(engine, tokens=40, watched=True), sink)
    assert "interpreter ends" in str(last.get(timeout=120))
    mail.close()
    assert not caplog.messages
