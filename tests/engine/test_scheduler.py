"""The scheduler alone: no model, no store, and a clock that the tests turn."""

import random
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from jaxrag.base.errors import ConfigError, Overloaded, RequestError
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.scheduler import Scheduler, SchedulerSettings
from jaxrag.engine.sequence import Need, RequestStatus, Sequence
from jaxrag.kv.cache import PageAllocator
from jaxrag.reuse.methods import METHODS

PARTS = 3  # of a page


class Sized(Sequence):
    """A sequence of which a test says what it needs and costs, and may be done with it."""

    need = cost = deadline = swappable = alone = None


def entry(number, own=1, chunks=None, need=None, batch="full", tokens=10, **more):
    """A request that always needs the same, or what ``need`` says."""
    needed = Need(chunks or {}, own, PARTS)
    nothing = np.zeros(0, np.int32)
    asked = {name: more.pop(name) for name in ("rows", "priority", "tenant") if name in more}
    prompt = Prompt(nothing, (), np.zeros(tokens, np.int32))
    request = Request(prompt, None, METHODS["full_attention"], 1, **{"rows": 2} | asked)
    made = Sized(number, request, [], batch)
    said = {"cost": 10.0, "deadline": None, "swappable": True, "alone": False, **more}
    for name, value in ({"need": need or (lambda there: needed)} | said).items():
        setattr(made, name, value)
    return made


def scheduler_of(pages, *entries, **options):
    found = Scheduler(PageAllocator(pages), SchedulerSettings(**options))
    for it in entries:
        found.submit(it, 0.0)
    return found


def numbers(admitted):
    return [it.number for it in admitted]


def decoding(found, *chosen):
    """Take requests without chunks from the queue to decoding."""
    found.admit(0.0)
    while (number := found.next_prefill()) is not None:
        found.prefilled(number)
    assert all(found.live[number].status is RequestStatus.DECODE for number in chosen)


# ------------------------------------------------------------------ one request, one chunk


def test_the_life_of_a_request():
    found = scheduler_of(10, entry(0, own=3, chunks={"a": 2, "b": 1}))
    (admitted,) = found.admit(0.0)
    assert (len(admitted.own), admitted.loads) == (3, ("a", "b"))
    assert {key: len(pages) for key, pages in admitted.chunks.items()} == {"a": 2, "b": 1}
    assert found.next_prefill() is None
    assert found.staged("b", 16) == []
    assert found.staged("a", 20) == [0]
    assert found.next_prefill() == 0 and found.occupancy == {"full": 1}
    found.prefilled(0, indexing=True)
    assert found.counts[RequestStatus.INDEXING] == 1
    found.indexed(0)
    found.generated(0, 5)
    assert found.service[""] == 10 + 2 * 5
    assert found.finish(0, "finished") is RequestStatus.DECODE
    assert found.finish(0, "finished") is None
    assert found.ended == {"finished": 1} and not found.live and not found.occupancy
    found.check()


def test_a_chunk_is_loaded_once_and_everybody_waits_for_it_alone():
    """The small request is ready with its own last chunk, whatever the large one waits for."""
    found = scheduler_of(20, entry(0, chunks={"a": 2, "b": 6}), entry(1, chunks={"a": 2}))
    large, small = found.admit(0.0)
    assert (large.loads, small.loads) == (("a", "b"), ())
    assert small.chunks["a"] == large.chunks["a"]
    assert found.staged("a", 20) == [1]
    assert found.next_prefill() == 1
    found.submit(entry(2, chunks={"a": 2}), 0.0)
    assert found.admit(0.0)[0].loads == () and found.live[2].status is RequestStatus.READY


def test_a_load_outlives_those_who_wait_for_it():
    found = scheduler_of(4, entry(0, chunks={"a": 2}))
    found.admit(0.0)
    assert found.finish(0, "cancelled") is RequestStatus.LOADING
    found.check()
    found.submit(entry(1, own=3), 0.0)
    assert found.admit(0.0) == []  # the load still writes to its two pages
    assert found.staged("a", 20) == []
    assert numbers(found.admit(0.0)) == [1]  # and now they are anybody's
    assert found.staged("a", 20) == found.refused("b") == []  # late, or never heard of


def test_who_misses_a_chunk_is_asked_again_and_keeps_its_place():
    refused = set()

    def need(there):
        return Need({}, 4) if refused else Need({"a": 2, "b": 1}, 1)

    first = entry(0, need=need)
    found = scheduler_of(6, first, entry(1, own=2), entry(2, own=2))
    assert numbers(found.admit(0.0)) == [0, 1]
    refused.add("a")
    assert found.refused("a") == [0]
    found.check()
    assert found.live[0].status is RequestStatus.WAITING
    assert found.staged("b", 16) == []  # its other load comes to its end
    assert found.finish(1, "finished") is RequestStatus.READY
    assert numbers(found.admit(0.0)) == [0, 2] and found.service[""] == 30  # charged once each


