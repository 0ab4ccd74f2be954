"""Processes of one model: who may take part, what is sent, and how all end when one is lost."""

import contextlib
import dataclasses
import json
import socket
import struct
import threading
import time

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, EngineError, RequestError
from jaxrag.engine import ranks, wire
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.reuse.attention_index.document import Indexing
from jaxrag.reuse.decode import DECODE_RULES, rule_from
from jaxrag.reuse.methods import METHODS

SECRET = bytes(32)
ABOUT = {"weights": "a", "version": "1"}
OTHERS = (wire.Abort(3), wire.Stop(2), wire.Forget(), wire.Loaded(8))
STORES = {"kb:a": object(), "tenant:": object()}


@pytest.fixture
def gathered(monkeypatch):
    """``gathered(said...)``: the leader or its error, and a follower or error for each."""
    monkeypatch.setattr(ranks, "JOIN_SECONDS", 5.0)
    monkeypatch.setattr(ranks, "BEAT_SECONDS", 0.02)
    made, kept = [], []

    def call(*said, processes=None, strangers=(), silent=0):
        server, found = socket.create_server(("127.0.0.1", 0)), {}
        address = server.getsockname()[:2]
        kept.extend(socket.create_connection(address) for _ in range(silent))

        def join(place, rank, about, secret):
            try:
                lost = []
                found[place] = ranks.follow(address, secret, rank, about, STORES, lost.append)
                found[place].heard = lost
            except ConfigError as error:
                found[place] = error

        for stranger in strangers:
            with socket.create_connection(address) as one:
                one.sendall(stranger)
        threads = [
            threading.Thread(target=join, args=(place, rank, about, secret))
            for place, (rank, about, secret) in enumerate(said)
        ]
        for thread in threads:
            thread.start()
        try:
            leader = ranks.lead(server, SECRET, processes or len(said) + 1, ABOUT, STORES)
        except ConfigError as error:
            leader = error
        for thread in threads:
            thread.join()
        made.append(leader)
        return leader, *(found[place] for place in range(len(said)))

    yield call
    for one in kept:
        one.close()
    for leader in made:
        if isinstance(leader, ranks.Leader):
            leader.close()


def until(condition):
    done = threading.Event()
    for _ in range(1000):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("it did not come to be")


def asked(method, rule="dense", **more):
    ids = [np.arange(n, dtype=np.int32) for n in (1, 4, 3)]
    prompt = Prompt(ids[0], (ids[1], ids[2]), ids[2], neighbours=((ids[1],), ()))
    return Request(
        prompt,
        STORES["kb:a"],
        dataclasses.replace(method, decode=rule_from(rule)),
        5,
        SamplingParams(0.5, seed=3),
        frozenset({7, 2}),
        Indexing(),
        ("isolated",),
        timeout=2.5,
        primer=_primer(method, ids[2]),
        **more,
    )


def _primer(method, ids):
    if method.wraps:
        return np.eye(2, dtype=np.float32)
    return ids if method.sees_primer else None


