import dataclasses
import threading

import pytest
from refusal import refused

from jaxrag.base.errors import StoreError
from jaxrag.kv.store import PutResult

WAIT = 30.0  # seconds before a test gives up; nothing is expected to take that long


def test_everything_submitted_is_stored(any_store, chunk):
    store = any_store()
    chunks = [chunk(number, 3 + number) for number in range(12)]
    with store.writer(max_inflight_bytes=2_000) as writer:
        futures = [writer.submit(c.key, c.kv, c.record) for c in chunks]
    assert all(future.result().won for future in futures)
    for c in chunks:
        c.assert_equal(store.get(c.key))


class Gate:
    """A put that waits until it is let through, and counts the bytes under way."""

    def __init__(self):
        self.open = threading.Event()
        self.lock = threading.Lock()
        self.entered = threading.Semaphore(0)
        self.inflight = self.peak = 0

    def __call__(self, key, kv, *, record, aux, replace):
        with self.lock:
            self.inflight += kv.nbytes
            self.peak = max(self.peak, self.inflight)
        self.entered.release()
        assert self.open.wait(WAIT)
        with self.lock:
            self.inflight -= kv.nbytes
        return PutResult(won=True, attempt="a" * 16)


def test_submit_waits_for_room(open_store, chunk, monkeypatch):
    store, gate = open_store(), Gate()
    monkeypatch.setattr(store, "put", gate)
    chunks = [chunk(number) for number in range(8)]
    submitted = []
    writer = store.writer(max_inflight_bytes=2 * chunks[0].kv.nbytes)

    def submit_all():
        with writer:
            for c in chunks:
                submitted.append(writer.submit(c.key, c.kv, c.record))

    thread = threading.Thread(target=submit_all)
    thread.start()
    for _ in range(2):
        assert gate.entered.acquire(timeout=WAIT)
    assert not gate.entered.acquire(timeout=0.1)  # the third has to wait
    assert len(submitted) <= 2
    gate.open.set()
    thread.join(WAIT)
    assert len(submitted) == 8
    assert gate.peak == 2 * chunks[0].kv.nbytes


def test_a_failed_put_is_raised_on_leaving(open_store, chunk):
    store = open_store()
    good, bad = chunk(1), chunk(2)
    with refused(StoreError), store.writer() as writer:
        failed = writer.submit("0" * 40, bad.kv, bad.record)
    assert isinstance(failed.exception(), StoreError)
    with store.writer() as writer:  # the store is as usable as before
        writer.submit(good.key, good.kv, good.record)
    good.assert_equal(store.get(good.key))


def test_a_failed_put_is_raised_by_the_next_submit(open_store, chunk):
    store = open_store()
    a, b = chunk(1), chunk(2)
    with refused(StoreError), store.writer() as writer:
        failed = writer.submit("0" * 40, a.kv, a.record)
        assert failed.exception(WAIT) is not None
        with refused(StoreError):
            writer.submit(b.key, b.kv, b.record)
    assert store.head([b.key]) == [None]


def test_an_error_of_the_body_is_not_hidden(open_store, chunk):
    store = open_store()
    good, bad = chunk(1), chunk(2)
    with pytest.raises(KeyError), store.writer() as writer:
        writer.submit(good.key, good.kv, good.record)
        writer.submit("0" * 40, bad.kv, bad.record)
        raise KeyError("mine")
    good.assert_equal(store.get(good.key))  # what was submitted before is stored all the same


def test_a_writer_that_was_left_refuses(open_store, chunk):
    store, c = open_store(), chunk(1)
    with store.writer() as writer:
        pass
    with refused(StoreError):
        writer.submit(c.key, c.kv, dataclasses.replace(c.record))


def test_the_bound_must_be_positive(open_store):
    with refused(StoreError, "max_inflight_bytes=0"):
        open_store().writer(max_inflight_bytes=0)