def test_who_comes_back_later_may_stand_before_who_came_back_first():
    found = scheduler_of(6, entry(0, chunks={"a": 1}), entry(1, chunks={"b": 1}))
    found.admit(0.0)
    assert (found.refused("b"), found.refused("a")) == ([1], [0])
    assert numbers(found.admit(0.0)) == [0, 1]


# ------------------------------------------------------------------ what is turned away


def test_what_never_fits_is_refused_at_once():
    found = scheduler_of(4, entry(0, own=2, chunks={"a": 2}))
    with pytest.raises(
        RequestError, match="10 tokens and its answer need 80 tokens of cache, the "
    ):
        found.submit(entry(1, own=2, chunks={"a": 3}), 0.0)
    with pytest.raises(RequestError, match="priority 1 is not known; ask for 0 to 0"):
        found.submit(entry(1, priority=1), 0.0)
    assert list(found.live) == [0]


def test_what_outgrows_the_pool_stands_in_nobodys_way():
    sizes = {0: 4}
    growing = entry(0, need=lambda there: Need({}, sizes[0]))
    found = scheduler_of(4, entry(1), max_bypass=0)
    found.admit(0.0)
    found.submit(growing, 0.0)
    found.submit(entry(2), 0.0)
    assert found.admit(0.0) == [] and found._queue.blocked[growing] == (0.0, 0)
    sizes[0] = 5
    assert numbers(found.admit(0.0)) == [2]
    assert found.outgrown() == [0] and growing not in found._queue.blocked
    found.check()
    assert found.finish(0, "failed") is RequestStatus.WAITING and found.outgrown() == []


def test_what_outgrew_a_lost_pool_is_admitted_to_a_larger_one():
    sizes = {0: 4}
    growing = entry(0, need=lambda there: Need({}, sizes[0]))
    found = scheduler_of(4, entry(1))
    found.admit(0.0)
    found.submit(growing, 0.0)
    sizes[0] = 5
    assert found.admit(0.0) == [] and found.outgrown() == [0]
    found.reset(PageAllocator(8))
    assert found.outgrown() == []
    assert numbers(found.admit(0.0)) == [1, 0]
    found.check()


def test_a_full_queue_says_which_bound_it_met():
    found = scheduler_of(4, entry(0), entry(1), max_waiting=2)
    with pytest.raises(Overloaded, match="2 requests wait and 2 may; .* raise max_waiting$"):
        found.submit(entry(2), 0.0)
    found = scheduler_of(4, entry(0, tokens=500), max_waiting_tokens=100)  # it found nobody waiting
    with pytest.raises(Overloaded, match="500 prompt tokens wait, 10 more would be above 100"):
        found.submit(entry(1), 0.0)
    found = scheduler_of(4, entry(0, tenant="x"), max_waiting_per_tenant=1)
    with pytest.raises(Overloaded, match="1 requests of tenant 'x' wait and 1 may"):
        found.submit(entry(1, tenant="x"), 0.0)
    found.submit(entry(1, tenant="y"), 0.0)
    found.admit(0.0)
    found.submit(entry(2, tenant="x"), 0.0)  # who is admitted does not wait
    assert found.waiting_tokens == 10


def test_settings_that_mean_nothing():
    with pytest.raises(ConfigError, match="tenant 'x' has weight 0; give it more than 0"):
        SchedulerSettings(weights={"x": 0})
    with pytest.raises(ConfigError, match="0 priority classes; there is at least 1"):
        SchedulerSettings(classes=0)


def test_deadlines():
    found = scheduler_of(4, *(entry(n, deadline=float(10 - n)) for n in range(3)), entry(3))
    assert found.next_deadline() == 8.0 and found.expired(7.9) == []
    assert found.expired(9.0) == found.expired(9.0) == [2, 1]
    found.finish(2, "expired")
    assert found.expired(9.0) == [1] and found.next_deadline() == 9.0
    for number in (0, 1):
        found.finish(number, "expired")
    assert found.next_deadline() is None


# ------------------------------------------------------------------ the order of admission


def test_smaller_ones_pass_who_does_not_fit_so_often_and_no_oftener():
    found = scheduler_of(6, entry(0, own=3), entry(1, own=4), max_bypass=2)
    assert numbers(found.admit(0.0)) == [0]  # 1 does not fit
    for number in range(2, 5):
        found.submit(entry(number), 0.0)
    assert numbers(found.admit(0.0)) == [2, 3]
    assert found._queue.blocked[found.live[1]][1] == 2
    for number in (2, 3):
        found.finish(number, "finished")
    assert (
        found.admit(0.0) == []
    )  # three pages are free, one is needed, and 1 has been passed twice
    found.finish(0, "finished")
    assert numbers(found.admit(0.0)) == [1, 4]


