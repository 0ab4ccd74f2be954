"""Models of a GGUF file: what ``config.json`` would say of them, and their tensors.

A tensor has the name and the values that it would have in a Hugging Face directory: blocks are
dequantised as they are read, and the rows of q and k, which llama.cpp's converter orders for pairs
of neighbouring dimensions in architectures like llama, are put back. What llama.cpp would
compute otherwise than the families here is refused by its key.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.config import MOST_EXPERTS, Llama3Scaling, RopeConfig
from jaxrag.base.errors import ModelError
from jaxrag.base.gguf import Header, is_gguf, read_header
from jaxrag.base.rotary import frequencies
from jaxrag.base.types import HostArray
from jaxrag.models.mxfp4 import joined
from jaxrag.models.tensor_files import DTYPES, StoredTensor, read_tensors
from jaxrag.models.text.gguf import ending_ids

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
}
# Whose q and k are ordered for pairs of neighbours.
_PAIRED = ("llama", "mistral", "granite", "smollm3")
_ROPE_FREQS = "rope_freqs.weight"
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
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks",
    },
}
_GEMMAS = ("gemma2", "gemma3")
# Layers; of the sizes that there are, these alone have scores by the width of a model.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
# Granite's constants, by their names in config.json; 0 is as none.
_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_CAPS = {  # Gemma 2's, as in config.json, and what llama.cpp takes where there is none
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
# Keys of another arithmetic, with the values that leave the result as it is.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "expert_gating_func": (0, 1),
    "use_parallel_residual": (False,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
}


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
    found = _tensors(read_header(path))
    found.pop(_ROPE_FREQS, None)  # of the config
    return found


def read_gguf_config(path: Path) -> dict[str, Any]:
    """What ``config.json`` of the model would hold, from metadata and the shapes of tensors.

    Raises ModelError for a file that is truncated or inconsistent, and for an architecture, a type
    of tensors or a rotary scaling that is not read.
    """
    header = read_header(path)
    architecture = _architecture(header)
    tensors = _tensors(header)
    number = _Numbers(header, architecture)
    heads, width = number.whole("attention.head_count"), number.whole("embedding_length")
    head_dim = number.whole("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        number.require(key, (head_dim,))
    scales = _scales(number, head_dim) if architecture == "granite" else {}
    gemma2 = architecture == "gemma2"
    for key, neutral in _UNSUPPORTED.items():
        if not ((scales and key in _SCALES.values()) or (gemma2 and key in _CAPS)):
            number.require(key, neutral)
    experts = _experts(number, architecture)
    window = number.whole("attention.sliding_window", 4096 if gemma2 else 0)
    if window and architecture not in ("llama", "mistral", "olmo2", "gpt-oss", *_GEMMAS):
        number.require("attention.sliding_window", (0,))
    kind = ARCHITECTURES[architecture]
    if architecture == "llama" and (window or experts):  # all that sets them apart from a Llama
        kind = "MixtralForCausalLM" if experts else ARCHITECTURES["mistral"]
    matrices = {tensor.identity[1] for tensor in tensors.values() if len(tensor.shape) > 1}
    bos = header.number("tokenizer.ggml.bos_token_id", -1)
    embed = tensors.get("model.embed_tokens.weight")
    rope = _rope(header, number, head_dim)
    own: dict[str, Any] = {"rope_parameters": rope}
    if architecture in _GEMMAS:
        large = number.whole("block_count") == _GEMMA_27B[architecture]
        scalar = width // heads if large else head_dim
        own = {**_of_gemma(number, rope, architecture), "query_pre_attn_scalar": scalar}
    elif architecture == "gpt-oss" and rope["rope_type"] != "default":
        own = {"rope_parameters": {**rope, "truncate": False}}  # as published
    elif window and architecture == "olmo2":
        kind, own = "Olmo3ForCausalLM", _of_olmo3(header, rope)
    return {
        **own,
        **experts,
        "architectures": [kind],
        "vocab_size": 0 if embed is None else embed.shape[0],
        "hidden_size": width,
        "intermediate_size": number.whole("feed_forward_length"),
        "num_hidden_layers": number.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": number.whole("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in tensors,
        "sliding_window": window or None,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": None if bos == -1 else bos,
        "eos_token_id": ending_ids(header),
        "dtype": "float32" if matrices == {"F32"} else "bfloat16",
        **scales,
    }


def _of_gemma(number: "_Numbers", rope: dict[str, Any], architecture: str) -> dict[str, Any]:
    """What it says of itself beside the rest."""
    if architecture == "gemma2":
        caps = {key: number(key, default) or None for key, default in _CAPS.items()}
        return {"rope_parameters": rope, **caps}
    local = {"rope_type": "default", "rope_theta": number("rope.freq_base_swa", 10_000.0)}
    return {
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "sliding_window_pattern": number.whole("attention.sliding_window_pattern", 6),
    }


def _of_olmo3(header: Header, rope: dict[str, Any]) -> dict[str, Any]:
    """An OLMo 2 with windows, in all layers but every fourth, unless the file says in which."""
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    said = header.numbers("olmo2.attention.sliding_window_pattern").tolist()
    kinds = ["sliding_attention" if it else "full_attention" for it in said]
    return {
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "layer_types": kinds or None,
    }


def _experts(number: "_Numbers", architecture: str) -> dict[str, Any]:
    """Of a model with experts what ``config.json`` says of them."""
    count = number.whole("expert_count", 0)
    if not count and architecture not in ("qwen3moe", "gpt-oss"):
        return {}
    used = {"num_experts_per_tok": number.whole("expert_used_count")}
    if architecture == "qwen3moe":
        return {
            **used,
            "num_experts": count,
            "moe_intermediate_size": number.whole("expert_feed_forward_length"),
            "norm_topk_prob": True,  # llama.cpp divides by their sum, always
        }
    if architecture not in ("llama", "gpt-oss"):
        number.require("expert_count", (0,))
    return {**used, "num_local_experts": count}


class _Numbers:
    """Numbers of the metadata below the name of the architecture."""

    def __init__(self, header: Header, architecture: str) -> None:
        self._header, self._architecture = header, architecture

    def __call__(self, key: str, default: float | None = None) -> Any:
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
        return self._header.text(f"{self._architecture}.{key}", default) or default

    def require(self, key: str, expected: tuple[Any, ...]) -> None:
        """Refuse a number that is there and none of these."""
        value = self(key, expected[0])
        if value not in expected:
            raise ModelError(
                f"{self._header.path}: {self._architecture}.{key}={value!r} is not supported, "
                f"expected {' or '.join(map(str, expected))}"
            )


def _architecture(header: Header) -> str:
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


def _tensors(header: Header) -> dict[str, StoredTensor]:
    """The tensors by their Hugging Face names, each of which lies in the file and apart."""
    architecture = _architecture(header)
    number = _Numbers(header, architecture)
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
        found = _NAME.fullmatch(entry)
        ours = None if found is None else names.get(found[2])
        if found is None or ours is None:
            raise ModelError(f"{where} is no tensor of a {architecture} model that is read")
        layer = "" if found[1] is None else f"model.layers.{found[1]}."
        name = f"{layer}{ours}.{found[3]}"
        paired = pairs.get(found[2], 0) if architecture in _PAIRED else 0
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
            less_one=architecture in _GEMMAS and found[2].endswith("norm"),
        )
        tensors |= {it.name: it for it in _apart(tensor)}
    return tensors


def _apart(tensor: GGUFTensor) -> list[GGUFTensor]:
    """Of a tensor of all experts each one's, else itself."""
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


