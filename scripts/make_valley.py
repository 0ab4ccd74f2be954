"""The example documents of examples/valley: a register of each town, with a few people in it.

Each document is one stored chunk of some 500 tokens: facts about places, and among them a few about
people. The questions ask about the people.

    python scripts/make_valley.py --out examples
"""

import argparse
import itertools
import json
import random
from pathlib import Path

from jaxrag.tasks.long.village import person_of
from jaxrag.tasks.world import PLACE_RELATIONS, RELATIONS, VALUES, Person

ASKED = ("teacher", "friend")
PEOPLE = 2  # of a document that are asked about


def main() -> None:
    """Write the documents and the questions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("examples"))
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=490, help="of a document, at least")
    parser.add_argument("--seed", type=int, default=8)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    folder = args.out / "valley"
    folder.mkdir(parents=True, exist_ok=True)
    towns = rng.sample(VALUES["place"], args.documents)
    met: list[Person] = []
    questions = []
    for town in towns:
        text, asked = make_document(rng, met, args.tokens)
        (folder / f"{town.lower()}.txt").write_text(text, encoding="utf-8")
        questions += asked
    rng.shuffle(questions)
    rows = (json.dumps(question) + "\n" for question in questions)
    (args.out / "valley-questions.jsonl").write_text("".join(rows), encoding="utf-8")


def make_document(
    rng: random.Random, met: list[Person], tokens: int
) -> tuple[str, list[dict[str, object]]]:
    """Text of a document, and a question about each of its people, whom no other names."""
    sentences: list[str] = []
    places = list(PLACE_RELATIONS.values())
    while sum(map(tokens_of, sentences)) < tokens:
        relation = rng.choice(places)
        place, value = rng.choice(VALUES["place"]), rng.choice(VALUES[relation.value])
        sentences.append(relation.said(rng.randrange(relation.wordings), place, "", value))
    questions: list[dict[str, object]] = []
    spots = rng.sample(range(len(sentences)), PEOPLE)
    for spot, name in zip(spots, rng.sample(ASKED, PEOPLE), strict=True):
        relation, person = RELATIONS[name], stranger(rng, met)
        value = (
            stranger(rng, met).name
            if relation.value == "person"
            else rng.choice(VALUES[relation.value])
        )
        fact = relation.said(rng.randrange(relation.wordings), person.name, "", value)
        sentences[spot] = fact
        asked = rng.choice(relation.questions).format(X=person.name)
        questions.append({"question": asked, "answers": [value]})
    return "\n".join(" ".join(part) for part in itertools.batched(sentences, 6)) + "\n", questions


def stranger(rng: random.Random, met: list[Person]) -> Person:
    """Somebody of the test split who shares no name with anybody before."""
    while True:
        person = person_of(rng, "test")
        if all(person.first != other.first and person.last != other.last for other in met):
            met.append(person)
            return person


def tokens_of(sentence: str) -> int:
    """Words and full stops."""
    return len(sentence.replace(".", " .").split())


if __name__ == "__main__":
    main()