def test_smaller_ones_pass_who_does_not_fit_so_long_and_no_longer():
    found = scheduler_of(6, entry(0, own=3), max_bypass_seconds=2.0)
    found.admit(0.0)
    found.submit(entry(1, own=4), 1.0)
    assert found.admit(5.0) == []  # the time runs from here, not from its arrival
    found.submit(entry(2), 6.0)
    assert numbers(found.admit(6.9)) == [2]
    found.submit(entry(3), 6.9)
    assert found.admit(7.0) == []


def test_who_was_passed_keeps_its_count_behind_those_who_come_back():
    own = dict.fromkeys("abc", 1)

    def of(number, key):
        need = lambda there: Need({key: 1} if own[key] == 1 else {}, own[key])  # noqa: E731
        return entry(number, need=need)

    found = scheduler_of(10, *map(of, range(3), "abc"), entry(3, own=3), max_bypass=1)
    found.admit(0.0)
    for key, small, admitted in (("c", 4, [4]), ("a", 5, []), ("b", 6, [])):
        own[key] = 8
        found.refused(key)
        found.submit(entry(small), 0.0)
        assert numbers(found.admit(0.0)) == admitted
    assert {it.number: times for it, (_, times) in found._queue.blocked.items()} == {0: 0, 2: 1}


def test_behind_the_first_the_least_served_tenant_is_next():
    found = scheduler_of(6, entry(0, own=3, tenant="y"))
    found.admit(0.0)
    for number, tenant, own in ((1, "x", 4), (2, "y", 1), (3, "z", 1)):
        found.submit(entry(number, own=own, tenant=tenant), 0.0)
    found.generated(0, 5)
    assert numbers(found.admit(0.0)) == [3, 2]


def test_better_classes_go_first_and_worse_ones_are_bound_by_the_bypass():
    waiting = [entry(1, own=4, priority=1), entry(2, priority=2), entry(3, priority=0)]
    found = scheduler_of(6, entry(0, own=3, swappable=False), *waiting, classes=3, max_bypass=0)
    assert numbers(found.admit(0.0)) == [0, 3]
    found.submit(entry(4, priority=0), 0.0)
    assert numbers(found.admit(0.0)) == [4]


def test_the_least_served_tenant_is_next_by_its_weight():
    found = scheduler_of(100, weights={"x": 2.0})
    for number in range(12):
        found.submit(entry(number, tenant="x" if number < 6 else "y"), 0.0)
    order = [found.live[number].request.tenant for number in numbers(found.admit(0.0))]
    assert order[:9].count("x") == 6  # twice the weight, twice the service


def test_idle_time_earns_nothing():
    """A tenant that comes late takes turns with those who were there, and does not catch up."""
    found = scheduler_of(8, *(entry(n, tenant="x") for n in range(16)))
    assert len(found.admit(0.0)) == 8
    for number in range(8):
        found.submit(entry(100 + number, tenant="y"), 0.0)
    for number in range(8):
        found.finish(number, "finished")
    served = numbers(found.admit(0.0))
    assert sum(number >= 100 for number in served) == 4


def test_idle_time_earns_nothing_when_nobody_waits():
    found = scheduler_of(8, *(entry(n, tenant="x") for n in range(8)))
    found.admit(0.0)
    found.submit(entry(100, tenant="y"), 0.0)
    assert found.service["y"] == found.service["x"] == 80.0


def test_admission_does_not_look_through_a_long_queue():
    asked = Counter()

    def counting(number):
        def need(there):
            asked[number] += 1
            return Need({}, 8)

        return entry(number, need=need)

    found = scheduler_of(8, *map(counting, range(10_000)))
    asked.clear()
    found.admit(0.0)
    assert asked.total() <= 2 * (16 + 2)
    start = time.process_time()
    for number in range(9_999):
        found.finish(number, "finished")
        found.admit(0.0)
    assert time.process_time() - start < 10  # half a second; minutes when events cost a queue
    assert found.live.keys() == {9_999}


# ------------------------------------------------------------------ rows


def test_rows_are_given_in_the_order_of_admission_and_a_fast_load_overtakes():
    found = scheduler_of(20, *(entry(n, chunks={str(n): 1}) for n in range(4)))
    found.admit(0.0)
    for key in "312":
        found.staged(key, 16)
    assert [found.next_prefill() for _ in range(3)] == [1, 2, None]  # two rows
    assert found.full("full") and found.hungry("full")
    assert [found.row_of(found.live[it]) for it in (1, 2)] == [0, 1]
    found.staged("0", 16)
    found.finish(1, "finished")
    assert found.next_prefill() == 0 and found.row_of(found.live[0]) == 0


