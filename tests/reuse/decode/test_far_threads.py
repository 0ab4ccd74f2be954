"""The host's threads: rows of a batch at once, tickets, failures, and what time went where."""

import threading

import numpy as np
import pytest

from jaxrag.reuse.decode import Account, HostSearch
from jaxrag.reuse.decode.far import FarLayer
from jaxrag.reuse.decode.host_search import NO_REQUEST

SHAPE = (2, 3, 4)  # K, G, H


class Doubled(FarLayer):
    """Gives twice the query, the position as lse; a head is ``pieces`` tasks and one after them."""

    def __init__(self, keys=1 << 20, account=None):
        self.account = account or Account(index_bytes=7)
        self.keys = keys
        self.threads = set()

    def work(self, position):
        return self.keys

    def tasks(self, q, position, answer, pieces):
        def last(head):
            answer.out[head] = 2 * q[head]
            answer.lse[head] = position
            answer.spent.append((0.25, 0.5))

        def first(head):
            self.threads.add(threading.get_ident())
            return [lambda: last(head)]

        return [lambda head=head: first(head) for head in range(len(q))]


class Broken(Doubled):
    """Fails in one of its tasks."""

    def tasks(self, q, position, answer, pieces):
        def fail():
            raise ValueError("no such key")

        return [*super().tasks(q, position, answer, pieces), fail]


class Held(Doubled):
    """Does not go on before ``open`` is set."""

    def __init__(self):
        super().__init__()
        self.open, self.begun, self.done = threading.Event(), threading.Event(), 0

    def tasks(self, q, position, answer, pieces):
        def hold():
            self.begun.set()
            assert self.open.wait(300)
            self.done += 1

        return [hold] * 16


@pytest.fixture
def host():
    made = HostSearch(threads=2)
    yield made
    made.close()


def admitted(host, *layers):
    numbers = [host.admit() for _ in layers]
    for number, layer in zip(numbers, layers, strict=True):
        host.begin(number, [None, layer])
    return numbers


def q_of(rows):
    return np.arange(rows * 24, dtype=np.float32).reshape(rows, *SHAPE)


def test_rows_of_a_batch_are_attended_together(host):
    one, other = admitted(host, Doubled(), Doubled())
    q = q_of(5)
    numbers = np.array([other, NO_REQUEST, one, one, other])
    out, lse = host.wait(host.start(1, numbers, q, np.array([9, 9, 8, -1, 7])))
    assert out.dtype == lse.dtype == np.float32 and lse.shape == (5, 2, 3)
    np.testing.assert_array_equal(out[[0, 2, 4]], 2 * q[[0, 2, 4]])
    np.testing.assert_array_equal(lse[[0, 2, 4], 0, 0], [9, 8, 7])
    assert (out[[1, 3]] == 0).all() and (lse[[1, 3]] == -np.inf).all()
    nothing = host.wait(host.start(0, numbers, q, np.full(5, 3)))  # nothing outside the pattern
    assert (nothing[0] == 0).all() and (nothing[1] == -np.inf).all()
    alone, _ = host.attend(one, 1, q[0], 4)
    np.testing.assert_array_equal(alone, 2 * q[0])


def test_the_caller_may_use_its_arrays_again(host):
    (number,) = admitted(host, held := Held())
    other = admitted(host, Doubled())[0]
    q = q_of(2)
    ticket = host.start(1, np.array([number, other]), q, np.array([1, 1]))
    q[:] = -1
    held.open.set()
    np.testing.assert_array_equal(host.wait(ticket)[0][1], 2 * q_of(2)[1])


def test_little_is_done_at_once_and_much_on_threads(host):
    small, large = Doubled(keys=5), Doubled()
    one, other = admitted(host, small, large)
    host.attend(one, 1, q_of(1)[0], 3)
    host.attend(other, 1, q_of(1)[0], 3)
    assert small.threads == {threading.get_ident()}
    assert threading.get_ident() not in large.threads


def test_start_does_not_wait(host):
    (number,) = admitted(host, held := Held())
    tickets = [host.start(1, np.array([number]), q_of(1), np.array([1])) for _ in range(3)]
    assert held.begun.wait(300) and held.done == 0
    held.open.set()
    for ticket in reversed(tickets):
        host.wait(ticket)
    assert held.done == 48


