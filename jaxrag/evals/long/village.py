"""Needle, passkey and key-value retrieval in the words of the synthetic task.

A model that knows only the words of ``evals.world`` cannot read numbers or prose. Here the filler
are facts about invented people and places, the needle is one more, and the answer is one word that
stands nowhere else. The person who is asked about is of the task's test split, so a model that was
trained on it has not met them.
"""

import itertools
import random
from collections.abc import Callable, Iterator

from jaxrag.evals.long.case import Case
from jaxrag.evals.world import (
    BRIDGES,
    FIRST_HE,
    FIRST_SHE,
    LAST,
    PLACE_RELATIONS,
    RELATIONS,
    VALUES,
    Person,
    Relation,
    split_of,
)

_TOLD = tuple(relation for name, relation in RELATIONS.items() if name not in BRIDGES)


def needle(rng: random.Random, depth: float) -> Case:
    """One fact of one person; the filler tells the same kinds of fact about others."""
    person, others = _people(rng)
    relation = rng.choice(_TOLD)
    value = rng.choice(VALUES[relation.value])

    def facts(rng: random.Random) -> Iterator[str]:
        for other in others:
            told = rng.choice(_TOLD)
            yield _said(rng, told, other.name, _other(rng, told, value))

    return _case(rng, person, relation, value, depth, facts)


def passkey(rng: random.Random, depth: float) -> Case:
    """One fact of one person; the filler tells of places only, and repeats itself."""
    person, _ = _people(rng)
    relation = rng.choice([one for one in _TOLD if one.value != "place"])
    value = rng.choice(VALUES[relation.value])

    def facts(rng: random.Random) -> Iterator[str]:
        while True:
            told = rng.choice(list(PLACE_RELATIONS.values()))
            yield _said(rng, told, rng.choice(VALUES["place"]), rng.choice(VALUES[told.value]))

    return _case(rng, person, relation, value, depth, facts)


def key_value(rng: random.Random, depth: float) -> Case:
    """The same fact of everybody, in the same words: people are the keys."""
    person, others = _people(rng)
    relation = rng.choice(_TOLD)
    value = rng.choice(VALUES[relation.value])
    plain = relation.wordings - 1

    def facts(rng: random.Random) -> Iterator[str]:
        for other in others:
            yield relation.said(plain, other.name, "", _other(rng, relation, value))

    return _case(rng, person, relation, value, depth, facts, plain=True)


def _case(
    rng: random.Random,
    person: Person,
    relation: Relation,
    value: str,
    depth: float,
    facts: Callable[[random.Random], Iterator[str]],
    plain: bool = False,
) -> Case:
    seed = rng.getrandbits(64)
    if plain:
        told = relation.said(relation.wordings - 1, person.name, "", value)
        question = relation.questions[-1]
    else:
        told, question = _said(rng, relation, person.name, value), rng.choice(relation.questions)
    return Case(
        needles=(told,),
        depths=(depth,),
        filler=lambda: facts(random.Random(seed)),
        question=question.format(X=person.name),
        expected=(value,),
    )


def _said(rng: random.Random, relation: Relation, subject: str, value: str) -> str:
    return relation.said(rng.randrange(relation.wordings), subject, "", value)


def _other(rng: random.Random, relation: Relation, taken: str) -> str:
    """A value of the relation that is not the one asked for."""
    return rng.choice([value for value in VALUES[relation.value] if value != taken])


def _people(rng: random.Random) -> tuple[Person, list[Person]]:
    """Who is asked about, and everybody who shares neither name with them, in random order."""
    everybody = [
        Person(first, last, she)
        for names, she in ((FIRST_SHE, True), (FIRST_HE, False))
        for first, last in itertools.product(names, LAST)
    ]
    rng.shuffle(everybody)
    asked = next(one for one in everybody if split_of(one.first, one.last) == "test")
    others = [one for one in everybody if one.first != asked.first and one.last != asked.last]
    return asked, others
