"""Threads that tenants share: whose turn it is, and what one tenant may hold at most."""

import asyncio
import threading

import pytest

from jaxrag.server.state.threads import FairThreads


@pytest.fixture
def fair():
    made = []

    def make(*args):
        made.append(FairThreads(*args))
        return made[-1]

    yield make
    for threads in made:
        threads.shutdown()


class Gate:
    """A job that runs until it is opened."""

    def __init__(self, threads, tenant):
        self.began, self.go = threading.Event(), threading.Event()
        self.done = threads.of(tenant).submit(self)

    def __call__(self):
        self.began.set()
        assert self.go.wait(300)


def test_tenants_take_turns(fair):
    threads, ran = fair(1, "t"), []
    gate = Gate(threads, "a")
    assert gate.began.wait(300)
    many = [threads.of("a").submit(ran.append, f"a{i}") for i in range(4)]
    few = [threads.of(name).submit(ran.append, name) for name in ("b", "c", "b")]
    gate.go.set()
    for future in (*many, *few):
        future.result(20)
    assert ran == ["a0", "b", "c", "a1", "b", "a2", "a3"]


def test_a_tenant_leaves_a_thread_to_the_others(fair):
    threads = fair(3, "t", 2)
    held = [Gate(threads, "a") for _ in range(3)]
    assert held[0].began.wait(300) and held[1].began.wait(300)
    assert threads.of("b").submit(lambda: threading.current_thread().name[:1]).result(20) == "t"
    assert not held[2].began.is_set()
    held[0].go.set()
    assert held[2].began.wait(300)
    for gate in held:
        gate.go.set()
        gate.done.result(20)


def test_what_is_cancelled_before_its_turn_is_not_begun(fair):
    threads, ran = fair(1, "t"), []
    gate = Gate(threads, "a")
    assert gate.began.wait(300)

    async def ask():
        loop = asyncio.get_running_loop()
        asked = loop.run_in_executor(threads.of("a"), ran.append, 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(ask())
    gate.go.set()
    assert threads.of("b").submit(lambda: 2).result(20) == 2
    assert threads.of("a").submit(lambda: 3).result(20) == 3
    assert ran == []


def test_what_fails_fails_alone(fair):
    threads = fair(1, "t")
    with pytest.raises(ZeroDivisionError):
        threads.of("a").submit(lambda: 1 / 0).result(20)
    assert threads.of("a").submit(int, "7").result(20) == 7


def test_nothing_begins_behind_the_end(fair):
    threads, ran = fair(1, "t"), []
    gate = Gate(threads, "a")
    assert gate.began.wait(300)
    waiting = threads.of("a").submit(ran.append, 1)
    threads.shutdown()
    gate.go.set()
    gate.done.result(20)
    assert waiting.cancelled() and ran == []
