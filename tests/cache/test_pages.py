"""Who owns which page: what leaves the pool first."""

import pytest

from jaxrag.cache import PageAllocator
from jaxrag.errors import RequestError


def test_the_least_recently_used_chunk_leaves_first():
    """By last use, not by age: a chunk that was asked for again stays."""
    pages = PageAllocator(4)
    for key in ("a", "b"):
        pages.insert(key, pages.allocate(2, "a test"), 20)
        pages.release(key)
    pages.acquire("a")
    pages.release("a")
    pages.allocate(2, "a test")
    assert "a" in pages and "b" not in pages


def test_a_chunk_in_use_never_leaves():
    pages = PageAllocator(4)
    for key in ("a", "b"):
        pages.insert(key, pages.allocate(2, "a test"), 20)
    pages.release("b")
    assert pages.num_available == 2
    with pytest.raises(RequestError, match="a test needs 48 tokens of cache and 32 of 64 are free"):
        pages.allocate(3, "a test")
    assert "a" in pages


def test_what_does_not_fit_evicts_nothing():
    pages = PageAllocator(4)
    for key in ("a", "b"):
        pages.insert(key, pages.allocate(2, "a test"), 20)
    pages.release("b")
    with pytest.raises(RequestError):
        pages.allocate(3, "a test")
    assert "b" in pages


def test_a_chunk_on_its_way_has_pages_and_no_kv():
    """Its pages are nobody else's, it can be waited for, and not yet mapped."""
    pages = PageAllocator(4)
    pages.begin("a", 3, "a test")
    assert (pages.num_loading, pages.num_available) == (3, 1)
    assert "a" not in pages and pages.acquire("a") is None
    assert pages.subscribe("a").ref_count == 2
    pages.complete("a", 40)
    assert "a" in pages and pages.chunks["a"].tokens == 40
    assert (pages.num_loading, pages.num_pinned, pages.num_available) == (0, 3, 1)
    pages.check()


def test_a_load_that_nobody_waits_for_ends_as_a_chunk_that_nobody_maps():
    pages = PageAllocator(4)
    pages.begin("a", 3, "a test")
    pages.release("a")
    assert pages.num_available == 1  # the load still writes to its pages
    pages.complete("a", 40)
    assert (pages.num_unpinned, pages.num_available) == (3, 4)
    pages.allocate(4, "a test")
    assert "a" not in pages


def test_a_load_that_fails_gives_its_pages_back():
    pages = PageAllocator(4)
    pages.begin("a", 3, "a test")
    pages.release("a")
    pages.abandon("a")
    assert pages.num_free == 4 and not pages.chunks
    pages.check()


def test_misuse_is_refused():
    pages = PageAllocator(4)
    pages.insert("a", pages.allocate(1, "a test"), 10)
    with pytest.raises(AssertionError, match="chunk a is in the pool already"):
        pages.insert("a", pages.allocate(1, "a test"), 10)
    pages.release("a")
    with pytest.raises(AssertionError, match="released more often than it was mapped"):
        pages.release("a")


def test_the_check_sees_a_page_that_is_lost_or_held_twice():
    pages = PageAllocator(4)
    own = pages.allocate(2, "a test")
    pages.check(own)
    with pytest.raises(AssertionError, match="lost or held twice"):
        pages.check(own[:1])
    with pytest.raises(AssertionError, match="lost or held twice"):
        pages.check([*own, own[0]])
