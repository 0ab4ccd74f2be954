"""Throughput of ingest, from texts to a committed knowledge base, beside a plain forward pass.

The plain pass runs the same tokens in the same packed rows through the model and keeps nothing.
Both are measured in turn, so that a slow moment of the machine falls on both; the first round is a
warm-up that compiles. The best of each is compared, since what else runs on a machine only ever
slows down; medians stand beside it. Processor seconds, of all threads, are hardly disturbed by
others: on a CPU their ratio says what ingest costs beyond the forward pass.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tqdm import tqdm

from jaxrag import ingest
from jaxrag.attention import PackedAttend
from jaxrag.bench.machine import describe
from jaxrag.bench.ttft import LLAMA_100M
from jaxrag.chunking import Chunking, split
from jaxrag.config import DType, ModelConfig
from jaxrag.documents import Document
from jaxrag.encode.rows import packed_batches
from jaxrag.errors import RequestError
from jaxrag.flops import forward_flops
from jaxrag.knowledge_base import KnowledgeBase
from jaxrag.models.decoder import forward
from jaxrag.models.export import export_hf
from jaxrag.models.model import Model, load_model
from jaxrag.models.spec import Params, init_params, num_params
from jaxrag.prompts import TEMPLATES
from jaxrag.rope import RopeTable
from jaxrag.types import Array, HostArray, Tokens

Clock = tuple[float, float]  # seconds on the wall, and of all processors together

TEMPLATE = "plain"
_DOCUMENT_WORDS = 1500
_MATMUL = {"cpu": 2048}  # side of the square matrices whose product is the peak; 8192 elsewhere


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure. ``model`` None makes a random Llama of 100M parameters."""

    model: str | None = None
    dtype: DType = "float32"
    tokens: int = 16_384
    chunk_tokens: int = 512
    repeats: int = 5
    folder: str | None = None  # where the knowledge bases go; None is the temporary folder
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be measured."""
        if self.repeats < 1 or self.chunk_tokens < 1 or self.tokens < self.chunk_tokens:
            raise RequestError(
                f"repeats={self.repeats} chunk_tokens={self.chunk_tokens} tokens={self.tokens}: "
                "expected positive numbers and at least one chunk"
            )
        if self.folder is not None and not Path(self.folder).is_dir():
            raise RequestError(f"folder {self.folder}: expected a folder that exists")


def run(options: Options) -> dict[str, Any]:
    """Measure; returns throughputs, their ratio, the machine and the setting, JSON-able."""
    rng = np.random.default_rng(options.seed)
    with tempfile.TemporaryDirectory(prefix="jaxrag-bench-", dir=options.folder) as folder:
        work = Path(folder)
        texts = _texts(rng, options.tokens)
        path = options.model or str(_write_random(work / "model", options, next(texts)))
        model = load_model(path, dtype=options.dtype)
        documents, batches = _corpus(model, texts, options)
        clocks: dict[str, list[Clock]] = {"plain": [], "ingest": []}
        peaks: list[float] = []
        for round_ in tqdm(range(options.repeats + 1), desc="rounds", disable=None):
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
                ) as kb,
                _clock(clocks["ingest"]),
            ):
                kb.add(documents)
        return _result(options, model, batches, clocks, max(peaks))


def _result(
    options: Options,
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
        "model": options.model or f"random Llama, {num_params(model.config) / 1e6:.1f}M",
        "dtype": options.dtype,
        "tokens": sum(lengths),
        "chunks": len(lengths),
        "chunk_tokens": options.chunk_tokens,
        "repeats": options.repeats,
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


def matmul_peak(dtype: DType, repeats: int = 5) -> float:
    """FLOP/s of a large square matrix product on the default device, the best of some."""
    side = _MATMUL.get(jax.default_backend(), 8192)
    a = jnp.ones((side, side), dtype)
    product = jax.jit(jnp.matmul)
    product(a, a).block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / min(seconds)


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


def _corpus(
    model: Model, texts: Iterator[str], options: Options
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


def _texts(rng: np.random.Generator, tokens: int) -> Iterator[str]:
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


def _write_random(directory: Path, options: Options, sample: str) -> Path:
    """A Hugging Face directory of the random model, with a tokenizer trained on a sample."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1000,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sample], trainer)
    config = dataclasses.replace(LLAMA_100M, dtype=options.dtype)
    params = jax.jit(lambda key: init_params(config, key))(jax.random.key(options.seed))
    export_hf(directory, params, config)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({}), encoding="utf-8")
    return directory
