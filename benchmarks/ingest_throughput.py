"""Throughput of ingest, from texts to a committed knowledge base, beside a plain forward pass.

The plain pass runs the same tokens in the same packed rows through the model and keeps nothing.
Both are measured in turn, so that a slow moment of the machine falls on both; the first round is a
warm-up that compiles. The best of each is compared, since what else runs on a machine only ever
slows down; medians stand beside it. Processor seconds, of all threads, are hardly disturbed by
others: on a CPU their ratio says what ingest costs beyond the forward pass.

With an encoder that sees neighbours every round also makes a knowledge base of that variant: the
chunks' own KV first (``after_prefix``), which is not part of the figure, then every chunk behind
its neighbours, from their search to the committed KV. The time of a chunk over that of an isolated
one is set against the same ratio of their FLOPs.

example: python benchmarks/ingest_throughput.py --tokens 16384 --out ingest.json
"""

import contextlib
import dataclasses
import functools
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from limits import matmul_peak
from script import run_script

from jaxrag.base.config import DType, ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_count
from jaxrag.base.types import Array, HostArray, Tokens
from jaxrag.library.documents import Document
from jaxrag.library.documents.chunking import Chunking, split
from jaxrag.library.knowledge_base import KnowledgeBase, ingest
from jaxrag.library.knowledge_base.reports import RefreshReport
from jaxrag.measure.bench.options import (
    DRAWN,
    DTYPE,
    RANDOM_100M,
    TEMPORARY,
    WARM,
    check_folder,
    check_positive,
)
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import LLAMA_100M, random_named, write_random
from jaxrag.models.attention import PackedAttend
from jaxrag.models.decoder import forward
from jaxrag.models.flops import forward_flops
from jaxrag.models.model import Model, load_model
from jaxrag.models.rope import RopeTable
from jaxrag.models.spec import Params
from jaxrag.models.text import byte_level
from jaxrag.models.text.progress import followed
from jaxrag.models.text.prompts import TEMPLATES
from jaxrag.reuse.encode import encoder_named
from jaxrag.reuse.encode.neighbours import batch_rows
from jaxrag.reuse.encode.packed import packed_batches

Clock = tuple[float, float]  # seconds on the wall, and of all processors together

TEMPLATE = "plain"
_DOCUMENT_WORDS = 1500


