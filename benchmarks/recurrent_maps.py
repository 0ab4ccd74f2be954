"""Chunks of models with recurrent layers: their bytes, and the time that their maps save.

*bytes*, a sum: of published sizes what a chunk takes as maps of the recurrent layers and KV of the
others, beside KV of the same model with attention everywhere in the dtype of the weights; the
milliseconds to read it, beside those to prefill it behind nothing. The sizes are of transformers
5.24's configuration classes, but those of CARDS, which their model cards say.

*times*: a random model of about 100M parameters, prompts of stored chunks. Seconds from the request
to the first token by maps, and with the whole prompt computed, in turn; those to put all chunks in
a row and run a token behind them; and what the logits behind the prompt lose where maps are
rounded, of the largest of them.

example: python benchmarks/recurrent_maps.py --out benchmarks/results/recurrent-maps.json
"""

import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from script import Result, run_script, spread

from jaxrag.base.config import ModelConfig, RopeConfig
from jaxrag.base.options import option, parse_counts, parse_names
from jaxrag.base.recurrent import RecurrentConfig
from jaxrag.base.types import HostArray
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.store import MemoryStore
from jaxrag.measure.machine import describe, settle
from jaxrag.models import FAMILIES
from jaxrag.models.flops import forward_flops
from jaxrag.models.map_rows import open_map_rows
from jaxrag.models.maps import MAP_FORMS, map_layout
from jaxrag.models.model import Model, random_model
from jaxrag.models.spec import num_params
from jaxrag.reuse.methods import METHODS

PARTS = ("bytes", "times")
SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "Qwen3-Next-80B-A3B": ("qwen3_next", {}),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe", {}),
    "Qwen3.5-9B": ("qwen3_5", {}),
    "Qwen3.5-27B": (
        "qwen3_5",
        {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "intermediate_size": 17_408,
            "linear_num_value_heads": 48,
        },
    ),
    "Qwen3.5-2B": (
        "qwen3_5",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 6144,
            "linear_num_value_heads": 16,
        },
    ),
}
CARDS = ("Qwen3.5-27B", "Qwen3.5-2B")
READ = (2e9, 7e9, 25e9)  # bytes/s: a network, a disk, memory of the host
COMPUTE = (400e12, 1e12)  # FLOP/s: a large GPU at work, a CPU


@dataclasses.dataclass(frozen=True)
class MapOptions:
    """What is counted and measured."""

    parts: tuple[str, ...] = option(PARTS, "in turn", "NAME,...", parse=parse_names)
    tokens: tuple[int, ...] = option(
        (128, 512, 1024, 2048, 4096), "of a chunk whose bytes are counted", "N,...",
        parse=parse_counts,
    )  # fmt: skip
    chunks: int = option(16, "of a prompt that is timed", "N")
    chunk_tokens: int = option(256, "of each of them", "N")
    repeats: int = option(3, "of what is timed", "N")


def run(options: MapOptions) -> Result:
    """Rows of every part, JSON-able."""
    found: Result = {"cards": CARDS}
    if "bytes" in options.parts:
        found["bytes"] = [_counted(name, tokens) for name in SIZES for tokens in options.tokens]
    if "times" in options.parts:
        found["times"] = _timed(options)
    return found | describe()


def _counted(name: str, tokens: int) -> Result:
    family, sizes = SIZES[name]
    config = FAMILIES[family].read_config({"dtype": "bfloat16", "vocab_size": 248_320, **sizes})
    attends = dataclasses.replace(config, recurrent=None)
    layouts = {form: map_layout(config, form) for form in MAP_FORMS.values()}
    plain = tokens * attends.kv_bytes_per_token
    flops = forward_flops(config, [(tokens, 0)], 0)
    return {
        "model": name,
        "tokens": tokens,
        "maps": {form: it.nbytes(0) for form, it in layouts.items()},
        "kv": tokens * config.kv_bytes_per_token,
        "attention_kv": plain,
        "ratio": {form: round(it.nbytes(tokens) / plain, 3) for form, it in layouts.items()},
        "read_ms": {
            form: {f"{by / 1e9:g} GB/s": round(1e3 * it.nbytes(tokens) / by, 1) for by in READ}
            for form, it in layouts.items()
        },
        "prefill_ms": {f"{by / 1e12:g} TFLOP/s": round(1e3 * flops / by, 1) for by in COMPUTE},
    }