def _scales(number: _Numbers, head_dim: int) -> dict[str, float]:
    found = {name: number(key, 0) or 1.0 for name, key in _SCALES.items()}
    return {**found, "attention_multiplier": number("attention.scale", 0) or head_dim**-0.5}


def _rope(header: Header, number: _Numbers, head_dim: int) -> dict[str, Any]:
    """The rotary settings, as ``read_rope`` reads them."""
    theta = number("rope.freq_base", 10_000.0)
    kind = number.text("rope.scaling.type", "linear")
    factor = number("rope.scaling.factor", number("rope.scale_linear", 0)) or 1.0
    original = number.whole("rope.scaling.original_context_length", 0)
    scaled: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{header.path}: rope.scaling.type={kind!r:.80} is not supported; none, linear, yarn "
            "and Llama 3's are read"
        )
    if kind != "none" and factor != 1:
        scaled |= {"rope_type": kind, "factor": factor}
    if scaled["rope_type"] == "yarn":
        named = {"original_max_position_embeddings": original or None,
                 "beta_fast": number("rope.scaling.yarn_beta_fast", 0) or None,
                 "beta_slow": number("rope.scaling.yarn_beta_slow", 0) or None}  # fmt: skip
        scaled |= {key: value for key, value in named.items() if value is not None}
    usual = 0.1 * math.log(factor) + 1 if kind == "yarn" and factor > 1 else 1.0
    stated = number("rope.scaling.yarn_attn_factor", 0)
    if stated not in (0, 1) and not math.isclose(stated, usual, rel_tol=1e-4):
        number.require("rope.scaling.yarn_attn_factor", (usual,))
    if _ROPE_FREQS not in header.tensors:
        return scaled
    plain = RopeConfig(theta=theta, rotary_dim=head_dim, interleaved=False, scaling=None)
    return {**scaled, **_llama3(header, plain, original or 8192)}


def _llama3(header: Header, plain: RopeConfig, original: int) -> dict[str, Any]:
    """Llama 3's scaling, of which a file has only by what it divides each frequency."""
    stored = _tensors(header)[_ROPE_FREQS].view()
    given = Llama3Scaling(
        factor=float(stored.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=original,
    )
    expected = frequencies(plain) / frequencies(dataclasses.replace(plain, scaling=given))
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise ModelError(
            f"{header.path}: {_ROPE_FREQS} is not Llama 3's scaling with low_freq_factor=1, "
            f"high_freq_factor=4 and original_max_position_embeddings={original}; take the model "
            "as a Hugging Face directory"
        )
    fields = dataclasses.asdict(given)
    original = fields.pop("original_max_positions")
    return {"rope_type": "llama3", "original_max_position_embeddings": original, **fields}
