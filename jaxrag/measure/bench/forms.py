"""Which forms of a computation run fastest on this processor, with the shapes of a model."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base.config import ModelConfig
from jaxrag.kv.cache import PAGE, PagePool
from jaxrag.models.attention import Pages, attend_pool, paged_attention, paged_decode_attention
from jaxrag.models.forms import DECODE_TILES, KEY_TILES, Forms, forms, traced_with
from jaxrag.models.linear import product
from jaxrag.models.rope import rope_table
from jaxrag.models.text.progress import progress_bar

Run = Callable[[], Any]
MakeRun = Callable[[], Run]  # called where a form is in use

_KEYS = 2048
_QUERIES = 256
_ROWS = 8
_TOKENS = 48
_WEIGHT_BYTES = 96 << 20  # more than a processor's caches hold
_LAYERS = 12
_ROUNDS = 9
_GAIN = 1.1  # times as fast in the median round, at least
_WINS = 8  # rounds, at least


@dataclasses.dataclass(frozen=True)
class MeasuredForm:
    """One choice: seconds of each form, medians, and which is taken."""

    choice: str
    seconds: Mapping[str, float]
    taken: str


def measure_forms(config: ModelConfig, seed: int = 0) -> tuple[Forms, list[MeasuredForm]]:
    """Time every form in turn, some ten milliseconds each, and take what is clearly faster.

    A form other than the default is taken where it is a tenth faster in the median of nine rounds,
    and faster in eight of them: a noisy measurement leaves the default. Some seconds are spent on
    compiling, under two on measuring.

    Args:
      config: whose heads, width and dtype are used. Of other dtypes the default stays.
      seed: of the numbers that are multiplied.

    Returns the forms, and what was measured.
    """
    default, dtype = Forms(), config.dtype
    prompt = {
        f"{tile} keys, heads {'apart' if apart else 'together'}": {
            "key_tile": tile,
            "heads_apart": _with(default.heads_apart, dtype, apart),
        }
        for tile in KEY_TILES
        for apart in (False, True)
    }
    step = {f"{count} tiles": {"decode_tiles": count} for count in DECODE_TILES}
    layers = {"apart": {"layers_apart": True}, "in a scan": {"layers_apart": False}}
    row = {"twice": {"doubled_row": True}, "once": {"doubled_row": False}}
    choices: list[tuple[str, Mapping[str, dict[str, Any]], MakeRun]] = [
        ("attention of a prompt", prompt, _attention(config, 1, _QUERIES, seed)),
        ("attention of a step", step, _attention(config, _ROWS, 1, seed)),
        ("layers of few rows", layers, _layers(config, seed)),
        ("one row in bfloat16", row, _single_row(config, seed)),
    ]
    chosen, measured = default, []
    with progress_bar(len(choices), "forms", "choice") as bar:
        for choice, candidates, make in choices:
            each = {name: dataclasses.replace(default, **it) for name, it in candidates.items()}
            [usual] = [name for name, it in each.items() if it == default]
            taken, seconds = _fastest({it: _traced(make, each[it]) for it in each}, usual)
            chosen = dataclasses.replace(chosen, **candidates[taken])
            measured.append(MeasuredForm(choice, seconds, taken))
            bar.update()
    return chosen, measured


def _with(dtypes: tuple[str, ...], dtype: str, within: bool) -> tuple[str, ...]:
    rest = [it for it in dtypes if it != dtype]
    return tuple(sorted([*rest, dtype] if within else rest))


def _traced(make: MakeRun, chosen: Forms) -> Run:
    """A program, compiled with these forms."""
    with traced_with(chosen):
        run = make()
        run()
    return run


def _fastest(runs: Mapping[str, Run], default: str) -> tuple[str, dict[str, float]]:
    """Which is taken, and the median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(_ROUNDS + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number:  # the first warms
                times[name].append(time.perf_counter() - start)
    return chosen_of(times, default), {name: statistics.median(it) for name, it in times.items()}


def chosen_of(times: Mapping[str, list[float]], default: str) -> str:
    """The name with the least median that is clearly faster than ``default``, else that."""
    best = min(times, key=lambda name: statistics.median(times[name]))
    ratios = [one / other for one, other in zip(times[default], times[best], strict=True)]
    clear = statistics.median(ratios) >= _GAIN and sum(it > 1 for it in ratios) >= _WINS
    return best if clear else default


def _attention(config: ModelConfig, rows: int, queries: int, seed: int) -> MakeRun:
    """Of ``queries`` tokens of each of ``rows`` over _KEYS keys of four chunks."""
    kv_heads, dim = config.num_kv_heads, config.head_dim
    rng = np.random.default_rng(seed)
    pages, dtype = _KEYS // PAGE, config.dtype
    table = Pages(
        jnp.asarray(rng.permutation(rows * pages).reshape(rows, pages), jnp.int32),
        jnp.asarray(np.tile(np.arange(pages) * 4 // pages * (_KEYS // 4), (rows, 1)), jnp.int32),
        jnp.asarray(np.tile(np.arange(_KEYS), (rows, 1)), jnp.int32),
    )
    at = np.tile(np.arange(_KEYS, _KEYS + queries), (rows, 1))
    rope = rope_table(config.rope, _KEYS + queries)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    k, v = (draw(rows * pages, PAGE, kv_heads, dim) for _ in range(2))
    pool = PagePool(k, v)
    q, position = draw(rows, queries, config.num_heads, dim), jnp.asarray(at, jnp.int32)
    op = paged_decode_attention if queries == 1 else paged_attention
    if queries == 1:
        q, position = q[:, 0], position[:, 0]

    def make() -> Run:
        compiled = jax.jit(lambda *them: attend_pool(op, config, *them))
        return lambda: jax.block_until_ready(compiled(rope, pool, q, table, position))

    return make


def _layers(config: ModelConfig, seed: int) -> MakeRun:
    """A few rows through layers of two products, whose weights no cache holds."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(config.dtype)
    inner = _WEIGHT_BYTES // (2 * _LAYERS * config.model_dim * dtype.itemsize)
    shape = (_LAYERS, config.model_dim, max(64, inner // 64 * 64))
    stacked = tuple(jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    apart = list(zip(*stacked, strict=True))
    x = jnp.asarray(rng.normal(size=(_TOKENS, config.model_dim)), dtype)

    def layer(x: jax.Array, weights: Sequence[jax.Array]) -> tuple[jax.Array, None]:
        up, down = weights
        return product(jnp.tanh(product(x, up)), down, axis=1).astype(dtype), None

    @jax.jit
    def through(x: jax.Array, weights: Sequence[Any]) -> jax.Array:
        if isinstance(weights, tuple):
            return jax.lax.scan(layer, x, weights)[0]
        for weight in weights:
            x, _ = layer(x, weight)
        return x

    def make() -> Run:
        weights = apart if forms().layers_apart else stacked
        return lambda: jax.block_until_ready(through(x, weights))

    return make


def _single_row(config: ModelConfig, seed: int) -> MakeRun:
    """One row in bfloat16 times weights that no cache holds."""
    rng = np.random.default_rng(seed)
    shape = (config.model_dim, max(64, _WEIGHT_BYTES // (4 * config.model_dim)))
    weight = jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    x = jnp.asarray(rng.normal(size=(1, config.model_dim)), jnp.bfloat16)

    def make() -> Run:
        compiled = jax.jit(lambda x, weight: product(x, weight))
        return lambda: jax.block_until_ready(compiled(x, weight))

    return make
