"""The decoder: one pure ``forward`` that training, encoding, prefill and decode all call."""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig
from jaxrag.base.types import Array, HostArray, Partial, Tokens
from jaxrag.models.attention import Attend, with_sink_logits
from jaxrag.models.experts import experts_mlp
from jaxrag.models.int8 import Int8Weight, int8_product
from jaxrag.models.linear import activated, linear, product
from jaxrag.models.recurrent import Paths, RowMemory, recurrent_out
from jaxrag.models.rope import RopeFactors, RopeTable
from jaxrag.models.spec import LayerParams, Params

_Carry = tuple[Any, Any]  # x, [B, T, D] or a ResidualStream, and the cache
# A layer's weights, its index and its window (of ``layer_windows``), scalar int32.
LayerAt = tuple[LayerParams, Array | HostArray, Array | None]
Layer = Callable[[_Carry, Any], tuple[_Carry, Any]]  # (carry, (layer's params, ...)) of the scan


class Decoder(struct.PyTreeNode):
    """What a compiled step needs of a model: ``Model.decoder`` gives it."""

    params: Params
    rope: RopeTable  # of at least as many positions as the step's table has slots
    config: ModelConfig = struct.static()
    factors: RopeFactors | None = None  # of the whole context, where KV is in host memory


class ResidualStream(struct.PyTreeNode):
    """The residual stream of models whose layers take more of a token than it.

    Attributes:
      x: [B, T, D].
      inputs: [L, B, T, P] of every layer, or None.
      k: [S, B, T, K, H] before rotation, of each of ``shared_from`` behind it; None: S = 0.
      v: the same of V.
    """

    x: Array
    inputs: Array | None
    k: Array | None
    v: Array | None


def shared_from(config: ModelConfig) -> tuple[int, ...]:
    """The layers whose K and V others take."""
    return tuple(sorted(set((config.kv_sources or ())[config.num_kv_layers :])))


def residual(x: Array | ResidualStream) -> Array:
    """[B, T, D] of what goes through the layers."""
    return x.x if isinstance(x, ResidualStream) else x


def rms_norm(x: Array, weight: Array | None, config: ModelConfig) -> Array:
    """RMSNorm over the last axis, statistics in float32, result in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.norm_eps)
    return _weighted(wide, weight, x.dtype, config)


def _weighted(wide: Array, weight: Array | None, dtype: Any, config: ModelConfig) -> Array:
    """What was normed, float32, times a weight, where it has one."""
    if weight is None:
        return wide.astype(dtype)
    if config.wide_norms:
        return (weight.astype(jnp.float32) * wide).astype(dtype)
    if config.unit_norms:
        return ((1 + weight.astype(jnp.float32)) * wide).astype(dtype)
    return weight * wide.astype(dtype)


def scaled(x: Array, by: float) -> Array:
    """x times a constant, rounded once; x itself where that is 1."""
    return x if by == 1.0 else (x.astype(jnp.float32) * by).astype(x.dtype)


def capped(x: Array, cap: float | None) -> Array:
    """x within a cap, softly; x itself where there is none."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def _project(x: Array, weight: Any, bias: Array | None) -> Array:
    """x [B, T, D] @ weight [D, heads, H] (+ bias) -> [B, T, heads, H]."""
    out = linear(x, weight)
    return out if bias is None else out + bias


def _linear(x: Array, weight: Any, bias: Array | None) -> Array:
    """x [B, T, I] @ weight [I, O] (+ bias)."""
    out = linear(x, weight)
    return out if bias is None else out + bias


