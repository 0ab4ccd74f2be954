"""The MLP of a layer with experts: which of them a token goes through, and their products.

Pairs of a token and one of its experts are sorted by expert. On the CPU they are cut into tiles of
one expert each, in turn: XLA:CPU expands ``ragged_dot`` to all pairs with all experts. In ms, of
float32 and 256 -> 896 -> 256 on one core, for 2 of 8 experts; and 256 -> 192 -> 256 for 8 of 64:

    tokens             1          8          256
    tiles            0.7  0.4   5.2  2.7    37   27
    every expert     2.6  7.4   4.1   13    64  146
    ragged_dot        13   85    15  102   125 1556

A tile has half as many rows as an expert has on average, which loses least to what tiles lack.

A tile of one row copies the weights of its expert a block at a time, which stays in the caches: a
copy of them whole is memory that is new to the process in every step. In GB/s of weights, on a core
that others used as well, whole and in blocks of 1 MiB: 1.3 and 2.3 (2 of 8 experts 1024 -> 2048 ->
1024, float32), 0.9 and 1.6 (the same in bfloat16), 1.4 and 2.7 (4 of 16, 1024 -> 768 -> 1024,
float32).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxrag.base.config import Activation, ExpertsConfig, ModelConfig
from jaxrag.base.sharding import Rules, attention_axes
from jaxrag.base.types import Array
from jaxrag.models.linear import activated, product
from jaxrag.models.spec import MLP, LayerParams

_LARGEST_TILE = 64
_BLOCK = 1 << 20  # bytes of a weight

GateForm = tuple[float, float] | Activation  # of the gate: with a clamp, or plain
_Weights = dict[str, Array]  # by name, [E, ...]; without E where they are of one expert
_Plan = tuple[Array, Array, Array]  # of every tile its expert, its tokens [., b], is it used?
_Product = Callable[[Array, str], Array]  # of rows [b, I] and the weight of this name


def experts_mlp(x: Array, p: LayerParams, config: ModelConfig) -> Array:
    """What the experts of one layer make of x [B, T, D], each of its tokens.

    Where the config names a mesh, every device computes what its experts give to its rows.
    """
    experts, mesh = config.experts, config.kernel_mesh
    assert experts is not None
    if experts.beside is not None:
        own = {"gate": p.expert_gate, "up": p.expert_up, "down": p.expert_down}
        p = p.replace(**own)
    weights = {name: it for name in MLP if (it := getattr(p, name)) is not None}
    router = {"weight": p.router} | ({} if p.router_bias is None else {"bias": p.router_bias})
    if mesh is None:
        return _through(x, router, weights, config, None)
    rows, over = attention_axes(mesh, x.shape[0], experts.count)[0], Rules().experts
    if over is not None and experts.count % mesh.shape[over]:
        over = None
    call = jax.shard_map(
        functools.partial(_through, config=config, over=over),
        mesh=mesh,
        in_specs=(PartitionSpec(rows), PartitionSpec(), PartitionSpec(over)),
        out_specs=PartitionSpec(rows),
        check_vma=False,
    )
    out: Array = call(x, router, weights)
    return out


def _through(
    x: Array, router: _Weights, weights: _Weights, config: ModelConfig, over: str | None
) -> Array:
    """x [B, T, D] through the experts of ``weights``, summed over the mesh axis ``over``."""
    experts = config.experts
    assert experts is not None
    form: GateForm = experts.clamp or config.activation
    tokens = x.reshape(-1, x.shape[-1])
    share, chosen = routed(tokens, router, experts)
    if over is not None:
        chosen = chosen - lax.axis_index(over) * len(weights["gate"])
    mix = by_tiles if jax.default_backend() == "cpu" else by_ragged_dot
    out = mix(tokens, share, chosen, weights, form)
    out = out if over is None else lax.psum(out, over)
    return out.astype(x.dtype).reshape(x.shape)


def routed(x: Array, router: _Weights, experts: ExpertsConfig) -> tuple[Array, Array]:
    """Shares, float32, and numbers, int32, of the experts of tokens [M, D]: [M, active] each."""
    weight = router["weight"].astype(jnp.float32)
    logits = jnp.dot(x.astype(jnp.float32), weight, precision=lax.Precision.HIGHEST)
    if "bias" in router:
        logits += router["bias"].astype(jnp.float32)
    share, chosen = lax.top_k(jax.nn.softmax(logits), experts.active)
    if experts.normalise:
        share = share / share.sum(-1, keepdims=True)
    return share, chosen


def _sorted(chosen: Array, count: int) -> tuple[Array, Array]:
    """The order of the pairs [M * active] by expert, and how many each of ``count`` experts has.

    Pairs of an expert that is not among them are last.
    """
    pairs = chosen.reshape(-1)
    pairs = jnp.where((pairs >= 0) & (pairs < count), pairs, count)
    sizes = (pairs[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
    return jnp.argsort(pairs), sizes


def by_ragged_dot(
    x: Array, share: Array, chosen: Array, weights: _Weights, form: GateForm
) -> Array:
    """Tokens x [M, D] through their experts, float32: grouped products over all pairs at once.

    ``chosen`` [M, active] are numbers of experts, ``share`` their shares; of numbers that
    ``weights`` do not have, nothing.
    """
    order, sizes = _sorted(chosen, len(weights["gate"]))
    expert = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(order))

    def project(rows: Array, name: str) -> Array:
        out = lax.ragged_dot(rows, weights[name], sizes)
        bias = weights.get(f"{name}_bias")
        return out if bias is None else out + bias[expert]

    at = order // chosen.shape[1]
    rows = x[at]
    hidden = _gated(project(rows, "gate"), project(rows, "up"), form)
    inside = jnp.arange(len(order)) < sizes.sum()
    of_pair = jnp.where(inside, share.reshape(-1)[order], 0)[:, None]
    out = project(hidden, "down").astype(jnp.float32) * of_pair
    return jnp.zeros(x.shape, jnp.float32).at[at].add(out)


def by_tiles(x: Array, share: Array, chosen: Array, weights: _Weights, form: GateForm) -> Array:
    """The same as ``by_ragged_dot``, tile after tile."""
    count, pairs = len(weights["gate"]), chosen.size
    mean = max(pairs // (2 * count), 1)
    size = min(1 << (mean.bit_length() - 1), _LARGEST_TILE)
    order, sizes = _sorted(chosen, count)
    tiles, starts = -(-sizes // size), jnp.cumsum(sizes) - sizes
    first = jnp.cumsum(tiles) - tiles  # tile of each expert
    used = min(count, pairs)
    number = jnp.arange((pairs - used) // size + used)
    expert = jnp.clip(jnp.searchsorted(first, number, side="right") - 1, 0, count - 1)
    rows = (starts[expert] + (number - first[expert]) * size)[:, None] + jnp.arange(size)
    there = rows < (starts + sizes)[expert][:, None]
    pair = order[jnp.where(there, rows, 0)]
    of_pair = jnp.where(there, share.reshape(-1)[pair], 0)
    plan = (expert, pair // chosen.shape[1], there[:, 0])
    return _tiled(form, x, of_pair, weights, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(form: GateForm, x: Array, share: Array, weights: _Weights, plan: _Plan) -> Array:
    def step(out: Array, tile: Any) -> tuple[Array, None]:
        share, (expert, at, used) = tile

        def add(out: Array) -> Array:
            if len(at) > 1:
                return out.at[at].add(_of_expert(form, x[at], share, _one(weights, expert)))
            by_blocks = functools.partial(_by_blocks, weights, expert)
            biases = _one({name: weights[name] for name in weights if "bias" in name}, expert)
            return out.at[at].add(_of_expert(form, x[at], share, biases, by_blocks))

        return lax.cond(used, add, lambda out: out, out), None

    return lax.scan(step, jnp.zeros(x.shape, jnp.float32), (share, plan))[0]


def _tiled_forward(form: GateForm, *operands: Any) -> tuple[Array, Any]:
    return _tiled(form, *operands), operands


def _tiled_backward(
    form: GateForm, operands: Any, d_out: Array
) -> tuple[Array, Array, _Weights, None]:
    """Every tile is computed again, and its gradients are added where they belong."""
    x, share, weights, plan = operands

    def step(sums: Any, tile: Any) -> tuple[Any, Array]:
        share, (expert, at, _) = tile
        back = jax.vjp(functools.partial(_of_expert, form), x[at], share, _one(weights, expert))[1]
        d_rows, d_share, d_one = back(d_out[at])
        d_x, d_weights = sums
        d_x = d_x.at[at].add(d_rows.astype(jnp.float32))
        # Unused tiles are not left out: a condition would copy all sums.
        d_weights = jax.tree.map(lambda sum_, one: sum_.at[expert].add(one), d_weights, d_one)
        return (d_x, d_weights), d_share

    nothing = (jnp.zeros(x.shape, jnp.float32), jax.tree.map(jnp.zeros_like, weights))
    (d_x, d_weights), d_share = lax.scan(step, nothing, (share, plan))
    return d_x.astype(x.dtype), d_share, d_weights, None


_tiled.defvjp(_tiled_forward, _tiled_backward)


def _one(weights: _Weights, expert: Array) -> _Weights:
    return {name: it[expert] for name, it in weights.items()}


def _by_blocks(weights: _Weights, expert: Array, row: Array, name: str) -> Array:
    """A row [1, I] times the expert's weight [I, O], a block of its rows at a time."""
    weight = weights[name]
    count, inner, outer = weight.shape
    parts = 1
    while inner % (2 * parts) == 0 and weight.nbytes // count // parts > _BLOCK:
        parts *= 2
    if parts == 1:
        return product(row, weight[expert])
    blocks = weight.reshape(count * parts, inner // parts, outer)

    def add(sums: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        row, number = part
        return sums + product(row, blocks[expert * parts + number], dtype=jnp.float32), None

    each = (row.reshape(parts, 1, -1), jnp.arange(parts))
    return lax.scan(add, jnp.zeros((1, outer), jnp.float32), each)[0].astype(row.dtype)


def _of_expert(
    form: GateForm,
    rows: Array,
    share: Array,
    one: _Weights,
    times: _Product | None = None,
) -> Array:
    """Rows [b, D] through one expert, times their shares [b], float32.

    ``times``: what multiplies with its weights, where ``one`` has the biases alone.
    """

    def project(rows: Array, name: str) -> Array:
        out = product(rows, one[name]) if times is None else times(rows, name)
        bias = one.get(f"{name}_bias")
        return out if bias is None else out + bias

    hidden = _gated(project(rows, "gate"), project(rows, "up"), form)
    return project(hidden, "down").astype(jnp.float32) * share[:, None]


def _gated(gate: Array, up: Array, form: GateForm) -> Array:
    if isinstance(form, str):
        return activated(gate, form) * up
    alpha, limit = form
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)
