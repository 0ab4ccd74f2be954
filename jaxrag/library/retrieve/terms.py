"""The words of texts, as the index of words has them."""

import collections
import functools
import itertools
import re
import unicodedata
from collections.abc import Mapping

TERMS = "terms"  # the setting of a catalog that names the version of its index's terms
TERMS_VERSION = 2  # of what ``terms`` gives; a catalog without the setting has 1

# Scripts without spaces between words, searched by single characters and pairs of neighbours: Han,
# Kana and Hangul; Thai, Lao, Myanmar and Khmer, without their digits and punctuation.
_PAIRED = (
    r"\u3005-\u3007\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
    r"\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ece\u0edc-\u0edf\u1000-\u103f\u1050-\u108f\u109a-\u109d"
    r"\ua9e0-\ua9ef\ua9fa-\ua9fe\uaa60-\uaa7f\u1780-\u17d3\u17d7\u17dc\u17dd"
)
# Soft hyphens (a word may go on in the next line), joiners and others of no width; Latin accents,
# Hebrew points; Arabic vowels, hamza above and below letters, and lengthening strokes.
_DROPPED = re.compile(
    r"\u00ad\n?|[\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    r"\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0000-\U000e0fff"
    r"\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20dc\u20e1\u20e5-\u20f0\ufe20-\ufe2f"
    r"\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7"
    r"\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed"
    r"\u08ca-\u08e1\u08e3-\u08ff]"
)
# One letter for those that are written for one another: alef maqsura, Persian ye; kaf; ta marbuta.
_ARABIC = str.maketrans("\u0649\u06cc\u06a9\u0629", "\u064a\u064a\u0643\u0647")
_PARTS = re.compile(rf"([{_PAIRED}]+)")  # runs of these among others
_LAST_MARK = 0x1F000


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What finds runs of letters, digits and marks; and a character with its marks."""
    kinds = ((chr(code), unicodedata.category(chr(code))) for code in range(0x300, _LAST_MARK))
    marks = "".join(mark for mark, kind in kinds if kind in ("Mn", "Mc"))
    # No mark is below U+0300; to look is quicker than to search so many.
    runs = rf"[^\W_]+(?:(?![\x00-\u02ff])[{marks}]+[^\W_]*)*"
    # What Khmer and Myanmar stack below a letter belongs to it.
    return re.compile(runs), re.compile(rf".(?:[\u17d2\u1039].|[{marks}])*")


def terms(text: str) -> list[str]:
    """The index terms of a text, in order, repeats kept.

    Compatibility forms are unified, case and Latin accents dropped, and so are Hebrew points,
    Arabic vowels and characters of no width. A run of Chinese, Japanese, Korean, Thai, Lao, Khmer
    or Myanmar characters gives each, with its marks, and each pair of neighbours; other text gives
    its words.
    """
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text).casefold())
    plain = unicodedata.normalize("NFC", _DROPPED.sub("", folded).translate(_ARABIC))
    runs, characters = _patterns()
    words: list[str] = []
    for run in runs.findall(plain):
        parts = [run] if run.isascii() else _PARTS.split(run)
        for place, part in enumerate(parts):
            if place % 2:
                units = characters.findall(part)
                words += units
                words += (left + right for left, right in itertools.pairwise(units))
            elif part:
                words.append(part)
    return words


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