def same(one, other):
    """Field by field, arrays by value."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Prompt | Request):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    return one == other


@pytest.mark.parametrize("method", [it for it in METHODS.values() if it.positions == "reordered"])
def test_requests_arrive_as_they_were(method):
    for rule in DECODE_RULES:
        request = asked(method, rule)
        commands = (wire.Submit(4, 1.25, "kb:a", request), *OTHERS)
        iteration = wire.iteration_of(
            wire.iteration_bytes(wire.EngineIteration(9, 1.5, commands)), STORES
        )
        assert (iteration.number, iteration.now, iteration.rests, iteration.commands[1:]) == (
            9,
            1.5,
            False,
            commands[1:],
        )
        assert (iteration.commands[0].number, iteration.commands[0].added) == (4, 1.25)
        assert same(iteration.commands[0].request, request)


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it["commands"][0].update(command="run"),
        lambda it: it["commands"][0].update(store="kb:other"),
        lambda it: it["commands"][0]["request"].pop("prompt"),
        lambda it: it["commands"][0]["request"]["method"].update({"is": "Popen"}),
        lambda it: it["commands"][0]["request"]["method"].update(encoder="x", positions="y"),
        lambda it: it["commands"][0]["request"]["prompt"].update(prefix={"int32": "!"}),
        lambda it: it["commands"][0]["request"]["sampling"].update(top_k=2**40),
        lambda it: it.pop("now"),
    ],
)
def test_what_is_no_iteration_is_refused(change):
    iteration = wire.EngineIteration(
        9, 1.5, (wire.Submit(4, 1.25, "kb:a", asked(METHODS["turborag"])),)
    )
    table = json.loads(wire.iteration_bytes(iteration))
    change(table)
    with refused(EngineError):
        wire.iteration_of(json.dumps(table).encode(), STORES)


def test_iterations_are_sent_and_digests_compared(gathered):
    leader, one, two = gathered((2, ABOUT, SECRET), (1, ABOUT, SECRET))
    iterations = [it.iterations() for it in (one, two)]
    assert leader.send(1.5, [wire.Stop(3)]) == 1
    for it in iterations:
        assert next(it) == wire.EngineIteration(1, 1.5, (wire.Stop(3),))
    lost = []
    leader.on_lost(lost.append)
    for done in (leader.done, one.done, two.done):
        done(1, 77)
    leader.send(0.0, rests=True)
    assert [next(it).rests for it in iterations] == [True, True]
    assert leader.lost is None and not lost
    leader.done(3, 5)
    two.done(3, 6)
    until(lambda: lost)
    assert "made another iteration 3 than the others" in str(leader.lost)
    until(lambda: one.heard and two.heard)  # all are told
    assert one.heard == [str(leader.lost)]
    with pytest.raises(ranks.RankLost):
        leader.send(2.0, [])


def test_a_batch_is_loaded_once_every_process_has_read_its_part(gathered):
    leader, one, two = gathered((1, ABOUT, SECRET), (2, ABOUT, SECRET))
    loaded = []
    leader.on_loaded(loaded.append)
    for it in (leader, one):
        it.loaded(0)
    one.loaded(1)
    two.loaded(1)
    until(lambda: leader._loaded == {0: {0, 1}, 1: {1, 2}})
    assert not loaded
    leader.loaded(1)
    two.loaded(0)
    until(lambda: len(loaded) == 2)
    assert loaded == [1, 0] and not leader._loaded


def test_the_end_is_heard_by_all(gathered):
    leader, one = gathered((1, ABOUT, SECRET))
    leader.close()
    assert list(one.iterations()) == [] and not one.heard and leader.lost is None


@pytest.mark.parametrize("how", ["gone", "says", "silent", "too much"])
def test_a_process_that_is_lost_ends_all(gathered, monkeypatch, how):
    monkeypatch.setattr(ranks, "STALL_SECONDS", 0.3)
    leader, one, two = gathered((1, ABOUT, SECRET), (2, ABOUT, SECRET))
    if how == "gone":
        one._link.close()
    elif how == "says":
        one.fail("no memory")
    elif how == "silent":
        one._over.set()  # no beats
    else:
        one._link.say(struct.pack(">cQ", b"d", 1 << 40))
    until(lambda: leader.lost)
    why = {"gone": "ended", "says": ": no memory", "silent": "silent", "too much": "ended"}[how]
    assert str(leader.lost).startswith("rank 1") and why in str(leader.lost)
    until(lambda: two.heard)
    assert two.heard == [str(leader.lost)]


def test_a_leader_that_is_gone_is_noticed(gathered, monkeypatch):
    leader, one = gathered((1, ABOUT, SECRET))
    leader._links[1].close()
    until(lambda: one.heard)
    assert one.heard == ["the leader ended"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([(1, {**ABOUT, "weights": "b"}, SECRET)], "rank 1 has weights b, the leader a"),
        ([(1, {"version": "1"}, SECRET)], "rank 1 has weights None, the leader a"),
        ([(2, ABOUT, SECRET)], "two processes are rank 2, or it is none of 1 to 1"),
        ([(0, ABOUT, SECRET)], "two processes are rank 0"),
        ([(1, ABOUT, SECRET), (1, ABOUT, SECRET)], "two processes are rank 1"),
    ],
)
def test_who_is_unlike_is_refused_in_one_line(gathered, said, why):
    leader, *others = gathered(*said)
    assert why in str(leader) and "\n" not in str(leader)
    assert all(str(it) == str(leader) for it in others[-1:] if isinstance(it, ConfigError))


def test_who_does_not_know_the_secret_is_no_rank(gathered, monkeypatch):
    monkeypatch.setattr(ranks, "_MEET_SECONDS", 0.2)
    noise = (b"", b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(64))
    leader, one, other = gathered(
        (1, ABOUT, SECRET), (1, ABOUT, b"x" * 32), processes=2, strangers=noise
    )
    met = [it for it in (one, other) if isinstance(it, ranks.Follower)]
    assert isinstance(leader, ranks.Leader) and isinstance(one, ranks.Follower) and len(met) == 1
    assert isinstance(other, ConfigError)


def test_who_says_nothing_keeps_nobody_waiting(gathered, monkeypatch):
    """As many as came first; one after the other they would take all the time that there is."""
    monkeypatch.setattr(ranks, "JOIN_SECONDS", 20.0)
    leader, one = gathered((1, ABOUT, SECRET), silent=12)
    assert isinstance(leader, ranks.Leader) and isinstance(one, ranks.Follower)


def test_a_drop_at_a_time_is_no_meeting(monkeypatch):
    monkeypatch.setattr(ranks, "_MEET_SECONDS", 0.5)
    monkeypatch.setattr(ranks, "_LOOK_SECONDS", 0.01)
    closed = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()[:2]) as drip:

        def read():
            with contextlib.suppress(OSError):
                while drip.recv(1 << 16):
                    pass
            closed.set()

        comers = ranks._comers(server, SECRET, time.monotonic() + 4)
        threads = [threading.Thread(target=it) for it in (read, lambda: list(comers))]
        for thread in threads:
            thread.start()
        begun = time.monotonic()
        while not closed.wait(0.1) and time.monotonic() < begun + 3.5:
            with contextlib.suppress(OSError):
                drip.sendall(b"a")
        assert closed.is_set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("rank", ["\u00b2", "9" * 5000, "-1", ""])
def test_who_says_nonsense_of_itself_is_a_stranger(gathered, monkeypatch, rank):
    monkeypatch.setattr(ranks, "JOIN_SECONDS", 1.0)
    leader, one = gathered((rank, ABOUT, SECRET))
    assert "did not come within" in str(leader) and isinstance(one, ConfigError)


def test_what_is_spoken_of_and_is_not_has_a_bound(gathered, monkeypatch):
    monkeypatch.setattr(ranks, "_MOST_OPEN", 50)
    leader, one = gathered((1, ABOUT, SECRET))
    for number in range(60):
        one.loaded(1000 + number)
    until(lambda: leader.lost)
    assert "rank 1 speaks of batches that there are not" in str(leader.lost)


def test_who_does_not_come_is_waited_for_a_while(gathered, monkeypatch):
    monkeypatch.setattr(ranks, "JOIN_SECONDS", 0.1)
    [error] = gathered(processes=3)
    assert "2 of 3 processes did not come within 0.1 s" in str(error)


def test_a_store_that_one_process_has_is_refused(gathered):
    leader, _ = gathered((1, ABOUT, SECRET))
    assert leader.name_of(STORES["tenant:"]) == "tenant:"
    with refused(RequestError):
        leader.name_of(object())
