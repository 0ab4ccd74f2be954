"""Rows of training from a data set's prompts, answered by the model itself with full attention.

They need no labels: with loss.objective = "distill" adapters learn to answer the same where
passages are read apart (docs/my-model.md).

    python scripts/own_answers.py nq_open --data nq-open-oracle.jsonl --model MODEL \
        --passages 5 --skip 300 --num 100 --out rows.jsonl
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from jaxrag.measure.evals.datasets.near import NearStudy
from jaxrag.measure.evals.datasets.options import NearOptions
from jaxrag.measure.evals.datasets.run import items_of
from jaxrag.measure.evals.datasets.spec import DatasetItem
from jaxrag.models.model import load_model


def parts_of(item: DatasetItem, passages: int | None) -> Iterator[DatasetItem]:
    """A prompt of so many passages for each of a question's in turn: none needs the right one."""
    for documents in itertools.batched(item.documents, passages or max(len(item.documents), 1)):
        yield dataclasses.replace(item, documents=documents)


def main() -> None:
    """Write a row for each prompt; those that are there already are kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name")
    for flag in ("--data", "--model", "--out"):
        parser.add_argument(flag, required=True)
    for flag, number in (("--passages", None), ("--skip", 0), ("--num", 100), ("--tokens", 16)):
        parser.add_argument(flag, type=int, default=number)
    args = parser.parse_args()
    options = NearOptions(
        args.name, (args.data,), model=args.model, template="chat", answer_tokens=args.tokens,
        documents=args.passages if args.name == "nq_open" else None,
    )  # fmt: skip
    asked = items_of(options)[args.skip :][: args.num]
    if not asked:
        parser.error(f"--skip {args.skip} leaves no question of {args.data}")
    study = NearStudy.open(options, load_model(args.model, dtype="float32"))
    study, out = dataclasses.replace(study, arms={}), Path(args.out)
    done = len(out.read_text("utf-8").splitlines()) if out.exists() else 0
    with out.open("a", encoding="utf-8") as file:
        for item in [part for question in asked for part in parts_of(question, args.passages)][
            done:
        ]:
            answer = study.measure(item)["full"]["text"]
            chunks = [{"title": title, "text": text} for title, text in item.documents]
            row = {"chunks": chunks, "question": item.question, "answers": [answer]}
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
