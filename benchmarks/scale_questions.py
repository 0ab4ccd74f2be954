"""Whether searches of a large knowledge base find what looking at everything finds.

The passages of HotpotQA and of RGB in Chinese are added to a knowledge base that scale.py has made,
and their questions are asked: by words, held against the sums of all postings; by vectors, held
against the products of all vectors; and by both. Each question whose 10 hits differ is listed.

example: python benchmarks/scale_questions.py --texts TEXTS --folder /tmp/scale --out FILE
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import batched
from pathlib import Path
from typing import Any

from scale import embed, opened, put_parts
from scale_texts import Texts

from jaxrag.cli import run_command
from jaxrag.cli.options import add_json
from jaxrag.cli.output import give_out, require_folder
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.search import SearchMode
from jaxrag.library.retrieve.base import Found
from jaxrag.library.retrieve.lance import VectorIndex
from jaxrag.library.retrieve.retrievers import fuse
from jaxrag.measure.machine import describe

ASKED = 60  # questions of each set
K = 10
CANDIDATES = 50  # of each ranking that is fused, as the hybrid search has them
FIRST = 2 * 10**9  # number of the first passage
BATCH = 1000


def main() -> int:
    """Ask, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", required=True, metavar="DIR", help="files of real text")
    parser.add_argument("--folder", required=True, metavar="DIR", help="of the knowledge base")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(parser)
    return run_command(measure, parser.parse_args())


def measure(args: argparse.Namespace) -> int:
    """Add the passages, then ask."""
    require_folder(args.out)
    data = Path(args.texts)
    questions, passages = sets(data)
    with opened(args, Texts(data)) as kb:
        there = kb._catalog.document("passage 0") is not None  # of an earlier run
        for some in batched([] if there else enumerate(passages), BATCH):
            put_parts(kb, [(Document(f"passage {n}", text), FIRST + n) for n, text in some])
        result = {
            "benchmark": "scale_questions",
            "chunks": kb.counts()["chunks"],
            "sets": {name: asked(kb, own) for name, own in questions.items()},
            "machine": describe(),
        }
    give_out(args, result, [json.dumps(result, indent=1, ensure_ascii=False)])
    return 0


def sets(data: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The questions of each set, and the passages of both, each once."""
    hotpot = json.loads((data / "hippo-multihop" / "hotpotqa_train.json").read_text())
    rgb = [json.loads(it) for it in (data / "rgb" / "zh_refine.json").read_text().splitlines()]
    passages = [" ".join(text) for it in hotpot for _, text in it["context"]]
    passages += [text for it in rgb for text in (*it["positive"], *it["negative"])]
    questions = {
        "HotpotQA": [it["question"] for it in hotpot[:ASKED]],
        "RGB zh": [it["query"] for it in rgb[:ASKED]],
    }
    one_line = (" ".join(text.split()) for text in passages)
    return questions, list(dict.fromkeys(text for text in one_line if text))


def asked(kb: KnowledgeBase, questions: Sequence[str]) -> dict[str, Any]:
    """For each way to search the recall, and the questions whose hits differ."""
    assert kb._vectors is not None
    words = kb._catalog.words()
    exact = VectorIndex.open(kb.path / "vectors", embed([""]).shape[1], "exact", mode="r")

    def by_vectors(question: str, k: int) -> list[Found]:
        ids, scores = exact.search(embed([question]), k)
        return [Found(*it) for it in zip(ids[0].tolist(), scores[0].tolist(), strict=True)]

    def by_both(question: str, k: int) -> list[Found]:
        rankings = words.search(question, CANDIDATES), by_vectors(question, CANDIDATES)
        return fuse(rankings, k)

    ways: dict[SearchMode, Callable[[str, int], list[Found]]] = {
        "bm25": words.search,
        "vector": by_vectors,
        "hybrid": by_both,
    }
    found: dict[str, Any] = {"questions": len(questions)}
    for mode, all_of_it in ways.items():
        hits = wanted = 0
        differ = []
        for question in questions:
            expected = [it.chunk_id for it in all_of_it(question, K)]
            got = [hit.chunk_id for hit in kb.search(question, K, mode=mode)]
            hits, wanted = hits + len(set(got) & set(expected)), wanted + len(expected)
            if got != expected:
                differ.append({"question": question, "missed": sorted({*expected} - {*got}),
                               "instead": sorted({*got} - {*expected})})  # fmt: skip
        found[mode] = {"recall": round(hits / wanted, 5), "differ": differ}
    return found


if __name__ == "__main__":
    sys.exit(main())
