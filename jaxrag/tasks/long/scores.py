"""The benchmarks' rules: 0..1 for the text of an answer and what is expected.

RULER and InfiniteBench publish these rules with their code; both match without a judge.
"""

import re
from collections.abc import Callable, Sequence

from jaxrag.tasks.world import words

Score = Callable[[str, Sequence[str]], float]

_CONTROL = re.compile(r"[\x00-\x1f]")
_BETWEEN_WORDS = re.compile(r"[\n:\"'.,?!{}]")


def string_match_all(text: str, expected: Sequence[str]) -> float:
    """RULER: share of what is expected that the text holds, letters of any case.

    A number inside a longer number counts as held, as it does there.
    """
    text = _plain(text)
    return sum(one.lower() in text for one in expected) / len(expected)


def first_integer(text: str, expected: Sequence[str]) -> float:
    """InfiniteBench passkey and number_string: the first run of digits is the number expected."""
    found = re.search(r"[0-9]+", text)
    return float(found is not None and found[0] == expected[0])


def among_words(text: str, expected: Sequence[str]) -> float:
    """InfiniteBench kv_retrieval: what is expected is a word of the text, marks taken away."""
    return float(expected[0] in _BETWEEN_WORDS.sub(" ", text).split())


def words_in_place(text: str, expected: Sequence[str]) -> float:
    """Share of the words expected that are the answer's word of the same number; for ordered ones.

    Marks are words; a word that is missing or too many puts all behind it out of place.
    """
    gold = words(" ".join(expected))
    return sum(a == b for a, b in zip(words(text), gold, strict=False)) / len(gold)


def _plain(text: str) -> str:
    return _CONTROL.sub("\n", text).strip().lower()
