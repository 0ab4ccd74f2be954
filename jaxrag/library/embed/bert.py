"""The BERT encoder: parameters, bidirectional forward pass and pooling, as pure functions.

BERT (Devlin et al. 2019, section 3) and RoBERTa differ here in one number only: the row of the
position table where a text starts. Letters: B texts, T tokens, S rows of the position table,
Y token types, L layers, D model width, F MLP width, N heads, H head dim, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxrag.base import struct
from jaxrag.base.types import Array
from jaxrag.models.family import TensorRule

Pooling = Literal["mean", "cls", "max", "last"]

_gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)
# By the names of ``hidden_act``.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes and constants of an encoder."""

    vocab_size: int  # V
    num_layers: int  # L
    model_dim: int  # D
    mlp_dim: int  # F
    num_heads: int  # N
    max_positions: int  # S
    num_types: int  # Y
    norm_eps: float
    activation: str  # a key of ACTIVATIONS
    first_position: int  # row of the position table of a text's first token

    @property
    def head_dim(self) -> int:
        """H."""
        return self.model_dim // self.num_heads

    @property
    def max_tokens(self) -> int:
        """The longest text that has positions, special tokens included."""
        return self.max_positions - self.first_position

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by the lower-case letters of the patterns in TENSORS."""
        return {
            "v": self.vocab_size,
            "s": self.max_positions,
            "y": self.num_types,
            "d": self.model_dim,
            "f": self.mlp_dim,
            "n": self.num_heads,
            "h": self.head_dim,
        }


class BertLayerParams(struct.PyTreeNode):
    """Weights of all layers; every leaf leads with L."""

    q: Any  # [L, D, N, H]
    k: Any  # [L, D, N, H]
    v: Any  # [L, D, N, H]
    o: Any  # [L, N, H, D]
    q_bias: Any  # [L, N, H]
    k_bias: Any  # [L, N, H]
    v_bias: Any  # [L, N, H]
    o_bias: Any  # [L, D]
    attn_norm: Any  # [L, D]
    attn_norm_bias: Any  # [L, D]
    up: Any  # [L, D, F]
    up_bias: Any  # [L, F]
    down: Any  # [L, F, D]
    down_bias: Any  # [L, D]
    mlp_norm: Any  # [L, D]
    mlp_norm_bias: Any  # [L, D]


class BertParams(struct.PyTreeNode):
    """All weights of an encoder."""

    tokens: Any  # [V, D]
    positions: Any  # [S, D]
    types: Any  # [Y, D]
    norm: Any  # [D]
    norm_bias: Any  # [D]
    layers: BertLayerParams


_LAYER = "encoder.layer.{layer}."
_SELF = _LAYER + "attention.self."
_OUT = _LAYER + "attention.output."

# Every weight: its name in a checkpoint, its path in BertParams, and the axes of both.
TENSORS = (
    TensorRule("embeddings.word_embeddings.weight", ("tokens",), "v d -> v d"),
    TensorRule("embeddings.position_embeddings.weight", ("positions",), "s d -> s d"),
    TensorRule("embeddings.token_type_embeddings.weight", ("types",), "y d -> y d"),
    TensorRule("embeddings.LayerNorm.weight", ("norm",), "d -> d"),
    TensorRule("embeddings.LayerNorm.bias", ("norm_bias",), "d -> d"),
    TensorRule(_SELF + "query.weight", ("layers.q",), "(n h) d -> d n h"),
    TensorRule(_SELF + "query.bias", ("layers.q_bias",), "(n h) -> n h"),
    TensorRule(_SELF + "key.weight", ("layers.k",), "(n h) d -> d n h"),
    TensorRule(_SELF + "key.bias", ("layers.k_bias",), "(n h) -> n h"),
    TensorRule(_SELF + "value.weight", ("layers.v",), "(n h) d -> d n h"),
    TensorRule(_SELF + "value.bias", ("layers.v_bias",), "(n h) -> n h"),
    TensorRule(_OUT + "dense.weight", ("layers.o",), "d (n h) -> n h d"),
    TensorRule(_OUT + "dense.bias", ("layers.o_bias",), "d -> d"),
    TensorRule(_OUT + "LayerNorm.weight", ("layers.attn_norm",), "d -> d"),
    TensorRule(_OUT + "LayerNorm.bias", ("layers.attn_norm_bias",), "d -> d"),
    TensorRule(_LAYER + "intermediate.dense.weight", ("layers.up",), "f d -> d f"),
    TensorRule(_LAYER + "intermediate.dense.bias", ("layers.up_bias",), "f -> f"),
    TensorRule(_LAYER + "output.dense.weight", ("layers.down",), "d f -> f d"),
    TensorRule(_LAYER + "output.dense.bias", ("layers.down_bias",), "d -> d"),
    TensorRule(_LAYER + "output.LayerNorm.weight", ("layers.mlp_norm",), "d -> d"),
    TensorRule(_LAYER + "output.LayerNorm.bias", ("layers.mlp_norm_bias",), "d -> d"),
)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """LayerNorm over the last axis, statistics in float32, result in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype) + bias


