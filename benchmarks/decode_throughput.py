"""Tokens a second of decoding by batch and context, beside peers and the memory's bandwidth.

Every row of a batch stands behind the same prompt of random tokens, which is run once and its KV
copied, so that each row reads KV of its own. Ours are the steps that the engine runs, in blocks as
for a request that nobody watches; a peer generates from the same weights in a process of its own.
The sides take turns, the first round is a warm-up that compiles, and only decoding is timed.

A step reads the weights and the KV of every row at least once: what that comes to a second stands
beside what the machine reads when it does nothing else.

example: python benchmarks/decode_throughput.py --peer transformers --peer-python PEER/bin/python
"""

import contextlib
import dataclasses
import functools
import sys
import time
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from script import (
    BESIDE_PEER,
    OURS,
    Rows,
    RowsOptions,
    bandwidth,
    between,
    draw,
    in_turn,
    ratios,
    run_script,
    spread,
)
from tqdm import tqdm

from jaxrag.base.config import DTYPES, DType
from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_count, parse_counts
from jaxrag.engine.decoding import DecodeBatch
from jaxrag.engine.engine import engine_of
from jaxrag.engine.mapping import map_sequence
from jaxrag.engine.prefill import Prefilled
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import DECODE_BLOCK, Prompt, Request, batch_of
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import Sequence
from jaxrag.engine.swap import swap_in, swap_out
from jaxrag.kv.cache import PAGE
from jaxrag.measure.bench.peer import Peer
from jaxrag.models.model import Model, load_model
from jaxrag.models.spec import Params
from jaxrag.reuse.methods import METHODS

HERE = Path(__file__).parent
TRANSFORMERS, LLAMA = "transformers", "llama.cpp"
INT8 = "int8"  # among the dtypes: weights in int8 beside llama.cpp's Q8_0, all else in float32
FLOATS = {INT8: "float32"}
CACHES = {TRANSFORMERS: ("dynamic", "static"), LLAMA: ("",)}  # each an arm of its own


