"""FusionRAG's premise on real text: are passages that a question needs each other's neighbours?

FusionRAG (arXiv:2601.12904, section 3.1 and Fig. 7a) encodes a chunk behind its most similar
chunks, for chunks that are retrieved together are often similar. No model is needed to look:
passages and questions are those of ``retrieval.py``, with the retrievers of a knowledge base, and
the neighbours of a passage are what the same retriever finds for the passage's own text. By number
of neighbours, with 95 % intervals over questions:

- best two: how often one of the two passages that are found first for a question is a neighbour of
  the other (Fig. 7a).
- some gold pair: of how many questions two passages that it needs are neighbours, one of the other.
- gold pairs: the share of pairs of passages that a question needs of which that is true.
- gold seen: the share of needed passages whose KV has seen another passage that the question needs,
  as it is among the passage's neighbours.

example: python benchmarks/premise.py --data DIR --out results.json
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from retrieval import CHUNK_TOKENS, Indexed, Question, Set, indexed, read_sets
from script import Result, run_script

from jaxrag.base.errors import RequestError
from jaxrag.base.options import option
from jaxrag.cli.output import titled
from jaxrag.library.retrieve.base import Retriever
from jaxrag.measure.evals.statistics import plain, share
from jaxrag.measure.machine import describe
from jaxrag.measure.table import Table, page, percent

NEIGHBOURS = (2, 5, 10)
SETS = ("HotpotQA", "MuSiQue")
MEASURES = ("best two", "some gold pair", "gold pairs", "gold seen")

Ranked = Mapping[str, Sequence[str]]  # the neighbours of a passage, the nearest first


@dataclasses.dataclass(frozen=True)
class PremiseOptions:
    """Of this script."""

    data: Path = option(dataclasses.MISSING, "where the sets lie", "DIR")
    embedder: Path | None = option(None, "an encoder", "DIR", unset="LSA")


def measure(options: PremiseOptions) -> Result:
    """Both sets under both retrievers."""
    sets = [one for one in read_sets(options.data) if one.name in SETS]
    if not sets:
        raise RequestError(f"--data {options.data}: no {' or '.join(SETS)} below it; see --help")
    rows: list[dict[str, Any]] = []
    for one in sets:
        with indexed(one, options.embedder, "exact") as found:
            for name, retriever in (("bm25", found.by_words), (found.embedder, found.by_vector)):
                rows += _rows(
                    one, name, _neighbours(found, retriever), _best(one, found, retriever)
                )
    return {
        "benchmark": "premise",
        "chunk_tokens": CHUNK_TOKENS,
        "neighbours": list(NEIGHBOURS),
        "rows": rows,
        "machine": describe(),
    }


def _neighbours(found: Indexed, retriever: Retriever) -> Ranked:
    """Of every passage the nearest others, by its text as a question."""
    near: dict[str, list[str]] = {}
    for chunk_id, text in found.texts.items():
        own = found.documents[chunk_id]
        near.setdefault(own, [])
        for other in _passages(found, retriever, text, max(NEIGHBOURS) + 1):
            if other != own and other not in near[own]:
                near[own].append(other)
    return {passage: others[: max(NEIGHBOURS)] for passage, others in near.items()}


def _best(data: Set, found: Indexed, retriever: Retriever) -> list[list[str]]:
    """Of every question the two passages that are found first."""
    return [_passages(found, retriever, it.text, 2 * max(NEIGHBOURS))[:2] for it in data.questions]


def _passages(found: Indexed, retriever: Retriever, text: str, depth: int) -> list[str]:
    [ranking] = retriever.search([text], depth)
    return list(dict.fromkeys(found.documents[hit.chunk_id] for hit in ranking))


def _rows(
    data: Set, name: str, near: Ranked, best: Sequence[Sequence[str]]
) -> Iterator[dict[str, Any]]:
    for count in NEIGHBOURS:
        yield {
            "set": data.name,
            "passages": len(data.passages),
            "questions": len(data.questions),
            "retriever": name,
            "neighbours": count,
            **{
                measure: _share(each)
                for measure, each in shares(data.questions, near, best, count).items()
            },
        }


def shares(
    questions: Sequence[Question], near: Ranked, best: Sequence[Sequence[str]], count: int
) -> dict[str, list[list[bool]]]:
    """What holds, by measure and question, with so many neighbours of a passage."""
    close = {passage: set(others[:count]) for passage, others in near.items()}

    def linked(a: str, b: str) -> bool:
        return a in close[b] or b in close[a]

    found: dict[str, list[list[bool]]] = {name: [] for name in MEASURES}
    for question, two in zip(questions, best, strict=True):
        gold = sorted(question.gold)
        found["best two"].append([linked(*two)] if len(two) == 2 else [])
        pairs = [linked(*pair) for pair in itertools.combinations(gold, 2)]
        found["some gold pair"].append([any(pairs)])
        found["gold pairs"].append(pairs)
        found["gold seen"].append([bool(close[one] & question.gold) for one in gold])
    return found


def _share(each: Sequence[Sequence[bool]]) -> dict[str, Any] | None:
    """Of all pairs or passages; those of one question belong together."""
    flat = np.array([one for of in each for one in of], np.bool_)
    samples = np.array([i for i, of in enumerate(each) for _ in of], np.int64)
    return plain(share(flat, samples))


def tables(result: Result) -> Iterator[Table]:
    """A line for each set, retriever and measure."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row, name in itertools.product(result["rows"], MEASURES):
        key = (f"{row['set']}, {row['passages']} passages", row["retriever"], name)
        found.setdefault(key, []).append(percent(row[name]))
    head = ["set", "retriever", "", *(f"{count} neighbours" for count in result["neighbours"])]
    yield Table(
        "passages that a question finds or needs, and are each other's neighbours, in %",
        [head, *([*key, *cells] for key, cells in found.items())],
        names=3,
    )


if __name__ == "__main__":
    sys.exit(
        run_script(
            __doc__,
            PremiseOptions,
            measure,
            lambda result: titled(tables(result)),
            markdown=lambda result: page(tables(result)),
        )
    )
