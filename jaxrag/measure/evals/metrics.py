"""Word metrics of answers, by the rules of SQuAD's official script.

Texts are normalised alike on both sides: lower case, ASCII punctuation deleted (nothing put in its
place), the articles a, an, the replaced by a space, white space joined. F1 is that of LongBench's
``qa_f1_score``: overlap of the bags of words, 0 where nothing overlaps, also when both are empty.

Chinese and Japanese put no space between words: their characters are words of their own, and their
full stops, commas and brackets are deleted as ASCII's are. Texts without them are not affected.
"""

import collections
import re
import string
from collections.abc import Sequence

_WIDE = "\u3001\u3002\uff0c\uff01\uff1f\uff1b\uff1a\uff08\uff09\u300a-\u300f\u3010\u3011\u30fb"
_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}{_WIDE}]")
_WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+")


def normalised(text: str) -> str:
    """The text as both metrics compare it."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", _PUNCTUATION.sub("", text.lower())).split())


def exact_match(answer: str, golds: Sequence[str]) -> bool:
    """Whether the normalised answer is one of the normalised right ones."""
    return normalised(answer) in map(normalised, golds)


def token_f1(answer: str, golds: Sequence[str]) -> float:
    """Best F1 of words over the right answers, 0..1."""
    return max((_f1(normalised(answer), normalised(gold)) for gold in golds), default=0.0)


def holds(answer: str, golds: Sequence[str]) -> bool:
    """Whether the words of a right answer stand in the answer, one behind the other."""
    said = f" {' '.join(_WORDS.findall(normalised(answer)))} "
    wanted = (" ".join(_WORDS.findall(normalised(gold))) for gold in golds)
    return any(words and f" {words} " in said for words in wanted)


def _f1(answer: str, gold: str) -> float:
    said, wanted = _WORDS.findall(answer), _WORDS.findall(gold)
    common = (collections.Counter(said) & collections.Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall)
