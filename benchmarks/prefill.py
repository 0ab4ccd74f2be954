"""Time of a full prefill by context, beside a peer's and the machine's matrix products.

One prompt of random tokens, nothing reused, until the id of its first token is on the host; the
peer gives the logits of the last token only and keeps the KV, as ours does. The sides take turns
and the first round is a warm-up that compiles. The FLOPs are those that are really multiplied,
beside the best of a large square product in the same dtype, ours and the peer's.

With --windows instead a prompt of stored chunks, of a random model with the layers and heads of
Gemma 3 270M, with its windows and without: bytes that a store gave, bytes of the pool that chunks
have then, both beside the bytes of all that a window of the question reaches, and seconds to the
first token. The KV is random, in a store on disk, and the chunks are not in the pool.

example: python benchmarks/prefill.py --peer transformers --peer-python PEER/bin/python
"""

import contextlib
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from script import (
    BESIDE_PEER,
    OURS,
    Rows,
    RowsOptions,
    between,
    draw,
    in_turn,
    matmul_peak,
    matmul_side,
    ratios,
    run_script,
    spread,
)
from tqdm import tqdm

from jaxrag.base.config import DType, ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_counts
from jaxrag.engine.engine import Engine, engine_of
from jaxrag.engine.request import Prompt
from jaxrag.engine.state import EngineSettings
from jaxrag.kv.store import ChunkStore
from jaxrag.kv.store.reading import ReadRequest, Refused
from jaxrag.kv.store.wrapper import StoreWrapper
from jaxrag.measure.bench import ttft
from jaxrag.measure.bench.peer import Peer
from jaxrag.measure.machine import describe
from jaxrag.models.flops import forward_flops
from jaxrag.models.gemma import read_config
from jaxrag.models.model import Model, load_model, random_model
from jaxrag.reuse.methods import METHODS

PEER = "transformers"


