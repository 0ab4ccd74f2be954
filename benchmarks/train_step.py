"""Time of a training step beside a peer's, and how it grows with the number of packed chunks.

Both sides train the same weights on the same tokens in float32: forward, next-token loss on every
token, backward, clip, AdamW. Rows are causal, or hold chunks under the block mask. Measurements of
both sides alternate; the first is a warm-up that compiles and is also where the losses are
compared. Growth is that of one row of chunks of a fixed size and a final block.

example: python benchmarks/train_step.py --peer transformers --peer-python PEER/bin/python
"""

import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from script import PEER, run_script

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_count
from jaxrag.base.sharding import make_mesh
from jaxrag.base.types import HostArray, Tokens
from jaxrag.measure.bench.peer import Peer
from jaxrag.measure.machine import describe, settle
from jaxrag.measure.zoo import llama
from jaxrag.models.export import export_hf
from jaxrag.models.rope import rope_table
from jaxrag.models.segments import lay_out
from jaxrag.models.spec import init_params, num_params
from jaxrag.models.text.progress import followed
from jaxrag.train.config import (
    ComputePart,
    DataPart,
    LossPart,
    ModelPart,
    OptimizerPart,
    SourcePart,
    TrainConfig,
)
from jaxrag.train.packing import NOTHING, RESPONSE, TrainBatch
from jaxrag.train.step import Program, TrainState, make_step, new_state, program_of, state_shardings

CHUNK_TOKENS = 64
FINAL_TOKENS = 64
RATE = 1e-4
PEER_SCRIPT = Path(__file__).with_name("peer_transformers.py")


_NARROW = {"model_dim": 128, "mlp_dim": 320, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32}
_WIDE = {"model_dim": 384, "mlp_dim": 1024, "num_heads": 6, "num_kv_heads": 2, "head_dim": 64}
MODELS: dict[str, ModelConfig] = {
    "0.8M": llama(num_layers=4, vocab_size=512, **_NARROW),
    "15M": llama(num_layers=6, vocab_size=8192, **_WIDE),
}


