"""Metrics of answers: pure functions of the text of an answer and the right answers, 0..1.

Benchmarks differ in what looks like a detail, and their numbers with it. So each function is one
benchmark's rule, and names it:

- ``squad_normalised``: lower case, every ASCII punctuation mark deleted (nothing put in its place),
  the articles a, an, the replaced by a space, white space joined. Used by HotpotQA, MuSiQue,
  lost-in-the-middle, LongBench and CacheBlend; quotes and dashes beyond ASCII stay.
- ``qa_f1`` is LongBench's: overlap of the bags of words, 0 where nothing overlaps, also when both
  are empty. HotpotQA's is 0 where one side is yes, no or noanswer and they differ; MuSiQue's is 1
  where both are empty.
- ``subspan`` is lost-in-the-middle's ``best_subspan_em`` and Block-Attention's accuracy: a right
  answer is a part of the answer, letter by letter. A right answer that is normalised to nothing is
  in every answer, and "1234567" is found in "12345678".
- ``rouge1`` is the fmeasure of the package rouge_score (FusionRAG's F1): articles are kept, and a
  text without letters or digits of ASCII, such as Chinese, is 0. The package rouge differs.

``normalised``, ``exact_match``, ``token_f1`` and ``holds`` are for one's own questions: Chinese and
Japanese put no space between words, so their characters are words of their own, and their full
stops, commas and brackets are deleted as ASCII's are.
"""

import collections
import re
import string
from collections.abc import Callable, Sequence

from jaxrag.base.errors import RequestError
from jaxrag.base.installed import installs

Golds = Sequence[str]
AnswerParts = Sequence[Golds]  # what an answer must hold all of, each with what it may be called

_WIDE = "\u3001\u3002\uff0c\uff01\uff1f\uff1b\uff1a\uff08\uff09\u300a-\u300f\u3010\u3011\u30fb"
_WIDE_MARKS = re.compile(f"[{_WIDE}]")
_ASCII_MARKS = re.compile(f"[{re.escape(string.punctuation)}]")
_WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+")
_REFUSALS = ("\u4fe1\u606f\u4e0d\u8db3", "insufficient information")  # as RGB looks for them
_YES_OR_NO = ("yes", "no", "noanswer")
# LongBench's Chinese marks, one by one as it has them: not among them are U+300A, U+3008, U+3009.
_CHINESE_MARKS = re.compile(
    "[\uff01\uff02-\uff0d\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff64\u3001-\u3003\u300b-\u3011"
    "\u3014-\u301f\u3030\u303e\u303f\u2013\u2014\u2018\u2019\u201b-\u201f\u2026\u2027\ufe4f"
    f"{re.escape(string.punctuation)}]"
)


def squad_normalised(text: str) -> str:
    """The text as SQuAD's official script compares it."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", _ASCII_MARKS.sub("", text.lower())).split())


def squad_exact_match(answer: str, golds: Golds) -> float:
    """Whether the normalised answer is one of the normalised right ones."""
    return float(squad_normalised(answer) in map(squad_normalised, golds))


def qa_f1(answer: str, golds: Golds) -> float:
    """LongBench's ``qa_f1_score``: the best F1 of words over the right answers."""
    return _best(_bag_f1, squad_normalised(answer).split(), golds, _squad_words)


def hotpotqa_f1(answer: str, golds: Golds) -> float:
    """HotpotQA's: 0 where one side is yes, no or noanswer, and they differ."""

    def f1(said: Sequence[str], gold: Sequence[str]) -> float:
        closed = any(" ".join(it) in _YES_OR_NO for it in (said, gold))
        return 0.0 if closed and said != gold else _bag_f1(said, gold)

    return _best(f1, _squad_words(answer), golds, _squad_words)


def musique_f1(answer: str, golds: Golds) -> float:
    """MuSiQue's: 1 where both sides are empty, 0 where one is."""

    def f1(said: Sequence[str], gold: Sequence[str]) -> float:
        return _bag_f1(said, gold) if said and gold else float(said == gold)

    return _best(f1, _squad_words(answer), golds, _squad_words)


def chinese_f1(answer: str, golds: Golds) -> float:
    """LongBench's ``qa_f1_zh_score``: jieba cuts both sides into words, then marks are deleted.

    Raises RequestError where jieba is not installed.
    """
    return _best(_bag_f1, _chinese_words(answer), golds, _chinese_words)


def character_f1(answer: str, golds: Golds) -> float:
    """InfiniteBench's Chinese F1: normalised as LongBench's, and every character is a word."""
    return _best(_bag_f1, list(_chinese(answer)), golds, lambda it: list(_chinese(it)))


def subspan(answer: str, golds: Golds) -> float:
    """Whether a right answer is a part of the answer, both normalised (``best_subspan_em``)."""
    said = squad_normalised(answer)
    return float(any(squad_normalised(gold) in said for gold in golds))


