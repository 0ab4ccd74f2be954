"""Who owns which page: what leaves the pool first."""

from collections import OrderedDict

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.kv.cache import PAGE, PageAllocator, pages_for
from jaxrag.kv.cache import heat as of_heat


def requests(rng, count, exponent, *, uploads=0.0, drift=0):
    """``count`` times 4 of 1,000 chunks, chosen by Zipf's law.

    A share of ``uploads`` is asked for once and never again; every ``drift`` requests a twentieth
    of the chunks changes its rank.
    """
    chance = 1 / np.arange(1, 1001) ** exponent
    ranked, once = np.arange(1000), 0
    for number in range(count):
        if drift and number and number % drift == 0:
            ranked = np.roll(ranked, 50)
        chosen = ranked[rng.choice(1000, 4, replace=False, p=chance / chance.sum())]
        named = [str(it) for it in chosen]
        for place in np.flatnonzero(rng.random(4) < uploads):
            named[place] = f"upload {once}"
            once += 1
        yield named


def pool_hits(asked, pages, warm):
    """Share of the chunks, of one page each, that were in the pool, after so many requests."""
    pool, hits = PageAllocator(pages), []
    for keys in asked:
        pool.tick()
        held = [key for key in keys if pool.subscribe(key) is not None]
        for key in keys:
            if key not in held:
                pool.insert(key, pool.allocate(1, "a test"), 16)
        for key in keys:
            pool.release(key)
        hits.append(len(held))
    pool.check()
    return sum(hits[warm:]) / (4 * len(hits[warm:]))


def recent_hits(asked, pages, warm):
    """The same of a pool that drops what was used least recently."""
    pool, hits = OrderedDict(), []
    for keys in asked:
        hits.append(sum(key in pool for key in keys))
        for key in keys:
            pool.pop(key, None)
            pool[key] = None
        while len(pool) > pages:
            pool.popitem(last=False)
    return sum(hits[warm:]) / (4 * len(hits[warm:]))


@pytest.mark.parametrize(
    "work",
    [{"exponent": 1.0}, {"exponent": 0.7}, {"exponent": 1.0, "uploads": 0.2}],
    ids=["zipf 1", "zipf 0.7", "uploads"],
)
def test_by_heat_more_is_found_than_by_recency(work):
    """A pool of a tenth of the chunks."""
    asked = list(requests(np.random.default_rng(5), 4000, **work))
    assert pool_hits(asked, 100, 1000) >= recent_hits(asked, 100, 1000) + 0.08


def test_a_use_counts_half_as_much_after_its_half_life():
    """One use now is two of then, and a little more than one of then and less."""
    heat = of_heat.DecayedHeat(half_life=100)
    for name in ("twice", "twice", "once"):
        heat.use(name)
    for _ in range(100):
        heat.tick()
    heat.use("now")
    assert heat.of("once") < heat.of("twice") < heat.of("now")
    assert heat.of("twice")[0] == pytest.approx(heat.of("now")[0])
    assert heat.of("once")[0] == pytest.approx(heat.of("now")[0] - 1)


def test_what_left_the_pool_comes_back_as_warm_as_it_was():
    pages = PageAllocator(2)

    def use(key):
        pages.tick()
        if pages.subscribe(key) is None:
            pages.insert(key, pages.allocate(1, "a test"), 16)
        pages.release(key)

    for key in ("a", "a", "a", "b", "b"):
        use(key)
    pages.evict("a")
    for key in ("a", "c"):
        use(key)
    assert "a" in pages and "b" not in pages


def test_names_are_forgotten_once_they_are_cold():
    heat, coldest = (it := of_heat.DecayedHeat(half_life=10)), of_heat.Coldest(it)
    heat.use("resident")
    coldest.add("resident")
    for number in range(5000):
        heat.tick()
        heat.use(number)
    assert len(heat._heat) <= of_heat._FEWEST + 1
    assert heat.of(0) == of_heat.NEVER < heat.of(4999)
    coldest.check()
    assert coldest.first() == "resident"


