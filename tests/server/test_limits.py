"""How much may wait and how often a tenant may ask, by a clock that the test moves."""

from types import SimpleNamespace

import pytest

from jaxrag.server.errors import Problem
from jaxrag.server.settings import ServerSettings
from jaxrag.server.state.limits import Limits


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def who(name="", requests_per_minute=None, tokens_per_minute=None):
    """Of what a key allows, all that is looked at here."""
    limits = SimpleNamespace(
        requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute
    )
    return SimpleNamespace(tenant=name, limits=limits)


def limits(clock, **settings):
    return Limits(ServerSettings(**settings), clock)


def refused(call, *args):
    with pytest.raises(Problem) as found:
        call(*args)
    assert (found.value.status, found.value.type) == (429, "rate_limit_error")
    return found.value


def test_so_many_requests_may_wait_in_all(clock):
    door = limits(clock, max_waiting=2)
    first, _ = door.enter(who()), door.enter(who("other"))
    problem = refused(door.enter, who())
    assert problem.code == "overloaded"
    assert "2 requests wait and 2 may" in problem.message
    door.started(first)
    assert (door.waiting, door.running) == (1, 2)
    door.enter(who())
    refused(door.enter, who())


def test_so_many_requests_of_one_tenant_may_wait(clock):
    door = limits(clock, max_waiting=8, max_waiting_per_tenant=1)
    mine = door.enter(who("a"))
    refused(door.enter, who("a"))
    door.enter(who("b"))
    door.leave(mine)
    door.enter(who("a"))


def test_a_request_of_many_prompts_counts_as_many_and_is_let_in_alone(clock):
    door = limits(clock, max_waiting=4)
    ticket = door.enter(who(), 5)
    assert door.waiting == 5
    refused(door.enter, who())
    door.leave(ticket)
    door.leave(ticket)
    assert (door.waiting, door.running) == (0, 0)
    door.enter(who(), 3)
    refused(door.enter, who(), 2)
    door.enter(who(), 1)


def test_so_many_tokens_may_wait(clock):
    door = limits(clock, max_waiting_tokens=100)
    first, second = door.enter(who()), door.enter(who())
    door.known(first, 500)  # nobody waits: it may come, whatever its length
    problem = refused(door.known, second, 1)
    assert "500 prompt tokens wait" in problem.message
    door.leave(second)
    door.started(first)
    third = door.enter(who())
    door.known(third, 100)
    assert door.waiting_tokens == 100


def test_when_to_ask_again_is_measured(clock):
    door = limits(clock, max_waiting=3)
    assert door.seconds_until_room() == 1.0
    done = door.enter(who())
    door.known(done, 1000)
    clock.now += 2.0
    door.started(done)  # 500 tokens a second
    door.leave(done)
    clock.now += 3600.0  # nobody waits: that does not count
    tickets = [door.enter(who()) for _ in range(3)]
    for ticket, tokens in zip(tickets, (1000, 2000, 1500), strict=True):
        door.known(ticket, tokens)
    problem = refused(door.enter, who())
    seconds = float(problem.headers["retry-after-ms"]) / 1000
    assert seconds == pytest.approx(4500 / 500, rel=0.01)
    assert problem.headers["retry-after"] == "9"


@pytest.mark.parametrize(("tokens", "told"), [(10_000_000, "120"), (1, "1")])
def test_nobody_is_told_to_wait_for_long_or_not_at_all(clock, tokens, told):
    door = limits(clock, max_waiting=1, max_waiting_tokens=10**9)
    done = door.enter(who())
    door.known(done, 100)
    clock.now += 1.0
    door.started(done)
    door.leave(done)
    door.known(door.enter(who()), tokens)
    assert refused(door.enter, who()).headers["retry-after"] == told


def test_a_tenant_may_ask_so_often_in_a_minute(clock):
    door = limits(clock)
    mine = who("a", requests_per_minute=2)
    for _ in range(2):
        door.leave(door.enter(mine))
    problem = refused(door.enter, mine)
    assert problem.code == "rate_limit_exceeded"
    assert problem.headers["retry-after"] == "30"
    door.enter(who("b", requests_per_minute=2))
    clock.now += 31.0
    door.enter(mine)
    refused(door.enter, mine)


def test_a_tenant_may_use_so_many_tokens_in_a_minute(clock):
    door = limits(clock)
    mine = who("a", tokens_per_minute=60)
    ticket = door.enter(mine)
    door.known(ticket, 80)
    door.leave(ticket, 10)  # 30 beyond
    problem = refused(door.enter, mine)
    assert float(problem.headers["retry-after-ms"]) == pytest.approx(30_000, rel=0.01)
    clock.now += 29.0
    refused(door.enter, mine)
    clock.now += 2.0
    door.enter(mine)


def test_an_idle_tenant_saves_up_one_minute_and_no_more(clock):
    door = limits(clock)
    slow = who("slow", requests_per_minute=3)
    door.check_rate(slow)
    clock.now += 3600.0
    for _ in range(3):
        door.check_rate(slow)
    refused(door.check_rate, slow)
