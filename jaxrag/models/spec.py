"""Parameters declared once: shape, logical axes and initialiser of every weight side by side.

Initialisation, sharding and the strict check of a checkpoint are all derived from ``param_specs``.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ConfigError, ModelError
from jaxrag.base.sharding import Rules, replicated, sharding, to_host
from jaxrag.base.types import Array

WRITES_RESIDUAL = ("o", "out", "down", "shared_down")  # of LayerParams
MLP = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")  # of LayerParams


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One weight: its shape, the logical axis of each dimension (sharding.Rules) and its init."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Literal["normal", "zeros", "ones", "decays"]
    fan_in: int = 1


class LayerParams(struct.PyTreeNode):
    """Weights of all layers; every leaf leads with L, or not (Params). Absent weights are None.

    Of a model with experts, ``gate``, ``up``, ``down`` and their biases have E behind L.
    """

    attn_norm: Any = None  # [L, D]
    q: Any = None  # [L, D, N, H]
    k: Any = None  # [L, D, K, H]
    v: Any = None  # [L, D, K, H]
    o: Any = None  # [L, N, H, D]
    mlp_norm: Any = None  # [L, D]
    gate: Any = None  # [L, D, F]
    up: Any = None  # [L, D, F]
    down: Any = None  # [L, F, D]
    q_bias: Any = None  # [L, N, H]
    k_bias: Any = None  # [L, K, H]
    v_bias: Any = None  # [L, K, H]
    o_bias: Any = None  # [L, D]
    gate_bias: Any = None  # [L, F]
    up_bias: Any = None  # [L, F]
    down_bias: Any = None  # [L, D]
    q_norm: Any = None  # [L, H], or [L, N, H] over all heads together
    k_norm: Any = None  # [L, H], or [L, K, H]
    post_attn_norm: Any = None  # [L, D]
    post_mlp_norm: Any = None  # [L, D]
    sink_logits: Any = None  # [L, N]
    layer_scale: Any = None  # [L, 1]
    expert_gate: Any = None  # [L, E, D, Fe], of experts beside an MLP
    expert_up: Any = None  # [L, E, D, Fe]
    expert_down: Any = None  # [L, E, Fe, D]
    post_dense_norm: Any = None  # [L, D]
    post_expert_norm: Any = None  # [L, D]
    input_gate: Any = None  # [L, D, P]
    input_out: Any = None  # [L, P, D]
    post_input_norm: Any = None  # [L, D]
    router: Any = None  # [L, D, E]
    router_bias: Any = None  # [L, E]
    shared_gate: Any = None  # [L, D, Fs], of the expert of all tokens
    shared_up: Any = None  # [L, D, Fs]
    shared_down: Any = None  # [L, Fs, D]
    shared_share: Any = None  # [L, D, 1]
    attn_gate: Any = None  # [L, D, N, H]
    mixed: Any = None  # [L, D, Hk, 2 Dk + 2 Dv Hv/Hk], of recurrent layers as all that follows
    qkv: Any = None  # [L, D, C], or with the next in ``mixed``
    out_gate: Any = None  # [L, D, Hv, Dv]
    rate: Any = None  # [L, D, Hk, Hv/Hk]
    decay: Any = None  # [L, D, Hk, Hv/Hk]
    decay_bias: Any = None  # [L, Hv]
    decay_log: Any = None  # [L, Hv]
    conv: Any = None  # [L, C, 1, W]
    out_norm: Any = None  # [L, Dv]
    out: Any = None  # [L, Hv, Dv, D]
    soft: Any = None  # [L, 2, R, K, H], of no checkpoint (Params)


class Params(struct.PyTreeNode):
    """All weights of a decoder. ``lm_head`` is None when the embedding is tied.

    ``soft`` is what ids from the vocabulary's size on are embedded as; where ``layers`` have such,
    it is their K before rotation and V, whatever they are embedded as (``with_soft``).

    ``layers`` is a LayerParams, or a list of one a layer, whose leaves lack L (by_layer); then the
    matrices and ``lm_head`` may be Int8Weight. ``sharing``, where the last layers take K and V of
    others, are these, without ``k`` and ``v``; ``layers`` are those before them, then. Those that
    keep a state are ``recurrent``; then ``layers`` are the others (``ModelConfig.stacks``).
    """

    embed: Any  # [V, D]
    layers: Any
    final_norm: Any  # [D]
    lm_head: Any = None  # [D, V]
    soft: Any = None  # [R, D], of no checkpoint
    sharing: Any = None
    recurrent: Any = None
    input_embed: Any = None  # [V, L, P], of all layers, as the next
    input_proj: Any = None  # [D, L, P]
    input_norm: Any = None  # [P]

    def with_soft(self, given: Any) -> "Params":
        """With R ids more: vectors [R, D], or K and V of every layer, [R, L, 2, K, H]."""
        if given.ndim == 2:
            return self.replace(soft=given)
        layers = self.layers.replace(soft=given.transpose(1, 2, 0, 3, 4))
        nothing = np.zeros((len(given), self.embed.shape[1]), given.dtype)
        return self.replace(soft=nothing, layers=layers)


def param_specs(config: ModelConfig) -> Params:
    """The tree of ParamSpec for a config; same structure as the parameters themselves."""
    c = config
    dim, gain = c.model_dim, _gain(c)
    whole = (c.num_layers, c.input_dim or 0)
    specs = Params(
        embed=ParamSpec((c.vocab_size, dim), ("vocab", "embed"), "normal", dim),
        layers=_layer_specs(c, c.num_kv_layers, c.mlp_dim),
        final_norm=ParamSpec((dim,), (None,), gain),
        lm_head=None
        if c.tie_embeddings
        else ParamSpec((dim, c.vocab_size), ("embed", "vocab"), "normal", dim),
    )
    if c.shared_layers:
        sharing = _layer_specs(c, c.shared_layers, c.shared_mlp_dim or c.mlp_dim)
        none = dict.fromkeys(("k", "v", "k_bias", "v_bias", "k_norm"))
        specs = specs.replace(sharing=sharing.replace(**none))
    if c.recurrent is not None:
        specs = specs.replace(recurrent=_recurrent_specs(c))
    if c.input_dim is None:
        return specs
    return specs.replace(
        input_embed=ParamSpec((c.vocab_size, *whole), ("vocab", None, None), "normal", c.input_dim),
        input_proj=ParamSpec((dim, *whole), ("embed", None, None), "normal", dim),
        input_norm=ParamSpec((c.input_dim,), (None,), gain),
    )


def _gain(config: ModelConfig) -> Literal["zeros", "ones"]:
    """How weights of norms begin."""
    return "zeros" if config.unit_norms else "ones"


def _layer_specs(config: ModelConfig, layers: int, mlp: int) -> LayerParams:
    """Of so many layers with an MLP of this width."""
    c, dim, head = config, config.model_dim, config.head_dim
    heads, kv_heads = c.num_heads, c.num_kv_heads

    def weight(shape: tuple[int, ...], axes: tuple[str | None, ...], fan_in: int) -> ParamSpec:
        return ParamSpec((layers, *shape), ("layers", *axes), "normal", fan_in)

    def bias(shape: tuple[int, ...], axes: tuple[str | None, ...], used: bool) -> ParamSpec | None:
        return ParamSpec((layers, *shape), ("layers", *axes), "zeros") if used else None

    gain = _gain(c)

    def norm(size: int, used: bool = True) -> ParamSpec | None:
        return ParamSpec((layers, size), ("layers", None), gain) if used else None

    def head_norm(count: int, axis: str) -> ParamSpec | None:
        if not (c.qk_norm and c.joint_qk_norm):
            return norm(head, c.qk_norm)
        return ParamSpec((layers, count, head), ("layers", axis, None), gain)

    specs = LayerParams(
        attn_norm=norm(dim, c.pre_norms),
        q=weight((dim, heads, head), ("embed", "heads", None), dim),
        k=weight((dim, kv_heads, head), ("embed", "kv_heads", None), dim),
        v=weight((dim, kv_heads, head), ("embed", "kv_heads", None), dim),
        o=weight((heads, head, dim), ("heads", None, "embed"), heads * head),
        mlp_norm=norm(dim, c.pre_norms),
        gate=weight((dim, mlp), ("embed", "mlp"), dim),
        up=weight((dim, mlp), ("embed", "mlp"), dim),
        down=weight((mlp, dim), ("mlp", "embed"), mlp),
        q_bias=bias((heads, head), ("heads", None), c.qkv_bias),
        k_bias=bias((kv_heads, head), ("kv_heads", None), c.qkv_bias),
        v_bias=bias((kv_heads, head), ("kv_heads", None), c.qkv_bias),
        o_bias=bias((dim,), ("embed",), c.o_bias),
        gate_bias=bias((mlp,), ("mlp",), c.mlp_bias),
        up_bias=bias((mlp,), ("mlp",), c.mlp_bias),
        down_bias=bias((dim,), ("embed",), c.mlp_bias),
        q_norm=head_norm(heads, "heads"),
        k_norm=head_norm(kv_heads, "kv_heads"),
        post_attn_norm=norm(dim, c.post_norms),
        post_mlp_norm=norm(dim, c.post_norms),
        layer_scale=ParamSpec((layers, 1), ("layers", None), "ones") if c.layer_scales else None,
        sink_logits=weight((heads,), ("heads",), 1) if c.sink_logits else None,
    )
    if c.input_dim is not None:
        specs = specs.replace(
            input_gate=weight((dim, c.input_dim), ("embed", None), dim),
            input_out=weight((c.input_dim, dim), (None, "embed"), c.input_dim),
            post_input_norm=norm(dim),
        )
    if c.output_gate:
        specs = specs.replace(attn_gate=specs.q)
    if c.experts is None:
        return specs
    if (of_all := c.experts.shared) is not None:
        specs = specs.replace(
            shared_gate=weight((dim, of_all), ("embed", "mlp"), dim),
            shared_up=weight((dim, of_all), ("embed", "mlp"), dim),
            shared_down=weight((of_all, dim), ("mlp", "embed"), of_all),
            shared_share=weight((dim, 1), ("embed", None), dim),
        )
    count, width = c.experts.count, c.experts.beside
    if width is None:
        each = {name: spec for name in MLP if (spec := getattr(specs, name)) is not None}
    else:
        each = {
            "expert_gate": weight((dim, width), ("embed", "mlp"), dim),
            "expert_up": weight((dim, width), ("embed", "mlp"), dim),
            "expert_down": weight((width, dim), ("mlp", "embed"), width),
        }
    norms = ("post_dense_norm", "post_expert_norm")
    parts: dict[str, ParamSpec | None] = {
        **{name: _of_each(spec, count) for name, spec in each.items()},
        **{name: norm(dim, width is not None) for name in norms},
    }
    return specs.replace(
        router=weight((dim, count), ("embed", None), dim),
        router_bias=bias((count,), (None,), c.experts.router_bias),
        **parts,
    )


def _recurrent_specs(config: ModelConfig) -> LayerParams:
    """Of the layers that keep a state."""
    r, dim, layers = config.recurrent, config.model_dim, len(config.stacks["recurrent"])
    assert r is not None
    each = r.value_heads // r.key_heads

    def of(shape: tuple[int, ...], axes: str, fan_in: int, init: Any = "normal") -> ParamSpec:
        """``axes``: a letter a dimension, e embed, h heads, . neither."""
        named = ("layers", *({"e": "embed", "h": "heads"}.get(it) for it in axes))
        return ParamSpec((layers, *shape), named, init, fan_in)

    gate, rates = (dim, r.value_heads, r.value_dim), (dim, r.key_heads, each)
    projections = {"qkv": of((dim, r.channels), "eh", dim), "out_gate": of(gate, "eh.", dim)}
    if r.fused:
        width = 2 * r.key_dim + 2 * each * r.value_dim
        projections = {"mixed": of((dim, r.key_heads, width), "eh.", dim)}
    common = _layer_specs(config, layers, config.mlp_dim)
    none = ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm")
    return common.replace(
        **dict.fromkeys((*none, "attn_gate")),
        **projections,
        rate=of(rates, "eh.", dim),
        decay=of(rates, "eh.", dim),
        decay_bias=of((r.value_heads,), "h", 1, "decays"),
        decay_log=of((r.value_heads,), "h", 1, "zeros"),
        conv=of((r.channels, 1, r.width), "h..", r.width),
        out_norm=of((r.value_dim,), ".", 1, "ones"),
        out=of((*gate[1:], dim), "h.e", r.value_heads * r.value_dim),
    )


def _of_each(spec: ParamSpec, count: int) -> ParamSpec:
    """A weight of the MLP as each of the experts has it; these are spread, and not their units."""
    axes = tuple(None if axis == "mlp" else axis for axis in spec.axes[1:])
    shape = (spec.shape[0], count, *spec.shape[1:])
    return dataclasses.replace(spec, shape=shape, axes=("layers", "experts", *axes))


def require_trainable(config: ModelConfig) -> None:
    """Raise ConfigError for layers that no training computes."""
    if config.shared_layers or config.input_dim:
        raise ConfigError(
            f"shared_layers={config.shared_layers}, input_dim={config.input_dim}: layers that take "
            "K and V of others or an input of their own are not trained; choose another model"
        )


def is_spec(leaf: object) -> bool:
    """Tell tree functions to stop at a ParamSpec."""
    return isinstance(leaf, ParamSpec)


def param_shardings(config: ModelConfig, mesh: Mesh, rules: Rules | None = None) -> Params:
    """A tree of NamedSharding in the structure of the parameters."""
    rules = rules or Rules()

    def of(path: tuple[Any, ...], spec: ParamSpec) -> Any:
        return sharding(mesh, spec.shape, spec.axes, rules, jax.tree_util.keystr(path))

    return jax.tree_util.tree_map_with_path(of, param_specs(config), is_leaf=is_spec)


def num_params(config: ModelConfig) -> int:
    """How many weights the config has."""
    return sum(math.prod(s.shape) for s in jax.tree.leaves(param_specs(config), is_leaf=is_spec))


def num_table_params(config: ModelConfig) -> int:
    """How many of them are the table of every layer's inputs: a token meets its row alone."""
    return config.vocab_size * config.num_layers * (config.input_dim or 0)


