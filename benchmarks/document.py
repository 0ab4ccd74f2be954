"""Questions about a stored long document, each asked by a new process.

One text becomes one chunk of a knowledge base, or chunks of a given length that are all retrieved,
stored with indexes of their keys. Then every question is asked in up to four ways, each time by
``jaxrag ask`` in a process of its own: with decode rule ``retrieval`` over the stored indexes, K
and V in host memory or on the device, with the stored KV and dense attention, and with full
prefill. The account of every answer says how many chunk tokens were encoded and how many indexes
were trained for it. Weights are random: only times and counts mean anything, and the effort of a
search is given, for where there is nothing to find none would do. The first question of each kind
compiles; programs are kept on disk, and later processes read them.

example: python benchmarks/document.py --text long.txt --tokens 32768 --out result.json
"""

import dataclasses
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from decode_rules import DecodeOptions
from ingest_throughput import invented_texts
from script import run_script
from tokenizers import Tokenizer

from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_count
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import random_named
from jaxrag.models.export import export_hf
from jaxrag.models.spec import init_params
from jaxrag.models.text import byte_level
from jaxrag.models.text.progress import followed
from jaxrag.reuse.attention_index.document import indexing_from

KINDS: dict[str, tuple[str, ...]] = {
    "retrieval": ("--method", "turborag", "--decode", "retrieval", "--kv", "device"),
    "retrieval, kv=host": ("--method", "turborag", "--decode", "retrieval", "--kv", "host"),
    "dense": ("--method", "turborag"),
    "full prefill": ("--method", "full_attention"),
}
_VOCABULARY = 2000
_SLACK = 512  # tokens of a prompt beside the document: question, answer, pages


