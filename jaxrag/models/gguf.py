"""Tensors of a GGUF file; what its ``config.json`` would say is in ``gguf_config.py``.

A tensor has the name and the values that it would have in a Hugging Face directory: blocks are
dequantised as they are read, and the rows of q and k, which llama.cpp's converter orders for pairs
of neighbouring dimensions in architectures like llama, are put back.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.config import MOST_EXPERTS
from jaxrag.base.errors import ModelError
from jaxrag.base.gguf import Header, is_gguf, read_header
from jaxrag.base.types import HostArray
from jaxrag.models.mxfp4 import joined
from jaxrag.models.tensor_files import DTYPES, StoredTensor, read_tensors

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "chatglm": "GlmForCausalLM",
}
# Whose q and k are ordered for pairs of neighbours.
_PAIRED = ("llama", "mistral", "granite", "smollm3")
ROPE_FREQS = "rope_freqs.weight"
_BLOCK = 1 << 20  # bytes that are dequantised at a time
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
    "rope_freqs": "rope_freqs",
}
_NORMS_BEHIND = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_JOINED = {"attn_qkv": "self_attn.{qkv}_proj", "ffn_up": "mlp.gate_up_proj"}
_EXPERTS = "block_sparse_moe.experts.{expert}."
# What else tensors are called; of Mixtral's files the architecture is "llama".
_OWN_NAMES = {
    "gemma2": _NORMS_BEHIND,
    "gemma3": _NORMS_BEHIND,
    "olmo2": _NORMS_BEHIND,
    "llama": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": _EXPERTS + "w1",
        "ffn_up_exps": _EXPERTS + "w3",
        "ffn_down_exps": _EXPERTS + "w2",
    },
    "chatglm": _JOINED,
    "glm4": {
        **_JOINED,
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks",
    },
}
GEMMAS = ("gemma2", "gemma3")


@dataclasses.dataclass(frozen=True)
class GGUFTensor(StoredTensor):
    """One tensor of a GGUF file; ``dtype`` is what its values are read as.

    Attributes:
      entry: its name in the file.
      kind: its type in the file, such as "Q4_K".
      size: bytes in the file.
      pairs: heads whose rows are ordered in pairs; 0: rows are as they should be.
      less_one: of Gemma's norms a file has 1 + weight.
    """

    entry: str
    kind: str
    size: int
    pairs: int
    less_one: bool

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file."""
        return self.size

    @property
    def identity(self) -> tuple[str, str]:
        """Name and type as the file has them."""
        return self.entry, self.kind

    def view(self) -> HostArray:
        """The values as an array of ``dtype`` and ``shape``, dequantised and in order."""
        rows = self.raw.reshape(self.shape[0], -1)
        if self.pairs:
            halves = rows.reshape(self.pairs, -1, 2, rows.shape[1])
            rows = halves.swapaxes(1, 2).reshape(rows.shape)
        if self.kind in DTYPES:
            values = rows.reshape(-1).view(self.dtype).reshape(self.shape)
            return values - values.dtype.type(1) if self.less_one else values
        from gguf import GGMLQuantizationType, quants

        kind, (_, size) = GGMLQuantizationType[self.kind], _block_of(self.kind)
        stored = rows.reshape(-1)
        values = np.empty(math.prod(self.shape), np.float32)
        step, done = _BLOCK // size * size, 0
        with np.errstate(over="ignore", invalid="ignore"):  # found when all is there
            for start in range(0, len(stored), step):
                part = quants.dequantize(stored[None, start : start + step], kind)[0]
                values[done : done + len(part)] = part
                done += len(part)
        return values.reshape(self.shape)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a model directory or a GGUF file, by their Hugging Face names.

    Raises ModelError as ``read_tensors`` and ``read_gguf_config`` do.
    """
    if not is_gguf(path):
        return joined(read_tensors(path))
    found = tensors_of(read_header(path))
    found.pop(ROPE_FREQS, None)  # of the config
    return found


class Numbers:
    """Numbers of the metadata below the name of the architecture.

    Raises ModelError for what is not there, or of another type.
    """

    def __init__(self, header: Header, architecture: str) -> None:
        self._header, self._architecture = header, architecture

    def __call__(self, key: str, default: float | None = None) -> Any:
        """A number; without a default it has to be there."""
        return self._header.number(f"{self._architecture}.{key}", default)

    def whole(self, key: str, default: int | None = None) -> int:
        """A size: from 1 on where there is no default, else from 0 on."""
        value = self(key, default)
        if type(value) is not int or not (default is None) <= value < 1 << 31:
            raise ModelError(
                f"{self._header.path}: {self._architecture}.{key}={value!r:.80}: expected a size"
            )
        return value

    def text(self, key: str, default: str) -> str:
        """A text."""
        return self._header.text(f"{self._architecture}.{key}", default) or default

    def require(self, key: str, expected: tuple[Any, ...]) -> None:
        """Refuse a number that is there and none of these."""
        value = self(key, expected[0])
        if value not in expected:
            raise ModelError(
                f"{self._header.path}: {self._architecture}.{key}={value!r} is not supported, "
                f"expected {' or '.join(map(str, expected))}"
            )


def architecture_of(header: Header) -> str:
    """A key of ARCHITECTURES. Raises ModelError for another, and for a part of a model."""
    parts = header.number("split.count", 0)
    if parts > 1:
        raise ModelError(
            f"{header.path}: one of {parts} parts of a model, which is read from one file; join "
            "them by `llama-gguf-split --merge FIRST-PART WHOLE.gguf`"
        )
    name, kind = header.text("general.architecture", ""), header.text("general.type", "model")
    if name not in ARCHITECTURES or kind != "model":
        what = f"architecture {name!r}" if kind == "model" else f"{kind!r}"
        raise ModelError(
            f"{header.path}: {what:.80} is not supported; models of the architectures "
            f"{', '.join(ARCHITECTURES)} are read"
        )
    return name


def tensors_of(header: Header) -> dict[str, StoredTensor]:
    """The tensors by their Hugging Face names, each of which lies in the file and apart."""
    architecture = architecture_of(header)
    number = Numbers(header, architecture)
    heads = number.whole("attention.head_count")
    pairs = {"attn_q": heads, "attn_k": number.whole("attention.head_count_kv", heads)}
    size, end = header.path.stat().st_size, 0
    tensors: dict[str, StoredTensor] = {}
    names = _NAMES | _OWN_NAMES.get(architecture, {})
    for entry, place in sorted(header.tensors.items(), key=lambda item: item[1].start):
        where, (kind, nbytes) = f"{header.path}: {entry!r}", _type_of(header, entry)
        inside = end <= place.start and place.start + nbytes <= size
        if not inside or 0 in place.shape:
            raise ModelError(
                f"{where}, {kind} {list(place.shape)} from byte {place.start}, does not lie whole "
                f"and apart in the {size} bytes of the file; download or copy it again"
            )
        end = place.start + nbytes
        match = _NAME.fullmatch(entry)
        ours = None if match is None else names.get(match[2])
        if match is None or ours is None:
            raise ModelError(f"{where} is no tensor of a {architecture} model that is read")
        layer = "" if match[1] is None else f"model.layers.{match[1]}."
        name = f"{layer}{ours}.{match[3]}"
        paired = pairs.get(match[2], 0) if architecture in _PAIRED else 0
        if paired and place.shape[0] % (2 * paired):
            raise ModelError(
                f"{where} has {place.shape[0]} rows, which {paired} heads do not share"
            )
        tensor = GGUFTensor(
            name=name,
            path=header.path,
            dtype=DTYPES.get(kind, np.dtype(np.float32)),
            shape=place.shape,
            start=place.start,
            entry=entry,
            kind=kind,
            size=nbytes,
            pairs=paired,
            less_one=architecture in GEMMAS and match[2].endswith("norm"),
        )
        tensors |= {it.name: it for it in _apart(tensor, (heads, pairs["attn_k"]))}
    return tensors


def _apart(tensor: GGUFTensor, heads: tuple[int, int]) -> list[GGUFTensor]:
    """Of a tensor of all experts each one's, of q, k and v each, else itself.

    ``heads``: of q, and of k and v.
    """
    if "{qkv}" in tensor.name:
        size, over = divmod(tensor.shape[0], heads[0] + 2 * heads[1])
        if over:
            raise ModelError(
                f"{tensor.path}: {tensor.entry!r} has {tensor.shape[0]} rows, which {heads[0]} "
                f"heads and twice {heads[1]} do not share"
            )
        experts, start, row = [], tensor.start, tensor.size // tensor.shape[0]
        for letter, count in zip("qkv", (heads[0], heads[1], heads[1]), strict=True):
            experts.append(
                dataclasses.replace(
                    tensor,
                    name=tensor.name.format(qkv=letter),
                    shape=(count * size, *tensor.shape[1:]),
                    start=start,
                    size=count * size * row,
                )
            )
            start += experts[-1].size
        return experts
    if "{expert}" not in tensor.name:
        return [tensor]
    count, size = tensor.shape[0], tensor.size // tensor.shape[0]
    axes = 2 if tensor.name.endswith("bias") else 3
    if len(tensor.shape) != axes or count > MOST_EXPERTS:
        raise ModelError(
            f"{tensor.path}: {tensor.entry!r} is {list(tensor.shape)}, expected {axes} axes, and "
            f"{MOST_EXPERTS} experts at most"
        )
    return [
        dataclasses.replace(
            tensor,
            name=tensor.name.format(expert=number),
            shape=tensor.shape[1:],
            start=tensor.start + number * size,
            size=size,
        )
        for number in range(count)
    ]


def _type_of(header: Header, entry: str) -> tuple[str, int]:
    """The type of a tensor by name, and its bytes. Raises ModelError for one that is not read."""
    from gguf import GGMLQuantizationType

    place = header.tensors[entry]
    names = {int(kind): kind.name for kind in GGMLQuantizationType}
    kind = names.get(place.kind, str(place.kind))
    if kind not in (*DTYPES, *QUANTISED):
        raise ModelError(
            f"{header.path}: {entry!r} is of the type {kind}, and "
            f"{', '.join((*DTYPES, *QUANTISED))} are read; quantise the model to one of them"
        )
    count, width = _block_of(kind)
    if count > 1 and (len(place.shape) < 2 or place.shape[-1] % count):
        raise ModelError(
            f"{header.path}: {entry!r} is {list(place.shape)}, which blocks of {count} values, of "
            f"the type {kind}, do not make; download or copy it again"
        )
    return kind, math.prod(place.shape) // count * width


def _block_of(kind: str) -> tuple[int, int]:
    """Values and bytes of a block."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    count, width = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return count, width
