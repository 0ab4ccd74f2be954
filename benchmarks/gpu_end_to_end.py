"""End to end on a GPU, random weights at the shapes of a real model: first tokens and decoding.

Rows of Block-Attention table 2 (one question of 50 tokens behind 512 to 32k tokens of chunks) and
of TurboRAG table 4 (1 to 8 requests of 8k + 128 tokens at once): full prefill, and with nothing or
15 % of the chunk tokens computed again. Chunk KV is resident in the pool, or comes from host memory
through the store that holds documents without a knowledge base. A time goes from token ids to the
first token on the host. Weights are random: what is generated means nothing.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from gpu_scenes import TINY, Shape

CONFIGS = Path(__file__).parents[1] / "configs" / "models"
RUNS = 3
RATIO = 0.15


def random_weights(name: str, shape: Shape, impl: str, cache_tokens: int) -> Any:
    """The model of configs/models/NAME.toml with random weights; a toy of its family if tiny."""
    import jax

    from jaxrag.base.config import config_from_dict
    from jaxrag.base.tables import read_toml
    from jaxrag.models.model import Model
    from jaxrag.models.spec import init_params

    config = config_from_dict(read_toml(CONFIGS / f"{name}.toml"))
    if shape is TINY:
        config = dataclasses.replace(
            config, vocab_size=512, num_layers=2, model_dim=64, mlp_dim=96, num_heads=shape.heads,
            num_kv_heads=shape.kv_heads, head_dim=shape.dim, dtype="float32",
            rope=dataclasses.replace(config.rope, rotary_dim=shape.dim),
        )  # fmt: skip
    config = dataclasses.replace(config, max_positions=1 << 17, kernels=impl)
    params = jax.jit(functools.partial(init_params, config))(jax.random.key(0))
    return Model(config, params, None, digest=f"random {name}", cache_tokens=cache_tokens)


def prompt_of(model: Any, shape: Shape, context: int, seed: int) -> Any:
    """Chunks of random ids and a question."""
    import numpy as np

    from jaxrag.engine.request import Prompt

    rng = np.random.default_rng((seed, context))

    def ids(count: int) -> Any:
        return rng.integers(3, model.config.vocab_size, count).astype(np.int32)

    chunks = tuple(ids(shape.chunk) for _ in range(context // shape.chunk))
    return Prompt(np.zeros(0, np.int32), chunks, ids(shape.question))


def first_tokens(model: Any, store: Any, method: Any, prompts: Sequence[Any]) -> float:
    """Seconds from token ids to the first token of every prompt on the host."""
    start = time.perf_counter()
    return max(max(its) for its in told(model, store, method, prompts, 1)) - start


def told(
    model: Any, store: Any, method: Any, prompts: Sequence[Any], tokens: int
) -> list[list[float]]:
    """By prompt when the engine told of its tokens, all prompts being asked at once."""
    from jaxrag.engine.engine import engine_of
    from jaxrag.engine.request import Request

    asked = [Request(prompt, store, method, tokens, rows=len(prompts)) for prompt in prompts]
    times: list[list[float]] = [[] for _ in asked]
    for progress in engine_of(model).iterate(asked):
        if progress.error is not None:
            raise progress.error
        if progress.new:
            times[progress.number].append(time.perf_counter())
    return times


def forget(model: Any, prompts: Sequence[Any]) -> None:
    """Drop the chunks from the pool; the store in host memory keeps them."""
    from jaxrag.engine.engine import engine_of
    from jaxrag.reuse.encode import chunk_key

    def evict(runner: Any) -> None:
        for prompt in prompts:
            for chunk in prompt.chunks:
                key = chunk_key(model.fingerprint, model, "isolated", prompt.prefix, chunk, None)
                runner.cache.allocator.evict(key)

    engine_of(model).call(evict)


def decoding_seconds(model: Any, store: Any, method: Any, prompts: Sequence[Any]) -> float:
    """Seconds a step while every prompt gets its next token."""
    import numpy as np

    from jaxrag.engine.request import DECODE_BLOCK

    times = told(model, store, method, prompts, 1 + (RUNS + 1) * DECODE_BLOCK)
    last = max(times, key=min)  # the others decode when it begins
    _, *blocks = last  # the first is one token
    return float(np.median(np.diff(blocks))) / DECODE_BLOCK


def end_to_end(name: str, shape: Shape, impl: str, found: MutableMapping[str, Any]) -> None:
    """Fill ``found`` row by row, the longest contexts and the smallest batches first."""
    import jax

    from jaxrag.kv.store import MemoryStore
    from jaxrag.models.flops import turborag_flops
    from jaxrag.reuse.methods import METHODS

    longest = max(shape.ttft_contexts)
    most = max(longest, max(shape.batches_ttft) * (shape.batch_context + shape.answer))
    # Beside the chunks lie FusionRAG's variants of them, and what full attention computes.
    model = random_weights(name, shape, impl, 3 * most + 8_192)
    config = model.config
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    store = MemoryStore(
        model.fingerprint, model.kv_layout, max_tokens=shape.chunk, max_bytes=64 << 30
    )
    reuse = METHODS["turborag"]
    again = METHODS["fusionrag"].with_ratio(RATIO)

    def measure(label: str, method: Any, prompts: Sequence[Any], from_host: bool = False) -> float:
        times = []
        for _ in range(RUNS + 1):  # the first one compiles, and encodes what is missing
            if from_host:
                forget(model, prompts)
            times.append(first_tokens(model, store, method, prompts))
        found[label] = {"seconds": statistics.median(times[1:])}
        return statistics.median(times[1:])

    def read_rate(label: str, rows: int, tokens: int) -> None:
        """Weights once and the KV of every row."""
        read = weights + rows * tokens * config.kv_bytes_per_token
        found[label] |= {"bytes_per_second": read / found[label]["seconds"]}

    def compare(where: str, prompts: Sequence[Any]) -> None:
        tokens = prompts[0].num_tokens
        full = measure(f"full prefill, {where}", METHODS["full_attention"], prompts)
        flops = len(prompts) * turborag_flops(config, tokens, tokens)
        found[f"full prefill, {where}"] |= {"flops_per_second": flops / full}
        for label, method in ((f"0 %, {where}", reuse), (f"{RATIO:.0%} again, {where}", again)):
            seconds = measure(label, method, prompts)
            found[label] |= {"times_faster_than_full": full / seconds}
        read_rate(f"0 %, {where}", len(prompts), tokens)
        label = f"0 %, {where}, KV from host memory"
        found_seconds = measure(label, reuse, prompts, from_host=True)
        found[label] |= {"times_faster_than_full": full / found_seconds}

    for context in sorted(shape.ttft_contexts, reverse=True):
        compare(f"{context} + {shape.question}", [prompt_of(model, shape, context, 0)])
    asked = dataclasses.replace(shape, question=shape.answer)
    for batch in sorted(shape.batches_ttft):
        prompts = [prompt_of(model, asked, shape.batch_context, 1 + b) for b in range(batch)]
        where = f"{batch} x ({shape.batch_context} + {shape.answer})"
        compare(where, prompts)
        seconds = decoding_seconds(model, store, reuse, prompts)
        label = f"decode, {where}"
        found[label] = {"seconds": seconds, "tokens_per_second": batch / seconds}
        read_rate(label, batch, prompts[0].num_tokens)
