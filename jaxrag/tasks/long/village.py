"""Needle, passkey and key-value retrieval in the words of the synthetic task.

A model that knows only the words of ``jaxrag.tasks.world`` cannot read numbers or prose. Here the
filler are facts about invented people and places, the needle is one more, and the answer is a
person whose names stand nowhere else. Two words are asked for because prefill gives the first token
of an answer, so that a decode rule shows from the second one on. Who is asked about is of one split
of the synthetic task: a model that was trained on the other has not met them. Prompts of the
training split name nobody of the test split, in the filler neither.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxrag.tasks.long.case import Case
from jaxrag.tasks.long.words import shuffled
from jaxrag.tasks.world import (
    BRIDGES,
    FIRST_HE,
    FIRST_SHE,
    LAST,
    PLACE_RELATIONS,
    RELATIONS,
    VALUES,
    Person,
    Relation,
    Split,
    split_of,
)


class _Scene(NamedTuple):
    """Who is asked about, what is asked, who it is, the seed of the filler, who may stand in it."""

    asked: Person
    relation: Relation
    answer: Person
    seed: int
    people: tuple[Person, ...]

    def others(self, rng: random.Random) -> Iterator[Person]:
        """Everybody who shares no name with the two, once, in random order."""
        for n in shuffled(rng, len(self.people)):
            other = self.people[n]
            if _apart(other, self.asked) and _apart(other, self.answer):
                yield other

    def other(self, rng: random.Random) -> str:
        """The name of one of them."""
        return next(self.others(rng)).name


def needle(rng: random.Random, depth: float, split: Split = "test") -> Case:
    """One fact of one person; the filler tells facts of every kind about others."""
    scene = _scene(rng, split)
    relations = list(RELATIONS.values())

    def facts() -> Iterator[str]:
        rng = random.Random(scene.seed)
        for other in scene.others(rng):
            relation = rng.choice(relations)
            people = relation.value == "person"
            value = scene.other(rng) if people else rng.choice(VALUES[relation.value])
            yield said(rng, relation, other.name, value)

    return _one_fact(rng, scene, depth, facts)


def passkey(rng: random.Random, depth: float, split: Split = "test") -> Case:
    """One fact of one person; the filler tells of places only, and repeats itself."""
    scene = _scene(rng, split)
    relations = list(PLACE_RELATIONS.values())

    def facts() -> Iterator[str]:
        rng = random.Random(scene.seed)
        while True:
            relation = rng.choice(relations)
            place, value = rng.choice(VALUES["place"]), rng.choice(VALUES[relation.value])
            yield said(rng, relation, place, value)

    return _one_fact(rng, scene, depth, facts)


def _one_fact(
    rng: random.Random, scene: _Scene, depth: float, filler: Callable[[], Iterator[str]]
) -> Case:
    """The scene's fact, hidden at a depth of the filler."""
    return Case(
        needles=(said(rng, scene.relation, scene.asked.name, scene.answer.name),),
        depths=(depth,),
        filler=filler,
        question=rng.choice(scene.relation.questions).format(X=scene.asked.name),
        expected=(scene.answer.name,),
    )


def key_value(rng: random.Random, depth: float, split: Split = "test") -> Case:
    """The same fact of everybody, in the same words: people are keys, and people are values."""
    scene = _scene(rng, split)
    relation = scene.relation
    plain = relation.wordings - 1

    def facts() -> Iterator[str]:
        rng = random.Random(scene.seed)
        for other in scene.others(rng):
            yield relation.said(plain, other.name, "", scene.other(rng))

    return Case(
        needles=(relation.said(plain, scene.asked.name, "", scene.answer.name),),
        depths=(depth,),
        filler=facts,
        question=relation.questions[-1].format(X=scene.asked.name),
        expected=(scene.answer.name,),
    )


def _scene(rng: random.Random, split: Split) -> _Scene:
    people = people_of(split)
    order = shuffled(rng, len(people))
    asked = next(p for p in map(people.__getitem__, order) if split_of(p.first, p.last) == split)
    answer = next(p for p in map(people.__getitem__, order) if _apart(p, asked))
    return _Scene(asked, RELATIONS[rng.choice(BRIDGES)], answer, rng.getrandbits(64), people)


def person_of(rng: random.Random, split: Split) -> Person:
    """Somebody of the split."""
    people = people_of(split)
    order = map(people.__getitem__, shuffled(rng, len(people)))
    return next(p for p in order if split_of(p.first, p.last) == split)


@functools.cache
def people_of(split: Split) -> tuple[Person, ...]:
    """Those of the training split, or everybody."""
    return tuple(
        Person(first, last, she)
        for names, she in ((FIRST_SHE, True), (FIRST_HE, False))
        for first, last in itertools.product(names, LAST)
        if split == "test" or split_of(first, last) == "train"
    )


def _apart(one: Person, other: Person) -> bool:
    """Whether two people share neither name."""
    return one.first != other.first and one.last != other.last


def said(rng: random.Random, relation: Relation, subject: str, value: str) -> str:
    """The fact in one of its wordings."""
    return relation.said(rng.randrange(relation.wordings), subject, "", value)