def test_a_full_batch_holds_up_no_other():
    others = [entry(2, batch="flat", rows=1), entry(3, batch=None, rows=0), entry(4)]
    found = scheduler_of(20, entry(0), entry(1), *others)
    found.admit(0.0)
    assert [found.next_prefill() for _ in range(5)] == [0, 1, 2, 3, None]
    assert (
        found.row_of(found.live[3]) is None and not found.full(None) and not found.full("unknown")
    )
    assert not found.hungry("flat") and found.hungry("full")


def test_who_is_alone_shares_its_batch_with_nobody():
    found = scheduler_of(20, entry(0), entry(1, alone=True), entry(2))
    found.admit(0.0)
    assert [found.next_prefill() for _ in range(2)] == [0, None]  # 2 does not overtake 1
    found.finish(0, "finished")
    assert [found.next_prefill() for _ in range(2)] == [1, None]
    assert found.full("full")
    found.finish(1, "finished")
    assert found.next_prefill() == 2


def test_static_batching_fills_a_batch_only_when_it_is_empty():
    found = scheduler_of(20, *(entry(n) for n in range(5)), static=True)
    found.admit(0.0)
    assert [found.next_prefill() for _ in range(3)] == [0, 1, None]
    found.finish(0, "finished")
    assert found.next_prefill() is None and found.full("full")
    found.finish(1, "finished")
    assert found.next_prefill() == 2
    found.finish(3, "cancelled")
    found.finish(4, "cancelled")
    assert found.next_prefill() is None  # nobody is ready: the batch is closed
    found.submit(entry(5), 0.0)
    found.admit(0.0)
    assert found.next_prefill() is None
    found.finish(2, "finished")
    assert found.next_prefill() == 5


def test_a_static_batch_is_closed_by_who_wants_to_be_alone():
    found = scheduler_of(20, entry(0), entry(1, alone=True), entry(2), static=True)
    found.admit(0.0)
    assert [found.next_prefill() for _ in range(2)] == [0, None]
    found.finish(1, "cancelled")
    assert found.next_prefill() is None
    found.finish(0, "finished")
    assert found.next_prefill() == 2


# ------------------------------------------------------------------ preemption


def test_a_better_class_takes_pages_of_the_worst_and_no_more_than_it_needs():
    held = [(1, 2), (3, 2), (3, 1)]
    held = [entry(n, own=own, priority=p, rows=3) for n, (own, p) in enumerate(held)]
    found = scheduler_of(8, *held, classes=3)
    decoding(found, 0, 1, 2)
    found.submit(entry(3, own=4, batch="flat"), 0.0)
    assert found.admit(0.0) == []
    assert found.victims(0.0) == [1]  # one page is free; the one of 0 is not enough, nor needed
    assert found.victims(0.0) == []  # it is on its way
    assert found.admit(0.0) == []
    found.swapped(1)
    assert found.live[1].status is RequestStatus.SWAPPED and found.row_of(found.live[1]) is None
    found.check()
    assert numbers(found.admit(0.0)) == [3]
    found.finish(3, "finished")
    found.submit(entry(4, own=3, priority=2, rows=3), 0.0)
    assert numbers(found.admit(0.0)) == [1]  # its old place, before 4


def test_nobody_is_preempted_in_vain():
    cases = {
        "too little": {"own": 5},
        "an equal": {"own": 2, "priority": 1},
        "fits": {"own": 1},
    }
    for name, asked in cases.items():
        found = scheduler_of(5, entry(0, own=3, priority=1), entry(1, priority=0), classes=2)
        decoding(found, 0, 1)
        found.submit(entry(2, batch="flat", **asked), 0.0)
        assert found.victims(0.0) == [], name
        found.admit(0.0)
        assert found.victims(0.0) == [], name


@pytest.mark.parametrize(("bypass", "victims"), [(0, []), (1, [0])])
def test_nobody_is_preempted_for_who_may_not_pass(bypass, victims):
    """The first of class 0 cannot be helped; of class 1 it can, if it is admitted before that."""
    held = [entry(0, own=2, priority=2), entry(1, own=4)]
    found = scheduler_of(6, *held, classes=3, max_bypass=bypass)
    decoding(found, 0, 1)
    for number, own in enumerate((5, 1)):
        found.submit(entry(2 + number, own=own, priority=number, batch="flat"), 0.0)
    assert found.admit(0.0) == [] and found.victims(0.0) == victims


@pytest.mark.parametrize("why", ["not swappable", "often enough", "one class"])
def test_who_is_not_preempted(why):
    options = {"classes": 1 if why == "one class" else 2}
    options |= {"max_preemptions": 0} if why == "often enough" else {}
    held = entry(0, own=4, priority=options["classes"] - 1, swappable=why != "not swappable")
    found = scheduler_of(4, held, **options)
    decoding(found, 0)
    found.submit(entry(1), 0.0)
    found.admit(0.0)
    assert found.victims(0.0) == []