def heads_of(
    x: Array | ResidualStream, p: LayerParams, config: ModelConfig, layer: Array | HostArray | int
) -> tuple[Array, Array, Array]:
    """q [B, T, N, H], k and v [B, T, K, H] of one layer, before rotation, of its input x."""
    if p.k is None:
        assert isinstance(x, ResidualStream) and x.k is not None and x.v is not None
        q = _project(_before(x.x, p.attn_norm, config), p.q, p.q_bias)
        at = jnp.searchsorted(jnp.array(shared_from(config)), jnp.array(config.kv_sources)[layer])
        return _head_norm(q, p.q_norm, config, layer), x.k[at], x.v[at]
    x = _before(residual(x), p.attn_norm, config)
    q = _project(x, p.q, p.q_bias)
    k = _project(x, p.k, p.k_bias)
    v = _project(x, p.v, p.v_bias)
    if config.joint_qk_norm:
        q, k = _joint_norm(q, p.q_norm, config), _joint_norm(k, p.k_norm, config)
    elif config.qk_norm:
        q, k = _head_norm(q, p.q_norm, config, layer), _head_norm(k, p.k_norm, config, layer)
    if config.value_norm:
        v = _head_norm(v, None, config, layer)
    return q, k, v


def _head_norm(x: Array, weight: Array | None, config: ModelConfig, layer: Any) -> Array:
    """RMSNorm of heads x [B, T, heads, H], of each part of a head where it has parts."""
    parts = config.head_parts
    most = max(parts)
    if most == 1:
        return rms_norm(x, weight, config)
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, most, -1)
    squares = (wide * wide).sum((-3, -1))
    whole = squares.sum(-1, keepdims=True) / most
    alone = jnp.asarray([it == 1 for it in parts])[layer]
    mean = jnp.where(alone, whole, squares) * (most / x.shape[-1])
    wide = wide * lax.rsqrt(mean + config.norm_eps)[..., None, :, None]
    return _weighted(wide.reshape(x.shape), weight, x.dtype, config)


def _before(x: Array, weight: Array, config: ModelConfig) -> Array:
    return rms_norm(x, weight, config) if config.pre_norms else x


def _joint_norm(x: Array, weight: Array, config: ModelConfig) -> Array:
    """RMSNorm of x [B, T, heads, H] over all heads together, by weight [heads, H]."""
    joined = rms_norm(x.reshape(*x.shape[:2], -1), weight.reshape(-1), config)
    return joined.reshape(x.shape)


def finish_layer(
    x: Array, part: Partial, p: LayerParams, config: ModelConfig, given: Array | None = None
) -> Array:
    """What one layer makes of its input x [B, T, D] and its attention over all keys.

    ``given`` is the input [B, T, P] that it has of its own.
    """
    attended = with_sink_logits(part, p.sink_logits)
    if p.attn_gate is not None:
        attended = attended * jax.nn.sigmoid(linear(_before(x, p.attn_norm, config), p.attn_gate))
    out = linear(attended, p.o)
    return _finish(x, out if p.o_bias is None else out + p.o_bias, p, config, given)


def _finish(
    x: Array, out: Array, p: LayerParams, config: ModelConfig, given: Array | None = None
) -> Array:
    """The same of what the layer adds before its MLP, [B, T, D]."""
    if config.post_norms:
        out = rms_norm(out, p.post_attn_norm, config)
    x = x + scaled(out, config.residual_scale)
    experts = config.experts
    mlp = _mlp if experts is None or experts.beside is not None else experts_mlp
    normed = _before(x, p.mlp_norm, config)
    out = mlp(normed, p, config)
    if p.shared_gate is not None:
        own = p.replace(gate=p.shared_gate, up=p.shared_up, down=p.shared_down)
        out += jax.nn.sigmoid(linear(normed, p.shared_share)) * _mlp(normed, own, config)
    if experts is not None and experts.beside is not None:
        # Whose weights hold those of the norm before them.
        other = experts_mlp(rms_norm(x, None, config), p, config)
        out = rms_norm(out, p.post_dense_norm, config)
        out += rms_norm(other, p.post_expert_norm, config)
    if config.post_norms:
        out = rms_norm(out, p.post_mlp_norm, config)
    x = x + scaled(out, config.residual_scale)
    if given is not None:
        gate = activated(linear(x, p.input_gate), config.activation)
        x = x + rms_norm(linear(gate * given, p.input_out), p.post_input_norm, config)
    return x if p.layer_scale is None else x * p.layer_scale.astype(x.dtype)


