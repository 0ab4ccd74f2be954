"""Documents and questions in the language of the shipped model, to train adapters on.

    python scripts/lora_documents.py runs/lora-path

What follows are the commands of docs/my-model.md ("Make your model read blocks") with the model
``checkpoints/synthetic-0.8m/full``, ``--chunk-by sentence --chunk-tokens 32 --overlap 0``,
``--k 6`` and the run ``configs/train/lora-dual-small.toml``.
"""

import argparse
import json
import random
from pathlib import Path

from jaxrag.tasks.world import (
    FILES,
    FIRST_HE,
    FIRST_SHE,
    LAST,
    RELATIONS,
    VALUES,
    Person,
    split_of,
)


def main() -> None:
    """Write people.jsonl and questions.jsonl."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    write_documents(out, random.Random(3))


def write_documents(out: Path, rng: random.Random) -> None:
    """A document for each of so many people: one passage, two facts."""
    lines, questions = [], []
    folk = people(rng)
    for number, person in zip(FILES, folk, strict=False):
        others = [other.name for other in folk if other != person]
        text, asked = told(rng, number, person, others)
        lines.append({"id": person.name, "text": text})
        questions += [{**one, "sources": [f"people.jsonl/{person.name}"]} for one in asked]
    for name, rows in (("people", lines), ("questions", questions)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")


def people(rng: random.Random) -> list[Person]:
    """People of the training split, of whom no two share a name."""
    firsts = [(name, True) for name in FIRST_SHE] + [(name, False) for name in FIRST_HE]
    rng.shuffle(firsts)
    last, found = rng.sample(LAST, len(LAST)), []
    for first, she in firsts:
        family = next((name for name in last if split_of(first, name) == "train"), None)
        if family is not None:
            last.remove(family)
            found.append(Person(first, family, she))
    return found[: len(FILES)]


def told(
    rng: random.Random, number: str, person: Person, others: list[str]
) -> tuple[str, list[dict[str, object]]]:
    """A passage on a person, and a question about each of its two facts."""
    subject, own = ("She", "her") if person.she else ("He", "his")
    sentences: list[str] = []
    asked: list[dict[str, object]] = []
    for place, name in enumerate(rng.sample(sorted(RELATIONS), 2)):
        relation = RELATIONS[name]
        value = rng.choice(others if relation.value == "person" else VALUES[relation.value])
        who = (person.name, "") if place == 0 else (subject, own)
        sentences.append(relation.said(rng.randrange(relation.wordings), *who, value))
        question = rng.choice(relation.questions).format(X=person.name)
        asked.append({"question": question, "answers": [value]})
    return f"File {number}: {' '.join(sentences)}", asked


if __name__ == "__main__":
    main()
