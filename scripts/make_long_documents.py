"""Rows of training data with hundreds of documents: several samples of the synthetic task as one.

The task itself has at most 50 documents, some 850 tokens. Here the documents of several samples,
none of which names a person of another, are shuffled into each other, each sample's in its own
order, and joined to chunks: of one document, or of up to a few hundred tokens. Questions give full
names.

    python scripts/make_long_documents.py runs/documents.jsonl --tokens 1024,2048,4096 --rows 1000
"""

import argparse
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrag.tasks.synthetic import Question, Sample, SyntheticTask, sample
from jaxrag.tasks.world import FIRST_HE, FIRST_SHE, LAST, words

_AROUND = 2  # tokens that the template puts around a chunk
_TRIES = 1000  # samples in a row that name somebody who is named already
_NAME = re.compile(rf"\b(?:{'|'.join((*FIRST_SHE, *FIRST_HE))}) (?:{'|'.join(LAST)})\b")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--tokens", default="1024,2048,4096", help="most tokens of a row's chunks")
    parser.add_argument("--rows", type=int, default=1000, help="of each length")
    parser.add_argument("--questions", type=int, default=24, help="of a row, at most")
    parser.add_argument(
        "--chunk-tokens",
        default="0,32,64,128,256,512",
        help="most tokens of a chunk, in turn; 0: every document is one",
    )
    parser.add_argument("--split", choices=("train", "test"), default="train")
    parser.add_argument("--seed", type=int, default=81)
    args = parser.parse_args()
    sizes = [int(size) for size in args.chunk_tokens.split(",")]
    task = SyntheticTask(
        chunks=(8, 24), relations=3, full_names=1.0, questions=12, split=args.split
    )
    drawn = (sample(task, args.seed, n) for n in itertools.count())
    args.path.parent.mkdir(parents=True, exist_ok=True)
    with args.path.open("w", encoding="utf-8") as file:
        for length in (int(tokens) for tokens in args.tokens.split(",")):
            for n in range(args.rows):
                rng = random.Random(f"{args.seed} {length} {n}")
                row = make_row(rng, drawn, length, sizes[n % len(sizes)], args.questions)
                file.write(json.dumps(row) + "\n")


def make_row(
    rng: random.Random, drawn: Iterator[Sample], length: int, chunk_tokens: int, questions: int
) -> dict[str, Any]:
    """One row whose chunks take at most ``length`` tokens."""
    parts: list[Sequence[str]] = []
    asked: list[Question] = []
    chunks: list[str] = []
    met: set[str] = set()
    for _ in range(_TRIES):
        one = next(drawn)
        text = " ".join((*one.chunks, *(question.question for question in one.questions)))
        named = set(_NAME.findall(text))
        if met & named:
            continue
        more = _joined(_riffled(rng, [*parts, _units(one)]), chunk_tokens)
        if sum(map(_tokens, more), _AROUND * len(more)) > length:
            break
        chunks = more
        parts.append(_units(one))
        asked += one.questions
        met |= named
    rng.shuffle(asked)
    return {
        "chunks": chunks,
        "questions": [
            {"question": question.question, "answers": [question.answer]}
            for question in asked[:questions]
        ],
        "length": length,
        "chunk_tokens": chunk_tokens,
    }


def _units(one: Sample) -> list[str]:
    """The documents, "she" together with her name."""
    parts = zip(one.subjects, one.chunks, strict=True)
    by_subject = itertools.groupby(parts, key=lambda part: part[0])
    return ["\n".join(text for _, text in group) for _, group in by_subject]


def _riffled(rng: random.Random, parts: Sequence[Sequence[str]]) -> list[str]:
    """All units in random order, those of a part in their own."""
    order = [n for n, part in enumerate(parts) for _ in part]
    rng.shuffle(order)
    left = [iter(part) for part in parts]
    return [next(left[n]) for n in order]


def _joined(units: Sequence[str], chunk_tokens: int) -> list[str]:
    """Chunks of whole units, or of the documents where they are to have no tokens."""
    if not chunk_tokens:
        return [text for unit in units for text in unit.split("\n")]
    chunks: list[list[str]] = []
    size = 0
    for unit in units:
        if not chunks or size + _tokens(unit) > chunk_tokens:
            chunks.append([])
            size = 0
        chunks[-1] += unit.split("\n")
        size += _tokens(unit)
    return [" ".join(chunk) for chunk in chunks]


def _tokens(text: str) -> int:
    return len(words(text))


if __name__ == "__main__":
    main()