def forward(params: BertParams, config: BertConfig, ids: Array, lengths: Array) -> Array:
    """Run all layers; a token sees every token of its own text.

    Args:
      ids: [B, T] int32, padded at the end; T <= config.max_tokens.
      lengths: [B] int32 tokens of each text, at least 1.

    Returns:
      [B, T, D] in the parameters' dtype; what is beyond a text's length means nothing.
    """
    first = config.first_position
    x = params.tokens[ids] + params.types[0] + params.positions[first : first + ids.shape[1]]
    x = layer_norm(x, params.norm, params.norm_bias, config.norm_eps)
    activation = ACTIVATIONS[config.activation]
    inside = (jnp.arange(ids.shape[1]) < lengths[:, None])[:, None, None, :]

    def layer(x: Array, p: BertLayerParams) -> tuple[Array, None]:
        q = jnp.einsum("btd,dnh->btnh", x, p.q) + p.q_bias
        k = jnp.einsum("btd,dnh->btnh", x, p.k) + p.k_bias
        v = jnp.einsum("btd,dnh->btnh", x, p.v) + p.v_bias
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(inside, scores * config.head_dim**-0.5, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.einsum("bnts,bsnh->btnh", weights, v)
        out = jnp.einsum("btnh,nhd->btd", out, p.o) + p.o_bias
        x = layer_norm(x + out, p.attn_norm, p.attn_norm_bias, config.norm_eps)
        out = activation(x @ p.up + p.up_bias) @ p.down + p.down_bias
        return layer_norm(x + out, p.mlp_norm, p.mlp_norm_bias, config.norm_eps), None

    x, _ = lax.scan(layer, x, params.layers)
    return x


def pool(hidden: Array, lengths: Array, pooling: Pooling) -> Array:
    """One vector a text: hidden [B, T, D], lengths [B] >= 1 -> float32 [B, D].

    "mean" and "max" are over the text's tokens, special ones included; "cls" is its first token,
    "last" its last.
    """
    hidden = hidden.astype(jnp.float32)
    inside = jnp.arange(hidden.shape[1]) < lengths[:, None]
    if pooling == "mean":
        return jnp.einsum("btd,bt->bd", hidden, inside / lengths[:, None])
    if pooling == "max":
        return jnp.max(hidden, axis=1, where=inside[:, :, None], initial=-jnp.inf)
    if pooling == "cls":
        return hidden[:, 0]
    return hidden[jnp.arange(hidden.shape[0]), lengths - 1]


@functools.partial(jax.jit, static_argnames=("config", "pooling", "normalize"))
def embed(
    params: BertParams,
    config: BertConfig,
    pooling: Pooling,
    normalize: bool,
    ids: Array,
    lengths: Array,
) -> Array:
    """Vectors of texts: ids [B, T], lengths [B] -> float32 [B, D], of length 1 if ``normalize``."""
    vectors = pool(forward(params, config, ids, lengths), lengths, pooling)
    if normalize:
        vectors /= jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    return vectors
