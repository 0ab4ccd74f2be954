"""Which forms of a computation run fastest on this processor, with the shapes of a model."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base.config import ModelConfig
from jaxrag.kv.cache import PAGE, PagePool
from jaxrag.models.attention import Pages, attend_pool, paged_attention, paged_decode_attention
from jaxrag.models.forms import DECODE_TILES, KEY_TILES, Forms, traced_with
from jaxrag.models.linear import product
from jaxrag.models.rope import rope_table
from jaxrag.models.text.progress import progress_bar

Run = Callable[[], Any]

_KEYS = 2048
_QUERIES = 256
_ROWS = 8
_TOKENS = 48
_WEIGHT_BYTES = 96 << 20  # more than a processor's caches hold
_LAYERS = 12
_ROUNDS = 9
_GAIN = 1.1  # of the median round; less is kept as it is, as is what won fewer rounds than
_WINS = 8


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
    forms, told = Forms(), []
    dtype = config.dtype
    choices: list[tuple[str, dict[str, Forms], Callable[[], Run]]] = []
    attention = {
        f"{tile} keys, heads {'apart' if apart else 'together'}": dataclasses.replace(
            forms, key_tile=tile, heads_apart=_with(forms.heads_apart, dtype, apart)
        )
        for tile in KEY_TILES
        for apart in (False, True)
    }
    choices.append(("attention of a prompt", attention, _attention(config, 1, _QUERIES, seed)))
    decode = {f"{n} tiles": dataclasses.replace(forms, decode_tiles=n) for n in DECODE_TILES}
    choices.append(("attention of a step", decode, _attention(config, _ROWS, 1, seed)))
    with progress_bar(len(choices) + 2, "forms", "choice") as bar:
        for choice, candidates, make in choices:
            taken, seconds = _fastest(
                {name: _traced(make, it) for name, it in candidates.items()}, _named(candidates)
            )
            chosen = candidates[taken]
            changed = {
                field: getattr(chosen, field)
                for field in ("key_tile", "heads_apart", "decode_tiles")
                if getattr(chosen, field) != getattr(Forms(), field)
            }
            forms = dataclasses.replace(forms, **changed)
            told.append(MeasuredForm(choice, seconds, taken))
            bar.update()
        apart = {"apart": _layers(config, True, seed), "in a scan": _layers(config, False, seed)}
        taken, seconds = _fastest(apart, "apart")
        forms = dataclasses.replace(forms, layers_apart=taken == "apart")
        told.append(MeasuredForm("layers of few rows", seconds, taken))
        bar.update()
        rows = {
            name: _traced(_single_row(config, seed), dataclasses.replace(forms, doubled_row=it))
            for name, it in (("twice", True), ("once", False))
        }
        taken, seconds = _fastest(rows, "twice")
        forms = dataclasses.replace(forms, doubled_row=taken == "twice")
        told.append(MeasuredForm("one row in bfloat16", seconds, taken))
        bar.update()
    return forms, told


def _with(dtypes: tuple[str, ...], dtype: str, within: bool) -> tuple[str, ...]:
    rest = [it for it in dtypes if it != dtype]
    return tuple(sorted([*rest, dtype] if within else rest))


def _named(candidates: Mapping[str, Forms]) -> str:
    """Which of them is the default."""
    [name] = [name for name, it in candidates.items() if it == Forms()]
    return name


def _traced(make: Callable[[], Run], forms: Forms) -> Run:
    """A program, compiled with these forms."""
    with traced_with(forms):
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


def _attention(config: ModelConfig, rows: int, queries: int, seed: int) -> Callable[[], Run]:
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

    pool = PagePool(*(draw(rows * pages, PAGE, kv_heads, dim) for _ in range(2)))
    q, position = draw(rows, queries, config.num_heads, dim), jnp.asarray(at, jnp.int32)
    op = paged_decode_attention if queries == 1 else paged_attention
    if queries == 1:
        q, position = q[:, 0], position[:, 0]

    def make() -> Run:
        compiled = jax.jit(lambda *them: attend_pool(op, config, *them))
        return lambda: jax.block_until_ready(compiled(rope, pool, q, table, position))

    return make


def _layers(config: ModelConfig, apart: bool, seed: int) -> Run:
    """A few rows through layers of two products, whose weights no cache holds."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(config.dtype)
    inner = _WEIGHT_BYTES // (2 * _LAYERS * config.model_dim * dtype.itemsize)
    shape = (_LAYERS, config.model_dim, max(64, inner // 64 * 64))
    up, down = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    x = jnp.asarray(rng.normal(size=(_TOKENS, config.model_dim)), dtype)

    def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        one, other = weights
        return product(jnp.tanh(product(x, one)), other, axis=1).astype(dtype), None

    @jax.jit
    def scanned(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jax.lax.scan(layer, x, (up, down))[0]

    @jax.jit
    def unrolled(x: jax.Array, each: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        for weights in each:
            x, _ = layer(x, weights)
        return x

    if not apart:
        return lambda: jax.block_until_ready(scanned(x, up, down))
    each = list(zip(up, down, strict=True))
    return lambda: jax.block_until_ready(unrolled(x, each))


def _single_row(config: ModelConfig, seed: int) -> Callable[[], Run]:
    """One row in bfloat16 times weights that no cache holds."""
    rng = np.random.default_rng(seed)
    shape = (config.model_dim, max(64, _WEIGHT_BYTES // (4 * config.model_dim)))
    weight = jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    x = jnp.asarray(rng.normal(size=(1, config.model_dim)), jnp.bfloat16)

    def make() -> Run:
        compiled = jax.jit(lambda x, weight: product(x, weight))
        return lambda: jax.block_until_ready(compiled(x, weight))

    return make
