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