@dataclasses.dataclass(frozen=True)
class PrefillOptions(RowsOptions):
    """What to measure."""

    contexts: tuple[int, ...] = option(
        (512, 1024, 2048, 4096, 8192), "tokens of the prompt", "N,...", parse=parse_counts
    )
    windows: bool = option(False, "measure what a model with windows reads and keeps of chunks")
    chunks: tuple[int, ...] = option(
        (512,), "with --windows, tokens of a chunk", "N,...", parse=parse_counts
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        self.check_lists("dtypes", "contexts", "chunks")
        if min(*self.contexts, *self.chunks, self.repeats) < 1:
            raise RequestError("contexts, chunks and repeats must be positive")


def run(options: PrefillOptions) -> dict[str, Any]:
    """Measure every dtype and context; returns the rows and the machine, JSON-able.

    The result is written to ``options.out`` after every row.
    """
    if options.windows:
        return _windows(options)
    table = Rows.open("prefill", options, ("dtype", "context"))
    for dtype in options.dtypes:
        left = [n for n in options.contexts if not table.has(dtype=dtype, context=n)]
        if not left:
            continue
        with contextlib.ExitStack() as stack:
            path, _ = stack.enter_context(options.directory(dtype))
            peer = None
            if options.peer_python:
                peer = Peer(options.peer_python, ttft.PEER_SCRIPT, path, dtype)
                stack.callback(peer.close)
            model = load_model(path, dtype=dtype, cache_tokens=2 * max(left))
            limits: dict[str, float] = {}
            for context in tqdm(left, desc=dtype, disable=None):
                for name, peak in _peaks(dtype, peer).items():
                    limits[name] = max(peak, limits.get(name, 0.0))
                row = _measure(model, peer, options, context, max(limits.values()))
                peers = {} if peer is None else {PEER: peer.about}
                table.add({"dtype": dtype, **row, "limits": dict(limits), "peers": peers})
            engine_of(model).call(lambda runner: runner.forget_cache())
    return table.result()


def _peaks(dtype: DType, peer: Peer | None) -> dict[str, float]:
    """FLOP/s of a square matrix product of each side, once the other's threads are at rest."""
    arms: dict[str, Callable[[], float]] = {OURS: lambda: matmul_peak(dtype)}
    if peer is not None:
        question = {"matmul": matmul_side()}
        arms[PEER] = lambda: float(peer.ask(question)["flops_per_second"])
    return {name: max(peaks) for name, peaks in in_turn(arms, 2).items()}


def _measure(
    model: Model, peer: Peer | None, options: PrefillOptions, context: int, peak: float
) -> dict[str, Any]:
    """One row of the table: both arms at one context."""
    ids = draw(model.config, options.seed, context)
    prompt, store = Prompt(np.zeros(0, np.int32), (), ids), engine_of(model).memory
    method = METHODS["full_attention"]
    tops: dict[str, int] = {}

    def ours() -> float:
        first = ttft.first_token(model, store, method, prompt)
        tops[OURS] = first.top
        return first.seconds

    def theirs() -> float:
        assert peer is not None
        answer = peer.ask({"ids": ids.tolist()})
        tops[PEER] = answer["top"]
        return float(answer["seconds"])

    arms = {OURS: ours} if peer is None else {OURS: ours, PEER: theirs}
    seconds = in_turn(arms, options.repeats)
    flops = forward_flops(model.config, [(context, 0)], num_logits=1)
    row: dict[str, Any] = {
        "context": context,
        "repeats": options.repeats,
        "flops": flops,
        "arms": {
            name: {
                "seconds": times,
                "spread": spread(times),
                "flops_per_second": flops / spread(times)["median"],
                "of_matmul": flops / spread(times)["median"] / peak,
            }
            for name, times in seconds.items()
        },
    }
    if peer is not None:
        row["arms"][PEER]["over_ours"] = ratios(seconds[PEER], seconds[OURS])
        row["same_first_token"] = tops[PEER] == tops[OURS]
    return row


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table; over ours: time of the peer over ours, round by round."""
    if result["benchmark"] == "windows":
        yield from _report_windows(result)
        return
    yield f"full prefill, {result['model']}; milliseconds, medians (range)"
    yield (
        f"{'':<14} {'ms':>26} {'TFLOP/s':>8} {'of matmul':>9} {'over ours':>18} {'first token':>11}"
    )
    for row in result["rows"]:
        limits = ", ".join(f"{name} {it / 1e12:.2f}" for name, it in row["limits"].items())
        yield (
            f"{row['dtype']}, {row['context']} tokens, {row['repeats']} rounds; square matmul "
            f"TFLOP/s: {limits}"
        )
        for name, arm in row["arms"].items():
            ms = {key: 1000 * value for key, value in arm["spread"].items()}
            line = f"  {name:<12} {between(ms, '.0f'):>26}"
            line += f" {arm['flops_per_second'] / 1e12:>8.3f} {arm['of_matmul']:>9.0%}"
            if "over_ours" in arm:
                line += f" {between(arm['over_ours'], '.2f'):>18}"
                line += f" {'same' if row['same_first_token'] else 'another':>11}"
            yield line


_QUESTION = 32  # tokens
_GEMMA = {
    "num_hidden_layers": 18, "hidden_size": 640, "intermediate_size": 2048, "head_dim": 256,
    "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512,
    "vocab_size": 32_768, "max_position_embeddings": 65_536,
}  # fmt: skip


class _Counted(StoreWrapper):
    """A store that counts the bytes that it gave."""

    nbytes = 0

    def _load(self, wanted: Sequence[ReadRequest]) -> Sequence[Refused | None]:
        self.nbytes += sum(it.out.nbytes for it in wanted)
        return super()._load(wanted)


def _windows(options: PrefillOptions) -> dict[str, Any]:
    """A row for every context and length of chunks: both models in turn."""
    windowed = dataclasses.replace(read_config(_GEMMA), dtype=options.dtypes[0])
    without = dataclasses.replace(windowed, sliding_window=None, window_layers=None)
    rows = []
    asked = [(context, chunk) for context in options.contexts for chunk in options.chunks]
    for context, chunk in tqdm(asked, disable=None):
        with tempfile.TemporaryDirectory(prefix="jaxrag-bench-") as folder:
            arms = {
                name: functools.partial(
                    _first_token, *_stored(config, context, chunk, Path(folder, name))
                )
                for name, config in (("windows", windowed), ("none", without))
            }
            found = in_turn(arms, options.repeats)
        row: dict[str, Any] = {
            "context": context,
            "chunk_tokens": chunk,
            "repeats": options.repeats,
        }
        row["arms"] = {}
        for name, config in (("windows", windowed), ("none", without)):
            window = min(config.sliding_window or context, context)
            reach = len(config.global_layers) * (context - window) + config.num_layers * window
            seconds = [it.pop("seconds") for it in found[name]]
            row["arms"][name] = {
                **found[name][0], "implied_bytes": 2 * config.kv_row_bytes * reach,
                "seconds": seconds, "spread": spread(seconds),
            }  # fmt: skip
        rows.append(row)
    about = f"random, the layers and heads of Gemma 3 270M, {options.dtypes[0]}"
    more = {"question_tokens": _QUESTION, "machine": describe()}
    return {"benchmark": "windows", "model": about, "rows": rows, **more}


def _stored(
    config: ModelConfig, context: int, chunk: int, folder: Path
) -> tuple[Model, Prompt, _Counted]:
    """A model, and a prompt whose chunks, of ``chunk`` tokens but for the first, are in a store."""
    model = random_model(config, cache_tokens=context + 2048)
    model.engine = Engine(model, EngineSettings(arena_bytes=0))
    layout = model.kv_layout
    store = ChunkStore.open(folder, model.fingerprint, layout, mode="rw", max_tokens=chunk)
    drawn = np.split(draw(config, 0, context), range(context % chunk or chunk, context, chunk))
    prompt = Prompt(drawn[0][:0], tuple(drawn), draw(config, 0, _QUESTION))
    kv = np.random.default_rng(0).standard_normal(layout.shape(chunk), np.float32)
    for load in ttft.loads_of(model, store, METHODS["turborag"], prompt).values():
        record = load.encoding.provenance(load.encoder, load.chunk)
        mine = kv[:, :, : load.tokens].astype(layout.numpy_dtype)
        store.put(load.stored_key, mine, record=record)
    return model, prompt, _Counted(store)


def _first_token(model: Model, prompt: Prompt, store: _Counted) -> dict[str, float]:
    engine, method = engine_of(model), METHODS["turborag"]
    engine.drop(list(ttft.loads_of(model, store, method, prompt)))
    before = store.nbytes
    first = ttft.first_token(model, store, method, prompt)
    tiers = engine.tiers()
    assert tiers is not None
    read, kept = store.nbytes - before, tiers.pool_bytes
    return {"seconds": first.seconds, "read_bytes": read, "pool_bytes": kept}


def _report_windows(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['model']}; tokens, MB, milliseconds"
    names = "context", "chunk", "layers", "implied", "read", "pool", "first token"
    yield "{:>8} {:>6} {:<8} {:>8} {:>8} {:>8} {:>24}".format(*names)
    for row in result["rows"]:
        for name, arm in row["arms"].items():
            sizes = (arm[f"{it}_bytes"] / 1e6 for it in ("implied", "read", "pool"))
            ms = {key: 1000 * value for key, value in arm["spread"].items()}
            line = " ".join(f"{it:>8.1f}" for it in sizes)
            first = f"{row['context']:>8} {row['chunk_tokens']:>6} {name:<8}"
            yield f"{first} {line} {between(ms, '.0f'):>24}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    return run_script(__doc__, PrefillOptions, run, report, argv, more=BESIDE_PEER)


if __name__ == "__main__":
    sys.exit(main())
