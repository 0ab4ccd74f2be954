"""A synthetic multi-document question task that shows what independent chunks lose.

A sample is a set of short documents about invented people and places, and questions on them:

- ``hop1``: the chunk that holds the fact names its subject.
- ``cross``: the chunk holds the fact of "she" or "he"; the name stands in the chunk before, of the
  same file. Read alone, the chunk cannot say who is meant; its file number can.
- ``latest``: two chunks give different values; the later one counts, so chunk order matters.
- ``hop2``: the value of one fact is the subject of another, in another chunk.
- ``unknown``: nobody says it; the answer is the refusal (TurboRAG section 3.3 trains one too).

All people of a sample share the same few relations, so that knowing the relation asked for does not
give the answer away; ``Question.guess`` is what that shortcut would score.
"""

import collections
import dataclasses
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from jaxrag.base.errors import ConfigError
from jaxrag.tasks.world import (
    BRIDGES,
    FILES,
    FIRST_HE,
    FIRST_SHE,
    LAST,
    PLACE_RELATIONS,
    REFUSAL,
    RELATIONS,
    VALUES,
    Person,
    Relation,
    Split,
    split_of,
)

QuestionKind = Literal["hop1", "cross", "latest", "hop2", "unknown"]
Value = Person | str
Asked = tuple[Person, str] | tuple[Person, str, str]  # a person, perhaps a bridge, the relation
KINDS: tuple[QuestionKind, ...] = ("hop1", "cross", "latest", "hop2", "unknown")

_MAX_TRIES = 200


@dataclasses.dataclass(frozen=True)
class SyntheticTask:
    """How samples are drawn; every field is a knob of difficulty.

    Attributes:
      chunks: fewest and most chunks of a sample.
      relations: how many relations the people of a sample share, the bridge among them.
      places: chunks about places, of those; they are never asked about people.
      headers: share of samples whose chunks begin with a file number.
      pronouns: share of the second facts of a chunk that say "she" or "he" for a person whom the
        chunk has named.
      pairs: share of people with a second chunk, which says "she" or "he".
      bridge: whether one of the relations has people as values; there are no two hops without it.
      full_names: share of questions that give first and last name, the others the first name.
      plain: share of statements and questions in the one form that is the same for every relation,
        "The home of X is V." and "What is the home of X?"; the others take any form.
      values: how many values of each kind occur, None for all; each is met oftener when few do.
      linked: share of bridge values that are people of the sample.
      mix: relative frequency of each kind of question, where the documents allow it.
      questions: most questions of one sample.
      split: "train" or "test"; no person is in both.
    """

    chunks: tuple[int, int] = (6, 6)
    relations: int = 3
    places: int = 0
    headers: float = 1.0
    pronouns: float = 0.5
    pairs: float = 0.5
    bridge: bool = True
    full_names: float = 0.6
    plain: float = 0.0
    values: int | None = None
    linked: float = 0.8
    mix: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: dict(zip(KINDS, (0.30, 0.25, 0.10, 0.25, 0.10), strict=True))
    )
    questions: int = 8
    split: Split = "train"

    def __post_init__(self) -> None:
        low, high = self.chunks
        if not 1 <= low <= high or self.places < 0 or self.places >= low:
            raise ConfigError(
                f"chunks={self.chunks}, places={self.places}: expected 1 <= fewest <= most and "
                "fewer place chunks than chunks"
            )
        fewest, most = (2, 1) if self.bridge else (1, 0)
        most += len(RELATIONS) - len(BRIDGES)
        if not fewest <= self.relations <= most:
            raise ConfigError(f"relations={self.relations}: expected {fewest}..{most}")
        if high > len(FILES):
            raise ConfigError(f"chunks={self.chunks}: expected at most {len(FILES)} of them")
        if set(self.mix) - set(KINDS) or not any(self.mix.values()) or min(self.mix.values()) < 0:
            raise ConfigError(f"mix={dict(self.mix)}: expected weights of {', '.join(KINDS)}")
        if self.questions < 1 or self.split not in ("train", "test"):
            raise ConfigError(f"questions={self.questions}, split={self.split!r}: not usable")
        if self.values is not None and self.values < 2:
            raise ConfigError(f"values={self.values}: expected at least 2 of each kind")
        for name in ("headers", "pronouns", "pairs", "full_names", "plain", "linked"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name}={getattr(self, name)}: expected a share from 0 to 1")


class Question(NamedTuple):
    """One question with its answer."""

    question: str
    answer: str
    kind: QuestionKind
    guess: float  # expected score of answering with any value of the relation that is asked for


@dataclasses.dataclass(frozen=True)
class Sample:
    """Documents in prompt order and independent questions on them.

    Attributes:
      prefix: text in front of them.
      subjects: the name of whom each chunk is about; "" of a place's, none where nobody knows.
    """

    chunks: tuple[str, ...]
    questions: tuple[Question, ...]
    prefix: str = ""
    subjects: tuple[str, ...] = ()