def num_active_params(config: ModelConfig) -> int:
    """How many of them a token meets: of the experts those that it goes through."""
    whole, experts = num_params(config), config.experts
    if experts is None:
        return whole
    specs = by_name(param_specs(config))
    each = sum(math.prod(spec.shape) for spec in specs.values() if "experts" in spec.axes)
    return whole - each // experts.count * (experts.count - experts.active)


def init_params(
    config: ModelConfig, key: jax.Array, dtype: str | None = None, *, for_training: bool = False
) -> Params:
    """Random parameters (normal, 1/sqrt(fan_in)) in ``dtype`` (default ``config.dtype``).

    ``for_training`` divides what writes into the residual stream, WRITES_RESIDUAL, by 2 L, so
    that the stream is the tokens' own at first: embeddings have the norm 1, what a layer writes
    would have sqrt(D).
    """
    specs, treedef = jax.tree.flatten(param_specs(config), is_leaf=is_spec)
    keys = jax.random.split(key, len(specs))
    target = jnp.dtype(dtype or config.dtype)

    def make(spec: ParamSpec, leaf_key: jax.Array) -> jax.Array:
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, target)
        if spec.init == "ones":
            return jnp.ones(spec.shape, target)
        if spec.init == "decays":  # half is left behind 1 to 760 tokens, by head
            steps = jnp.linspace(-7.0, 0.0, spec.shape[-1])
            return jnp.broadcast_to(steps, spec.shape).astype(target)
        values = jax.random.normal(leaf_key, spec.shape, jnp.float32) * spec.fan_in**-0.5
        return values.astype(target)

    made: Params = jax.tree.unflatten(
        treedef, [make(spec, k) for spec, k in zip(specs, keys, strict=True)]
    )
    if not for_training:
        return made
    shrink = 1 / (2 * config.num_layers)
    writing = {
        name: it * shrink
        for name, it in by_name(made).items()
        if name.rpartition(".")[2] in WRITES_RESIDUAL
    }
    return from_names({**by_name(made), **writing})