@dataclasses.dataclass(frozen=True)
class TrainStepOptions:
    """What to measure."""

    models: tuple[str, ...] = option(("0.8M", "15M"), "sizes", "NAME,...")
    rows: int = option(8, "of a step", "N")
    row_tokens: int = option(512, "of a row", "N", parse=parse_count)
    repeats: int = option(5, "after a warm-up", "N")
    growth: tuple[int, ...] = option((8, 16, 32, 64, 128), "chunks of a row; '' for none", "N,...")
    peer_python: str | None = None
    seed: int = option(0, "of what is drawn", "N")

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be measured."""
        unknown = sorted(set(self.models) - set(MODELS))
        if unknown:
            raise RequestError(f"model {unknown[0]!r}: expected one of {', '.join(MODELS)}")
        if self.row_tokens % CHUNK_TOKENS or self.row_tokens < 2 * CHUNK_TOKENS:
            raise RequestError(
                f"row tokens {self.row_tokens}: expected a multiple of {CHUNK_TOKENS}, from "
                f"{2 * CHUNK_TOKENS} on"
            )
        if min(self.rows, self.repeats, *self.growth, 1) < 1:
            raise RequestError("rows, repeats and numbers of chunks must be positive")


class Trainer:
    """Our side: a random model and its compiled step."""

    def __init__(self, model: ModelConfig, seed: int) -> None:
        self.config = TrainConfig(
            model=ModelPart(path="random"),
            data=DataPart(row_tokens=1, rows=1, sources=(SourcePart("made", paths=("made",)),)),
            optimizer=OptimizerPart(steps=1_000_000, learning_rate=RATE, decay="constant"),
            loss=LossPart(logits_tokens=8192),
            compute=ComputePart(dtype="float32"),
        )
        self.model, self.mesh = model, make_mesh()
        self.program: Program = program_of(self.config, model, self.mesh)
        self.shardings = state_shardings(self.config, model, self.mesh)
        self.state: TrainState = self._first(seed)
        self._step = make_step(self.config, self.program, self.shardings)

    def step(self, batch: TrainBatch) -> tuple[float, float]:
        """Seconds and loss of one step."""
        table = rope_table(self.model.rope, batch.kinds.shape[-1])
        batch = jax.device_put(batch)
        jax.block_until_ready((table, batch))
        start = time.perf_counter()
        self.state, metrics = self._step(self.state, None, table, batch)
        loss = float(metrics.loss)
        jax.block_until_ready(self.state)
        return time.perf_counter() - start, loss

    def memory(self, batch: TrainBatch) -> int:
        """Bytes of temporaries of the compiled step; parameters and optimizer not counted."""
        table = rope_table(self.model.rope, batch.kinds.shape[-1])
        step: Any = self._step
        compiled = step.lower(self.state, None, table, batch).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    def _first(self, seed: int) -> TrainState:
        params = init_params(self.model, jax.random.key(seed), "float32")
        return jax.device_put(new_state(self.config, params), self.shardings)


def rows_of(ids: HostArray, chunks: int) -> TrainBatch:
    """Rows [1, B, T] that predict every next token: ``chunks`` equal chunks and a final block.

    0 chunks is one causal block.
    """
    batch, length = ids.shape
    final = length - chunks * CHUNK_TOKENS
    layout = lay_out(0, [CHUNK_TOKENS] * chunks, final)
    kinds = np.full(ids.shape, RESPONSE, np.int8)
    kinds[:, -1] = NOTHING

    def every(row: HostArray) -> HostArray:
        return np.broadcast_to(row, ids.shape)[None]

    tokens: dict[str, Any] = {
        "ids": ids[None],
        "positions": every(layout.positions),
        "segments": every(layout.segments),
        "examples": np.zeros((1, batch, length), np.int32),
    }
    arrays: dict[str, Any] = {"targets": np.roll(ids, -1, 1)[None], "kinds": kinds[None]}
    arrays["in_order"] = every(np.arange(length, dtype=np.int32))
    return TrainBatch(tokens=Tokens(**tokens), **arrays)


def run(options: TrainStepOptions) -> dict[str, Any]:
    """Measure every model; returns the rows, the growth and the machine, JSON-able."""
    rng = np.random.default_rng(options.seed)
    rows = []
    about = None
    for name in followed(options.models, "train step", "model"):
        model = MODELS[name]
        with contextlib.ExitStack() as stack:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxrag-bench-")))
            trainer, peer = Trainer(model, options.seed), None
            if options.peer_python:
                export_hf(work / "model", trainer.state.trained, model)  # type: ignore[arg-type]
                peer = Peer(
                    options.peer_python, PEER_SCRIPT, "train", str(work / "model"), str(RATE)
                )
                stack.callback(peer.close)
                about = peer.about
            shape = (options.rows, options.row_tokens)
            ids = rng.integers(3, model.vocab_size, shape).astype(np.int32)
            for mode in ("full", "block"):
                measured = _measure(trainer, peer, ids, mode, options)
                rows.append({"model": name, "parameters": num_params(model), **measured})
    return {
        "benchmark": "train-step",
        "rows_per_step": options.rows,
        "row_tokens": options.row_tokens,
        "chunk_tokens": CHUNK_TOKENS,
        "repeats": options.repeats,
        "rows": rows,
        "growth": _growth(options, rng),
        "peer": None if about is None else {"name": "transformers", **about},
        "machine": describe(),
    }


def _measure(
    trainer: Trainer, peer: Peer | None, ids: HostArray, mode: str, options: TrainStepOptions
) -> dict[str, Any]:
    chunks = 0 if mode == "full" else options.row_tokens // CHUNK_TOKENS - 1
    batch = rows_of(ids, chunks)
    segments = np.asarray(batch.tokens.segments[0]).tolist() if chunks else None
    question = {"ids": ids.tolist(), "segments": segments}
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    losses: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(options.repeats + 1):
        settle()
        seconds, loss = trainer.step(batch)
        times["ours"].append(seconds)
        losses["ours"].append(loss)
        if peer is not None:
            settle()
            answer = peer.ask(question)
            times["peer"].append(answer["seconds"])
            losses["peer"].append(answer["loss"])
    tokens = options.rows * options.row_tokens
    best = {name: min(t[1:]) for name, t in times.items() if t}
    median = {name: statistics.median(t[1:]) for name, t in times.items() if t}
    row: dict[str, Any] = {
        "mode": mode,
        "seconds": median,
        "best_seconds": best,
        "runs": {name: t[1:] for name, t in times.items() if t},
        "tokens_per_second": {name: tokens / seconds for name, seconds in best.items()},
        "losses": losses,
    }
    if peer is not None:
        pairs = zip(times["peer"][1:], times["ours"][1:], strict=True)
        row["ratios"] = [theirs / ours for theirs, ours in pairs]
        row["peer_over_ours"] = statistics.median(row["ratios"])
        row["peer_over_ours_best"] = best["peer"] / best["ours"]
    return row


def _growth(options: TrainStepOptions, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Time and memory of a step of one row of more and more chunks, with the smallest model."""
    if not options.growth:
        return []
    model = MODELS["0.8M"]
    trainer, rows = Trainer(model, options.seed), []
    for chunks in followed(options.growth, "growth", "size"):
        tokens = chunks * CHUNK_TOKENS + FINAL_TOKENS
        ids = rng.integers(3, model.vocab_size, (1, tokens)).astype(np.int32)
        batch = rows_of(ids, chunks)
        times = [trainer.step(batch)[0] for _ in range(options.repeats + 1)]
        rows.append(
            {
                "chunks": chunks,
                "tokens": tokens,
                "seconds": min(times[1:]),
                "bytes": trainer.memory(batch),
            }
        )
    return rows


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of two tables."""
    yield (
        f"training steps of {result['rows_per_step']} rows of {result['row_tokens']} tokens, "
        f"float32; milliseconds, median of {result['repeats']} and their range"
    )
    peer = result["peer"]
    head = f"{'model':>6} {'mode':>6} {'ours':>7} {'range':>13} {'tokens/s':>9}"
    yield head + (f" {'peer':>7} {'range':>13} {'peer/ours':>9} {'range':>11}" if peer else "")
    for row in result["rows"]:
        rate = result["rows_per_step"] * result["row_tokens"] / row["seconds"]["ours"]
        line = f"{row['model']:>6} {row['mode']:>6} {_timed(row, 'ours')} {rate:>9.0f}"
        if peer:
            low, high = min(row["ratios"]), max(row["ratios"])
            line += f" {_timed(row, 'peer')} {row['peer_over_ours']:>9.2f} {low:>6.2f}-{high:.2f}"
        yield line
    if result["growth"]:
        yield ""
        yield f"one row of chunks of {result['chunk_tokens']} tokens, 0.8M parameters"
        yield f"{'chunks':>7} {'tokens':>7} {'ms':>9} {'us/token':>9} {'MiB':>8} {'KiB/token':>9}"
        for row in result["growth"]:
            yield (
                f"{row['chunks']:>7} {row['tokens']:>7} {1000 * row['seconds']:>9.1f} "
                f"{1e6 * row['seconds'] / row['tokens']:>9.1f} {row['bytes'] / 2**20:>8.1f} "
                f"{row['bytes'] / 1024 / row['tokens']:>9.1f}"
            )


def _timed(row: dict[str, Any], side: str) -> str:
    """Milliseconds of one side: the median, and the range."""
    times = [1000 * seconds for seconds in row["runs"][side]]
    between = f"{min(times):.0f}-{max(times):.0f}"
    return f"{1000 * row['seconds'][side]:>7.0f} {between:>13}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    return run_script(__doc__, TrainStepOptions, run, report, argv, more=PEER)


if __name__ == "__main__":
    sys.exit(main())
