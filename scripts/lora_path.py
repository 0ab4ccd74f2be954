"""From stock weights to weights that read blocks, on documents of your own: the whole path.

    python scripts/lora_path.py --out runs/lora-path

It makes documents and questions in the language of the shipped model, and then only runs commands:
`jaxrag ingest`, `kb questions`, `train`, `kb gate` and `ask`, with `eval synthetic` before and
after. A step whose result is there already is left out, so a run that was cut short is started
again with the same line. The training takes most of the time (configs/train/lora-dual-small.toml).
"""

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
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

BASE = Path("checkpoints/synthetic-0.8m/full")
CONFIG = Path("configs/train/lora-dual-small.toml")
CHUNKS = ("--chunk-by", "sentence", "--chunk-tokens", "32", "--overlap", "0")
K = ("--k", "6")
GATE = (*K, "--method", "turborag", "--answer-tokens", "4")


def main() -> None:
    """Run the steps that are not done yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/lora-path"))
    parser.add_argument("--steps", type=int, help="of the training, to try the path (all)")
    parser.add_argument("--num-questions", type=int, default=500, help="of the accuracy by mode")
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    tuned = out / "run" / "model"
    if not (out / "questions.jsonl").is_file():
        write_documents(out, random.Random(3))
    if not (out / "kb-before").is_dir():
        jaxrag("ingest", out / "people.jsonl", "--kb", out / "kb-before", "--model", BASE, *CHUNKS)
    if not (out / "rows.jsonl").is_file():
        files = "--out", out / "rows.jsonl", "--held-out", out / "held-out.jsonl"
        share = "--held-out-share", "0.3"
        asked = "--questions", out / "questions.jsonl"
        jaxrag("kb", "questions", out / "kb-before", *asked, *files, *share, *K)
    gate(out / "kb-before", out, out / "gate-before.json", codes=(0, 3))
    if not tuned.is_dir():
        some = () if args.steps is None else ("--steps", args.steps)
        rows = "--set", f'data.sources.1.paths=["{out / "rows.jsonl"}"]'
        jaxrag("train", CONFIG, *rows, "--out", out / "run", "--resume", *some)
    jaxrag("check", tuned, "--quick")
    if not (out / "kb-after").is_dir():
        jaxrag("ingest", out / "people.jsonl", "--kb", out / "kb-after", "--model", tuned, *CHUNKS)
    gate(out / "kb-after", out, out / "gate-after.json")
    held = ("--questions", out / "held-out.jsonl", *K)
    jaxrag("eval", "own", "--kb", out / "kb-after", *held, "--methods", "turborag")
    first = json.loads((out / "held-out.jsonl").read_text(encoding="utf-8").splitlines()[0])
    jaxrag("ask", first["question"], "--kb", out / "kb-after", "--method", "turborag", *K)
    synthetic = out / "accuracy.json"
    if not synthetic.is_file():
        models = ("--model", f"full={BASE}", "--model", f"lora={tuned}")
        asked = ("--num-questions", args.num_questions)
        pairs = ("--compare", "lora:block,full:block", "--compare", "lora:block,full:full")
        jaxrag("eval", "synthetic", *models, *asked, *pairs, "--out", synthetic)


def gate(kb: Path, out: Path, result: Path, codes: tuple[int, ...] = (0,)) -> None:
    """Hold turborag at ratio 0 against full attention on the held-out questions."""
    if result.is_file():
        return
    held = ("--questions", out / "held-out.jsonl")
    printed = jaxrag("kb", "gate", kb, *held, *GATE, "--json", codes=codes)
    result.write_text(printed, encoding="utf-8")
    print(printed, end="")


def jaxrag(*command: object, codes: tuple[int, ...] = (0,)) -> str:
    """Run a command; what it prints is shown, but for --json, and returned."""
    words = ["jaxrag", *map(str, command)]
    print(f"$ {shlex.join(words)}", flush=True)
    began, kept = time.perf_counter(), "--json" in words
    done = subprocess.run(
        [sys.executable, "-m", *words], stdout=subprocess.PIPE if kept else None, text=True
    )
    if done.returncode not in codes:
        raise SystemExit(done.returncode)
    print(f"# {time.perf_counter() - began:.0f} s", flush=True)
    return done.stdout or ""


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