def test_pages_of_a_chunk_count_when_its_last_user_goes():
    """And not those of a chunk that the better request wants itself."""
    for wanted, own, victims in (({"a": 4}, 3, [0, 1, 2]), ({}, 5, [0, 1])):
        held = [entry(n, chunks={"a": 4}, priority=1, rows=3) for n in (0, 1)]
        found = scheduler_of(7, *held, entry(2, priority=1, rows=3), classes=2)
        found.admit(0.0)
        found.staged("a", 60)
        decoding(found, 0, 1, 2)
        found.submit(entry(3, own=own, chunks=wanted, batch="flat"), 0.0)
        found.admit(0.0)
        assert sorted(found.victims(0.0)) == victims


def test_what_is_swapped_out_is_for_nobody_else():
    """The first victim does not take its pages back while the second is still being copied."""
    held = [entry(n, own=3, priority=1, rows=3) for n in (0, 1, 2)]
    found = scheduler_of(9, *held, classes=2)
    decoding(found, 0, 1, 2)
    found.submit(entry(3, own=5, batch="flat"), 0.0)
    found.admit(0.0)
    assert found.victims(0.0) == [2, 1]  # of equals, who was admitted last
    found.swapped(2)
    assert found.admit(0.0) == [] and found.victims(0.0) == []
    found.swapped(1)
    assert numbers(found.admit(0.0)) == [3]


def test_a_better_class_takes_a_row():
    found = scheduler_of(20, entry(0, own=2, priority=1), classes=2)
    decoding(found, 0)
    found.submit(entry(9), 0.0)
    found.admit(0.0)
    assert found.victims(0.0) == []  # there is a row
    found.finish(9, "cancelled")
    found.submit(entry(1, priority=1), 0.0)
    decoding(found, 0, 1)
    found.submit(entry(2), 0.0)
    found.admit(0.0)
    assert found.next_prefill() is None
    assert found.victims(0.0) == [1]
    assert found.next_prefill() is None  # the row is free when its pages are copied
    assert found.victims(0.0) == []
    found.swapped(1)
    assert numbers(found.admit(0.0)) == [1]
    assert [found.next_prefill() for _ in range(2)] == [2, None]
    found.check()


def test_who_is_finished_while_it_is_swapped_is_gone():
    found = scheduler_of(4, entry(0, own=4, priority=1), classes=2)
    decoding(found, 0)
    found.submit(entry(1), 0.0)
    found.admit(0.0)
    assert found.victims(0.0) == [0]
    assert found.finish(0, "cancelled") is RequestStatus.SWAPPING
    found.swapped(0)
    found.check()
    assert numbers(found.admit(0.0)) == [1]


def test_a_lost_pool_sends_everybody_back_in_order():
    held = [entry(0, chunks={"a": 1}), entry(1), entry(2)]
    found = scheduler_of(8, *held, entry(3, own=8))
    assert numbers(found.admit(0.0)) == [0, 1, 2]
    found.next_prefill()
    found.reset(PageAllocator(8))
    found.check()
    assert found.counts[RequestStatus.WAITING] == 4 and found.occupancy == {"full": 0}
    found.submit(entry(4), 0.0)
    assert [(it.number, it.loads) for it in found.admit(0.0)] == [
        (0, ("a",)),
        (1, ()),
        (2, ()),
        (4, ()),
    ]
    assert found.service[""] == 40.0


# ------------------------------------------------------------------ fairness


def test_many_that_are_admitted_leave_the_next_row_to_another_tenant():
    """However many wait for rows; who comes again and again gets its share, and no more."""
    found = scheduler_of(100, *(entry(n, batch="full", rows=2, tenant="x") for n in range(20)))
    found.admit(0.0)
    served = [found.next_prefill(), found.next_prefill()]
    for number in range(100, 110):
        found.submit(entry(number, batch="full", rows=2, tenant="y"), 0.0)
    found.admit(0.0)
    while len(served) < 22:
        found.finish(served[-2], "finished")
        served.append(found.next_prefill())
    assert served[2] == 100
    assert served[:2] + [n for n in served if n < 100][2:] == list(range(12))
    behind = [sum(n >= 100 for n in served[2 : 3 + at]) for at in range(20)]
    assert behind == [(at + 2) // 2 for at in range(20)]  # by turns
    last = entry(200, batch="full", rows=2, tenant="z")
    found.submit(last, 0.0)
    found.admit(0.0)
    found.finish(served[-2], "finished")
    assert found.next_prefill() == 200


@settings(max_examples=60)
@given(
    costs=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=30, max_size=60),
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0])] * 3),
    rows=st.integers(1, 4),
)
def test_tenants_that_wait_are_served_alike(costs, weights, rows):
    """Their virtual service stays within two requests of each other while they wait.

    One request at a time: the bound is that of the largest, answer included. Several: those that
    run are charged for what they generate after the next was chosen, which adds up over the rows.
    """
    found = Scheduler(
        PageAllocator(rows), SchedulerSettings(weights=dict(zip("xyz", weights, strict=True)))
    )
    answers = {}
    for number, (prompt, answer) in enumerate(costs):
        it = entry(number, tenant="xyz"[number % 3], cost=float(prompt), batch=None)
        answers[number] = answer
        found.submit(it, 0.0)
    largest = max((p + 2 * a) / weights[n % 3] for n, (p, a) in enumerate(costs))
    bound = 2 * largest if rows == 1 else (1 + rows) * largest
    while found.live:
        running = numbers(found.admit(0.0))
        for number in running:
            found.generated(number, answers[number])
        waiting = {
            it.request.tenant for it in found.live.values() if it.status is RequestStatus.WAITING
        }
        served = [found.service[tenant] for tenant in waiting]
        assert not served or max(served) - min(served) <= bound
        for number in running:
            found.finish(number, "finished")


