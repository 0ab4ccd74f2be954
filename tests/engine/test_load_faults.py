"""Stores that are slow, hang, break and lie: the right answer or a clear error, and nobody else's.

Nothing waits in real time: gates say when a read ends, and the engine's clock is the test's.
"""

import dataclasses
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from jaxrag.base.errors import Cancelled, DeadlineExceeded, StoreError
from jaxrag.engine import transfers
from jaxrag.engine.links import FAILURES, OPEN_SECONDS
from jaxrag.engine.mapping import sequence_of
from jaxrag.engine.staging import encode
from jaxrag.engine.thread import ask


def resident(served, asked, tokens=200):
    """Somebody who answers for long, needs no store, and has begun."""
    request = asked(served.engine, "full_attention", tokens=tokens, rows=4, watched=True)
    [number] = served.add(request)
    served.until(lambda: served.client.ids.get(number))
    return number


TIMEOUT = 60  # seconds in which what must happen happens
COMPUTE = {"slow_load": "compute", "arena_bytes": 1 << 20}


@pytest.mark.parametrize("comes_back", [True, False], ids=["slow", "hangs"])
def test_what_is_not_read_in_time_is_computed(serving, stored, asked, at_rest, comes_back):
    [request], expected = stored()
    served = serving(**COMPUTE)
    served.store.gate.clear()
    long = resident(served, asked)
    numbers = served.add(*served.moved(request))
    served.store.until_read()
    before = served.steps
    served.until(lambda: served.steps >= before + 50)  # who answers goes on
    assert not served.client.last
    served.advance(10.0)
    assert served.ended(numbers) == expected
    assert set(served.how(numbers[0])) == {"encoded"}
    why = {row.why for row in served.client.last[numbers[0]].outcome.reuse}
    assert why == {"it was not read in time"}
    if comes_back:
        served.store.gate.set()  # too late: it is dropped, and kept in the arena
    assert len(served.ended([long])[0]) == 200
    served.until_idle(late=0 if comes_back else 1)
    at_rest(served.engine)
    link = served.link()
    assert link.failures == 1 and link.circuit == "closed"
    assert len(served.store.reads) == 1
    assert (served.engine.tiers().host.chunks > 0) == comes_back
    if not comes_back:  # who comes later does not wait for the read that hangs
        hangs, served.store.gate = served.store.gate, threading.Event()
        served.store.gate.set()
        served.evict()
        [number] = served.add(*served.moved(request))
        assert served.ended([number]) == expected
        assert set(served.how(number)) == {"store"} and len(served.store.reads) == 2
        hangs.set()
        served.until_idle()
        at_rest(served.engine)


@pytest.mark.parametrize("first", ["store", "encoded"])
def test_of_a_late_read_and_its_encoding_the_first_is_placed_once(serving, stored, at_rest, first):
    """The engine's thread is held until both are there, the one or the other before."""
    [request], expected = stored()
    served = serving(**COMPUTE, keep_events=100)
    served.store.gate.clear()
    numbers = served.add(*served.moved(request))
    served.store.until_read()

    def late():
        loading = served.engine._core._transfers
        served.now[0] += 10.0
        loading.expire(served.now[0])
        assert len(loading._to_encode) == 3
        if first == "encoded":
            while loading.encode_some():
                pass
        served.store.gate.set()
        while any(it.late or it.queued for it in served.engine.tiers().links):
            pass
        while not all(it.claimed for it in loading._pending.values()):
            pass

    served.engine._mail.post(late)
    assert served.ended(numbers) == expected
    assert set(served.how(numbers[0])) == {first}
    served.until_idle()
    at_rest(served.engine)
    placed = [event.key for event in served.engine.events() if event.what == "placed"]
    assert len(placed) == len(set(placed)) == 3
    assert served.engine.tiers().hits == {first: 3, "pool": 0}


def test_a_chunk_that_nobody_waits_for_any_more_is_not_encoded(serving, stored, at_rest):
    [request], expected = stored()
    served = serving(**COMPUTE)
    served.store.gate.clear()
    [number] = served.add(*served.moved(request))
    served.store.until_read()

    def leave():
        served.now[0] += 10.0
        served.engine._core._transfers.expire(served.now[0])
        served.engine._core.abort(number)

    ask(served.engine._mail.post, leave)
    served.store.gate.set()
    at_rest(served.engine)
    [number] = served.add(*served.moved(request))
    assert served.ended([number]) == expected