@dataclasses.dataclass(frozen=True)
class DocumentOptions:
    """What to measure.

    Attributes:
      text: a file; None invents words.
      tokens: of the document at most.
      attention_index: what it is stored with, as ``jaxrag ingest --attention-index``.
      chunk_tokens: of its chunks, all of which are retrieved; None: it is one chunk.
      layers: of a random Llama, as in ``decode_rules.py``.
      questions: after one that compiles.
      max_new_tokens: of an answer.
      seed: of what is drawn.
      kinds: of KINDS, how it is asked.
    """

    text: str | None = option(None, "the document", "FILE", unset="invented words")
    tokens: int = option(32_768, "of it at most", "N", parse=parse_count)
    attention_index: str = option("lists:exact_below=4096,probes=3", "as of jaxrag ingest", "KIND")
    chunk_tokens: int | None = option(
        None, "of its chunks, all retrieved", "N", parse=parse_count, unset="one chunk"
    )
    layers: int = option(4, "of the model", "N")
    questions: int = option(3, "after one that compiles", "N", flag="--num-questions")
    max_new_tokens: int = option(16, "of an answer", "N", parse=parse_count)
    seed: int = option(0, "of what is drawn", "N")
    kinds: tuple[str, ...] = option(
        tuple(KINDS),
        "how it is asked, such as 'retrieval, kv=host;dense'",
        "KIND;...",
        parse=lambda text: tuple(text.split(";")),
        unset="all",
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        for name in ("tokens", "layers", "questions"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name}={getattr(self, name)}: expected a positive integer")
        if self.max_new_tokens < 2:
            raise RequestError(
                f"max_new_tokens={self.max_new_tokens}: expected 2 or more; the first one comes "
                "from prefill, which no decode rule changes"
            )
        if self.chunk_tokens is not None and not 0 < self.chunk_tokens <= self.tokens:
            raise RequestError(
                f"chunk_tokens={self.chunk_tokens}: expected 1 to {self.tokens}, the whole document"
            )
        odd = [kind for kind in self.kinds if kind not in KINDS]
        if odd or not self.kinds:
            raise RequestError(f"kinds={odd}: expected some of {', '.join(map(repr, KINDS))}")
        if self.text is not None and not Path(self.text).is_file():
            raise RequestError(f"--text {self.text}: no such file")
        least = self.chunk_tokens or self.tokens
        if not indexing_from(self.attention_index).covers(least):
            raise RequestError(
                f"tokens={least}: {self.attention_index!r} makes no index of so few; lower "
                "its exact_below, or take a longer document"
            )


def run(options: DocumentOptions) -> dict[str, Any]:
    """Ingest, ask, and compare; returns rows, machine and setting, JSON-able."""
    with tempfile.TemporaryDirectory(prefix="jaxrag-bench-") as folder:
        work = Path(folder)
        about, question_words = _write(work, options)
        ingest = ["ingest", str(work / "document.txt"), "--kb", str(work / "kb")]
        ingest += ["--model", str(work / "model"), "--template", "plain", "--overlap", "0"]
        ingest += ["--encoder", "isolated", "--stored", "native"]
        ingest += ["--chunk-tokens", str(about["chunk_tokens"])]
        ingest += ["--attention-index", options.attention_index]
        made, _ = _jaxrag(ingest)
        stats, _ = _jaxrag(["kb", "stats", str(work / "kb")])
        cache = 2 * (about["tokens"] + _SLACK)
        chunks = str(made["chunks"])
        ask = ["--kb", str(work / "kb"), "--k", chunks, "--cache-tokens", str(cache)]
        ask += ["--max-new-tokens", str(options.max_new_tokens)]
        kinds = {kind: KINDS[kind] for kind in options.kinds}
        rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for word in followed(question_words, "ask", "question"):
            for kind, how in kinds.items():
                answer, seconds = _jaxrag(["ask", f"What is said of {word}?", *ask, *how])
                if len(answer["sources"]) != made["chunks"]:
                    raise RequestError(
                        f"{word!r} was found in {len(answer['sources'])} of {made['chunks']} "
                        "chunks; take longer chunks, or another seed"
                    )
                rows[kind].append(_row(answer, seconds))
        commands = [ingest, *(["ask", "QUESTION", *ask, *how] for how in kinds.values())]
    return {
        "benchmark": "document",
        **about,
        "attention_index": options.attention_index,
        "index": stats["attention_index"],
        "max_new_tokens": options.max_new_tokens,
        "ingest_seconds": made["seconds"],
        "chunks": made["chunks"],
        "rows": rows,
        "ttft_full_over_retrieval": _ratio(rows),
        "commands": [_shown(command, work) for command in commands],
        "machine": describe(),
    }


def _write(work: Path, options: DocumentOptions) -> tuple[dict[str, Any], list[str]]:
    """The document and a random model that reads it; what they are, and words to ask about."""
    rng = np.random.default_rng(options.seed)
    if options.text is None:
        drawn = invented_texts(rng, options.tokens)
        text = "\n".join(itertools.islice(drawn, options.tokens // 1000 + 1))
    else:
        text = Path(options.text).read_text(encoding="utf-8")
    tokenizer = byte_level.train([text], _VOCABULARY)
    text = tokenizer.decode(tokenizer.encode(text).ids[: options.tokens])
    (work / "document.txt").write_text(text, encoding="utf-8")
    count = len(tokenizer.encode(text).ids)
    indexing = indexing_from(options.attention_index)
    if not indexing.covers(count):
        raise RequestError(
            f"--text {options.text}: {count} tokens, and {options.attention_index!r} makes no "
            "index of so few; take a longer text, or lower exact_below"
        )
    config = dataclasses.replace(
        DecodeOptions(layers=options.layers).config(),
        vocab_size=tokenizer.get_vocab_size(),
        max_positions=count + 2 * _SLACK,
    )
    params = jax.jit(lambda key: init_params(config, key))(jax.random.key(options.seed))
    export_hf(work / "model", params, config)
    byte_level.save(tokenizer, work / "model")
    words = _words_of_all(tokenizer.encode(text).ids, tokenizer, options.chunk_tokens or count)
    if not words:
        raise RequestError(
            f"--text {options.text}: it has no word to ask about that stands in every chunk of "
            f"{options.chunk_tokens or count} tokens; take longer chunks"
        )
    chosen = rng.choice(words, options.questions + 1).tolist()
    about = {
        "model": f"{random_named(config)}, {config.num_layers} layers",
        "text": "invented words" if options.text is None else Path(options.text).name,
        "tokens": count,
        "chunk_tokens": options.chunk_tokens or count + 8,
        "kv_bytes": count * config.kv_bytes_per_token,
    }
    return about, chosen


def _words_of_all(ids: Sequence[int], tokenizer: Tokenizer, chunk_tokens: int) -> list[str]:
    """Words that a search finds in every chunk, wherever between two sentences it is cut."""
    starts = range(0, max(len(ids) - chunk_tokens // 2, 1), chunk_tokens)
    middles = [
        tokenizer.decode(ids[at + chunk_tokens // 4 : at + 3 * chunk_tokens // 4]).split()[1:-1]
        for at in starts
    ]
    words = set[str].intersection(*map(set, middles))
    return sorted(word for word in words if word.isalpha())


def _jaxrag(arguments: Sequence[str]) -> tuple[dict[str, Any], float]:
    """Run the command in a new process: its JSON object, and the seconds of the whole process.

    Raises RequestError with the command's own message where it fails.
    """
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "jaxrag", *arguments, "--json"], capture_output=True, text=True
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise RequestError(f"jaxrag {arguments[0]} failed: {lines[-1]}")
    return dict(json.loads(done.stdout)), seconds


def _row(answer: dict[str, Any], seconds: float) -> dict[str, Any]:
    kept = ("timings", "counts", "indexes", "flops", "notes", "token_ids")
    return {name: answer[name] for name in kept} | {"process_seconds": seconds}


def _median(rows: Sequence[dict[str, Any]], name: str = "ttft") -> float:
    """Of a timing, without the question that compiles."""
    return statistics.median(row["timings"][name] for row in rows[1:])


def _ratio(rows: dict[str, list[dict[str, Any]]]) -> float | None:
    """Time to first token of full prefill by that of retrieval; None where either was left out."""
    fast = next((rows[kind] for kind in KINDS if kind in rows and "retrieval" in kind), None)
    full = rows.get("full prefill")
    return None if fast is None or full is None else _median(full) / _median(fast)


def _shown(command: Sequence[str], work: Path) -> str:
    """A command as one would type it."""
    return "jaxrag " + shlex.join(part.replace(f"{work}/", "") for part in command)


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    index = result["index"]
    yield (
        f"{result['model']}; a document of {result['tokens']} tokens ({result['text']}) in "
        f"{result['chunks']} chunk(s), {result['kv_bytes'] / 1e6:.0f} MB of KV, with "
        f"{result['attention_index']} of {index['bytes'] / 1e6:.0f} MB; ingested in "
        f"{result['ingest_seconds']:.1f} s"
    )
    questions = len(next(iter(result["rows"].values()))) - 1
    yield f"each of {questions} questions by a new process after one that compiles; medians"
    yield (
        f"{'':<19} {'ttft ms':>9} {'load ms':>9} {'ms/token':>9} {'process s':>9} "
        f"{'encoded':>8} {'trained':>8} {'stored keys':>12} {'GFLOP':>8}"
    )
    for kind, rows in result["rows"].items():
        indexes = [row["indexes"] for row in rows]
        yield (
            f"{kind:<19} {1000 * _median(rows):>9.1f} {1000 * _median(rows, 'load'):>9.1f} "
            f"{1000 * _median(rows, 'per_token'):>9.1f} "
            f"{statistics.median(row['process_seconds'] for row in rows[1:]):>9.1f} "
            f"{max(row['counts']['encoded'] for row in rows):>8} "
            f"{max(one.get('trained', 0) for one in indexes):>8} "
            f"{min(one.get('stored', 0) for one in indexes):>12} "
            f"{rows[-1]['flops'] / 1e9:>8.1f}"
        )
    if (ratio := result["ttft_full_over_retrieval"]) is not None:
        yield f"full prefill / retrieval, time to first token: {ratio:.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    return run_script(__doc__, DocumentOptions, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
