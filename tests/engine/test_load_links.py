"""Links: whose turn it is, how fast they are, how much is on its way, when they are not used."""

import threading

import pytest

from jaxrag.base.errors import StoreError
from jaxrag.engine.links import FAILURES, OPEN_SECONDS, LinkOpen, Links, LoadDeadline


class Tier:
    """Anything that links belong to."""


class Reads:
    """Reads that a test lets begin and end, and what came of them."""

    def __init__(self, links, link):
        self.links, self.link = links, link
        self.begun, self.answers, self.errors = [], {}, {}
        self.gates, self._changed = {}, threading.Condition()

    def ask(self, name, order=0, nbytes=10, holds=False):
        gate = self.gates[name] = threading.Event()

        def fetch():
            with self._changed:
                self.begun.append(name)
                self._changed.notify_all()
            assert gate.wait(300)
            if name in self.errors:
                raise self.errors[name]
            return name

        def then(answer):
            with self._changed:
                self.answers[name] = answer
                self._changed.notify_all()
            return holds

        return self.links.submit(self.link, (order, 0, 0), nbytes, fetch, then)

    def wait(self, condition):
        with self._changed:
            assert self._changed.wait_for(condition, 60)

    def until_begun(self, *names):
        self.wait(lambda: set(names) <= set(self.begun))

    def end(self, name, error=None):
        if error is not None:
            self.errors[name] = error
        self.gates[name].set()
        self.wait(lambda: name in self.answers)


def state_when(links, ready):
    """The only link's state once it is as asked; threads report a moment after they answer."""
    for _ in range(100_000):
        (state,) = links.states()
        if ready(state):
            return state
    raise AssertionError(state)


@pytest.fixture
def made():
    """``made(threads=..., max_bytes=...)``: links, reads over one of them, and their clock."""
    tier, closing = Tier(), []

    def make(threads=1, max_bytes=1000):
        now = [0.0]
        links = Links(lambda: now[0], threads, max_bytes)
        reads = Reads(links, links.of(tier, "far"))
        closing.append((links, reads))
        return links, reads, now

    yield make
    for links, reads in closing:
        for gate in reads.gates.values():
            gate.set()
        links.close()


def test_who_is_admitted_goes_before_who_is_prefetched(made):
    links, reads, _ = made()
    reads.ask("first")
    reads.until_begun("first")
    reads.ask("ahead", order=3)
    later = reads.ask("ahead, then wanted", order=4)
    dropped = reads.ask("dropped", order=1)
    reads.ask("admitted", order=2)
    links.hasten(later, (0, 0, 0))
    assert links.cancel(dropped)
    for gate in reads.gates.values():
        gate.set()
    reads.wait(lambda: len(reads.answers) == 4)
    assert reads.begun == ["first", "ahead, then wanted", "admitted", "ahead"]
    assert not links.cancel(later)


def test_no_more_than_so_many_bytes_and_threads_at_a_time(made):
    links, reads, _ = made(threads=3, max_bytes=25)
    held = [reads.ask(name, holds=True) for name in "ab"]
    reads.ask("c")
    reads.until_begun("a", "b")
    assert state_when(links, lambda it: it.bytes_in_flight == 20).queued == 1
    reads.end("a")
    assert state_when(links, lambda it: it.reads == 1).bytes_in_flight == 20  # not placed yet
    links.done(held[0])
    reads.until_begun("c")
    links.done(held[0])  # once more changes nothing
    reads.end("b")
    reads.end("c")
    links.done(held[1])
    assert state_when(links, lambda it: not it.bytes_in_flight).queued == 0
    reads.ask("larger than all", nbytes=1000)
    reads.end("larger than all")