def _small() -> ModelConfig:
    kinds = tuple(layer % 4 != 3 for layer in range(16))
    return ModelConfig(
        family="qwen3_5", vocab_size=32_000, num_layers=16, model_dim=640, mlp_dim=1792,
        num_heads=10, num_kv_heads=2, head_dim=64, norm_eps=1e-6,
        rope=RopeConfig(1e7, 16, interleaved=False, scaling=None), max_positions=16_384,
        sliding_window=None, window_layers=None, qkv_bias=False, o_bias=False, mlp_bias=False,
        qk_norm=True, post_norms=False, tie_embeddings=True, dtype="float32", bos_id=None,
        eos_ids=(), unit_norms=True, output_gate=True,
        recurrent=RecurrentConfig(kinds, key_heads=4, value_heads=8, key_dim=64, value_dim=64,
                                  width=4),
    )  # fmt: skip


def _timed(options: MapOptions) -> Result:
    model = random_model(_small(), cache_tokens=4 * options.chunks * options.chunk_tokens)
    store = MemoryStore(model.fingerprint, model.kv_layout, max_tokens=model.config.max_positions)
    rng = np.random.default_rng(0)

    def drawn(count: int) -> HostArray:
        return rng.integers(0, model.config.vocab_size, count).astype(np.int32)

    chunks = tuple(drawn(options.chunk_tokens) for _ in range(options.chunks))
    seconds: dict[str, list[float]] = {"turborag": [], "full_attention": []}
    for number in range(options.repeats + 1):  # the first compiles, and encodes
        order = tuple(chunks[at] for at in rng.permutation(len(chunks)))
        for method, taken in seconds.items():
            prompt = Prompt(drawn(0), order, drawn(32))
            settle()
            taken.append(_first_token(model, Request(prompt, store, METHODS[method], 1)))
            print(number, method, taken[-1], file=sys.stderr, flush=True)
    first = {method: spread(taken[1:]) for method, taken in seconds.items()}
    sooner = min(seconds["full_attention"][1:]) / min(seconds["turborag"][1:])
    return {
        "parameters": num_params(model.config),
        "prompt_tokens": options.chunks * options.chunk_tokens + 32,
        "first_token_seconds": first,
        "times_sooner": round(sooner, 1),
        "chunk_bytes": {
            form: map_layout(model.config, form).nbytes(options.chunk_tokens)
            for form in MAP_FORMS.values()
        },
        "rounded": list(_rounded(model, chunks, drawn(32), options.repeats)),
    }


def _first_token(model: Model, request: Request) -> float:
    start = time.perf_counter()
    for progress in engine_of(model).iterate([request]):
        if progress.error is not None:
            raise progress.error
        if progress.new:
            return time.perf_counter() - start
    raise AssertionError("no token came")


def _rounded(
    model: Model, chunks: tuple[HostArray, ...], question: HostArray, repeats: int
) -> Iterator[dict[str, Any]]:
    """Of every form the seconds to put chunks into a row, and what the logits lose."""
    exact = None
    for form in MAP_FORMS.values():
        cells = 2 * sum(map(len, chunks))
        rows = open_map_rows(model.config, model.params, form, cells)
        stored, taken = dict(rows.encode(question[:0], chunks)), []
        life, place = rows.live(), 0
        for number in range(repeats + 1):
            rows.leave(0)
            place, start = 0, time.perf_counter()
            for index, chunk in enumerate(chunks):
                rows.restore(0, stored[index], 0, place, life)
                place += len(chunk)
            [logits] = rows.step([(0, place, question[:1], True)], life)
            taken += [time.perf_counter() - start] * (number > 0)
        [logits] = rows.step([(0, place + 1, question[1:], True)], life)
        exact = logits if exact is None else exact
        yield {
            "form": form,
            "put_seconds": min(taken),
            "logit_error": float(np.abs(logits - exact).max() / np.abs(exact).max()),
        }


if __name__ == "__main__":
    sys.exit(run_script(__doc__, MapOptions, run))