def by_name(tree: Params) -> dict[str, Any]:
    """The leaves of a ``Params`` of arrays, specs or shardings, by dotted name."""
    return {
        ".".join(key.name for key in path): leaf
        for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_spec)
    }


def from_names(leaves: Mapping[str, Any]) -> Params:
    """Inverse of ``by_name``."""
    return nested(Params, LayerParams, leaves)


def nested[P](params: Callable[..., P], layer: Callable[..., Any], leaves: Mapping[str, Any]) -> P:
    """Parameters from leaves by dotted name; what has a dot in it is of a ``layer``."""
    parts: dict[str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for name, leaf in leaves.items():
        part, _, inner = name.partition(".")
        if inner:
            parts.setdefault(part, {})[inner] = leaf
        else:
            rest[name] = leaf
    return params(**{part: layer(**its) for part, its in parts.items()}, **rest)


def require_finite(directory: str | Path, params: Params, mesh: Mesh | None = None) -> None:
    """Raise ModelError where weights, as they were loaded, hold NaN or infinity.

    They are read once, on the devices where they are; ``mesh`` is theirs.
    """
    leaves = by_name(params)
    place = None if mesh is None else replicated(mesh)
    finite = to_host(jax.jit(_finite, out_shardings=place)(list(leaves.values())))
    bad = [name for name, good in zip(leaves, finite.tolist(), strict=True) if not good]
    if bad:
        raise ModelError(
            f"{directory}: {bad[0]!r} holds NaN or infinity in {leaves[bad[0]].dtype.name}"
            + (f", as do {len(bad) - 1} other parameters" if bad[1:] else "")
            + "; download or copy the weights again, or load them in a wider dtype"
        )


def _finite(leaves: list[Array]) -> Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])
