"""The tasks by name: RULER's, InfiniteBench's, and the needle of the length and depth grid."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from jaxrag.tasks.long import village, village_ruler, words
from jaxrag.tasks.long.case import Case
from jaxrag.tasks.long.scores import (
    Score,
    among_words,
    first_integer,
    string_match_all,
    words_in_place,
)
from jaxrag.tasks.world import Split

ANSWERS = 16  # names of an answer of RULER's village flavour
DEPTHS = tuple(n / 39 for n in range(40))  # where RULER hides needles


@dataclasses.dataclass(frozen=True)
class Draw:
    """What a case is made from.

    Attributes:
      depth: of the needle, for tasks that hide one; 0..1.
      prose: the filler of tasks that hide needles in running text.
      split: of the people whom the village flavour asks about.
      answers: names that an answer of the village flavour of RULER has.
    """

    rng: random.Random
    depth: float
    prose: words.Prose = words.prose
    split: Split = "test"
    answers: int = ANSWERS


@dataclasses.dataclass(frozen=True)
class Task:
    """How cases are made, scored, and how many tokens an answer may have.

    ``one_needle`` says that ``Draw.depth`` is where the answer is.
    """

    make: Callable[[Draw], Case]
    score: Score
    max_new_tokens: int
    one_needle: bool = False


@dataclasses.dataclass(frozen=True)
class Niah:
    """RULER's needles in a haystack: ``keys`` of them with ``values`` each, some of them asked."""

    haystack: Literal["noise", "prose", "needles"]
    key: Literal["name", "code"] = "name"
    value: Literal["number", "code"] = "number"
    keys: int = 1
    values: int = 1
    asked: int = 1

    def __call__(self, draw: Draw) -> Case:
        """A case; all keys and all values differ."""
        rng = draw.rng
        keys = words.names(rng) if self.key == "name" else words.codes(rng)
        values = words.numbers(rng) if self.value == "number" else words.codes(rng)
        pairs = [
            (key, value)
            for key in (next(keys) for _ in range(self.keys))
            for value in (next(values) for _ in range(self.values))
        ]
        names = list(dict.fromkeys(key for key, _ in pairs))[: self.asked]
        alone = len(pairs) == 1
        depths = [draw.depth] if alone else rng.sample(DEPTHS, len(pairs))
        order = rng.sample(range(len(pairs)), len(pairs))
        seed = rng.getrandbits(64)

        def filler() -> Iterator[str]:
            rng = random.Random(seed)
            if self.haystack == "needles":
                return self._distractors(rng, {word for pair in pairs for word in pair})
            sentences = words.noise if self.haystack == "noise" else draw.prose
            secret = [value for _, value in pairs]  # a user's text may hold such a number
            return (text for text in sentences(rng) if not any(one in text for one in secret))

        plural = "s" if self.asked * self.values > 1 else ""
        return Case(
            needles=tuple(self._sentence(*pairs[i]) for i in order),
            depths=tuple(depths),
            filler=filler,
            question=f"What {'are all' if plural else 'is'} the secret {self.value}{plural} of "
            f"{_listed([self._named(name) for name in names])}?",
            expected=tuple(value for key, value in pairs if key in names),
            lead=f"The secret {self.value}{plural} of {_listed(list(map(self._named, names)))} "
            f"{'are' if plural else 'is'}",
        )

    def _distractors(self, rng: random.Random, taken: set[str]) -> Iterator[str]:
        keys = words.names(rng) if self.key == "name" else words.codes(rng)
        values = words.numbers(rng) if self.value == "number" else words.codes(rng)
        fresh = (word for word in values if word not in taken)
        for key in keys:
            if key not in taken:
                yield self._sentence(key, next(fresh))

    def _sentence(self, key: str, value: str) -> str:
        return f"The secret {self.value} of {self._named(key)} is {value}."

    def _named(self, key: str) -> str:
        return f"the {key}" if self.key == "name" else key


def variable_tracking(draw: Draw, hops: int = 4) -> Case:
    """RULER's vt: one number goes from box to box; every box that holds it is asked for."""
    rng = draw.rng
    value = next(words.numbers(rng, digits=5))
    coined = words.coined(rng)
    boxes = [next(coined).upper() for _ in range(hops + 1)]
    sentences = [f"Box {boxes[0]} holds {value}."]
    sentences += [
        f"Box {later} holds what box {earlier} holds."
        for earlier, later in itertools.pairwise(boxes)
    ]
    seed = rng.getrandbits(64)
    return Case(
        needles=tuple(sentences),
        depths=tuple(sorted(rng.sample(DEPTHS, len(sentences)))),
        filler=lambda: words.noise(random.Random(seed)),
        question=f"Which {len(boxes)} boxes hold {value}, at first or second hand?",
        expected=tuple(boxes),
        lead=f"The boxes that hold {value} are",
    )


def common_words(draw: Draw, common: int = 10, often: int = 30, seldom: int = 3) -> Case:
    """RULER's cwe: ten words that stand thirty times in a list, the others three times."""
    rng = draw.rng
    coined = words.coined(rng)
    asked = [next(coined) for _ in range(common)]
    needles = asked * often
    rng.shuffle(needles)
    seed = rng.getrandbits(64)

    def others() -> Iterator[str]:
        rng = random.Random(seed)
        fresh = (word for word in words.coined(rng) if word not in asked)
        while True:
            block = [next(fresh) for _ in range(100)] * seldom
            rng.shuffle(block)
            yield from block

    return Case(
        needles=tuple(needles),
        depths=tuple(rng.random() for _ in needles),
        filler=others,
        question=f"Which {common} words occur most often in the list?",
        expected=tuple(asked),
        lead=f"The {common} words that occur most often are:",
        glue="\n",
    )


