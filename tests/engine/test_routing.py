"""Which engine gets a request, as a function of what engines hold and have to do."""

from collections import Counter

import numpy as np
import pytest

from jaxrag.engine.routing import Candidate, PromptPiece, RoutedRequest, missing, ranked

RATE = 1000.0
FAST, SLOW = 1e9, 1e6  # bytes a second: host, store
CHUNK = PromptPiece(7, nbytes=1_000_000)
TURN = PromptPiece(9, tokens=500)
COST = 50.0


def engine(name="a", **has):
    return Candidate(name, **{"rate": RATE, "store_rate": SLOW, "host_rate": FAST, **has})


def first(routing, pieces, engines, number=0):
    return ranked(routing, RoutedRequest(pieces, COST, number), engines)[0]


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ({}, 1.5),  # read from the store, and the turn computed
        ({"host": {7}}, 0.501),
        ({"pool": {7}}, 0.5),
        ({"pool": {7, 9}}, 0.0),
        ({"pool": {7, 9}, "queued": 250.0}, 0.0),
    ],
)
def test_seconds_of_what_an_engine_lacks(has, expected):
    found = engine(**has)
    assert missing(RoutedRequest([CHUNK, TURN]), found, [found]) == pytest.approx(expected)


def test_residency_asks_who_holds_the_chunks():
    engines = [engine("a"), engine("b", pool={7}), engine("c", host={7})]
    assert ranked("residency", RoutedRequest([CHUNK], COST), engines) == ["b", "c", "a"]


def test_a_conversation_goes_where_its_turns_are():
    engines = [engine("a", pool={7}), engine("b", pool={9})]
    cheap = PromptPiece(7, nbytes=1000)
    assert first("residency", [cheap, TURN], engines) == "b"


def test_some_requests_are_served_together_where_their_chunks_are():
    engines = [engine("a"), engine("b", pool={7}, queued=3 * COST)]
    assert first("residency", [CHUNK], engines) == "b"
    engines = [engine("a"), engine("b", pool={7}, queued=3 * COST + 1)]
    assert first("residency", [CHUNK], engines) == "a"


def test_more_may_wait_where_more_wait_everywhere():
    """Up to one and a half of the mean, with the request itself."""
    engines = [engine("a", queued=8 * COST), engine("b", pool={7}, queued=14 * COST)]
    assert first("residency", [CHUNK], engines) == "b"
    engines = [engine("a", queued=8 * COST), engine("b", pool={7}, queued=30 * COST)]
    assert first("residency", [CHUNK], engines) == "a"


def test_engines_above_the_bound_follow_by_when_they_could_begin():
    late = engine("b", pool={7}, queued=2000 * COST)
    later = engine("c", queued=2001 * COST)
    engines = [engine("a"), late, later, *(engine(name) for name in "defgh")]
    assert ranked("residency", RoutedRequest([CHUNK], COST), engines)[-2:] == ["b", "c"]


def test_a_slow_engine_gets_less():
    engines = [engine("a", queued=100.0, rate=10.0), engine("b", queued=900.0, rate=1000.0)]
    assert first("residency", [], engines) == "b"


def test_of_equal_engines_the_one_with_least_to_do_and_then_always_the_same():
    """Also before anybody holds anything, so that what is asked for at once meets."""
    engines = [engine("a", queued=9.0), engine("b", queued=5.0), engine("c", queued=9.0)]
    assert first("residency", [CHUNK], engines) == "b"
    engines = [engine(name, store_rate=SLOW * at) for at, name in enumerate("abcd", 1)]
    assert (
        len({first("residency", [PromptPiece(5, nbytes=1)], engines, at) for at in range(9)}) == 1
    )
    spread = Counter(first("residency", [PromptPiece(it, nbytes=1)], engines) for it in range(400))
    assert min(spread[name] for name in "abcd") > 60


def test_hashing_moves_few_chunks_where_an_engine_goes():
    engines = [engine(name) for name in "abcd"]
    before = [first("hashing", [PromptPiece(it)], engines) for it in range(400)]
    after = [first("hashing", [PromptPiece(it)], engines[:3]) for it in range(400)]
    moved = [was for was, now in zip(before, after, strict=True) if was != now]
    assert set(moved) == {"d"}
    assert 60 < len(moved) < 140


def test_hashing_looks_at_the_first_chunk_alone():
    engines = [engine(name, queued=1e3 * at) for at, name in enumerate("abcd")]
    pieces = [[PromptPiece(3), PromptPiece(it)] for it in range(50)]
    assert len({first("hashing", it, engines, at) for at, it in enumerate(pieces)}) == 1


def test_round_robin_takes_turns():
    engines = [engine(name) for name in "abc"]
    assert [first("round_robin", [CHUNK], engines, it) for it in range(4)] == list("abca")


def test_random_is_even_and_the_same_again():
    engines = [engine(name) for name in "abcd"]
    drawn = [first("random", [CHUNK], engines, it) for it in range(400)]
    assert drawn == [first("random", [CHUNK], engines, it) for it in range(400)]
    assert all(60 < drawn.count(name) < 140 for name in "abcd")


@pytest.mark.parametrize("routing", ["residency", "hashing", "round_robin", "random"])
def test_every_engine_is_ranked_once(routing):
    engines = [engine(name) for name in "abcd"]
    pieces = [PromptPiece(it, 9) for it in np.random.default_rng(0).integers(0, 99, 5).tolist()]
    for asked in (pieces, []):
        assert sorted(ranked(routing, RoutedRequest(asked, COST, 5), engines)) == list("abcd")


class Pool:
    """Of so many chunks; the one that was used least recently leaves."""

    def __init__(self, size):
        self.size, self.held = size, {}

    def __contains__(self, name):
        return name in self.held

    def use(self, name):
        there = self.held.pop(name, None) is not None
        self.held[name] = True
        if len(self.held) > self.size:
            del self.held[next(iter(self.held))]
        return there


def share_of_hits(routing):
    """Of chunks, under Zipf(1.0), four pools of a tenth of the corpus, eight requests at a time."""
    rng, documents = np.random.default_rng(4), 400
    popular = np.arange(1, documents + 1) ** -1.0
    asked = rng.choice(documents, (800, 3), p=popular / popular.sum())
    pools = {name: Pool(documents // 10) for name in "abcd"}
    running, hits = [], 0
    for number, names in enumerate(asked.tolist()):
        if len(running) == 8:
            running.pop(rng.integers(8))
        engines = [
            engine(name, pool=pool, queued=COST * running.count(name))
            for name, pool in pools.items()
        ]
        chosen = first(routing, [PromptPiece(it, nbytes=1000) for it in names], engines, number)
        running.append(chosen)
        found = [pools[chosen].use(it) for it in names]
        hits += sum(found) if number >= 200 else 0
    return hits / (3 * 600)


def test_residency_finds_more_in_the_pools_than_any_other():
    found = {it: share_of_hits(it) for it in ("residency", "hashing", "round_robin", "random")}
    others = max(share for routing, share in found.items() if routing != "residency")
    assert found["residency"] > others + 0.08, found