def test_the_check_sees_an_order_that_is_wrong():
    pages = PageAllocator(4)
    for key in ("a", "b"):
        pages.insert(key, pages.allocate(1, "a test"), 10)
        pages.release(key)
    pages.check()
    pages._heat.use("a")  # while it may leave at any moment
    with pytest.raises(AssertionError):
        pages.check()


def test_of_chunks_used_as_often_the_longest_unused_leaves_first():
    """By last use, not by age: a chunk that was asked for again stays."""
    pages = PageAllocator(4)
    for key in ("a", "b"):
        pages.insert(key, pages.allocate(2, "a test"), 20)
        pages.release(key)
    pages.subscribe("a")
    pages.release("a")
    pages.allocate(2, "a test")
    assert "a" in pages and "b" not in pages


def test_a_chunk_in_use_never_leaves():
    pages = PageAllocator(4)
    for key in ("a", "b"):
        pages.insert(key, pages.allocate(2, "a test"), 20)
    pages.release("b")
    assert pages.num_available == 2
    with refused(RequestError, "48"):
        pages.allocate(3, "a test")
    assert "a" in pages and "b" in pages, "what does not fit evicts nothing"


def test_misuse_is_refused():
    pages = PageAllocator(4)
    pages.insert("a", pages.allocate(1, "a test"), 10)
    with pytest.raises(AssertionError):
        pages.insert("a", pages.allocate(1, "a test"), 10)
    pages.release("a")
    with pytest.raises(AssertionError):
        pages.release("a")


def test_the_check_sees_a_page_that_is_lost_or_held_twice():
    pages = PageAllocator(4)
    own = pages.allocate(2, "a test")
    pages.check(own)
    with pytest.raises(AssertionError):
        pages.check(own[:1])
    with pytest.raises(AssertionError):
        pages.check([*own, own[0]])


def test_chunks_share_the_parts_of_a_page():
    """Three parts a page: five parts and four are three pages, and another three fit no hole."""
    pages = PageAllocator(4, page_parts=3)
    first = pages.begin("a", -5, "a test").pages
    second = pages.begin("b", -4, "a test").pages
    assert sorted(first + second) == list(range(-9, 0))
    assert (pages.num_held, pages.num_loading, pages.num_available) == (3, 3, 1)
    for key in ("a", "b"):
        pages.complete(key, 60)
    pages.release("a")
    pages.check()
    # Of the second page one part is of the chunk that is in use.
    assert (pages.num_pinned, pages.num_unpinned, pages.num_available) == (2, 1, 2)
    assert pages.lacking(3, {"a": -5}) == 3 + 1 - 2
    assert pages.freed(["b"], []) == 2 and pages.freed(["b"], ["a"]) == 1
    own = pages.allocate(2, "a test")  # the first chunk leaves, and two parts beside the other
    pages.check(own)
    assert "a" not in pages
    with refused(RequestError, "16", "cache_tokens"):
        pages.begin("c", -3, "a test")
    assert len(pages.begin("c", -2, "a test").pages) == 2
    pages.check(own)
    pages.release("c")
    pages.abandon("c")
    pages.free(own)
    pages.check()


def test_the_check_sees_a_part_that_is_lost_or_held_twice():
    pages = PageAllocator(2, page_parts=3)
    pages.begin("a", -2, "a test")
    pages.check()
    [(page, parts)] = pages._open.items()
    for wrong in ([], parts * 2):
        pages._open[page] = wrong
        with pytest.raises(AssertionError):
            pages.check()


@pytest.mark.parametrize("chunk", [128, 256, 512, 1000])
@pytest.mark.parametrize("context", [8192, 32768])
def test_pages_of_chunks_in_part_are_what_their_layers_take(context, chunk):
    """As Gemma 3 270M: three of 18 layers see all, six parts a page; the last 512 tokens whole."""
    pages = PageAllocator(pages_for(context), page_parts=6)
    ends = range(context, 0, -chunk)
    for end in ends:
        count = pages_for(min(chunk, end))
        pages.begin(str(end), count if end > context - 512 else -count, "a test")
    kept = sum(min(chunk, end) * (18 if end > context - 512 else 3) for end in ends)
    assert kept <= pages.num_held * PAGE * 18 <= 1.02 * kept
    pages.check()