def _mlp(x: Array, p: LayerParams, config: ModelConfig) -> Array:
    gate = _linear(x, p.gate, p.gate_bias)
    hidden = activated(gate, config.activation) * _linear(x, p.up, p.up_bias)
    return _linear(hidden, p.down, p.down_bias)


def layer_of(params: Params, layer: Array | int) -> LayerParams:
    """The weights of one layer, of stacked ones."""
    weights: LayerParams = jax.tree.map(lambda a: a[layer], params.layers)
    return weights


def layers_at(decoder: Decoder) -> Iterator[LayerAt]:
    """What ``run_layer`` takes of every layer, of a decoder whose layers are apart."""
    windows = layer_windows(decoder.config)
    for index, weights in enumerate(decoder.params.layers):
        yield weights, np.asarray(index, np.int32), None if windows is None else windows[index]


def without_layers(decoder: Decoder) -> Decoder:
    """What is left of it before the first and behind the last layer."""
    return decoder.replace(params=decoder.params.replace(layers=[], sharing=None))


def layer_windows(config: ModelConfig) -> Array | None:
    """Sliding window of every layer [L] int32, INT32_MAX for none; None when no layer has one."""
    if config.sliding_window is None:
        return None
    uses = config.window_layers or (True,) * config.num_layers
    unbounded = jnp.iinfo(jnp.int32).max
    return jnp.array([config.sliding_window if use else unbounded for use in uses], jnp.int32)


def embedded(params: Params, config: ModelConfig, ids: Array) -> Array:
    """x [B, T, D] of token ids [B, T] int32: rows of ``embed`` and, behind them, of ``soft``."""
    x: Array = params.embed[ids]
    by = _rounded(config.embedding_scale, x, config)
    if params.soft is None:
        return scaled(x, by)
    behind = ids - params.embed.shape[0]
    rows = jnp.asarray(params.soft)[jnp.clip(behind, 0, params.soft.shape[0] - 1)]
    return scaled(jnp.where((behind >= 0)[..., None], rows, x), by)


def _rounded(by: float, x: Array, config: ModelConfig) -> float:
    return float(np.asarray(by, x.dtype)) if config.unit_norms or config.wide_norms else by


def before_layers(params: Params, config: ModelConfig, ids: Array) -> Array | ResidualStream:
    """What goes into the first layer of token ids [B, T] int32."""
    x = embedded(params, config, ids)
    if config.input_dim is None and not config.shared_layers:
        return x
    k = inputs = None
    if config.shared_layers:
        shape = (len(shared_from(config)), *ids.shape, config.num_kv_heads, config.head_dim)
        k = jnp.zeros(shape, x.dtype)
    if config.input_dim is not None:
        inputs = linear(x, params.input_proj)
        inputs = rms_norm(scaled(inputs, config.model_dim**-0.5), params.input_norm, config)
        rows = params.input_embed[ids]
        if params.soft is not None:  # which have none
            rows = jnp.where((ids < config.vocab_size)[..., None, None], rows, 0)
        rows = scaled(rows, _rounded(config.input_dim**0.5, x, config))
        inputs = jnp.moveaxis(scaled(inputs + rows, 2**-0.5), 2, 0)
    return ResidualStream(x, inputs, k, k)


def _given(k: Array, v: Array, soft: Array, behind: Array) -> tuple[Array, Array]:
    """k and v [B, T, K, H]; of tokens whose ``behind`` [B, T] is not negative those of ``soft``.

    ``soft`` is K and V [2, R, K, H] of one layer, of which ``behind`` is the row.
    """
    rows = soft[:, jnp.clip(behind, 0, soft.shape[1] - 1)]
    is_given = (behind >= 0)[..., None, None]
    return jnp.where(is_given, rows[0], k), jnp.where(is_given, rows[1], v)


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Tokens,
    cache: Any,
    attend: Attend,
    wrap_layer: Callable[[Layer], Layer] | None = None,
    recurrent: RowMemory = None,
) -> tuple[Array, Any, Any]:
    """Run all layers over tokens [B, T].

    Args:
      tokens: ids, positions, segments (and examples), [B, T].
      cache: what ``attend`` reads and writes (a PagePool, or None); carried through the layer scan.
      wrap_layer: applied to the function of one layer before it is scanned over ``params.layers``;
        training puts rematerialisation, casts and adapters there.
      recurrent: what the layers that keep a state know before the tokens, or the paths of packed
        rows; None where the model has no such layers.

    Returns:
      hidden [B, T, D] after the final norm; the cache; what attend collected, stacked over the
      layers with KV of their own or of others. Where the model has recurrent layers the last is a
      pair: that, and their memory behind the tokens (of packed rows None).
    """
    x, cache, collected = run_layers(
        params, config, tokens, cache, attend, config.num_layers, wrap_layer, recurrent
    )
    return rms_norm(residual(x), params.final_norm, config), cache, collected


