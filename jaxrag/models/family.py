"""What a model family is: a way to read and write its ``config.json``, and a table of its tensors.

A family adds no code to the forward pass; it only says how a Hugging Face directory of that family
maps onto ``ModelConfig`` and ``Params``. The table is data, so that loading, exporting and the
strict check of a checkpoint all follow from the same lines.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxrag.base.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """One tensor of a checkpoint and the parameter (or fused parameters) it holds.

    ``key`` is the name in the file, with ``{layer}`` where it repeats per layer. ``paths`` are
    attribute paths in ``Params``; several paths lie fused, in that order, along the file tensor's
    first axis. ``pattern`` is an einops pattern from the file's axes to one layer of the parameter;
    it is inverted by swapping its sides.
    """

    key: str
    paths: tuple[str, ...]
    pattern: str

    @property
    def per_layer(self) -> bool:
        """Whether the file holds one such tensor per layer."""
        return "{layer}" in self.key

    @property
    def inverse(self) -> str:
        """The einops pattern from the parameter back to the file's axes."""
        left, right = self.pattern.split(" -> ")
        return f"{right} -> {left}"

    def axis_sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Name the axes of one layer of the parameter, whose shape is ``shape``."""
        return dict(zip(self.pattern.split(" -> ")[1].split(), shape, strict=True))

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the file's tensor, given the shape of one layer of one parameter."""
        sizes = self.axis_sizes(shape)
        axes: list[int] = []
        group: list[int] | None = None
        for word in self.pattern.split(" -> ")[0].replace("(", "( ").replace(")", " )").split():
            if word == "(":
                group = []
            elif word == ")":
                axes.append(math.prod(group or []))
                group = None
            elif group is not None:
                group.append(sizes[word])
            else:
                axes.append(sizes[word])
        return (axes[0] * len(self.paths), *axes[1:])


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: its names in ``config.json``, its config reader and writer, its tensors.

    ``read_config`` raises ConfigError for a key that changes the arithmetic and is not supported.
    ``ignored`` are ``fnmatch`` patterns of tensors that older checkpoints carry and nothing reads.
    ``within`` are architectures that have such a model in them, whose tensors then begin with one
    of ``prefixes`` in place of what this stands for. ``needs_bos``: it reads a text badly that has
    no BOS token in front, so that no chunk is encoded alone, unless it was trained for that.
    """

    name: str
    architecture: str
    model_type: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    tensors: tuple[TensorRule, ...]
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq", "*.attn.masked_bias")
    needs_bos: bool = False
    within: tuple[str, ...] = ()
    prefixes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def own_name(self, name: str) -> str:
        """What a tensor is called where the model is not in another."""
        found = next((it for it in self.prefixes if name.startswith(it)), "")
        return self.prefixes.get(found, "") + name.removeprefix(found)


_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."
_LAYER = "model.layers.{layer}."

DECODER = (
    TensorRule("model.embed_tokens.weight", ("embed",), "v d -> v d"),
    TensorRule("model.norm.weight", ("final_norm",), "d -> d"),
    TensorRule("lm_head.weight", ("lm_head",), "v d -> d v"),
    TensorRule(_LAYER + "input_layernorm.weight", ("layers.attn_norm",), "d -> d"),
    TensorRule(_LAYER + "post_attention_layernorm.weight", ("layers.mlp_norm",), "d -> d"),
    TensorRule(_ATTENTION + "q_proj.weight", ("layers.q",), "(n h) d -> d n h"),
    TensorRule(_ATTENTION + "k_proj.weight", ("layers.k",), "(k h) d -> d k h"),
    TensorRule(_ATTENTION + "v_proj.weight", ("layers.v",), "(k h) d -> d k h"),
    TensorRule(_ATTENTION + "o_proj.weight", ("layers.o",), "d (n h) -> n h d"),
)
QKV_BIAS = (
    TensorRule(_ATTENTION + "q_proj.bias", ("layers.q_bias",), "(n h) -> n h"),
    TensorRule(_ATTENTION + "k_proj.bias", ("layers.k_bias",), "(k h) -> k h"),
    TensorRule(_ATTENTION + "v_proj.bias", ("layers.v_bias",), "(k h) -> k h"),
)
O_BIAS = (TensorRule(_ATTENTION + "o_proj.bias", ("layers.o_bias",), "d -> d"),)
QK_NORM = (
    TensorRule(_ATTENTION + "q_norm.weight", ("layers.q_norm",), "h -> h"),
    TensorRule(_ATTENTION + "k_norm.weight", ("layers.k_norm",), "h -> h"),
)
JOINT_QK_NORM = (
    TensorRule(_ATTENTION + "q_norm.weight", ("layers.q_norm",), "(n h) -> n h"),
    TensorRule(_ATTENTION + "k_norm.weight", ("layers.k_norm",), "(k h) -> k h"),
)
GATED_MLP = (
    TensorRule(_MLP + "gate_proj.weight", ("layers.gate",), "f d -> d f"),
    TensorRule(_MLP + "up_proj.weight", ("layers.up",), "f d -> d f"),
    TensorRule(_MLP + "down_proj.weight", ("layers.down",), "d f -> f d"),
)
MLP_BIAS = (
    TensorRule(_MLP + "gate_proj.bias", ("layers.gate_bias",), "f -> f"),
    TensorRule(_MLP + "up_proj.bias", ("layers.up_bias",), "f -> f"),
    TensorRule(_MLP + "down_proj.bias", ("layers.down_bias",), "d -> d"),
)
FUSED_MLP = (
    TensorRule(_MLP + "gate_up_proj.weight", ("layers.gate", "layers.up"), "f d -> d f"),
    TensorRule(_MLP + "down_proj.weight", ("layers.down",), "d f -> f d"),
)
POST_NORMS = (
    TensorRule(_LAYER + "post_self_attn_layernorm.weight", ("layers.post_attn_norm",), "d -> d"),
    TensorRule(_LAYER + "post_mlp_layernorm.weight", ("layers.post_mlp_norm",), "d -> d"),
)
