"""Reads in threads: within a time and an amount of memory, and mapped by other processes."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from stored_chunks import ROPE

from jaxrag.connectors import fetch, manifest
from jaxrag.connectors.fetch import _HANGING, Fetches, NotReadyError, SharedArray
from jaxrag.connectors.plan import Planner
from jaxrag.connectors.settings import ConnectorSettings
from jaxrag.kv.store import ChunkStore

ROOT = Path(__file__).parents[2]


@pytest.fixture
def parts(stored):
    engine = manifest.read(stored.out).engine
    store = ChunkStore.open(engine.store, engine.fingerprint, engine.layout)
    made = []

    def fetches(**options):
        given = {"threads": 1, "deadline": 5.0, "host_bytes": 1 << 30, **options}
        shared = given.pop("shared", False)
        settings = ConnectorSettings(str(stored.out), **given)
        made.append(Fetches(store, ROPE, settings, shared=shared))
        return made[-1]

    yield fetches
    for one in made:
        one.close()
    store.close()


def plan_of(stored, *numbers):
    return Planner(manifest.read(stored.out)).plan(stored.prompt(*numbers), None, 0)[0]


def until_ready(fetches, name, plan, start=0):
    end = time.monotonic() + 10
    while not fetches.ready(name, plan, start):
        assert time.monotonic() < end
        time.sleep(0.001)


def test_from_any_token_on(stored, parts):
    plan, fetches = plan_of(stored, 0, 1, 0), parts()
    until_ready(fetches, "all", plan)
    whole = fetches.take("all", 0)
    for start in (1, 11, 30, plan.end - 1):
        until_ready(fetches, f"from {start}", plan, start)
        np.testing.assert_array_equal(fetches.take(f"from {start}", start), whole[:, :, start:])
        np.testing.assert_array_equal(fetches.take("all", start), whole[:, :, start:])


def test_another_process_maps_what_was_read(stored, parts, tmp_path):
    plan, fetches = plan_of(stored, 1, 2), parts(shared=True)
    until_ready(fetches, "a", plan, 5)
    shared = fetches.take("a", 20)
    assert isinstance(shared, SharedArray)
    program = (
        "import sys; from jaxrag.connectors.fetch import SharedArray; import numpy as np\n"
        f"np.save(sys.argv[1], {shared!r}.open())"
    )
    path = tmp_path / "seen.npy"
    subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT, check=True)
    plain = parts()
    until_ready(plain, "a", plan)
    np.testing.assert_array_equal(np.load(path), plain.take("a", 20))
    fetches.loaded("a")
    fetches.end("a")
    with pytest.raises(OSError):
        shared.open()


def test_memory_is_bounded(stored, parts):
    plan = plan_of(stored, 0)
    need = stored.layout.nbytes(plan.end)
    with pytest.raises(NotReadyError):
        parts(host_bytes=need - 1).ready("a", plan, 0)
    fetches = parts(host_bytes=need)
    until_ready(fetches, "a", plan)
    assert not fetches.ready("b", plan, 0)  # there is no room
    fetches.take("a", 0)
    assert not fetches.ready("b", plan, 0)  # nor while it is being written
    fetches.loaded("a")
    until_ready(fetches, "b", plan)  # what the engine has makes room
    fetches.end("b")
    until_ready(fetches, "a", plan)


def test_what_is_being_written_outlives_its_request(stored, parts):
    plan, fetches = plan_of(stored, 0), parts(shared=True)
    until_ready(fetches, "a", plan)
    shared = fetches.take("a", 0)
    fetches.end("a")
    assert shared.open().shape[2] == plan.end  # the step that writes it is on its way
    fetches.loaded("a")
    with pytest.raises(OSError):
        shared.open()


def test_reads_that_hang_are_not_waited_for(stored, parts, monkeypatch):
    """A few of them leave room for others; many say that the store is gone, until they return."""
    release = threading.Event()
    read = ChunkStore.get_many

    def hangs(*args, **options):
        release.wait(20)
        return read(*args, **options)

    monkeypatch.setattr(ChunkStore, "get_many", hangs)
    now = [0.0]
    monkeypatch.setattr(fetch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    plan, fetches = plan_of(stored, 0), parts(deadline=2.0)
    for number in range(_HANGING):
        assert not fetches.ready(f"a{number}", plan, 0)
        assert not fetches.ready("b", plan, 0)  # waits for the thread
        now[0] += 2.1
        with pytest.raises(NotReadyError):
            fetches.ready(f"a{number}", plan, 0)
        fetches.end(f"a{number}")
        if number == 0:
            monkeypatch.setattr(ChunkStore, "get_many", read)
            until_ready(fetches, "c", plan)
            fetches.end("c")
            monkeypatch.setattr(ChunkStore, "get_many", hangs)
    with pytest.raises(NotReadyError):
        fetches.ready("b", plan, 0)
    monkeypatch.setattr(ChunkStore, "get_many", read)
    release.set()
    end = time.monotonic() + 10
    while not all(one.done.done() for one in fetches._abandoned) and time.monotonic() < end:
        time.sleep(0.01)
    until_ready(fetches, "d", plan)