# ------------------------------------------------------------------ everything at once

PAGES = 12
SIZES = {"a": 1, "b": 2, "c": 3, "d": 1, "e": 4, "f": 2, "g": -1, "h": -4, "i": -5}
BATCHES = {"full": 3, "flat": 1, None: 0}
RUNNING = {RequestStatus.PREFILL, RequestStatus.INDEXING, RequestStatus.DECODE}
QUEUED = {RequestStatus.WAITING, RequestStatus.SWAPPED}


class Serving(RuleBasedStateMachine):
    """An engine without a model: it reports events in any order, and keeps its own books."""

    @initialize(
        options=st.fixed_dictionaries(
            {
                "static": st.booleans(),
                "classes": st.integers(1, 3),
                "max_bypass": st.integers(0, 3),
                "max_preemptions": st.integers(0, 2),
                "weights": st.just({"x": 2.0}),
            }
        ),
        seed=st.integers(0, 2**16),
    )
    def start(self, options, seed):
        self.now = 0.0
        self.random = random.Random(seed)
        self.settings = SchedulerSettings(**options)
        self.allocator = PageAllocator(PAGES, page_parts=PARTS)
        self.scheduler = Scheduler(self.allocator, self.settings)
        self.submitted = 0
        self.ended = Counter()
        self.loads = set()  # that the engine was asked for and has not reported
        self.refused = set()
        self.outgrown = set()
        self.firsts = {}  # who was first and did not fit -> [since when, how often it was passed]
        self.swaps = Counter()
        self.orders = {}
        self.batches = {}  # batch -> rows given since it was empty; more than it has: closed
        self.submit(25, worst=options["classes"] - 1)  # ten times what the pool holds

    def need_of(self, keys, own):
        """A chunk that does not come is computed by each request on its own, in a page more."""

        def need(there):
            assert {key for key in SIZES if there(key)} <= set(self.allocator.chunks)
            lost = [abs(SIZES[key]) + 1 for key in keys if key in self.refused and not there(key)]
            kept = [key for key in keys if key not in self.refused or there(key)]
            return Need({key: SIZES[key] for key in kept}, own + sum(lost), PARTS)

        return need

    def status(self, *statuses):
        live = self.scheduler.live.values()
        return sorted(it.number for it in live if it.status in statuses)

    def missing(self):
        return {number: self.scheduler.missing(it) for number, it in self.scheduler.live.items()}

    def standing(self):
        statuses = {number: it.status for number, it in self.scheduler.live.items()}
        return statuses, set(self.loads), dict(self.swaps)

    def one(self, candidates):
        return self.random.choice(sorted(candidates))

    # what comes from outside

    @rule(count=st.integers(1, 12))
    def submit(self, count, worst=0):
        for _ in range(count):
            draw = self.random
            keys = draw.sample(sorted(SIZES), draw.randint(0, 4))
            batch = draw.choice(list(BATCHES))
            it = entry(
                self.submitted,
                batch=batch,
                rows=BATCHES[batch],
                tokens=draw.randint(1, 50),
                cost=draw.uniform(1, 50),
                priority=max(draw.randrange(self.settings.classes), worst),
                tenant=draw.choice("xyz"),
                deadline=draw.choice([None, None, self.now + draw.uniform(0, 30)]),
                alone=draw.random() < 0.1,
                swappable=draw.random() < 0.8,
            )
            it.need = self.need_of(keys, draw.choice([1, 1, 2, 3, 6]))
            try:
                self.scheduler.submit(it, self.now)
            except RequestError:
                assert it.need(lambda key: False).pages > PAGES
                assert it.number not in self.scheduler.live
            else:
                self.submitted += 1

    @rule(seconds=st.sampled_from([0.1, 0.7, 3.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def cancel(self):
        if self.scheduler.live:
            self.end(self.one(self.scheduler.live), "cancelled")
        assert self.scheduler.finish(self.submitted, "cancelled") is None

    @rule()
    def expire(self):
        live = self.scheduler.live.values()
        passed = {it.number for it in live if it.deadline is not None and it.deadline <= self.now}
        assert set(self.scheduler.expired(self.now)) == passed
        for number in passed:
            self.end(number, "expired")
        nearest = self.scheduler.next_deadline()
        assert nearest is None or nearest > self.now

    # what the engine does

    def end(self, number, why):
        was = self.scheduler.live[number].status
        assert self.scheduler.finish(number, why) is was
        assert self.scheduler.finish(number, why) is None
        self.ended[number] += 1
        self.firsts.pop(number, None)

    @rule()
    def admit(self):
        admitted = self.scheduler.admit(self.now)
        outgrown = set(self.scheduler.outgrown())
        for number in outgrown - self.outgrown:
            self.firsts.pop(number, None)  # it stands in nobody's way any more
            found = self.scheduler.live[number]
            assert found.need(self.allocator.chunks.__contains__).pages > PAGES
        self.outgrown = outgrown
        for it in admitted:
            found = self.scheduler.live[it.number]
            self.passes(found)
            assert self.loads.isdisjoint(it.loads)
            self.loads.update(it.loads)
            assert it.own == found.own and set(it.chunks) == set(found.held)
            assert all(self.allocator.chunks[key].pages == it.chunks[key] for key in it.chunks)
            assert self.orders.setdefault(it.number, found.start_tag[1]) == found.start_tag[1]
        for found in self.scheduler.live.values():
            if found.status in QUEUED and found in self.scheduler._queue.blocked:
                since, times = self.scheduler._queue.blocked[found]
                first = self.firsts.setdefault(found.number, [since, 0])
                assert first[0] == since
                assert times <= self.settings.max_bypass
        queued = set(self.status(*QUEUED)) - set(self.scheduler.outgrown())
        # Whoever is first now was looked at, and had it fitted it would have been admitted.
        assert not queued or queued & set(self.firsts)

    def passes(self, admitted):
        """Count those who were first and did not fit before this call, and are passed by it."""
        self.firsts.pop(admitted.number, None)
        again = admitted.number in self.orders
        for number, first in self.firsts.items():
            found = self.scheduler.live[number]
            place = (0, self.orders[number]) if number in self.orders else (1, 0)
            behind = not again or (0, admitted.start_tag[1]) > place
            if admitted.request.priority > found.request.priority or (
                admitted.request.priority == found.request.priority and behind
            ):
                first[1] += 1
                assert first[1] <= self.settings.max_bypass
                assert self.now - first[0] < self.settings.max_bypass_seconds

    @rule()
    def stage(self):
        if self.loads:
            key = self.one(self.loads)
            self.loads.remove(key)
            waiting = {
                n for n, it in self.scheduler.live.items() if self.scheduler.missing(it) == {key}
            }
            assert set(self.scheduler.staged(key, 16 * SIZES[key])) == waiting
            assert self.scheduler.staged(key, 16) == self.scheduler.refused(key) == []

    @rule()
    def refuse(self):
        if self.loads:
            key = self.one(self.loads)
            self.loads.remove(key)
            self.refused.add(key)
            waiting = {
                n for n, it in self.scheduler.live.items() if key in self.scheduler.missing(it)
            }
            assert set(self.scheduler.refused(key)) == waiting
            assert all(self.scheduler.live[n].status is RequestStatus.WAITING for n in waiting)

    @rule()
    def store_again(self):
        self.refused.clear()

    @rule()
    def prefill(self):
        live = self.scheduler.live.values()
        ready = [it for it in live if it.status is RequestStatus.READY]
        rows = Counter(it.batch for it in live if self.scheduler.row_of(it) is not None)
        number = self.scheduler.next_prefill()
        for batch in BATCHES:
            if not rows[batch]:
                self.batches[batch] = 0
        if number is None:
            for batch in filter(None, BATCHES):
                self.batches[batch] += BATCHES[batch] + 1 if rows[batch] else 0
            assert all(rows[it.batch] or it.batch not in BATCHES for it in ready)
            assert not any(it.batch is None for it in ready)
            return
        chosen = self.scheduler.live[number]
        before = [it for it in ready if it.batch == chosen.batch]
        assert chosen is min(before, key=lambda it: (it.request.priority, *it.start_tag))
        mine = [it for it in before if it.request.tenant == chosen.request.tenant]
        assert chosen is min(mine, key=lambda it: (it.request.priority, it.start_tag[1]))
        if chosen.batch is not None:
            self.batches[chosen.batch] += 1
            assert not self.settings.static or self.batches[chosen.batch] <= BATCHES[chosen.batch]
        self.scheduler.prefilled(number, indexing=self.random.random() < 0.3)

    @rule()
    def index(self):
        for number in self.status(RequestStatus.INDEXING)[:1]:
            self.scheduler.indexed(number)

    @rule(count=st.integers(1, 8))
    def generate(self, count):
        for number in self.status(RequestStatus.DECODE):
            self.scheduler.generated(number, count)

    @rule()
    def preempt(self):
        decoding = self.status(RequestStatus.DECODE)
        wanting = self.status(RequestStatus.READY, *QUEUED)
        best = min((self.scheduler.live[n].request.priority for n in wanting), default=9)
        victims = self.scheduler.victims(self.now)
        for number in victims:
            found = self.scheduler.live[number]
            self.swaps[number] += 1
            assert number in decoding and found.status is RequestStatus.SWAPPING
            assert found.swappable and found.request.priority > best
            times = self.scheduler._preemptions[number]
            assert self.swaps[number] == times <= self.settings.max_preemptions
        assert self.scheduler.victims(self.now) == []  # they are enough

    @rule()
    def swap(self):
        for number in self.status(RequestStatus.SWAPPING)[:1]:
            self.scheduler.swapped(number)
            assert self.scheduler.live[number].status is RequestStatus.SWAPPED

    @rule()
    def finish(self):
        running = self.status(*RUNNING)
        if running:
            self.end(self.one(running), "finished")

    @rule()
    def fail(self):
        for number in self.scheduler.outgrown():
            self.end(number, "failed")

    @rule()
    def turn(self):
        """Of the engine's loop; most loads come, some do not."""
        self.now += 0.3
        self.admit()
        for _ in range(3):
            (self.refuse if self.random.random() < 0.2 else self.stage)()
            self.prefill()
        self.index()
        if self.random.random() < 0.3:
            self.store_again()

    @rule(lost=st.booleans())
    def lose_the_pool(self, lost):
        if not lost:
            return
        self.allocator = PageAllocator(PAGES, page_parts=PARTS)
        swapped = self.status(RequestStatus.SWAPPED)
        self.scheduler.reset(self.allocator)
        self.loads.clear()
        self.outgrown.clear()
        assert self.status(RequestStatus.SWAPPED) == swapped
        assert len(self.scheduler.live) == self.scheduler.counts[RequestStatus.WAITING] + len(
            swapped
        )

    # what holds after every event

    @invariant()
    def books_agree(self):
        self.scheduler.check()
        live, allocator = self.scheduler.live, self.allocator
        owned = sum(len(it.own) for it in live.values())
        parts = allocator.num_free, allocator.num_unpinned, allocator.num_pinned
        assert sum(parts) + allocator.num_loading + owned == PAGES
        assert self.loads == {key for key, it in allocator.chunks.items() if not it.ready}
        for key, chunk in allocator.chunks.items():
            assert chunk.ref_count == sum(key in it.held for it in live.values()) >= 0
        assert self.ended.keys().isdisjoint(live) and set(self.ended.values()) <= {1}
        assert len(self.ended) + len(live) == self.submitted
        for batch, rows in BATCHES.items():
            row_of = self.scheduler.row_of
            inside = [it for it in live.values() if it.batch == batch and row_of(it) is not None]
            assert len({row_of(it) for it in inside}) == len(inside) <= rows
            assert len(inside) < 2 or not any(it.alone for it in inside)
            hungry = {
                RequestStatus.WAITING,
                RequestStatus.SWAPPED,
                RequestStatus.LOADING,
                RequestStatus.READY,
            }
            mine = [it for it in live.values() if it.batch == batch]
            assert self.scheduler.hungry(batch) == any(it.status in hungry for it in mine)

    def teardown(self):
        """Take what can be done until nothing is left: there is always something."""
        if not hasattr(self, "scheduler"):
            return
        for act in (self.turn, lambda: self.submit(2), self.preempt, self.expire) * 8:
            act()
            self.books_agree()
        do = (self.stage, self.swap, self.index, self.admit, self.prefill, self.preempt, self.fail)
        while self.scheduler.live or self.loads:
            before = self.standing()
            for act in do:
                act()
            self.books_agree()
            if self.standing() == before:  # those who run go on to their end
                self.finish()
            assert self.standing() != before, f"stuck: {dict(self.scheduler.counts)}"
        assert self.ended == Counter(range(self.submitted))
        assert self.scheduler.ended.total() == self.submitted
        assert self.allocator.num_available == PAGES
        assert not any(self.scheduler.counts.values()) and not self.scheduler.waiting_tokens


def test_any_order_of_events():
    """Pages are kept, bounds hold, every request ends once, and nothing is ever stuck."""
    run_state_machine_as_test(
        Serving,
        settings=settings(
            max_examples=50,
            stateful_step_count=40,
            phases=[Phase.generate],  # making a failure smaller takes minutes: add it by hand
            suppress_health_check=list(HealthCheck),
        ),
    )