def test_a_failure_is_raised_where_it_is_waited_for_and_leaves_nothing(host):
    good, bad = admitted(host, Doubled(), Broken())
    rows = np.array([good, bad])
    ticket = host.start(1, rows, q_of(2), np.array([1, 1]))
    with pytest.raises(ValueError):
        host.wait(ticket)
    assert not host._begun
    with pytest.raises(KeyError):
        host.wait(ticket)
    gone = host.start(1, np.array([99]), q_of(1), np.array([1]))
    with pytest.raises(RuntimeError):
        host.wait(gone)
    odd = host.start(2, rows[:1], q_of(1), np.array([1]))
    with pytest.raises(RuntimeError):
        host.wait(odd)
    out, _ = host.wait(host.start(1, rows[:1], q_of(1), np.array([1])))
    np.testing.assert_array_equal(out, 2 * q_of(1))


def test_after_a_failure_nothing_is_under_way(host):
    """wait raises once the tasks that had begun are done, and the others were not begun."""
    (bad,) = admitted(host, held := Held())
    tasks = held.tasks

    def failing(q, position, answer, pieces):
        def fail():
            assert held.begun.wait(300)
            threading.Timer(0.05, held.open.set).start()
            raise ValueError("late")

        return [*tasks(q, position, answer, pieces)[:1], fail, *[held.tasks] * 5]

    held.tasks = failing
    ticket = host.start(1, np.array([bad]), q_of(1), np.array([1]))
    with pytest.raises(ValueError):
        host.wait(ticket)
    assert held.done == 1


def test_a_request_may_leave_while_its_ticket_is_out(host):
    """Its work ends, and who waits finds nothing; beside other requests it goes on."""
    number, other = admitted(host, held := Held(), Doubled())
    alone = host.start(1, np.array([number]), q_of(1), np.array([1]))
    both = host.start(1, np.array([number, other]), q_of(2), np.array([1, 1]))
    assert held.begun.wait(300)
    host.release([number])
    held.open.set()
    out, lse = host.wait(alone)
    assert out.shape == (1, *SHAPE) and (out == 0).all() and (lse == -np.inf).all()
    np.testing.assert_array_equal(host.wait(both)[0][1], 2 * q_of(2)[1])
    assert held.done < 32  # of the first ticket's tasks those that had begun
    host.release([other])
    assert not host._begun and not host._dropped


def test_a_closed_host_takes_no_work(host):
    (number,) = admitted(host, Doubled())
    host.attend(number, 1, q_of(1)[0], 1)
    threads = host.crew
    host.close()
    threads.shutdown()
    host._pool = threads
    number = admitted(host, Doubled())[0]
    with pytest.raises(RuntimeError):
        host.attend(number, 1, q_of(1)[0], 1)
    host._pool = None


def test_seconds_and_bytes_are_added_up(host):
    one, other = admitted(host, Doubled(), Doubled(account=Account(index_bytes=5, trained=2)))
    ticket = host.start(1, np.array([one, other]), q_of(2), np.array([1, 1]))
    host.wait(ticket)
    host.wait(host.start(1, np.array([one]), q_of(1), np.array([1])))
    spent = host.seconds
    assert (spent.search, spent.attend) == (1.5, 3.0)
    assert spent.waited >= 0 and spent.elapsed > 0
    assert host.account_of([one, other]) == Account(index_bytes=12, trained=2)
    host.release([one])
    with pytest.raises(KeyError):
        host.account_of([one])


def test_many_at_once(host):
    """From several threads, with more tickets than threads: each gets its own."""
    numbers = admitted(host, *(Doubled() for _ in range(4)))
    wrong = []

    def ask(seed):
        rng = np.random.default_rng(seed)
        for _ in range(50):
            q = rng.standard_normal((4, *SHAPE)).astype(np.float32)
            out, lse = host.wait(host.start(1, np.array(numbers), q, np.arange(4) + seed))
            if not (out == 2 * q).all() or lse[:, 0, 0].tolist() != [seed + i for i in range(4)]:
                wrong.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not wrong and not host._begun
    assert not [thread for thread in threads if thread.is_alive()]
