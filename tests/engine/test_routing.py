"""Which engine gets a request, as a function of what engines hold and have to do."""

from collections import Counter

import numpy as np
import pytest

from jaxrag.engine.routing import Candidate, PromptPiece, ranked, seconds

RATE = 1000.0
FAST, SLOW = 1e9, 1e6  # bytes a second: host, store
CHUNK = PromptPiece(7, nbytes=1_000_000)
TURN = PromptPiece(9, tokens=500)


def engine(name="a", **has):
    return Candidate(name, **{"rate": RATE, "store_rate": SLOW, "host_rate": FAST, **has})


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ({}, 1.5),  # read from the store, and the turn computed
        ({"host": {7}}, 0.501),
        ({"pool": {7}}, 0.5),
        ({"pool": {7, 9}}, 0.0),
        ({"pool": {7, 9}, "queued": 250.0}, 0.25),
    ],
)
def test_seconds_until_an_engine_could_begin(has, expected):
    assert seconds([CHUNK, TURN], engine(**has)) == pytest.approx(expected)


def test_residency_asks_who_holds_the_chunks():
    engines = [engine("a"), engine("b", pool={7}), engine("c", host={7})]
    assert ranked("residency", [CHUNK], engines, 0) == ["b", "c", "a"]


def test_residency_spills_over_once_waiting_is_longer_than_reading():
    held = [engine("a"), engine("b", pool={7}, queued=999.0)]
    assert ranked("residency", [CHUNK], held, 0)[0] == "b"
    held = [engine("a"), engine("b", pool={7}, queued=1001.0)]
    assert ranked("residency", [CHUNK], held, 0)[0] == "a"


def test_a_slow_engine_gets_less():
    engines = [engine("a", queued=100.0, rate=10.0), engine("b", queued=900.0, rate=1000.0)]
    assert ranked("residency", [], engines, 0)[0] == "b"


def test_of_equal_engines_a_chunk_has_one_of_its_own():
    """Also before anybody holds anything, so that what is asked for at once meets."""
    engines = [engine(name) for name in "abcd"]
    first = [
        ranked("residency", [PromptPiece(it, nbytes=1)], engines, at)[0]
        for at, it in enumerate([5] * 9)
    ]
    assert len(set(first)) == 1
    spread = Counter(
        ranked("residency", [PromptPiece(it, nbytes=1)], engines, 0)[0] for it in range(400)
    )
    assert min(spread[name] for name in "abcd") > 60


def test_hashing_moves_few_chunks_where_an_engine_goes():
    engines = [engine(name) for name in "abcd"]
    before = [ranked("hashing", [PromptPiece(it)], engines, 0)[0] for it in range(400)]
    after = [ranked("hashing", [PromptPiece(it)], engines[:3], 0)[0] for it in range(400)]
    moved = [was for was, now in zip(before, after, strict=True) if was != now]
    assert set(moved) == {"d"}
    assert 60 < len(moved) < 140


def test_hashing_looks_at_the_first_chunk_alone():
    engines = [
        engine(name, queued=queued) for name, queued in zip("abcd", (9, 0, 4, 2), strict=True)
    ]
    found = {
        ranked("hashing", [PromptPiece(3), PromptPiece(it)], engines, it)[0] for it in range(50)
    }
    assert len(found) == 1


def test_round_robin_takes_turns():
    engines = [engine(name) for name in "abc"]
    assert [ranked("round_robin", [CHUNK], engines, it)[0] for it in range(4)] == list("abca")


def test_random_is_even_and_the_same_again():
    engines = [engine(name) for name in "abcd"]
    drawn = [ranked("random", [CHUNK], engines, it)[0] for it in range(400)]
    assert drawn == [ranked("random", [CHUNK], engines, it)[0] for it in range(400)]
    assert all(60 < drawn.count(name) < 140 for name in "abcd")


@pytest.mark.parametrize("routing", ["residency", "hashing", "round_robin", "random"])
def test_every_engine_is_ranked_once(routing):
    engines = [engine(name) for name in "abcd"]
    pieces = [
        PromptPiece(it, nbytes=9) for it in np.random.default_rng(0).integers(0, 99, 5).tolist()
    ]
    for asked in (pieces, []):
        assert sorted(ranked(routing, asked, engines, 5)) == list("abcd")
