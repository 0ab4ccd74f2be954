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

With --stages every round also ingests with one stage after the other: a document is prepared, then
encoded, then put, then committed, and nothing overlaps. That tells what each stage takes, and what
overlapping them saves. Another ingest has a reader beside it, in a thread and in a process, which
tells how long the longest of their readings waited for the catalog.

example: python benchmarks/ingest_throughput.py --tokens 16384 --out ingest.json
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from script import matmul_peak, run_script

from jaxrag.base.config import DType, ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_count
from jaxrag.base.types import Array, HostArray, Tokens
from jaxrag.kv.store import ChunkStore
from jaxrag.library.documents import Document
from jaxrag.library.documents.chunking import Chunking, split
from jaxrag.library.knowledge_base import KnowledgeBase, ingest
from jaxrag.library.knowledge_base.ingest import Ingest
from jaxrag.library.knowledge_base.prepare import Preparer
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
    stages: int = option(0, "rounds that also ingest stage by stage, and read meanwhile", "N")

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
        stages: list[dict[str, float]] = []
        waits: list[dict[str, float]] = []
        behind: list[_Behind] = []
        peaks: list[float] = []
        for round_ in followed(range(options.repeats + 1), "ingest", "round"):
            peaks.append(matmul_peak(options.dtype))
            with _clock(clocks["plain"]):
                _plain(model, batches)
            with (
                _opened(work / f"kb{round_}", model, options) as kb,
                _clock(clocks["ingest"]),
            ):
                kb.add(documents)
            if round_ <= options.stages and options.stages:
                stages.append(one_by_one(work / f"stages{round_}", model, documents, options))
                waits.append(read_beside(work / f"read{round_}", model, documents, options))
            if encoder_named(options.encoder).sees_neighbours:
                place = work / f"behind{round_}"
                behind.append(encode_behind(model, documents, batches, options, place))
        result = _result(options, model, batches, clocks, max(peaks))
        if behind:
            result["neighbours"] = _neighbours_result(options, result, behind[1:])
        if stages:
            result["one stage after the other"] = _medians(stages[1:])
            result["longest reading beside it, ms"] = _medians(waits[1:])
        return result


def _opened(path: Path, model: Model, options: IngestOptions) -> KnowledgeBase:
    return KnowledgeBase.open(
        path, model, template=TEMPLATE, chunk_tokens=options.chunk_tokens, overlap=0,
        chunk_by="tokens", encoders=["isolated"],
    )  # fmt: skip


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(it[name] for it in rounds) for name in rounds[0]}


class AtOnce(concurrent.futures.Executor):
    """Takes the place of a pool of threads: does everything when it is asked for."""

    def __init__(self, *_: object) -> None:
        """As a pool is made."""

    def submit[**P, T](
        self, job: Callable[P, T], /, *args: P.args, **given: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Do it, and return what it came to."""
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            done.set_result(job(*args, **given))
        except BaseException as error:
            done.set_exception(error)
        return done


STAGES = ((Preparer, "prepare"), (ChunkStore, "put"), (Ingest, "commit"))


def one_by_one(
    path: Path, model: Model, documents: Sequence[Document], options: IngestOptions
) -> dict[str, float]:
    """Seconds of an ingest in which nothing overlaps, by stage."""
    taken: dict[str, float] = {}

    def timed(work: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **given: Any) -> Any:
            start = time.perf_counter()
            try:
                return work(*args, **given)
            finally:
                taken[name] = taken.get(name, 0.0) + time.perf_counter() - start

        return run

    with contextlib.ExitStack() as stack:
        kb = stack.enter_context(_opened(path, model, options))
        for owner, name in STAGES:
            work = timed(getattr(owner, name), name)
            stack.enter_context(mock.patch.object(owner, name, work))
        stack.enter_context(mock.patch("concurrent.futures.ThreadPoolExecutor", AtOnce))
        start = time.perf_counter()
        kb.add(documents)
        whole = time.perf_counter() - start
    return {**taken, "encode and the rest": whole - sum(taken.values()), "seconds": whole}


def read_beside(
    path: Path, model: Model, documents: Sequence[Document], options: IngestOptions
) -> dict[str, float]:
    """Milliseconds that the longest reading took, of many, while documents are added."""
    end = threading.Event()
    held: list[float] = [0.0]

    def read(kb: KnowledgeBase) -> None:
        while not end.is_set():
            start = time.perf_counter()
            kb._catalog.document("document 0")
            held[0] = max(held[0], time.perf_counter() - start)
            time.sleep(0.002)

    with _opened(path, model, options) as kb:
        kb.add(documents[:1])
        command = [sys.executable, "-c", READER, str(path)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            other.stdout.readline()
            thread = threading.Thread(target=read, args=(kb,))
            thread.start()
            kb.add(documents)
            end.set()
            thread.join()
            found = json.loads(other.communicate("end\n")[0])
    return {"thread": 1000 * held[0], **{name: 1000 * value for name, value in found.items()}}


READER = """
import json, pathlib, sys, threading, time
from jaxrag.library.catalog import Catalog
catalog = Catalog.open(pathlib.Path(sys.argv[1]) / "catalog.sqlite")
catalog.document("document 0")
print("ready", flush=True)
end, longest = threading.Event(), 0.0
threading.Thread(target=lambda: (sys.stdin.readline(), end.set())).start()
while not end.is_set():
    start = time.perf_counter()
    catalog.document("document 0")
    longest = max(longest, time.perf_counter() - start)
    time.sleep(0.002)
print(json.dumps({"process": longest}))
"""


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
    if "one stage after the other" in result:
        row = result["one stage after the other"]
        parts = ", ".join(f"{name} {value:.2f}" for name, value in row.items() if name != "seconds")
        saved = 1 - result["ingest"]["median_seconds"] / row["seconds"]
        waits = result["longest reading beside it, ms"]
        yield (
            f"one stage after the other {row['seconds']:.2f} s ({parts}); overlapping saves "
            f"{saved:.0%}; the longest reading beside it took {waits['thread']:.0f} ms in a "
            f"thread, {waits['process']:.0f} ms in a process"
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