@dataclasses.dataclass(frozen=True)
class IngestOptions:
    """What to measure. ``model`` None makes a random Llama of 100M parameters."""

    model: str | None = option(None, metavar="MODEL", unset=RANDOM_100M)
    dtype: DType = option("float32", DTYPE)
    tokens: int = option(16_384, "of all documents", "N", parse=parse_count)
    chunk_tokens: int = option(512, "of a chunk", "N", parse=parse_count)
    repeats: int = option(5, WARM, "N")
    folder: str | None = option(None, "a disk to measure", "DIR", unset=TEMPORARY)
    seed: int = option(0, DRAWN, "N")
    encoder: str = option(
        "isolated",
        "also encode every chunk behind similar ones",
        choices=("isolated", "neighbours", "neighbours_joint"),
    )
    neighbours: int = option(10, "how many", "N")  # read by encoders that see them

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be measured."""
        check_positive(self, "repeats", "chunk_tokens", "neighbours")
        if self.tokens < self.chunk_tokens:
            raise RequestError(
                f"tokens={self.tokens}: expected at least one chunk of {self.chunk_tokens}"
            )
        encoder_named(self.encoder)
        check_folder(self.folder)


def run(options: IngestOptions) -> dict[str, Any]:
    """Measure; returns throughputs, their ratio, the machine and the setting, JSON-able."""
    rng = np.random.default_rng(options.seed)
    with tempfile.TemporaryDirectory(prefix="jaxrag-bench-", dir=options.folder) as folder:
        work = Path(folder)
        texts = invented_texts(rng, options.tokens)
        path = options.model or _written(work / "model", options, next(texts))
        model = load_model(path, dtype=options.dtype)
        documents, batches = corpus(model, texts, options)
        clocks: dict[str, list[Clock]] = {"plain": [], "ingest": []}
        behind: list[_Behind] = []
        peaks: list[float] = []
        for round_ in followed(range(options.repeats + 1), "ingest", "round"):
            peaks.append(matmul_peak(options.dtype))
            with _clock(clocks["plain"]):
                _plain(model, batches)
            with (
                KnowledgeBase.open(
                    work / f"kb{round_}",
                    model,
                    template=TEMPLATE,
                    chunk_tokens=options.chunk_tokens,
                    overlap=0,
                    chunk_by="tokens",
                    encoders=["isolated"],
                ) as kb,
                _clock(clocks["ingest"]),
            ):
                kb.add(documents)
            if encoder_named(options.encoder).sees_neighbours:
                place = work / f"behind{round_}"
                behind.append(encode_behind(model, documents, batches, options, place))
        result = _result(options, model, batches, clocks, max(peaks))
        if behind:
            result["neighbours"] = _neighbours_result(options, result, behind[1:])
        return result


@dataclasses.dataclass(frozen=True)
class _Behind:
    """One round of encoding every chunk behind its neighbours."""

    refreshed: RefreshReport
    flops: int


def encode_behind(
    model: Model,
    documents: Sequence[Document],
    batches: Sequence[Sequence[HostArray]],
    options: IngestOptions,
    path: Path,
) -> _Behind:
    """Make a knowledge base at ``path`` and encode its chunks behind their neighbours."""
    with KnowledgeBase.open(
        path,
        model,
        template=TEMPLATE,
        chunk_tokens=options.chunk_tokens,
        overlap=0,
        chunk_by="tokens",
        encoders=("after_prefix", options.encoder),
        neighbours=options.neighbours,
    ) as kb:
        refreshed = kb.add(documents).neighbours
        assert refreshed is not None
        prefix = len(TEMPLATES[TEMPLATE].prefix_ids(model.text_tokenizer()))
        lengths = (len(ids) for batch in batches for ids in batch)
        flops = 0
        for document in documents:
            chunk_ids = kb.chunks.of_document(document.id)
            for others in kb.neighbours_of(chunk_ids, options.encoder):
                length, before = next(lengths), prefix + sum(map(len, others))
                joint = encoder_named(options.encoder).neighbours == "joint"
                span = (before + length, 0) if joint else (length, before)
                flops += forward_flops(model.config, [span], num_logits=0)
    return _Behind(refreshed, flops)


def _neighbours_result(
    options: IngestOptions, result: dict[str, Any], rounds: Sequence[_Behind]
) -> dict[str, Any]:
    """Throughput behind neighbours, and the time of a chunk beside its FLOPs."""
    best = min(rounds, key=lambda it: it.refreshed.seconds)
    report, isolated = best.refreshed, result["ingest"]
    flops_ratio = best.flops / report.encoded * result["chunks"] / result["flops"]
    time_ratio = report.seconds / report.encoded * isolated["chunks_per_second"]
    return {
        "encoder": options.encoder,
        "top_n": options.neighbours,
        "batch_rows": batch_rows(options.chunk_tokens),
        "encoded": report.encoded,
        "context_tokens": report.context_tokens,
        "seconds": report.seconds,
        "median_seconds": statistics.median(it.refreshed.seconds for it in rounds),
        "chunks_per_minute": report.chunks_per_minute,
        "flops": best.flops,
        "flops_per_second": best.flops / report.seconds,
        "flops_ratio": flops_ratio,
        "time_ratio": time_ratio,
        "time_over_flops": time_ratio / flops_ratio,
    }


def _result(
    options: IngestOptions,
    model: Model,
    batches: Sequence[Sequence[HostArray]],
    clocks: dict[str, list[Clock]],
    peak: float,
) -> dict[str, Any]:
    lengths = [len(chunk) for batch in batches for chunk in batch]
    flops = forward_flops(model.config, [(length, 0) for length in lengths], num_logits=0)
    measured = {}
    for name, rounds in clocks.items():
        best = min(wall for wall, _ in rounds[1:])
        measured[name] = {
            "seconds": best,
            "median_seconds": statistics.median(wall for wall, _ in rounds[1:]),
            "processor_seconds": min(processor for _, processor in rounds[1:]),
            "tokens_per_second": sum(lengths) / best,
            "chunks_per_second": len(lengths) / best,
            "flops_per_second": flops / best,
            "flop_utilisation": flops / best / peak,
        }
    plain, whole = measured["plain"], measured["ingest"]
    return {
        "benchmark": "ingest",
        "model": options.model or random_named(model.config),
        "dtype": options.dtype,
        "tokens": sum(lengths),
        "chunks": len(lengths),
        "chunk_tokens": options.chunk_tokens,
        "repeats": options.repeats,
        "flops": flops,
        "kv_bytes": sum(lengths) * model.config.kv_bytes_per_token,
        "matmul_peak_flops_per_second": peak,
        **measured,
        "ingest_over_plain": plain["seconds"] / whole["seconds"],
        "ingest_over_plain_median": plain["median_seconds"] / whole["median_seconds"],
        "ingest_over_plain_processor": plain["processor_seconds"] / whole["processor_seconds"],
        "machine": describe(),
    }


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    yield (
        f"{result['model']}, {result['dtype']}; {result['tokens']} tokens in {result['chunks']} "
        f"chunks, {result['kv_bytes'] / 1e6:.0f} MB of KV; best of {result['repeats']}"
    )
    yield f"{'':>14} {'s':>7} {'chunks/s':>9} {'tokens/s':>9} {'GFLOP/s':>8} {'of peak':>8}"
    for name, title in (("plain", "plain forward"), ("ingest", "ingest")):
        row = result[name]
        yield (
            f"{title:>14} {row['seconds']:>7.2f} {row['chunks_per_second']:>9.2f} "
            f"{row['tokens_per_second']:>9.0f} {row['flops_per_second'] / 1e9:>8.1f} "
            f"{row['flop_utilisation']:>8.1%}"
        )
    yield (
        f"ingest reaches {result['ingest_over_plain']:.1%} of the plain forward pass "
        f"({result['ingest_over_plain_median']:.1%} by medians, "
        f"{result['ingest_over_plain_processor']:.1%} by processor seconds); matmul peak "
        f"{result['matmul_peak_flops_per_second'] / 1e9:.1f} GFLOP/s"
    )
    if "neighbours" in result:
        row = result["neighbours"]
        yield (
            f"{row['encoder']} {row['top_n']}: {row['chunks_per_minute']:.1f} chunks/min, batches "
            f"of {row['batch_rows']}, {row['flops_per_second'] / 1e9:.1f} GFLOP/s; a chunk takes "
            f"{row['time_ratio']:.2f} times an isolated one's time for {row['flops_ratio']:.2f} "
            f"times its FLOPs ({row['time_over_flops']:.2f})"
        )


@functools.partial(jax.jit, static_argnames=("config",))
def _forward(params: Params, config: ModelConfig, tokens: Tokens, rope: RopeTable) -> Array:
    """Final hidden states [B, T, D]; no KV is kept."""
    return forward(params, config, tokens, None, PackedAttend(config, rope, True))[0]


@contextlib.contextmanager
def _clock(rounds: list[Clock]) -> Iterator[None]:
    start = time.perf_counter(), time.process_time()
    yield
    rounds.append((time.perf_counter() - start[0], time.process_time() - start[1]))


def _plain(model: Model, batches: Sequence[Sequence[HostArray]]) -> None:
    """The forward passes that ingest runs, without anything else."""
    prefix = np.zeros(0, np.int32)
    for chunks in batches:
        out = [
            _forward(model.params, model.config, tokens, rope)
            for tokens, rope, _ in packed_batches(model, prefix, chunks)
        ]
        jax.block_until_ready(out)


def corpus(
    model: Model, texts: Iterator[str], options: IngestOptions
) -> tuple[list[Document], list[list[HostArray]]]:
    """Documents of about that many tokens, and their chunks in the batches ingest makes of them."""
    tokenizer, template = model.text_tokenizer(), TEMPLATES[TEMPLATE]
    chunking = Chunking(options.chunk_tokens, 0)
    documents: list[Document] = []
    batches: list[list[HostArray]] = [[]]
    total = in_batch = 0
    while total < options.tokens:
        documents.append(Document(f"document {len(documents)}", next(texts)))
        for chunk in split(documents[-1].text, tokenizer, chunking):
            ids = template.chunk_ids(tokenizer, chunk.ids)
            batches[-1].append(ids)
            in_batch += len(ids)
        if in_batch >= ingest.BATCH_TOKENS:
            total, in_batch = total + in_batch, 0
            batches.append([])
        elif total + in_batch >= options.tokens:
            break
    return documents, [batch for batch in batches if batch]


def invented_texts(rng: np.random.Generator, tokens: int) -> Iterator[str]:
    """Endless documents of invented words, the frequent ones short; the same for a seed."""
    syllables = [a + b for a, b in itertools.product("bdfgklmnprstvz", "aeiou")]
    words = ["".join(rng.choice(syllables, 1 + n // 400)) for n in range(2000)]
    share = 1 / np.arange(2, len(words) + 2)
    while True:
        chosen = rng.choice(len(words), min(_DOCUMENT_WORDS, tokens), p=share / share.sum())
        sentences = [
            " ".join(words[i] for i in part).capitalize() + "."
            for part in itertools.batched(chosen, 12)
        ]
        yield " ".join(sentences)


def _written(directory: Path, options: IngestOptions, sample: str) -> str:
    """A directory of the random model, with a tokenizer trained on a sample."""
    write_random(directory, LLAMA_100M, options.dtype, options.seed)
    byte_level.save(byte_level.train([sample], 1000), directory)
    return str(directory)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    return run_script(__doc__, IngestOptions, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
