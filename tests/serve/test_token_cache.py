"""Ids of texts seen before: those of the tokenizer, one owner's apart from another's, bounded."""

import numpy as np
import pytest

from jaxrag.serve.token_cache import TokenCache


def encode(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def never(text):
    raise AssertionError(f"{text!r} is tokenised again")


def test_a_known_text_is_not_tokenised_again():
    seen = TokenCache()
    first = seen.ids("ann", "salt wells", encode)
    again = seen.ids("ann", "salt wells", never)
    assert np.array_equal(first, encode("salt wells")) and np.array_equal(first, again)
    assert (seen.hits, seen.misses) == (1, 1)
    with pytest.raises(ValueError):
        again[0] = 0


@pytest.mark.parametrize("pair", [(("ann", "x"), ("bob", "x")), (("an", "nx"), ("ann", "x"))])
def test_what_another_asked_is_not_found(pair):
    seen = TokenCache()
    for owner, text in pair:
        assert np.array_equal(seen.ids(owner, text, encode), encode(text))
    assert (seen.hits, seen.misses) == (0, 2)


def test_what_was_asked_for_longest_ago_makes_room():
    seen = TokenCache(max_bytes=3 * (256 + 40))
    for text in ("a" * 10, "b" * 10, "c" * 10):
        seen.ids("", text, encode)
    seen.ids("", "a" * 10, never)
    seen.ids("", "d" * 10, encode)
    seen.ids("", "a" * 10, never)
    with pytest.raises(AssertionError):
        seen.ids("", "b" * 10, never)
    seen.ids("", "e" * 10_000, encode)  # larger than all of it
    assert seen.nbytes <= 3 * (256 + 40)
