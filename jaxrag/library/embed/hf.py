"""Load an encoder from a Hugging Face directory: ``config.json`` and safetensors, strictly.

Every tensor of the files has a place or is known to be unused, and every weight is found in its
shape.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrag.base.errors import ConfigError, ModelError
from jaxrag.base.types import HostArray
from jaxrag.library.embed.bert import ACTIVATIONS, TENSORS, BertConfig, BertParams, LayerParams
from jaxrag.models.family import TensorRule
from jaxrag.models.hf import match_tensors
from jaxrag.models.hf_config import read_float, read_int
from jaxrag.models.names import nested
from jaxrag.models.tensor_files import read_json, read_tensors


@dataclasses.dataclass(frozen=True)
class EncoderFamily:
    """An encoder's names in ``config.json`` and in its tensors, and what its config leaves out."""

    model_type: str
    architectures: tuple[str, ...]
    prefix: str  # of tensor names in a checkpoint that was saved with a head
    vocab_size: int
    pad_id: int
    counts_from_pad: bool  # positions start at pad_token_id + 1


FAMILIES = (
    EncoderFamily(
        "bert",
        ("BertModel", "BertForMaskedLM", "BertForPreTraining", "Contriever"),
        prefix="bert.",
        vocab_size=30522,
        pad_id=0,
        counts_from_pad=False,
    ),
    EncoderFamily(
        "roberta",
        ("RobertaModel", "RobertaForMaskedLM"),
        prefix="roberta.",
        vocab_size=50265,
        pad_id=1,
        counts_from_pad=True,
    ),
    EncoderFamily(
        "xlm-roberta",
        ("XLMRobertaModel", "XLMRobertaForMaskedLM"),
        prefix="roberta.",
        vocab_size=30522,
        pad_id=1,
        counts_from_pad=True,
    ),
)

# Buffers of older checkpoints, the pooler and the language-model head shape no vector.
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_IGNORED = (*_BUFFERS, "pooler.*", "cls.*", "lm_head.*")

# Keys that would change the arithmetic, with the values that leave it as it is.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "quantization_config": (None,),
}


def load_config(directory: Path) -> tuple[EncoderFamily, BertConfig]:
    """Read ``config.json``.

    Raises ModelError when the directory or the file is missing or the architecture is not
    supported, ConfigError for a malformed or refused key.
    """
    if not directory.is_dir():
        raise ModelError(
            f"{directory}: no such directory; name a Hugging Face or sentence-transformers model"
        )
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"{directory}: no config.json; expected a Hugging Face model directory")
    hf = read_json(path)
    family = _find_family(hf, path)
    try:
        return family, _read_config(hf, family)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from None


def load_params(
    directory: Path,
    family: EncoderFamily,
    config: BertConfig,
    *,
    dtype: str,
    sharding: jax.sharding.Sharding | None = None,
) -> BertParams:
    """Load the weights, cast to ``dtype``; one of them at a time lies in host memory.

    ``sharding`` None puts them on the default device. Raises ModelError when tensors are missing,
    left over or of the wrong shape.
    """
    stored = read_tensors(directory)
    prefix = family.prefix if family.prefix + TENSORS[0].key in stored else ""
    sources = match_tensors(
        directory, stored, {rule: _shape(rule, config) for rule in TENSORS}, config.num_layers,
        (family.model_type, "encoder"), _IGNORED, prefix,
    )  # fmt: skip
    leaves = {}
    for path, source in sources.items():
        shape = _shape(source.rule, config)
        block: HostArray = np.empty((len(source.tensors), *shape), jax.numpy.dtype(dtype))
        for layer, row in enumerate(block):
            row[...] = source.layer(layer, shape)
        placed = jax.device_put(block if source.rule.per_layer else block[0], sharding)
        leaves[path] = jax.block_until_ready(placed)
    return nested(BertParams, LayerParams, leaves)


def _find_family(hf: Mapping[str, Any], path: Path) -> EncoderFamily:
    architectures = hf.get("architectures") or []
    for family in FAMILIES:
        if set(family.architectures) & set(architectures):
            return family
        if not architectures and hf.get("model_type") == family.model_type:
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    found = ", ".join(architectures) or hf.get("model_type")
    raise ModelError(
        f"{path}: architecture {found} is not supported as an embedder; supported are {supported}, "
        "or pass any function from texts to vectors"
    )


def _read_config(hf: Mapping[str, Any], family: EncoderFamily) -> BertConfig:
    for key, neutral in _UNSUPPORTED.items():
        if hf.get(key) not in neutral:
            raise ConfigError(f"config.json: {key}={hf[key]!r} is not supported for an embedder")
    activation = hf.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: hidden_act={activation!r}: expected one of {', '.join(ACTIVATIONS)}"
        )
    model_dim = read_int(hf, "hidden_size", 768)
    num_heads = read_int(hf, "num_attention_heads", 12)
    if num_heads < 1 or model_dim % num_heads:
        raise ConfigError(
            f"config.json: hidden_size={model_dim} is not a multiple of num_attention_heads="
            f"{num_heads}"
        )
    pad_id = read_int(hf, "pad_token_id", family.pad_id)
    return BertConfig(
        vocab_size=read_int(hf, "vocab_size", family.vocab_size),
        num_layers=read_int(hf, "num_hidden_layers", 12),
        model_dim=model_dim,
        mlp_dim=read_int(hf, "intermediate_size", 3072),
        num_heads=num_heads,
        max_positions=read_int(hf, "max_position_embeddings", 512),
        num_types=read_int(hf, "type_vocab_size", 2),
        norm_eps=read_float(hf, "layer_norm_eps", 1e-12),
        activation=activation,
        first_position=pad_id + 1 if family.counts_from_pad else 0,
    )


def _shape(rule: TensorRule, config: BertConfig) -> tuple[int, ...]:
    """Shape of one layer of a weight."""
    return tuple(config.sizes[letter] for letter in rule.pattern.split(" -> ")[1].split())