def run_layers(
    params: Params,
    config: ModelConfig,
    tokens: Tokens,
    cache: Any,
    attend: Attend,
    num_layers: int,
    wrap_layer: Callable[[Layer], Layer] | None = None,
    recurrent: RowMemory = None,
) -> tuple[Any, Any, Any]:
    """Run the first ``num_layers`` layers over tokens [B, T]; arguments and results as ``forward``.

    The first result is what goes into the next layer, ``residual`` of it before any further norm.
    Of a model with recurrent layers all run, whatever ``num_layers``.
    """
    x = before_layers(params, config, tokens.ids)
    layer_ids, windows = jnp.arange(config.num_layers, dtype=jnp.int32), layer_windows(config)

    def layer(carry: _Carry, scanned: Any) -> tuple[_Carry, Any]:
        x, cache = carry
        if scanned[0].out is not None:
            x, collected = _run_recurrent(config, scanned, x, tokens, recurrent)
        else:
            x, cache, collected = run_layer(config, scanned, x, tokens, cache, attend)
        return (x, cache), collected

    body = layer if wrap_layer is None else wrap_layer(layer)
    if config.recurrent is not None:
        return _run_kinds(params, config.recurrent.layers, (x, cache), body, recurrent)
    if isinstance(params.layers, list):
        some = params.layers[:num_layers]
        (x, cache), collected = _through(jax.jit(body), (x, cache), (some, layer_ids, windows))
        return x, cache, collected
    own = config.num_kv_layers
    scanned = (params.layers, *_some((layer_ids, windows), 0, own))
    (x, cache), collected = lax.scan(body, (x, cache), _some(scanned, 0, min(num_layers, own)))
    if num_layers <= own:
        return x, cache, collected
    scanned = (params.sharing, *_some((layer_ids, windows), own, config.num_layers))
    (x, cache), more = lax.scan(body, (x, cache), _some(scanned, 0, num_layers - own))
    return x, cache, jax.tree.map(lambda *it: jnp.concatenate(it), collected, more)