def samples(task: SyntheticTask, seed: int, start: int = 0) -> Iterator[Sample]:
    """Samples ``start``, ``start + 1``, ... of an endless sequence; each depends on its index only.

    Samples without a single possible question are drawn again.
    """
    index = start
    while True:
        yield sample(task, seed, index)
        index += 1


def sample(task: SyntheticTask, seed: int, index: int) -> Sample:
    """Sample number ``index`` of the sequence."""
    key = hashlib.blake2b(f"{task.split} {seed} {index}".encode(), digest_size=8).digest()
    rng = random.Random(int.from_bytes(key))
    for _ in range(_MAX_TRIES):
        drawn = _Drawing(task, rng).draw()
        if drawn.questions:
            return drawn
    raise ConfigError(f"mix={dict(task.mix)} allows no question with chunks={task.chunks}")


class _Fact(NamedTuple):
    subject: Person
    relation: str


class _Chunk(NamedTuple):
    """What a chunk is about: part 0 names its person, 1 says she or he, 2 corrects a fact."""

    subject: Person
    part: int


class _Drawing:
    """One sample in the making."""

    def __init__(self, task: SyntheticTask, rng: random.Random) -> None:
        self.task = task
        self.rng = rng
        self.values: dict[_Fact, Value] = {}
        self.where: dict[_Fact, int] = {}  # the part of its subject's chunks that holds it
        self.statements: dict[_Chunk, list[tuple[str, Value]]] = {}
        bridge = rng.choice(BRIDGES)
        others = [name for name in RELATIONS if name not in BRIDGES]
        if task.bridge:
            self.relations = [bridge, *rng.sample(others, task.relations - 1)]
        else:
            self.relations = rng.sample(others, task.relations)

    def draw(self) -> Sample:
        task, rng = self.task, self.rng
        left = rng.randint(*task.chunks) - task.places
        corrected = left >= 4 and rng.random() < 0.5
        left -= corrected
        people = pairs = 0
        while left:
            people, left = people + 1, left - 1
            if left and rng.random() < task.pairs:
                pairs, left = pairs + 1, left - 1
        drawn = self._people(people + 2)
        self.people, self.strangers = drawn[:people], drawn[people:]
        files = [
            [_Chunk(p, part) for part in range(2 if i < pairs else 1)]
            for i, p in enumerate(self.people)
        ]
        rng.shuffle(files)
        chunks = [chunk for file in files for chunk in file]
        for person in self.people:
            self._state(person, in_two=_Chunk(person, 1) in chunks)
        if corrected:
            self._correct(chunks)
        texts = self._write(chunks)
        subjects = [chunk.subject.name for chunk in chunks]
        gaps = self._gaps(chunks)
        for gap in sorted(rng.choices(gaps, k=task.places), reverse=True):
            texts.insert(gap, self._place())
            subjects.insert(gap, "")
        return Sample(tuple(texts), tuple(self._ask()), subjects=tuple(subjects))

    def _people(self, count: int) -> list[Person]:
        """Distinct first and last names, every combination of the task's split."""
        first = [(name, True) for name in FIRST_SHE] + [(name, False) for name in FIRST_HE]
        while True:
            chosen = self.rng.sample(first, count)
            last = self.rng.sample(LAST, len(LAST))
            people = []
            for name, she in chosen:
                family = next((f for f in last if split_of(name, f) == self.task.split), None)
                if family is None:
                    break
                last.remove(family)
                people.append(Person(name, family, she))
            if len(people) == count:
                return people

    def _value(self, subject: Person, relation: str, but: Value | None = None) -> Value:
        kind = RELATIONS[relation].value
        while True:
            if kind == "person":
                linked = self.rng.random() < self.task.linked
                pool = [p for p in (self.people if linked else self.strangers) if p != subject]
                value: Value = self.rng.choice(pool or self.strangers)
            else:
                value = self.rng.choice(VALUES[kind][: self.task.values])
            if value != but:
                return value

    def _state(self, person: Person, in_two: bool) -> None:
        """Two facts in one chunk, or all relations over two: the rest, then a third of them."""
        count = self.task.relations if in_two else min(2, self.task.relations)
        behind = max(1, count // 2) if in_two else 0
        for n, relation in enumerate(self.rng.sample(self.relations, count)):
            part = 1 if n >= count - behind else 0
            self._say(_Chunk(person, part), relation, self._value(person, relation))

    def _say(self, chunk: _Chunk, relation: str, value: Value) -> None:
        fact = _Fact(chunk.subject, relation)
        self.values[fact], self.where[fact] = value, chunk.part
        self.statements.setdefault(chunk, []).append((relation, value))

    def _correct(self, chunks: list[_Chunk]) -> None:
        """A later chunk that gives one named fact another value."""
        fact = self.rng.choice([f for f, part in self.where.items() if part == 0])
        chunk = _Chunk(fact.subject, 2)
        behind = max(i for i, other in enumerate(chunks) if other.subject == fact.subject)
        gaps = [gap for gap in self._gaps(chunks) if gap > behind]
        chunks.insert(self.rng.choice(gaps), chunk)
        value = self._value(fact.subject, fact.relation, self.values[fact])
        self._say(chunk, fact.relation, value)

    def _gaps(self, chunks: list[_Chunk]) -> list[int]:
        """Where a chunk may be inserted without parting "she" from her name."""
        return [i for i in range(len(chunks) + 1) if i == len(chunks) or chunks[i].part != 1]

    def _write(self, chunks: list[_Chunk]) -> list[str]:
        rng = self.rng
        numbers = rng.sample(FILES, len(FILES))
        own = {person: numbers.pop() for person in self.people}
        self.headers, self.spare = rng.random() < self.task.headers, numbers
        texts = []
        for chunk in chunks:
            person, part = chunk
            number = own[person] if part < 2 else self.spare.pop()
            said = self.statements[chunk]
            rng.shuffle(said)
            sentences = [f"File {number}:"] if self.headers else []
            for n, (relation, value) in enumerate(said):
                pronoun = part == 1 or (n > 0 and rng.random() < self.task.pronouns)
                sentences.append(self._sentence(RELATIONS[relation], person, pronoun, value))
            texts.append(" ".join(sentences))
        return texts

    def _sentence(self, relation: Relation, person: Person, pronoun: bool, value: Value) -> str:
        subject, own = person.name, ""
        if pronoun:
            subject, own = ("She", "her") if person.she else ("He", "his")
        shown = value.name if isinstance(value, Person) else value
        wording = relation.wordings - 1 if self._plain() else self.rng.randrange(relation.wordings)
        return relation.said(wording, subject, own, shown)

    def _plain(self) -> bool:
        return self.task.plain > 0 and self.rng.random() < self.task.plain

    def _place(self) -> str:
        """A chunk that only distracts."""
        place = self.rng.choice(VALUES["place"])
        sentences = [f"File {self.spare.pop()}:"] if self.headers else []
        for relation in PLACE_RELATIONS.values():
            value = self.rng.choice(VALUES[relation.value])
            wording = self.rng.randrange(len(relation.statements))
            sentences.append(relation.said(wording, place, "", value))
        return " ".join(sentences)

    def _ask(self) -> Iterator[Question]:
        rng = self.rng
        named = [fact for fact, part in self.where.items() if part == 0]
        bridge = self.relations[0]
        two_hops = [
            (fact.subject, bridge, second)
            for fact in named
            if fact.relation == bridge and isinstance(self.values[fact], Person)
            for second in self.relations
            if self.where.get(_Fact(self.values[fact], second)) == 0  # type: ignore[arg-type]
        ]
        pools: dict[QuestionKind, list[Asked]] = {
            "hop1": list(named),
            "cross": [fact for fact, part in self.where.items() if part == 1],
            "latest": [fact for fact, part in self.where.items() if part == 2],
            "hop2": list(two_hops),
            "unknown": [
                (person, relation)
                for person in (*self.people, self.strangers[0])
                for relation in self.relations
                if (person, relation) not in self.values
            ],
        }
        for pool in pools.values():
            rng.shuffle(pool)
        for _ in range(self.task.questions):
            kinds = [kind for kind in KINDS if pools[kind] and self.task.mix.get(kind, 0) > 0]
            if not kinds:
                return
            (kind,) = rng.choices(kinds, [self.task.mix[kind] for kind in kinds])
            yield self._question(kind, pools[kind].pop())

    def _question(
        self, kind: QuestionKind, asked: tuple[Person, str] | tuple[Person, str, str]
    ) -> Question:
        rng = self.rng
        person, relation = asked[0], asked[-1]
        subject = person.name if rng.random() < self.task.full_names else person.first
        fact = _Fact(person, relation)
        if len(asked) == 3:
            subject = f"the {RELATIONS[asked[1]].noun} of {subject}"
            fact = _Fact(self.values[_Fact(person, asked[1])], relation)  # type: ignore[arg-type]
        forms = RELATIONS[relation].questions
        question = (forms[-1] if self._plain() else rng.choice(forms)).format(X=subject)
        if kind == "unknown":
            return Question(question, REFUSAL, kind, 0.0)
        said = [value for (_, name), value in self.values.items() if name == relation]
        value = self.values[fact]
        shown = value.name if isinstance(value, Person) else value
        return Question(question, shown, kind, said.count(value) / len(said))


def describe(task: SyntheticTask, seed: int, count: int) -> dict[str, dict[str, float]]:
    """Over ``count`` samples: per kind the share of questions and what the shortcut scores."""
    number: collections.Counter[str] = collections.Counter()
    guess: dict[str, float] = collections.defaultdict(float)
    for index in range(count):
        for question in sample(task, seed, index).questions:
            number[question.kind] += 1
            guess[question.kind] += question.guess
    total = number.total()
    rows: dict[str, dict[str, float]] = {
        kind: {"share": number[kind] / total, "shortcut": guess[kind] / number[kind]}
        for kind in KINDS
        if number[kind]
    }
    return {**rows, "all": {"share": 1.0, "shortcut": sum(guess.values()) / total}}
