"""What the digests of the catalog's rows cost: two checkouts, in turns, on the same work.

A knowledge base of random documents over a random model of one layer, in chunks of 48 tokens: the
less a chunk costs to encode, the more its rows weigh. Every turn is a process of its own and adds
all documents at once, then some one by one, then asks questions by words.

example: python benchmarks/digests.py ../before . --out benchmarks/results/digests.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from trained import trained_tokenizer

from jaxrag.cli import run_command
from jaxrag.cli.options import add_json
from jaxrag.cli.output import give_out, require_folder
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import llama
from jaxrag.models.model import random_model

CHUNK_TOKENS = 48
VOCABULARY = 20_000  # words, drawn as natural text draws them
ONE_BY_ONE = 40
QUESTIONS = 300


def main() -> int:
    """Run the turns, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="+", metavar="DIR", help="before, after")
    parser.add_argument("--turns", type=int, default=7, metavar="N", help="of each (7)")
    parser.add_argument("--documents", type=int, default=200, metavar="N", help="(200)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(parser)
    args = parser.parse_args()
    return run_command(one_turn if args.child else compare, args)


def compare(args: argparse.Namespace) -> int:
    """Run both in turns; print medians, indented or on one line."""
    require_folder(args.out)
    before, after = (Path(path).absolute() for path in args.checkouts)
    turns: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    for _ in range(args.turns):
        for name, folder in (("before", before), ("after", after)):
            turns[name].append(in_checkout(folder, args.documents))
    medians = {
        name: {field: statistics.median(turn[field] for turn in rows) for field in rows[0]}
        for name, rows in turns.items()
    }
    pairs = list(zip(turns["before"], turns["after"], strict=True))
    result = {
        "benchmark": "digests",
        "documents": args.documents,
        "chunk_tokens": CHUNK_TOKENS,
        "median_ratio_of_ingest": ratio(pairs, "ingest_processor_seconds"),
        "median_ratio_of_one_document": ratio(pairs, "add_processor_ms"),
        "search_slower_ms": round(
            statistics.median(b["search_ms"] - a["search_ms"] for a, b in pairs), 3
        ),
        "first_search_slower_ms": round(
            statistics.median(b["first_search_ms"] - a["first_search_ms"] for a, b in pairs), 3
        ),
        "medians": medians,
        "turns": turns,
        "machine": describe(),
    }
    give_out(args, result, [json.dumps(result, indent=1)])
    return 0


def ratio(pairs: list[tuple[dict[str, float], dict[str, float]]], field: str) -> float:
    """The median over the turns of after / before."""
    return round(statistics.median(b[field] / a[field] for a, b in pairs), 4)


def in_checkout(folder: Path, documents: int) -> dict[str, float]:
    """One turn, by the code of a checkout."""
    command = [sys.executable, __file__, str(folder), "--child", "--documents", str(documents)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def one_turn(args: argparse.Namespace) -> int:
    """Do the work once and print what it took."""
    texts = [text_of(n) for n in range(200)]
    tokenizer = trained_tokenizer(texts, 4096)
    config = llama(
        vocab_size=tokenizer.vocab_size, num_layers=1, model_dim=32, mlp_dim=64, num_heads=4,
        num_kv_heads=2, head_dim=8, max_positions=1024, tie_embeddings=False, bos_id=None,
        eos_ids=(),
    )  # fmt: skip
    model = random_model(config, tokenizer=tokenizer)
    documents = [Document(f"{n:06}", text_of(n)) for n in range(args.documents)]
    with (
        tempfile.TemporaryDirectory() as name,
        KnowledgeBase.open(
            Path(name) / "kb",
            model,
            template="plain",
            chunk_tokens=CHUNK_TOKENS,
            overlap=0,
            chunk_by="tokens",
            encoders=["isolated"],
        ) as kb,
    ):
        kb.add(documents[:4])  # programs are compiled
        start = time.process_time()
        made = kb.add(documents[4:])
        ingest = time.process_time() - start
        start = time.process_time()
        for n in range(ONE_BY_ONE):
            kb.add([Document(f"one-{n}", text_of(10**6 + n))])
        adds = time.process_time() - start
        rng = np.random.default_rng(1)
        questions = [" ".join(draw(rng, 8)) for _ in range(QUESTIONS)]
        first: list[float] = []
        times: list[float] = []
        for number, question in enumerate(questions):
            if number % 30 == 0:
                kb.remove([f"one-{number // 30}"])
            start = time.perf_counter()
            kb.search(question, 5, mode="bm25")
            taken = 1000 * (time.perf_counter() - start)
            (times if number % 30 else first).append(taken)
    print(
        json.dumps(
            {
                "chunks": made.chunks,
                "ingest_processor_seconds": round(ingest, 4),
                "add_processor_ms": round(1000 * adds / ONE_BY_ONE, 3),
                "search_ms": round(statistics.median(times), 4),
                "first_search_ms": round(statistics.median(first), 4),
            }
        )
    )
    return 0


def draw(rng: np.random.Generator, count: int) -> list[str]:
    """Words; the n-th is drawn about 1 / n as often as the first."""
    ranks = np.exp(rng.uniform(0, np.log(VOCABULARY), count)).astype(int)
    return [f"w{rank:x}" for rank in ranks]


def text_of(seed: int) -> str:
    """About ten chunks."""
    return " ".join(draw(np.random.default_rng(seed), 240))


if __name__ == "__main__":
    sys.exit(main())
