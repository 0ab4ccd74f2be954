"""Spare jobs run beside requests: at once when nobody is served, and with a share when some are."""

import itertools
import threading
import time

import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError
from jaxrag.engine.state import EngineSettings


def test_a_spare_job_runs_on_the_engines_thread_and_gives_its_result(engine_on, at_rest):
    engine = engine_on()
    assert engine.spare(lambda: threading.current_thread().name) == "jaxrag-engine"
    assert engine.spare(lambda: engine.spare(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        engine.spare(lambda: 1 / 0)
    at_rest(engine)


def test_spare_jobs_share_the_engine_with_a_request(engine_on, asked, at_rest):
    """While somebody reads, a job waits for its share; it neither starves nor is in the way."""
    clock = iter(range(10**9)).__next__  # a second a look, so that the share does not depend on us
    engine = engine_on(settings=EngineSettings(spare_wait=8.0))
    engine._clock = lambda: float(clock())
    order, left = [], threading.Semaphore(0)

    def sink(progress):
        if not order:
            thread.start()
            while not engine._mail._events:  # the first job is posted before the second token
                time.sleep(0.001)
        order.append("token")
        if progress.last:
            order.append("end")

    def jobs():
        for _ in range(6):
            engine.spare(lambda: order.append("job"))
        left.release()

    thread = threading.Thread(target=jobs)
    engine.add(asked(engine, tokens=64, watched=True), sink)
    assert left.acquire(timeout=120)
    thread.join()
    while "end" not in order:
        engine.spare(lambda: None)
    at_rest(engine)
    assert order.count("job") == 6
    tokens = [i for i, what in enumerate(order) if what == "token"]
    inside = [i for i, what in enumerate(order) if what == "job" and tokens[0] < i < tokens[-1]]
    assert inside, "no job ran while the request was served"
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(inside))


def test_a_wait_below_zero_is_refused():
    with refused(ConfigError, "spare_wait=-1"):
        EngineSettings(spare_wait=-1.0)
