"""What a model family is: a way to read and write its ``config.json``, and a table of its tensors.

A family adds no code to the forward pass: it says how a Hugging Face directory of that family maps
onto ``ModelConfig`` and ``Params``. New arithmetic is a field of ``ModelConfig`` first, which
``decoder.py`` reads. The table is data, so that loading, exporting and the
strict check of a checkpoint all follow from the same lines.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrag.base.config import ModelConfig

if TYPE_CHECKING:
    from jaxrag.base.types import HostArray
    from jaxrag.models.tensor_files import StoredTensor

    Arrange = Callable[[Mapping[str, StoredTensor], ModelConfig], Mapping[str, StoredTensor]]


BESIDE = (
    "visual",
    "vision_tower",
    "multi_modal_projector",
    "embed_vision",
    "audio_tower",
    "embed_audio",
)
# How tensors of a model in another begin, and what this stands for.
_PREFIXES = {"language_model.": "", "model.language_model.": "model."}


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """One tensor of a checkpoint and the parameter (or fused parameters) it holds.

    ``key`` is the name in the file, with ``{layer}`` where it repeats per layer and ``{expert}``
    where per expert. ``paths`` are attribute paths in ``Params``. ``pattern`` is an einops pattern
    from the file's axes to one repetition of a parameter; where several lie fused, ``p`` is the
    axis of which they are the parts, in the order of ``paths``. ``layers`` is that of each
    repetition.
    """

    key: str
    paths: tuple[str, ...]
    pattern: str
    layers: tuple[int, ...] = ()

    def of_stack(self, stack: str, layers: tuple[int, ...]) -> "TensorRule":
        """The same of the layers that lie in this stack of ``Params``."""
        paths = tuple(path.replace("layers.", f"{stack}.", 1) for path in self.paths)
        return dataclasses.replace(self, paths=paths, layers=layers)

    @property
    def repeats(self) -> int:
        """How many of the parameter's first axes the file has as so many tensors: L, or L and E."""
        return ("{layer}" in self.key) + ("{expert}" in self.key)

    def name(self, at: Sequence[int]) -> str:
        """The tensor at this layer and expert, as many numbers as it repeats over."""
        at = (self.layers[at[0]], *at[1:]) if at and self.layers else at
        return self.key.format(**dict(zip(("layer", "expert"), at, strict=False)))

    def taken(self, stored: "HostArray", part: int, shape: tuple[int, ...]) -> "HostArray":
        """Of the file's tensor one repetition, of this shape, of the parameter ``paths[part]``."""
        from einops import rearrange  # it brings NumPy, which no help text waits for

        left, right = self.pattern.split(" -> ")
        sizes = self._sizes(shape)
        if "p" not in sizes:
            return rearrange(stored, self.pattern, **sizes)
        return rearrange(stored, f"{left} -> p {right}", **sizes)[part]

    def joined(self, parts: "Sequence[HostArray]") -> "HostArray":
        """Inverse of ``taken``: the file's tensor, of one repetition of every parameter."""
        from einops import rearrange

        left, right = self.pattern.split(" -> ")
        if len(parts) == 1:
            return rearrange(parts[0], f"{right} -> {left}")
        return rearrange(list(parts), f"p {right} -> {left}")

    def _sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """The axes of the pattern by name."""
        fused = {} if len(self.paths) == 1 else {"p": len(self.paths)}
        return fused | dict(zip(self.pattern.split(" -> ")[1].split(), shape, strict=True))

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the file's tensor, given that of one repetition of one parameter."""
        left, sizes = self.pattern.split(" -> ")[0], self._sizes(shape)
        words = re.findall(r"\(([^)]*)\)|(\w+)", left)
        return tuple(math.prod(sizes[axis] for axis in "".join(word).split()) for word in words)


def rules_of(rules: Sequence[TensorRule], config: ModelConfig) -> tuple[TensorRule, ...]:
    """The rules of a table, those of layers once for each stack of ``Params``.

    Of them hold those whose paths are in ``param_specs``.
    """
    outer = tuple(it for it in rules if not it.repeats)
    of_layers = [it for it in rules if it.repeats]
    stacks = config.stacks.items()
    return outer + tuple(it.of_stack(name, numbers) for name, numbers in stacks for it in of_layers)


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: its names in ``config.json``, its config reader and writer, its tensors.

    ``read_config`` raises ConfigError for a key that changes the arithmetic and is not supported.
    ``apart`` are the tensors of a GGUF file, where they are others.
    ``ignored`` are ``fnmatch`` patterns of tensors that older checkpoints carry and nothing reads.
    ``within`` are architectures that have such a model in them, and what sees images beside it
    (``BESIDE``), which nothing reads. ``arrange`` makes of tensors of several shapes those of the
    table. ``needs_bos``: it reads a text badly that has
    no BOS token in front, so that no chunk is encoded alone, unless it was trained for that.
    """

    name: str
    architecture: str
    model_type: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    tensors: tuple[TensorRule, ...]
    apart: tuple[TensorRule, ...] = ()
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq", "*.attn.masked_bias")
    needs_bos: bool = False
    within: tuple[str, ...] = ()
    arrange: "Arrange | None" = None

    def own_name(self, name: str) -> str:
        """What a tensor is called where the model is not in another."""
        found = next((it for it in _PREFIXES if self.within and name.startswith(it)), "")
        return _PREFIXES.get(found, "") + name.removeprefix(found)

    def beside(self, name: str) -> str:
        """Of a model around this one the part that a tensor is of; "" of what is read."""
        words = name.split(".")
        return next((it for it in BESIDE if self.within and it in words[:2]), "")


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
    TensorRule(_MLP + "gate_up_proj.weight", ("layers.gate", "layers.up"), "(p f) d -> d f"),
    TensorRule(_MLP + "down_proj.weight", ("layers.down",), "d f -> f d"),
)
_EXPERT = _MLP + "experts.{expert}."
EXPERTS = (
    TensorRule(_MLP + "gate.weight", ("layers.router",), "e d -> d e"),
    TensorRule(_EXPERT + "gate_proj.weight", ("layers.gate",), "f d -> d f"),
    TensorRule(_EXPERT + "up_proj.weight", ("layers.up",), "f d -> d f"),
    TensorRule(_EXPERT + "down_proj.weight", ("layers.down",), "d f -> f d"),
)
POST_NORMS = (
    TensorRule(_LAYER + "post_self_attn_layernorm.weight", ("layers.post_attn_norm",), "d -> d"),
    TensorRule(_LAYER + "post_mlp_layernorm.weight", ("layers.post_mlp_norm",), "d -> d"),
)