@dataclasses.dataclass(frozen=True)
class ThroughputOptions(RowsOptions):
    """What to measure.

    Attributes:
      batches: rows that are decoded together.
      tokens: that every row generates.
      llama_python: interpreter with llama_cpp and gguf; None measures them not.
    """

    kinds: ClassVar = (*DTYPES, INT8)
    batches: tuple[int, ...] = option(
        (1, 4, 8, 32), "rows that are decoded together", "N,...", parse=parse_counts, flag="--batch"
    )
    tokens: int = option(32, "that every row generates", "N", parse=parse_count)
    llama_python: str | None = option(None, "interpreter that imports llama_cpp and gguf", "FILE")

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        self.check_lists("dtypes", "batches", "contexts")
        if self.llama_python and "float16" in self.dtypes:
            raise RequestError("dtype 'float16': llama.cpp is measured in float32 and bfloat16")
        if min(*self.batches, *self.contexts, self.tokens, self.repeats) < 1:
            raise RequestError("batches, contexts, tokens and repeats must be positive")


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One measurement: seconds of all steps, and a row's token ids from the prompt's first on."""

    seconds: float
    ids: list[int]


class SamePrompt:
    """Rows of one batch behind the same prompt, which decode from there as often as asked.

    For ``prefilled``.
    """

    def __init__(self, runner: ModelRunner, first: Sequence, there: Prefilled) -> None:
        """Copy the KV of a prompt, which lies in pages of its own, to all of its rows."""
        self._request, self._runner = first.request, runner
        self._mapped = [first]
        content = swap_out(runner, first.own)
        for _ in range(1, self._request.rows):
            own = runner.cache.allocator.allocate(len(first.own), "another row")
            self._mapped.append(dataclasses.replace(first, own=own))
            map_sequence(self._mapped[-1], {})
            swap_in(runner, own, content)
        self._logits = jnp.repeat(there.logits, self._request.rows, axis=0)
        key = batch_of(self._request, len(first.table.pages))
        assert key is not None
        self._batch = DecodeBatch(runner, key)

    def decode(self) -> Decoded:
        """Every row generates its tokens, from the prompt on."""
        runner = self._runner
        batch, left = self._batch, self._request.room
        rows = range(self._request.rows)
        first = batch.join(rows, self._mapped, self._logits)
        ids = [np.asarray(first.ids)[:, None]]
        jax.block_until_ready(runner.cache.pool)
        start = time.perf_counter()
        steps = []
        while left:
            block = min(DECODE_BLOCK, left)
            steps.append((batch.step(block)[0], block))
            left -= block
        ids += [np.asarray(new)[:, :block] for new, block in steps]
        seconds = time.perf_counter() - start
        every = np.concatenate(ids, axis=1)
        if (every != every[0]).any():
            raise RuntimeError("rows behind the same prompt generated different tokens")
        return Decoded(seconds, every[0].tolist())

    def close(self) -> None:
        """Give the pages of the other rows back."""
        for it in self._mapped[1:]:
            self._runner.cache.allocator.free(it.own)


def run(options: ThroughputOptions) -> dict[str, Any]:
    """Measure every dtype, batch and context; returns the rows and the machine, JSON-able.

    The result is written to ``options.out`` after every row.
    """
    table = Rows.open("decode-throughput", options, ("dtype", "batch", "context"))
    for dtype in options.dtypes:
        left = [
            (batch, context)
            for context in options.contexts
            for batch in options.batches
            if not table.has(dtype=dtype, batch=batch, context=context)
        ]
        if not left:
            continue
        with contextlib.ExitStack() as stack:
            path, folder = stack.enter_context(options.directory(dtype))
            limits = bandwidth()
            peers = _peers(options, path, dtype, folder, stack)
            about = {name: peer.about for name, peer in peers.items()}
            model = load_model(path, dtype=FLOATS.get(dtype, dtype))
            model = model.decoding_with("int8" if dtype == INT8 else None)
            for batch, context in tqdm(left, desc=dtype, disable=None):
                row = _measure(model, peers, options, batch, context, limits["read"])
                table.add({"dtype": dtype, **row, "limits": limits, "peers": about})
    return table.result()


def _peers(
    options: ThroughputOptions, path: str, dtype: DType, folder: Path, stack: contextlib.ExitStack
) -> dict[str, Peer]:
    """The peers that were asked for, started on the model; they end with the stack."""
    peers = {}
    if options.peer_python:
        script, numbers = HERE / "peer_transformers.py", FLOATS.get(dtype, dtype)
        peers[TRANSFORMERS] = Peer(options.peer_python, script, "decode", path, numbers)
        stack.callback(peers[TRANSFORMERS].close)
    if options.llama_python:
        peers[LLAMA] = Peer(
            options.llama_python,
            HERE / "peer_llama.py",
            path,
            dtype,
            str(folder / "model.gguf"),
            option="--llama-python",
            needs="llama_cpp and gguf",
        )
        stack.callback(peers[LLAMA].close)
    return peers


def _measure(
    model: Model,
    peers: Mapping[str, Peer],
    options: ThroughputOptions,
    batch: int,
    context: int,
    read: float,
) -> dict[str, Any]:
    """One row of the table: all arms at one batch and context."""
    ids = draw(model.config, options.seed, context)
    pages = -(-(context + options.tokens) // PAGE) + 1
    model = dataclasses.replace(model, cache_tokens=batch * pages * PAGE)  # a pool of its own
    engine = engine_of(model)
    request = Request(
        Prompt(np.zeros(0, np.int32), (), ids),
        engine.memory,
        METHODS["full_attention"],
        options.tokens + 1,
        rows=batch,
    )
    theirs: dict[str, Callable[[], Decoded]] = {}
    question = {"ids": ids.tolist(), "rows": batch, "tokens": options.tokens}
    for name, peer in peers.items():
        for cache in CACHES[name]:
            asked = functools.partial(peer.ask, {**question, "cache": cache})
            theirs[f"{name} {cache}".strip()] = functools.partial(_decoded, asked)

    def decoded(
        runner: ModelRunner, state: Sequence, there: Prefilled
    ) -> Mapping[str, abc.Sequence[Decoded]]:
        ours = SamePrompt(runner, state, there)
        try:
            return in_turn({OURS: ours.decode, **theirs}, options.repeats)
        finally:
            ours.close()

    [answers] = inspect_prompts(engine, [request], decoded)
    bytes_ = step_bytes(model, batch, context, options.tokens)
    row: dict[str, Any] = {
        "batch": batch,
        "context": context,
        "tokens": options.tokens,
        "repeats": options.repeats,
        "bytes_per_step": bytes_,
        "limit_tokens_per_second": batch * read / sum(bytes_.values()),
        "arms": {name: _arm(answers, name, batch, options.tokens) for name in answers},
    }
    for arm in row["arms"].values():
        arm["bytes_per_second"] = sum(bytes_.values()) / arm["seconds_per_token"]["median"]
        arm["of_read"] = arm["bytes_per_second"] / read
    return row


def _decoded(asked: Callable[[], dict[str, Any]]) -> Decoded:
    return Decoded(**asked())


def _arm(
    answers: Mapping[str, abc.Sequence[Decoded]], name: str, batch: int, tokens: int
) -> dict[str, Any]:
    """The measurements of one arm, beside ours."""
    seconds, ours = ([it.seconds for it in answers[arm]] for arm in (name, OURS))
    arm: dict[str, Any] = {
        "seconds": seconds,
        "tokens_per_second": spread([batch * tokens / it for it in seconds]),
        "seconds_per_token": spread([it / tokens for it in seconds]),
    }
    if name != OURS:
        arm["over_ours"] = ratios(seconds, ours)
        arm["same_tokens"] = same(answers[name][0].ids, answers[OURS][0].ids)
    return arm


def same(ids: abc.Sequence[int], others: abc.Sequence[int]) -> int:
    """How many tokens two answers begin with in common."""
    pairs = zip(ids, others, strict=True)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(ids))


def step_bytes(model: Model, batch: int, context: int, tokens: int) -> dict[str, int]:
    """Bytes that a step reads at least: ``weights`` once, ``kv`` of every row in mid-answer.

    Of a table of embeddings only the rows of the batch are read, unless it is the output's too.
    """
    params: Params = model.decoder(context, weights="decode").params
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    if params.lm_head is not None:
        weights -= params.embed.nbytes
    kv = batch * (context + (tokens + 1) // 2) * model.config.kv_bytes_per_token
    return {"weights": weights, "kv": kv}


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table.

    over ours: time of the peer over ours, round by round; same: tokens that both begin with, of one
    more than were timed.
    """
    yield f"decoding, {result['model']}; medians (range)"
    yield f"{'':<22} {'tokens/s':>22} {'ms':>8} {'GB/s':>6} {'of read':>7} {'over ours':>18} same"
    for row in result["rows"]:
        limits = row["limits"]
        yield (
            f"{row['dtype']}, batch {row['batch']}, context {row['context']}, {row['tokens']} "
            f"tokens, {row['repeats']} rounds; at most {row['limit_tokens_per_second']:.1f} "
            f"tokens/s: memory reads {limits['read'] / 1e9:.1f} GB/s, copies "
            f"{limits['copy'] / 1e9:.1f}"
        )
        for name, arm in row["arms"].items():
            line = f"  {name:<20} {between(arm['tokens_per_second'], '.1f'):>22}"
            line += f" {1000 * arm['seconds_per_token']['median']:>8.2f}"
            line += f" {arm['bytes_per_second'] / 1e9:>6.1f} {arm['of_read']:>7.0%}"
            if "over_ours" in arm:
                line += f" {between(arm['over_ours'], '.2f'):>18} {arm['same_tokens']:>4}"
            yield line


def main(argv: abc.Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    return run_script(__doc__, ThroughputOptions, run, report, argv, more=BESIDE_PEER)


if __name__ == "__main__":
    sys.exit(main())
