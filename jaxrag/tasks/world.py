"""The invented world of the synthetic task: people, places, what is said of them and asked.

Everything is a fixed table. A person is a first and a last name; which combinations belong to the
test set is decided by a hash, so no person of a test question was ever seen in training.
"""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterator
from typing import Literal

ValueKind = Literal["person", "place", "country", "job", "dish", "animal", "instrument", "goods"]
Split = Literal["train", "test"]

_TEST_SHARE = 8  # one combination of names in eight is kept for the test set


@dataclasses.dataclass(frozen=True)
class Person:
    """Somebody invented; ``she`` decides the pronoun."""

    first: str
    last: str
    she: bool

    @property
    def name(self) -> str:
        """First and last name."""
        return f"{self.first} {self.last}"


@dataclasses.dataclass(frozen=True)
class Relation:
    """One thing that can be said of a subject, and asked.

    ``{S}`` is the subject, ``{V}`` the value, ``{X}`` the subject as a question names it.
    """

    noun: str
    value: ValueKind
    statements: tuple[str, ...]
    questions: tuple[str, ...]

    def said(self, wording: int, subject: str, own: str, value: str) -> str:
        """The statement in one of ``wordings``; ``own`` is "her", "his" or "" for a full name."""
        if wording < len(self.statements):
            return self.statements[wording].format(S=subject, V=value)
        if own:
            return f"{own.capitalize()} {self.noun} is {value}."
        return f"The {self.noun} of {subject} is {value}."

    @property
    def wordings(self) -> int:
        """How many ways there are to say it."""
        return len(self.statements) + 1


RELATIONS: dict[str, Relation] = {
    "birthplace": Relation(
        "birthplace",
        "place",
        ("{S} was born in {V}.", "{S} comes from {V}."),
        ("Where was {X} born?", "What is the birthplace of {X}?"),
    ),
    "home": Relation(
        "home",
        "place",
        ("{S} lives in {V}.", "{S} owns a house in {V}."),
        ("Where does {X} live?", "What is the home of {X}?"),
    ),
    "job": Relation(
        "job",
        "job",
        ("{S} works as a {V}.", "{S} earns money as a {V}."),
        ("What does {X} work as?", "What is the job of {X}?"),
    ),
    "dish": Relation(
        "favourite dish",
        "dish",
        ("{S} likes to eat {V}.", "{S} often cooks {V}."),
        ("What does {X} like to eat?", "What is the favourite dish of {X}?"),
    ),
    "animal": Relation(
        "animal",
        "animal",
        ("{S} keeps a {V}.", "{S} walks with a {V} every day."),
        ("Which animal does {X} keep?", "What is the animal of {X}?"),
    ),
    "instrument": Relation(
        "instrument",
        "instrument",
        ("{S} plays the {V}.", "{S} practises the {V} every evening."),
        ("Which instrument does {X} play?", "What is the instrument of {X}?"),
    ),
    "teacher": Relation(
        "teacher",
        "person",
        ("{S} learned from {V}.", "{S} was taught by {V}."),
        ("Who taught {X}?", "Who is the teacher of {X}?"),
    ),
    "friend": Relation(
        "best friend",
        "person",
        ("{S} often meets {V}.", "{S} spends the summer with {V}."),
        ("Whom does {X} often meet?", "Who is the best friend of {X}?"),
    ),
}

PLACE_RELATIONS: dict[str, Relation] = {
    "country": Relation(
        "country",
        "country",
        ("{S} lies in {V}.", "{S} belongs to {V}."),
        ("In which country does {X} lie?", "What is the country of {X}?"),
    ),
    "goods": Relation(
        "main product",
        "goods",
        ("{S} is known for {V}.", "{S} sells {V}."),
        ("What is {X} known for?", "What is the main product of {X}?"),
    ),
}

BRIDGES = ("teacher", "friend")  # relations whose value is a person

REFUSAL = "The documents do not say."


def _each(listed: str) -> tuple[str, ...]:
    return tuple(listed.split())


JOBS = _each(
    "baker smith weaver pilot judge nurse painter miller tailor scribe hunter farmer potter guard "
    "cook sailor singer dancer mason carpenter doctor poet brewer gardener"
)
DISHES = _each(
    "bread cheese honey plums lentils trout rice apples onions pears beans walnuts figs olives "
    "barley grapes cherries dates oats cabbage garlic mint soup porridge"
)
ANIMALS = _each(
    "dog cat goat horse donkey parrot rabbit falcon turtle pony sheep goose duck hen fox mule "
    "calf lamb pigeon crow"
)
INSTRUMENTS = _each(
    "flute harp drum lute fiddle horn trumpet organ bell guitar piano cello whistle zither tuba "
    "banjo"
)
GOODS = _each(
    "glass wool salt paper silk copper ropes candles leather tiles barrels clocks knives boats "
    "carpets lamps"
)
FILES = tuple(str(number) for number in range(10, 60))


def _syllables(count: int, *parts: str) -> tuple[str, ...]:
    """``count`` names spread evenly over all combinations of the parts."""
    found = ["".join(p).capitalize() for p in itertools.product(*(part.split() for part in parts))]
    step = 0.6180339887498949 * len(found)
    order = sorted(range(len(found)), key=lambda i: (i * step) % len(found))
    return tuple(sorted(found[i] for i in order[:count]))


FIRST_SHE = _syllables(40, "b d k l m n r s t v", "a e i o u", "d l n r v", "a ia")
FIRST_HE = _syllables(40, "b d f g h j k p r t", "a e i o u", "d l n r s", "o us")
LAST = _syllables(80, "b d f g k l m p r s t v", "a e i o u", "l n r v d m", "er in ow ell")
PLACES = _syllables(48, "b d f g h k l m n r s t", "a e i o u", "l n r th", "dorf ham ven mouth")
COUNTRIES = _syllables(16, "b d g k l m n s", "a e o u", "rl st nd lm", "and ia")

VALUES: dict[ValueKind, tuple[str, ...]] = {
    "place": PLACES,
    "country": COUNTRIES,
    "job": JOBS,
    "dish": DISHES,
    "animal": ANIMALS,
    "instrument": INSTRUMENTS,
    "goods": GOODS,
}


def split_of(first: str, last: str) -> Split:
    """Which set a combination of names belongs to."""
    digest = hashlib.blake2b(f"{first} {last}".encode(), digest_size=4).digest()
    return "test" if int.from_bytes(digest) % _TEST_SHARE == 0 else "train"


def words(text: str) -> list[str]:
    """The words and marks of a text, as the task's vocabulary counts them."""
    return re.findall(r"[^\W_]+|[^\w\s]|_", text)


def vocabulary() -> list[str]:
    """Every word that documents, questions and answers of the task can hold, sorted."""
    return sorted(set(itertools.chain.from_iterable(map(words, _texts()))))


def _texts() -> Iterator[str]:
    yield from (
        *FIRST_SHE,
        *FIRST_HE,
        *LAST,
        *FILES,
        REFUSAL,
        "File : She Her He His she her he his",
    )
    for values in VALUES.values():
        yield from values
    for relation in (*RELATIONS.values(), *PLACE_RELATIONS.values()):
        for own in ("", "her", "his"):
            for wording in range(relation.wordings):
                yield relation.said(wording, "", own, "")
        yield from (question.format(X=f"the {relation.noun} of") for question in relation.questions)
