"""Change one document among many: what is encoded again, found, freed on disk, and answered.

Makes a knowledge base of random documents over a small random Llama, adds them all again with one
of them changed, collects the garbage, and compares with a knowledge base that is made afresh from
the same documents. Exits with an error when anything is not as it should be.

example: python benchmarks/update.py --documents 1000 --out benchmarks/results/update.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from trained import trained_tokenizer

from jaxrag.cli import run_command
from jaxrag.cli.options import add_json
from jaxrag.cli.output import give_out, require_folder
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import llama
from jaxrag.models.model import Model, random_model
from jaxrag.serve.answers import Result
from jaxrag.serve.generate import generate

CHUNK_TOKENS = 128
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "larch", "maple")
OLD, NEW = "quokka", "wombat"  # words that only the changed document holds


def main() -> int:
    """Run, print and check; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=1000, metavar="N", help="(1000)")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(parser)
    return run_command(run, parser.parse_args())


def run(args: argparse.Namespace) -> int:
    """Print the result, indented or on one line; exit code 1 where a check failed."""
    require_folder(args.out)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args.documents) | {"machine": describe()}
    give_out(args, result, [json.dumps(result, indent=1)])
    failed = [name for name, passed in result["checks"].items() if not passed]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def measure(folder: Path, count: int) -> dict[str, Any]:
    """Add, change, add again, collect; numbers and checks, JSON-able."""
    model = small_model()
    before = [Document(f"{n:05}", text_of(n)) for n in range(count)]
    at = count // 2
    head, tail = text_of(at)[:CHUNK_TOKENS], text_of(at)[CHUNK_TOKENS:]
    before[at] = Document(f"{at:05}", f"{head} {OLD} {tail}")
    after = [*before]
    after[at] = Document(f"{at:05}", f"{head} {NEW} {tail}")  # of the same length
    question = f"Where is the {OLD} or {NEW}?"

    with open_kb(folder / "kb", model) as kb:
        made = kb.add(before)
        old_hits = kb.search(OLD, k=1)
        old_answer = ask(kb, question)
        disk_full = du(folder / "kb")
        seconds = time.perf_counter()
        again = kb.add(after)
        seconds = time.perf_counter() - seconds
        found_old, found_new = kb.search(OLD, k=1), kb.search(NEW, k=1)
        new_answer = ask(kb, question)
        orphans = kb.stats(walk=True)["stored"]
        disk_changed = du(folder / "kb")
        collected = kb.gc(grace_seconds=0)
        disk_collected = du(folder / "kb")
        later_answer = ask(kb, question)
        sizes = {d.id: d.num_chunks for d in kb.documents()}
        whole = kb.verify()
    with open_kb(folder / "fresh", model) as fresh:
        fresh.add(after)
        fresh_answer = ask(fresh, question)
    return {
        "documents": count,
        "chunks": made.chunks,
        "chunks_of_the_changed_document": sizes[f"{at:05}"],
        "encoded_first": made.encoded,
        "encoded_again": again.encoded,
        "unchanged": again.unchanged,
        "replaced": again.replaced,
        "seconds_first": round(made.seconds, 3),
        "seconds_again": round(seconds, 3),
        "orphan_chunks": orphans["orphans"],
        "freed_chunks": collected.chunks,
        "freed_bytes": collected.nbytes,
        "du_full": disk_full,
        "du_changed": disk_changed,
        "du_collected": disk_collected,
        "checks": {
            "only the changed document was replaced": (again.replaced, again.unchanged)
            == (1, count - 1),
            "only its changed chunks were encoded": 0 < again.encoded < sizes[f"{at:05}"],
            "the old text was found before": bool(old_hits),
            "the old text is unreachable": found_old == [],
            "the new text is found": [hit.document_id for hit in found_new] == [f"{at:05}"],
            "gc frees as many chunks as were replaced": collected.chunks
            == orphans["orphans"]
            == again.encoded,
            "gc frees their bytes on disk": disk_changed - disk_collected >= collected.nbytes,
            "the answer comes from the new text": NEW in new_answer.sources[0].text
            and OLD in old_answer.sources[0].text,
            "the answer is that of a fresh knowledge base": new_answer.token_ids
            == fresh_answer.token_ids,
            "gc changes no answer": later_answer.token_ids == new_answer.token_ids,
            "nothing was encoded to answer": new_answer.counts["encoded"] == 0,
            "every chunk is whole": whole.ok > 0 and whole.damaged == (),
        },
    }


def ask(kb: KnowledgeBase, question: str) -> Result:
    """The greedy answer from the best chunk."""
    result: Result = generate(question, kb=kb, k=1, max_new_tokens=16)
    return result


def open_kb(folder: Path, model: Model) -> KnowledgeBase:
    """A knowledge base of small chunks without overlap."""
    return KnowledgeBase.open(
        folder, model, template="plain", chunk_tokens=CHUNK_TOKENS, overlap=0,
        chunk_by="tokens", encoders=["isolated"],
    )  # fmt: skip


def du(folder: Path) -> int:
    """Bytes on disk, as du counts them."""
    out = subprocess.run(["du", "-s", "-B1", str(folder)], capture_output=True, check=True)
    return int(out.stdout.split()[0])


def text_of(seed: int) -> str:
    """About four chunks of random words."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, 80))


def small_model() -> Model:
    """A random Llama whose tokenizer has one token per byte."""
    config = llama(
        vocab_size=256, num_layers=2, model_dim=64, mlp_dim=128, num_heads=4, num_kv_heads=2,
        head_dim=16, max_positions=1024, tie_embeddings=False, bos_id=None, eos_ids=(),
    )  # fmt: skip
    return random_model(config, tokenizer=trained_tokenizer([], config.vocab_size))


if __name__ == "__main__":
    sys.exit(main())