def test_a_read_is_not_called_off_while_another_of_its_chunks_is_waited_for(
    serving, stored, at_rest
):
    [request], _ = stored(chunks=4)
    served = serving(**COMPUTE, load_threads=1)
    chunks = request.prompt.chunks
    first, second = (
        dataclasses.replace(request, prompt=dataclasses.replace(request.prompt, chunks=some))
        for some in (chunks[:1], chunks[1:3])
    )
    served.store.gate.clear()
    numbers = served.add(*served.moved(first))
    served.store.until_read()
    numbers += served.add(*served.moved(second))
    while served.link().queued != 1:
        pass

    def encode_some():
        loading = served.engine._core._transfers
        waiting = loading._pending.values()
        queued = [it for it in waiting if it.batch.read in it.batch.read.link.queue]
        assert len(queued) == 2
        loading._give_up(queued[0], "it is late")
        assert loading.encode_some()
        read = queued[0].batch.read
        return read in read.link.queue

    assert ask(served.engine._mail.post, encode_some)
    served.store.gate.set()
    served.ended(numbers)
    assert sorted(served.how(numbers[1])) == ["encoded", "pool", "store"]
    served.until_idle()
    at_rest(served.engine)


def test_what_was_staged_for_a_pool_that_is_lost_is_in_flight_no_more(
    serving, stored, at_rest, monkeypatch
):
    [request], expected = stored()
    served = serving(arena_bytes=1 << 20)
    place, breaks = transfers.place, iter([True])

    def broken(*args):
        if next(breaks, False):
            raise RuntimeError("injected")
        return place(*args)

    monkeypatch.setattr(transfers, "place", broken)
    assert served.ended(served.add(*served.moved(request))) == expected
    assert served.engine._core.state.restarts == 1
    at_rest(served.engine)
    assert sum(it.bytes_in_flight for it in served.engine.tiers().links) == 0


def test_a_link_that_is_known_to_be_slow_is_not_waited_for(serving, stored, at_rest):
    requests, expected = stored(4, chunks=1)
    served = serving(**COMPUTE)
    first, *others = served.moved(*requests)
    served.store.gate.clear()
    [number] = served.add(first)
    served.store.until_read()
    served.now[0] = 0.4  # in time, and a hundredth of what would be fast enough for more
    served.store.gate.set()
    assert served.ended([number]) == expected[:1]
    served.store.gate.clear()
    longer = dataclasses.replace(
        others[0],
        prompt=dataclasses.replace(
            others[0].prompt, chunks=tuple(it.prompt.chunks[0] for it in requests[::-1])
        ),
    )
    rate = served.link().rate
    need = sum(served.store.layout.nbytes(len(it)) for it in longer.prompt.chunks)
    assert need / rate > 0.55
    [number] = served.add(longer)
    [ids] = served.ended([number])  # no time passed
    assert isinstance(ids, list) and "encoded" in served.how(number)
    served.store.gate.set()
    served.until_idle()
    at_rest(served.engine)


def test_who_waits_for_a_store_that_hangs_has_a_deadline(serving, stored, asked, at_rest):
    """By default a load is waited for; a request's own timeout ends it, and the load goes on."""
    [request], _ = stored()
    served = serving(arena_bytes=1 << 20)
    served.store.gate.clear()
    long = resident(served, asked)
    numbers = served.add(*served.moved(request, timeout=20.0), *served.moved(request))
    served.store.until_read()
    served.advance(19.0)
    before = served.steps
    served.until(lambda: served.steps >= before + 20)
    assert not served.client.last
    served.advance(2.0)
    [error] = served.ended(numbers[:1])
    assert isinstance(error, DeadlineExceeded) and "timeout=20.0 s" in str(error)
    served.engine.abort(numbers[1])  # the last subscriber
    [error] = served.ended(numbers[1:])
    assert isinstance(error, Cancelled)
    served.store.gate.set()
    served.ended([long])
    at_rest(served.engine)
    served.until_idle()
    again = served.add(*served.moved(request))
    served.ended(again)
    assert set(served.how(again[0])) == {"pool"}  # it came all the same
    assert len(served.store.reads) == 1


