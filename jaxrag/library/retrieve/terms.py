"""The words of texts, as the index of words has them."""

import collections
import itertools
import re
import unicodedata
from collections.abc import Mapping

# Han, Kana and Hangul: scripts searched by single characters and pairs of neighbours.
_CJK = (
    r"\u3005-\u3007\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_CJK}]+|[^\W_{_CJK}]+")
_CJK_FIRST = re.compile(rf"[{_CJK}]")
_LATIN_MARKS = re.compile(r"[\u0300-\u036f]")


def terms(text: str) -> list[str]:
    """The index terms of a text, in order, repeats kept.

    Compatibility forms are unified, case and Latin accents dropped. A run of Chinese, Japanese or
    Korean characters gives each character and each pair of neighbours; other text gives its words.
    """
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text).casefold())
    plain = unicodedata.normalize("NFC", _LATIN_MARKS.sub("", folded))
    found: list[str] = []
    for run in _WORD.findall(plain):
        if _CJK_FIRST.match(run):
            found.extend(run)
            found.extend(left + right for left, right in itertools.pairwise(run))
        else:
            found.append(run)
    return found


TermPostings = list[tuple[int, int]]  # of a term: chunk id, count


def gathered(
    texts: Mapping[int, str],
) -> tuple[list[tuple[str, TermPostings]], list[tuple[int, int]]]:
    """Postings of texts by term, in the order of the table, and (chunk id, number of terms)."""
    by_term: dict[str, TermPostings] = {}
    lengths = []
    for chunk_id, text in texts.items():
        found = terms(text)
        lengths.append((chunk_id, len(found)))
        for term, count in collections.Counter(found).items():
            by_term.setdefault(term, []).append((chunk_id, count))
    return sorted(by_term.items()), lengths