def frequent_words(draw: Draw, exponent: float = 2.0, vocabulary: int = 200) -> Case:
    """RULER's fwe: words whose frequency falls with the square of their rank; dots come first.

    Ranks 2 to 4 are asked for. Each rank comes at even distances, so that every beginning of the
    list has the same frequencies.
    """
    rng = draw.rng
    coined = words.coined(rng)
    ranked = ["....", *(next(coined) for _ in range(vocabulary - 1))]
    weights = [rank**-exponent for rank in range(1, vocabulary + 1)]
    seed = rng.getrandbits(64)

    return Case(
        needles=(),
        depths=(),
        filler=lambda: words.evenly(random.Random(seed), ranked, weights),
        question="Dots aside, which three words occur most often in the text?",
        expected=tuple(ranked[1:4]),
        lead="The three words that occur most often are:",
        least=200,
    )


def passkey(draw: Draw) -> Case:
    """InfiniteBench's Retrieve.PassKey: five digits in the same sentences again and again."""
    return _hidden_number(draw, next(words.numbers(draw.rng, digits=5)))


def number_string(draw: Draw) -> Case:
    """InfiniteBench's Retrieve.Number: ten digits, every one of them repeated."""
    rng = draw.rng
    digits = ""
    while len(digits) < 10:
        left = 10 - len(digits)
        run = left if left < 4 else rng.choice([n for n in (2, 3, 4) if left - n != 1])
        others = [digit for digit in "0123456789" if not digits.endswith(digit)]
        digits += rng.choice(others) * run
    return _hidden_number(draw, digits)


def key_value(draw: Draw) -> Case:
    """InfiniteBench's Retrieve.KV: random codes as keys and values, one pair a line."""
    rng = draw.rng
    codes = words.codes(rng)
    key, value = next(codes), next(codes)
    seed = rng.getrandbits(64)

    def pairs() -> Iterator[str]:
        codes = words.codes(random.Random(seed))
        for other in codes:
            yield f'"{other}": "{next(codes)}"'

    return Case(
        needles=(f'"{key}": "{value}"',),
        depths=(draw.depth,),
        filler=pairs,
        question=f'Which value belongs to the key "{key}"?',
        expected=(value,),
        lead=f'The value that belongs to the key "{key}" is "',
        glue="\n",
    )


def _hidden_number(draw: Draw, number: str) -> Case:
    seed = draw.rng.getrandbits(64)
    return Case(
        needles=(f"The door opens with the number {number} and with no other.",),
        depths=(draw.depth,),
        filler=lambda: words.noise(random.Random(seed)),
        question="With which number does the door open?",
        expected=(number,),
        lead="The door opens with the number",
    )


def _listed(parts: list[str]) -> str:
    """a; a and b; a, b and c."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _village(make: Callable[[random.Random, float, Split], Case]) -> Task:
    return Task(
        lambda draw: make(draw.rng, draw.depth, draw.split), string_match_all, 8, one_needle=True
    )


def _long_answer(
    make: Callable[[random.Random, Split, int], Case], score: Score, tokens: int = 20
) -> Task:
    return Task(lambda draw: make(draw.rng, draw.split, draw.answers), score, tokens)


_GRID = Task(Niah("prose"), string_match_all, 32, one_needle=True)

# Answers have as many tokens as the benchmarks give them.
RULER: Mapping[str, Task] = {
    "niah_single_1": Task(Niah("noise"), string_match_all, 128, one_needle=True),
    "niah_single_2": Task(Niah("prose"), string_match_all, 128, one_needle=True),
    "niah_single_3": Task(Niah("prose", value="code"), string_match_all, 128, one_needle=True),
    "niah_multikey_1": Task(Niah("prose", keys=4), string_match_all, 128),
    "niah_multikey_2": Task(Niah("needles"), string_match_all, 128, one_needle=True),
    "niah_multikey_3": Task(
        Niah("needles", key="code", value="code"), string_match_all, 128, one_needle=True
    ),
    "niah_multivalue": Task(Niah("prose", values=4), string_match_all, 128),
    "niah_multiquery": Task(Niah("prose", keys=4, asked=4), string_match_all, 128),
    "vt": Task(variable_tracking, string_match_all, 30),
    "cwe": Task(common_words, string_match_all, 120),
    "fwe": Task(frequent_words, string_match_all, 50),
}
INFINITEBENCH: Mapping[str, Task] = {
    "passkey": Task(passkey, first_integer, 6, one_needle=True),
    "number_string": Task(number_string, first_integer, 12, one_needle=True),
    "kv_retrieval": Task(key_value, among_words, 50, one_needle=True),
}

VILLAGE_RULER: Mapping[str, Task] = {
    "niah_multivalue": _long_answer(village_ruler.multivalue, string_match_all),
    "niah_multiquery": _long_answer(village_ruler.multiquery, string_match_all, 36),
    "vt": _long_answer(village_ruler.variable_tracking, words_in_place),
    "majority": _long_answer(village_ruler.majority, string_match_all, 36),
    "cwe": _long_answer(village_ruler.common_names, string_match_all),
    "copy": _long_answer(village_ruler.copy, words_in_place, 48),
}

# Suite and flavour -> tasks.
SUITES: Mapping[tuple[str, str], Mapping[str, Task]] = {
    ("needle", "plain"): {"needle": _GRID},
    ("ruler", "plain"): RULER,
    ("infinitebench", "plain"): INFINITEBENCH,
    ("ruler", "village"): VILLAGE_RULER,
    ("needle", "village"): {"needle": _village(village.needle)},
    ("infinitebench", "village"): {
        "passkey": _village(village.passkey),
        "kv_retrieval": _village(village.key_value),
    },
}