def files_of(tmp_path, key):
    """The bytes of a chunk."""
    found = [it for it in (tmp_path / "store").rglob("c/**/*") if it.is_file() and key in it.parts]
    assert found
    return found


def flip(path):
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.unlink()
    path.write_bytes(data)


def shorten(path):
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (flip, "damaged: layer"),
        (shorten, "damaged: bytes refused: the file has"),
        (lambda path: path.unlink(), "committed, but its bytes are gone"),
    ],
    ids=["corrupt", "short", "missing"],
)
def test_what_cannot_be_read_is_encoded_and_healed(serving, stored, at_rest, tmp_path, damage, why):
    [request], expected = stored()
    served = serving(arena_bytes=1 << 20)
    key = next(iter({it.key for it in served.store.records()} - {served_prefix(served, request)}))
    for path in files_of(tmp_path, key):
        damage(path)
    for how in ("encoded", "pool"):
        numbers = served.add(*served.moved(request))
        assert served.ended(numbers) == expected
        assert how in served.how(numbers[0])
    [first] = [it for it in served.client.last.values() if it.number == numbers[0] - 1]
    assert why in " ".join(row.why for row in first.outcome.reuse)
    served.until_idle()
    at_rest(served.engine)
    other = serving(arena_bytes=0)
    numbers = other.add(*other.moved(request))
    assert other.ended(numbers) == expected
    assert set(other.how(numbers[0])) == {"store"}


def served_prefix(served, request):
    """The key of a request's prefix."""
    plan = sequence_of(served.engine.runner.model, *served.moved(request))
    return plan.parts[0].load.key


def test_a_store_that_raises_fails_or_is_done_without(serving, stored, asked, at_rest):
    [request], expected = stored()
    for settings, fails in (({}, True), (COMPUTE, False)):
        served = serving(**settings)
        served.store.error = StoreError("disk: cannot be read")
        long = resident(served, asked, tokens=30)
        numbers = served.add(*served.moved(request, request))
        for answer in served.ended(numbers):
            if fails:
                assert isinstance(answer, StoreError) and str(answer) == "disk: cannot be read"
            else:
                assert answer == expected[0]
        assert len(served.ended([long])[0]) == 30
        served.until_idle()
        at_rest(served.engine)


def test_a_circuit_opens_loads_become_encodings_and_it_closes(serving, asked, alone, at_rest):
    """Chunks of a request each, so that each is a read; by default, so the first five fail."""
    served = serving(arena_bytes=0, cache_tokens=64)
    rng = np.random.default_rng(7)

    def one():
        request = asked(served.engine, chunks=1, tokens=3, store=served.store)
        chunk = rng.integers(3, 101, 24).astype(np.int32)
        prompt = dataclasses.replace(request.prompt, chunks=(chunk,), prefix=chunk[:0])
        return dataclasses.replace(request, prompt=prompt)

    requests = [one() for _ in range(FAILURES + 3)]
    served.store.error = StoreError("no route")
    for request in requests[:FAILURES]:
        [error] = served.ended(served.add(request))
        assert isinstance(error, StoreError) and str(error) == "no route"
    assert served.link().circuit == "open"
    for request in requests[FAILURES:]:
        [number] = served.add(request)
        [ids] = served.ended([number])
        assert len(ids) == 3 and served.how(number) == ["encoded"]
        [row] = served.client.last[number].outcome.reuse
        assert row.why == f"{served.store.location} failed {FAILURES} times in a row"
        [note] = served.client.last[number].outcome.notes
        assert note.endswith("and not stored: its store was not asked")
    assert len(served.store.reads) == FAILURES  # none of these was read
    served.store.error = None
    served.advance(OPEN_SECONDS)
    [number] = served.add(requests[0])  # the probe finds the store at work
    [ids] = served.ended([number])
    assert len(ids) == 3 and len(served.store.reads) == FAILURES + 1
    assert served.link().circuit == "closed" and served.link().opened == 1
    served.until_idle()
    at_rest(served.engine)


