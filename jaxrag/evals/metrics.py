"""Word metrics of answers, by the rules of SQuAD's official script.

Texts are normalised alike on both sides: lower case, ASCII punctuation deleted (nothing put in its
place), the articles a, an, the replaced by a space, white space joined. F1 is that of LongBench's
``qa_f1_score``: overlap of the bags of words, 0 where nothing overlaps, also when both are empty.
"""

import collections
import re
import string
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """The text as both metrics compare it."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golds: Sequence[str]) -> bool:
    """Whether the normalised answer is one of the normalised right ones."""
    return normalised(answer) in map(normalised, golds)


def token_f1(answer: str, golds: Sequence[str]) -> float:
    """Best F1 of words over the right answers, 0..1."""
    return max((_f1(normalised(answer), normalised(gold)) for gold in golds), default=0.0)


def _f1(answer: str, gold: str) -> float:
    said, wanted = answer.split(), gold.split()
    common = (collections.Counter(said) & collections.Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall)
