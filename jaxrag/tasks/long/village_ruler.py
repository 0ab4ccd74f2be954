"""RULER's tasks with long answers, in the words of the synthetic task.

Answers are names of one token each, sixteen of them, and each stands at another place of the
haystack (``majority``: at several, ``common_names``: everywhere; ``copy``: a paragraph, token by
token). What is said of places is drawn anew for every case. The filler are facts about people, of
one split as in ``village``.
"""

import itertools
import random
from collections.abc import Iterator, Sequence

from jaxrag.tasks.long.case import Case
from jaxrag.tasks.long.village import people_of, person_of, said
from jaxrag.tasks.long.words import evenly, shuffled
from jaxrag.tasks.world import FILES, FIRST_SHE, LAST, PLACES, RELATIONS, VALUES, Person, Split

NAMES = (*FIRST_SHE, *LAST)  # none is part of another one
_DISTRACTORS = 0.3  # of the sentences of a filler
_PLAIN = [relation for relation in RELATIONS.values() if relation.value not in ("person", "place")]


def multiquery(rng: random.Random, split: Split, answers: int) -> Case:
    """RULER's niah_multiquery: who owns each of sixteen places; an answer is a place and a name."""
    asked, others = _places(rng, answers)
    owners = rng.sample(NAMES, len(PLACES))
    sentences = [_owned(*pair) for pair in zip((*asked, *others), owners, strict=True)]
    return _case(
        rng,
        split,
        needles=rng.sample(sentences[:answers], answers),
        distractors=sentences[answers:],
        question=f"Who owns {' '.join(asked)}?",
        expected=[" ".join(pair) for pair in zip(asked, owners[:answers], strict=True)],
    )


def multivalue(rng: random.Random, split: Split, answers: int) -> Case:
    """RULER's niah_multivalue: the sixteen people whom one person meets, the first first."""
    people = people_of(split)
    asked = person_of(rng, split)
    met = rng.sample(NAMES, answers)
    others = [people[n] for n in itertools.islice(shuffled(rng, len(people)), 2 * answers)]
    return _case(
        rng,
        split,
        needles=[_met(asked, name) for name in met],
        distractors=[_met(other, rng.choice(NAMES)) for other in others if other != asked],
        question=f"Whom does {asked.name} meet every day?",
        expected=met,
    )


def variable_tracking(rng: random.Random, split: Split, answers: int) -> Case:
    """RULER's vt: each place lies in the next one; the chain of sixteen behind the one asked."""
    asked, others = _places(rng, answers + 1)
    chain = [_lies(*pair) for pair in itertools.pairwise(asked)]
    return _case(
        rng,
        split,
        needles=rng.sample(chain, answers),
        distractors=[_lies(*pair) for pair in itertools.pairwise(others)],
        question=f"Where does {asked[0]} lie?",
        expected=asked[1:],
    )


def majority(
    rng: random.Random, split: Split, answers: int, votes: int = 3, against: int = 2
) -> Case:
    """Who owns each of sixteen places, where three sentences name one person, two another."""
    asked, others = _places(rng, answers)
    names = rng.sample(NAMES, len(PLACES) + answers)
    owners, wrong = names[: len(PLACES)], names[len(PLACES) :]
    sentences = [_owned(*pair) for pair in zip((*asked, *others), owners, strict=True)]
    denied = [_owned(*pair) for pair in zip(asked, wrong, strict=True)]
    needles = sentences[:answers] * votes + denied * against
    return _case(
        rng,
        split,
        needles=rng.sample(needles, len(needles)),
        distractors=sentences[answers:],
        question=f"Who often owns {' '.join(asked)}?",
        expected=[" ".join(pair) for pair in zip(asked, owners[:answers], strict=True)],
    )


def common_names(rng: random.Random, split: Split, answers: int, often: float = 10.0) -> Case:
    """RULER's cwe: sixteen names that stand ten times as often in a list as the others.

    Each name comes at even distances, so that every beginning of the list has the same frequencies,
    and the sixteen follow one another in one order, others between them. They are expected in the
    order of the list.
    """
    del split  # no person is told of
    names = rng.sample((*NAMES, *PLACES), len(NAMES) + len(PLACES))
    weights = [often] * answers + [1.0] * (len(names) - answers)
    seed = rng.getrandbits(64)

    def listed() -> Iterator[str]:
        return evenly(random.Random(seed), names, weights)

    common = set(names[:answers])
    first = dict.fromkeys(name for name in itertools.islice(listed(), 1000) if name in common)
    return Case(
        needles=(),
        depths=(),
        filler=listed,
        question="Who is often in the documents?",
        expected=tuple(first),
        between=" ",
        least=100,
    )


def copy(rng: random.Random, split: Split, answers: int, files: int = 4) -> Case:
    """A paragraph that is asked for by its number, word by word; there are others."""
    numbers = rng.sample(FILES, files)
    people = people_of(split)
    order = shuffled(rng, len(people))
    texts = [
        " ".join(_fact(rng, people[next(order)]) for _ in range(max(answers // 4, 1)))
        for _ in numbers
    ]
    named = [f"File {number}: {text}" for number, text in zip(numbers, texts, strict=True)]
    return _case(
        rng,
        split,
        needles=rng.sample(named, files),
        distractors=(),
        question=f"Read File {numbers[0]}.",
        expected=texts[:1],
    )


def _case(
    rng: random.Random,
    split: Split,
    needles: Sequence[str],
    distractors: Sequence[str],
    question: str,
    expected: Sequence[str],
) -> Case:
    """Needles anywhere, in their order; around them distractors and facts about people."""
    people, seed = people_of(split), rng.getrandbits(64)

    def filler() -> Iterator[str]:
        rng = random.Random(seed)
        while True:
            if distractors and rng.random() < _DISTRACTORS:
                yield rng.choice(distractors)
            else:
                yield _fact(rng, rng.choice(people))

    return Case(
        needles=tuple(needles),
        depths=tuple(sorted(rng.random() for _ in needles)),
        filler=filler,
        question=question,
        expected=tuple(expected),
        between=" ",
    )


def _places(rng: random.Random, asked: int) -> tuple[list[str], list[str]]:
    """Places that are asked about, and all the others."""
    places = rng.sample(PLACES, len(PLACES))
    return places[:asked], places[asked:]


def _fact(rng: random.Random, person: Person) -> str:
    relation = rng.choice(_PLAIN)
    return said(rng, relation, person.name, rng.choice(VALUES[relation.value]))


def _owned(place: str, owner: str) -> str:
    return f"{place} belongs to {owner}."


def _met(person: Person, name: str) -> str:
    return f"{person.name} often meets {name}."


def _lies(place: str, other: str) -> str:
    return f"{place} lies in {other}."