def rouge1(answer: str, golds: Golds) -> float:
    """ROUGE-1 fmeasure of the package rouge_score without stemming."""
    return _best(_bag_f1, _ascii_words(answer), golds, _ascii_words)


def numbers(answer: str, golds: Golds) -> float:
    """LongBench's retrieval and count: the share of all numbers that are that of the right one."""
    found = re.findall(r"\d+", answer)
    expected = [re.findall(r"\d+", gold)[0] for gold in golds]
    return max((found.count(n) / len(found) for n in expected), default=0.0) if found else 0.0


def string_match_part(answer: str, golds: Golds) -> float:
    """RULER's for questions: whether any right answer is in the answer, in letters of any case."""
    said = re.sub(r"[\x00-\x1f]", "\n", answer).strip().lower()
    return float(any(gold.lower() in said for gold in golds))


def rgb_labels(answer: str, parts: AnswerParts) -> list[int]:
    """RGB's: [-1] for a refusal, else for every part 1 where one of its names is in the answer.

    Letters of any case; nothing else is normalised.
    """
    if refuses(answer, parts):
        return [-1]
    said = answer.lower()
    return [int(any(name.lower() in said for name in names)) for names in parts]


def rgb_accuracy(answer: str, parts: AnswerParts) -> float:
    """RGB's where there is something to find: no part is missing, and it is no refusal."""
    labels = rgb_labels(answer, parts)
    return float(0 not in labels and 1 in labels)


def refuses(answer: str, parts: AnswerParts) -> float:
    """RGB's: whether the answer says that the documents are not enough."""
    del parts  # whatever is right
    return float(any(refusal in answer for refusal in _REFUSALS))


def rgb_accuracy_at_noise(answer: str, parts: AnswerParts) -> float:
    """RGB's where all documents are noise: a refusal counts as right, beside a right answer."""
    return max(refuses(answer, parts), rgb_accuracy(answer, parts))


def first_line(answer: str) -> str:
    """What lost-in-the-middle scores of an answer."""
    return answer.split("\n")[0].strip()


def of_any_part(metric: Callable[[str, Golds], float]) -> Callable[[str, AnswerParts], float]:
    """A metric of right answers as one of parts, of which there is one."""
    return lambda answer, parts: metric(answer, parts[0])


# By the name that results give it.
METRICS: dict[str, Callable[[str, AnswerParts], float]] = {
    "exact_match": of_any_part(squad_exact_match),
    "f1": of_any_part(qa_f1),
    "f1_hotpotqa": of_any_part(hotpotqa_f1),
    "f1_musique": of_any_part(musique_f1),
    "f1_zh": of_any_part(chinese_f1),
    "f1_characters": of_any_part(character_f1),
    "subspan": of_any_part(subspan),
    "rouge1": of_any_part(rouge1),
    "numbers": of_any_part(numbers),
    "string_match_part": of_any_part(string_match_part),
    "rgb": rgb_accuracy,
    "rgb_noise": rgb_accuracy_at_noise,
    "refuses": refuses,
}


def normalised(text: str) -> str:
    """The text as ``exact_match``, ``token_f1`` and ``holds`` compare it."""
    return squad_normalised(_WIDE_MARKS.sub("", text))


def exact_match(answer: str, golds: Golds) -> bool:
    """Whether the normalised answer is one of the normalised right ones."""
    return normalised(answer) in map(normalised, golds)


def token_f1(answer: str, golds: Golds) -> float:
    """Best F1 of words over the right answers, 0..1."""
    return _best(_bag_f1, _words(answer), golds, _words)


def holds(answer: str, golds: Golds) -> bool:
    """Whether the words of a right answer stand in the answer, one behind the other."""
    said = f" {' '.join(_words(answer))} "
    gold_texts = (" ".join(_words(gold)) for gold in golds)
    return any(words and f" {words} " in said for words in gold_texts)


def _best(
    f1: Callable[[Sequence[str], Sequence[str]], float],
    said: Sequence[str],
    golds: Golds,
    words: Callable[[str], Sequence[str]],
) -> float:
    return max((f1(said, words(gold)) for gold in golds), default=0.0)


def _bag_f1(said: Sequence[str], gold: Sequence[str]) -> float:
    common = (collections.Counter(said) & collections.Counter(gold)).total()
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    return _WORDS.findall(normalised(text))


def _squad_words(text: str) -> list[str]:
    return squad_normalised(text).split()


def _ascii_words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _chinese(text: str) -> str:
    return "".join(_CHINESE_MARKS.sub("", text.lower()).split())


def _chinese_words(text: str) -> list[str]:
    try:
        import jieba
    except ImportError:
        raise RequestError(
            f"metric f1_zh cuts Chinese with jieba, which is not installed; {installs('evals')}, "
            "or choose f1_characters"
        ) from None
    return [word for word in map(_chinese, jieba.cut(text, cut_all=False)) if word]
