"""The host arena: what it keeps, and who leaves first."""

import random
import threading

import numpy as np
import pytest

from jaxrag.engine import arena as arenas
from jaxrag.engine.arena import HostArena, default_arena_bytes
from jaxrag.kv.cache.heat import HALF_LIFE


def kv(value, nbytes=8):
    return np.full(nbytes, value, np.uint8)


def test_it_holds_what_fits_and_the_coldest_leaves():
    arena = HostArena(24, lambda key: False)
    arena.asked(["a", "b"])
    arena.asked(["a"])
    assert all(arena.put(key, kv(n)) for n, key in enumerate("abc"))
    assert arena.put("d", kv(3)) and "b" not in arena  # asked for once, and before the others came
    assert not arena.put("large", kv(9, 25))
    assert arena.get("a").tobytes() == kv(0).tobytes() and arena.get("b") is None
    assert arena.state.nbytes == 24 and arena.state.chunks == 3 and arena.state.evicted == 1
    arena.check()
    assert [arena.use("a"), arena.use("a"), arena.use("b")] == [True, False, False]
    held = arena.get("a")
    arena.clear()
    assert not arena.nbytes and held.tobytes() == kv(0).tobytes()  # who reads it keeps it
    arena.check()


def test_what_was_asked_for_long_ago_counts_less():
    arena = HostArena(16, lambda key: False)
    for key, times in (("old", 3), ("new", 2)):
        for _ in range(times):
            arena.asked([key])
        arena.put(key, kv(0))
        for _ in range(int(HALF_LIFE) if key == "old" else 0):
            arena.asked(["other"])
    arena.put("next", kv(1))
    assert "new" in arena and "old" not in arena  # 3 / 2 against 2


def test_of_the_coldest_those_in_the_pool_leave_first():
    arena = HostArena(16 * 8, {"k1", "k9"}.__contains__)
    for n in range(16):
        arena.asked([f"k{n}"])
        arena.put(f"k{n}", kv(n))
    arena.put("more", kv(0))
    assert "k1" not in arena and "k0" in arena  # the coldest eighth: k0 and k1
    arena.put("still more", kv(0))
    assert "k0" not in arena and "k9" in arena  # k9 is in the pool, and not cold
    arena.check()


def test_who_is_asked_for_since_the_coldest_were_found_stays():
    arena = HostArena(16 * 8, lambda key: False)
    for n in range(16):
        arena.asked([f"k{n}"])
        arena.put(f"k{n}", kv(n))
    arena.put("more", kv(0))
    assert "k0" not in arena and "k1" in arena  # both were the coldest eighth
    arena.asked(["k1"])
    arena.put("still more", kv(0))
    assert "k1" in arena and "k2" not in arena


def test_it_remembers_the_heat_of_a_bounded_number():
    arena = HostArena(80, lambda key: False, half_life=100)
    for n in range(20_000):
        arena.asked([f"once {n}", "often"])
        arena.put(f"once {n}" if n % 2 else "often", kv(0))
    arena.check()
    assert "often" in arena and len(arena._heat) < 2500  # of ten half-lives


def test_many_threads_leave_it_whole():
    arena = HostArena(50 * 8, lambda key: hash(key) % 2 == 0)
    wrong = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(1500):
            number = rng.randrange(100)
            arena.asked([str(number)])
            found = arena.get(str(number))
            if found is None:
                arena.put(str(number), kv(number))
            elif found.tobytes() != kv(number).tobytes():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    arena.check()
    assert not wrong and arena.state.chunks == 50


@pytest.mark.parametrize(
    ("free", "taken"), [(8 << 30, 2 << 30), (None, 1 << 30), (1 << 40, 64 << 30)]
)
def test_a_quarter_of_free_memory_is_taken(monkeypatch, free, taken):
    monkeypatch.setattr(arenas, "available_bytes", lambda: free)
    assert default_arena_bytes() == taken