def test_a_full_disk_costs_nobody_an_answer(serving, stored, asked, alone, at_rest):
    requests, expected = stored(2)
    served = serving(arena_bytes=0)
    list(map(served.store.delete, [[it.key] for it in list(served.store.records())]))
    served.store.full = True
    numbers = served.add(*served.moved(*requests))
    assert served.ended(numbers) == expected
    notes = " ".join(served.client.last[numbers[0]].outcome.notes)
    assert "not stored: disk: no space left" in notes
    assert not list(served.store.records())
    served.until_idle()
    at_rest(served.engine)


def test_chunks_that_cannot_be_stored_are_no_fault_of_the_disk(
    serving, asked, at_rest, monkeypatch, rng
):
    """Integers hold no NaN: whoever has such a chunk fails, however many of them there are."""
    served = serving(arena_bytes=1 << 20, form="int8")

    def poisoned(loads, **options):
        made = encode(loads, **options)
        for it in made:
            it.chunk.kv[:, 1, 0] = np.nan
        return made

    monkeypatch.setattr(transfers, "encode", poisoned)
    for _ in range(FAILURES + 1):
        [error] = served.ended(served.add(asked(served.engine, chunks=1, store=served.store)))
        assert isinstance(error, StoreError) and "holds NaN" in str(error)
    at_rest(served.engine)  # its other chunk has failed too
    monkeypatch.undo()
    [number] = served.add(asked(served.engine, chunks=1, store=served.store))
    assert len(served.ended([number])[0]) == 8 and set(served.how(number)) == {"encoded"}
    served.until_idle()
    at_rest(served.engine)


def test_a_job_does_not_wait_for_what_nobody_wants(serving, asked, at_rest):
    """A request ends, and a job comes, between the read of its chunks and their encoding."""
    served = serving(arena_bytes=1 << 20)
    served.store.gate.clear()
    [number] = served.add(asked(served.engine, chunks=1, store=served.store))
    served.store.until_read()
    begun, go, ran = threading.Event(), threading.Event(), Future()
    served.engine._mail.post(lambda: (begun.set(), go.wait(TIMEOUT)))
    assert begun.wait(TIMEOUT)
    served.store.gate.set()
    served.until_idle()  # that nothing is stored waits for the engine's thread
    core = served.engine._core

    def event():
        core.abort(number)
        core.queue(lambda runner: True, ran)

    served.engine._mail.post(event)
    go.set()
    assert ran.result(TIMEOUT)
    assert isinstance(served.ended([number])[0], Cancelled)
    at_rest(served.engine)


def test_fifty_for_one_chunk_are_one_read(serving, stored, at_rest):
    [request], expected = stored(tokens=3)
    served = serving(arena_bytes=1 << 20, cache_tokens=4096)
    served.store.gate.clear()
    numbers = served.add(*served.moved(*[request] * 50))
    served.store.until_read()
    served.store.gate.set()
    assert served.ended(numbers) == expected * 50
    assert len(served.store.reads) == 1
    hits = served.engine.tiers().hits
    assert hits["store"] == 3 and hits["pool"] == 49 * 3
    served.until_idle()
    at_rest(served.engine)


@pytest.mark.parametrize("where", ["store", "arena"])
def test_a_chunk_that_is_evicted_while_it_is_read(serving, stored, at_rest, where):
    """From its store: a miss, and it is encoded. From the arena: who reads it has it all."""
    [request], expected = stored()
    served = serving(arena_bytes=1 << 20)
    if where == "arena":
        assert served.ended(served.add(*served.moved(request))) == expected
        arena = served.engine._core.state.arena
        get = arena.get

        def and_gone(key):
            found = get(key)
            with arena._lock:
                arena._nbytes -= arena._kv.pop(key).nbytes
            return found

        served.evict()
        arena.get = and_gone
    else:
        served.store.gate.clear()
    numbers = served.add(*served.moved(request))
    if where == "store":
        served.store.until_read()
        for record in list(served.store.records()):
            served.store.delete([record.key])
        served.store.gate.set()
    assert served.ended(numbers) == expected
    assert set(served.how(numbers[0])) == {"host" if where == "arena" else "encoded"}
    served.until_idle()
    at_rest(served.engine)