def test_the_rate_is_that_of_all_reads_together(made):
    links, reads, now = made(threads=2, max_bytes=350)
    assert links.seconds(reads.link, (0, 0, 0), 100) == 0.0  # not known yet
    reads.ask("a", nbytes=100)
    reads.ask("b", nbytes=100)
    reads.until_begun("a", "b")
    now[0] = 2.0
    reads.end("a")
    now[0] = 4.0
    reads.end("b")
    assert state_when(links, lambda it: it.reads == 2).bytes_read == 200
    assert links.states()[0].rate == pytest.approx(180 / (0.8 * 2 + 2))  # the older counts less
    now[0] = 100.0  # nobody reads: that is no slowness
    reads.ask("c", nbytes=100)
    reads.until_begun("c")
    now[0] = 102.0
    reads.end("c")
    state = state_when(links, lambda it: it.reads == 3)
    assert state.rate == pytest.approx(50, rel=0.05)
    reads.ask("d", nbytes=100)
    reads.until_begun("d")
    reads.ask("e", order=1, nbytes=300)  # there is no room for it yet
    assert links.backlog(reads.link) == 400
    assert links.seconds(reads.link, (0, 0, 0), 100) == pytest.approx(200 / state.rate)
    assert links.seconds(reads.link, (1, 0, 0), 100) == pytest.approx(500 / state.rate)
    assert links.seconds(reads.link, (1, 0, 0), 10**6) == 0.0  # too much to know from so little


def fail(reads, count):
    for number in range(count):
        name = f"bad {len(reads.begun)} {number}"
        reads.ask(name)
        reads.end(name, StoreError("no route"))


def test_a_circuit_opens_and_a_probe_closes_it(made):
    links, reads, now = made()
    fail(reads, FAILURES - 1)
    reads.ask("good")
    reads.end("good")  # in a row: it counts anew
    fail(reads, FAILURES - 1)
    assert not links.is_open(reads.link)
    fail(reads, 1)
    assert links.is_open(reads.link)
    assert state_when(links, lambda it: it.opened == 1).circuit == "open"
    begun = len(reads.begun)
    reads.ask("refused")
    reads.wait(lambda: "refused" in reads.answers)
    assert isinstance(reads.answers["refused"], LinkOpen)
    assert str(reads.answers["refused"]) == "far failed 5 times in a row"
    assert len(reads.begun) == begun  # not tried
    now[0] = OPEN_SECONDS
    reads.ask("probe")
    reads.until_begun("probe")
    assert links.is_open(reads.link)  # one at a time
    reads.end("probe", StoreError("still none"))
    now[0] += OPEN_SECONDS - 0.1
    assert links.is_open(reads.link)
    now[0] += 0.1
    reads.ask("second probe")
    reads.until_begun("second probe")
    reads.end("second probe")
    state = state_when(links, lambda it: it.circuit == "closed")
    assert state.opened == 1 and state.failures == 2 * FAILURES and state.reads == 2
    fail(reads, FAILURES)  # a second outage is probed like the first
    assert links.is_open(reads.link)
    now[0] += OPEN_SECONDS
    assert not links.is_open(reads.link)


def test_what_is_given_up_stands_in_nobodys_way(made):
    links, reads, _ = made(threads=1, max_bytes=10)
    trips = [reads.ask(f"hangs {n}") for n in range(FAILURES)]
    for n, trip in enumerate(trips):
        reads.until_begun(f"hangs {n}")
        assert links.give_up(trip) and not links.give_up(trip)
    state = state_when(links, lambda it: it.late == FAILURES)
    assert state.circuit == "open" and state.bytes_in_flight == 0
    for n in range(FAILURES):
        reads.end(f"hangs {n}")
    state = state_when(links, lambda it: it.late == 0)
    assert state.circuit == "open"  # they worked, and too late
    assert reads.answers["hangs 0"] == "hangs 0"


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 0.5), (2000, 0.7), (10**6, 30.0)])
def test_deadlines_grow_with_what_is_loaded(tokens, seconds):
    assert LoadDeadline().of(tokens) == pytest.approx(seconds)