def _run_kinds(
    params: Params, kinds: tuple[bool, ...], carry: _Carry, body: Layer, memory: RowMemory
) -> tuple[Any, Any, Any]:
    """The layers of a model with recurrent ones, a scan over the shortest period of ``kinds``."""
    whole, body = len(kinds), jax.jit(body)  # layers of one shape are traced once
    given = None if isinstance(memory, Paths) else memory
    apart = isinstance(params.layers, list)
    repeats = (n for n in range(1, whole) if kinds == kinds[:n] * (whole // n))
    size = whole if apart else next(repeats, whole)

    def period(carry: _Carry, parts: Sequence[Any]) -> tuple[_Carry, Any]:
        each: tuple[list[Any], list[Any]] = [], []
        at = [0, 0]
        for kind, run in itertools.groupby(kinds[:size]):
            rows_of_kind = slice(at[kind], at[kind] + len(list(run)))
            at[kind] = rows_of_kind.stop
            take = operator.itemgetter(rows_of_kind)
            own = jax.tree.map(take, parts[kind], is_leaf=lambda it: isinstance(it, list))
            carry, collected = _through(body, carry, own)
            each[kind].append(collected)
        return carry, tuple(jax.tree.map(lambda *it: jnp.concatenate(it), *some) for some in each)

    stacks: Any = (params.layers, params.recurrent)
    if apart:
        stacks = [[p for p in params.layers if (p.out is not None) == it] for it in (False, True)]
    numbers = [jnp.arange(kinds.count(kind), dtype=jnp.int32) for kind in (False, True)]
    parts = [*zip(stacks, numbers, (None, given), strict=True)]
    if apart:
        carry, collected = period(carry, parts)
        return *carry, collected
    periods = jax.tree.map(lambda a: a.reshape(whole // size, -1, *a.shape[1:]), parts)
    carry, collected = lax.scan(period, carry, periods)
    return *carry, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), collected)


def _through(body: Layer, carry: _Carry, layers: tuple[Any, ...]) -> tuple[_Carry, Any]:
    """Layers one after the other, stacked or, where the first of these is a list, apart."""
    weights, *rest = layers
    if not isinstance(weights, list):
        return lax.scan(body, carry, layers)
    each = []
    for index, p in enumerate(weights):
        carry, collected = body(carry, (p, *jax.tree.map(operator.itemgetter(index), rest)))
        each.append(collected)
    return carry, jax.tree.map(lambda *it: jnp.stack(it), *each)


def _run_recurrent(
    config: ModelConfig, layer: Any, x: Array, tokens: Tokens, memory: RowMemory
) -> tuple[Array, Any]:
    """One layer that keeps a state: x behind it, and its memory behind the tokens."""
    p, _, given = layer
    of_layer = memory if isinstance(memory, Paths) else given
    normed = _before(x, p.attn_norm, config)
    out, behind = recurrent_out(normed, p, config, tokens, of_layer)
    return _finish(x, out, p, config), behind


def _some(stacked: Any, start: int, end: int) -> Any:
    """Of arrays [L, ...] the layers from ``start`` on; themselves where that is all."""
    return jax.tree.map(lambda a: a if (start, len(a)) == (0, end) else a[start:end], stacked)


def run_layer(
    config: ModelConfig, layer: LayerAt, x: Any, tokens: Tokens, cache: Any, attend: Attend
) -> tuple[Any, Any, Any]:
    """One layer over x, an array or a ResidualStream: x behind it, cache, what attend collected."""
    p, index, window = layer
    q, k, v = heads_of(x, p, config, index)
    if p.soft is not None:
        k, v = _given(k, v, p.soft, tokens.ids - config.vocab_size)
    part, cache, collected = attend(jnp.asarray(index), window, q, k, v, tokens, cache)
    if not isinstance(x, ResidualStream):
        return finish_layer(x, part, p, config), cache, collected
    if x.k is not None and x.v is not None and p.k is not None:
        new = (jnp.asarray(shared_from(config)) == index)[:, None, None, None, None]
        x = x.replace(k=jnp.where(new, k, x.k), v=jnp.where(new, v, x.v))
    given = None if x.inputs is None else x.inputs[index]
    return x.replace(x=finish_layer(x.x, part, p, config, given)), cache, collected


def keys_and_values(
    params: Params, config: ModelConfig, tokens: Tokens, cache: Any, attend: Attend, layer: int
) -> tuple[Array, Array, Any, Any]:
    """K before rotation and V [B, T, K, H] of one layer (0-based), cache, and what was collected.

    Only the layers before it run, and nothing of this layer but its projections.
    """
    x, cache, collected = run_layers(params, config, tokens, cache, attend, layer)
    _, k, v = heads_of(x, layer_of(params, layer), config, layer)
    return k, v, cache, collected


def unembed(params: Params, config: ModelConfig, hidden: Array) -> Array:
    """Logits in float32: hidden [..., D] -> [..., V]."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    if isinstance(params.lm_head, Int8Weight):
        logits = int8_product(rows, params.lm_head)
    elif params.lm_head is None:
        logits = product(rows, params.embed, 1, jnp.float32)
    else:
        logits = product(rows, params.lm_head, 0, jnp.float32)
    logits = capped(scaled(logits, config.logit_scale), config.logit_cap)
    return logits.reshape(*hidden.shape[:-1], -1)
