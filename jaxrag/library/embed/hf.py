"""What a directory of an embedding model holds: config, weights, and how texts become vectors.

Weights are read strictly: every tensor of the files has a place or is known to be unused, and
every weight is found in its shape. Beside them are sentence-transformers' files:

modules.json                       which steps follow the encoder, in which folders
1_Pooling/config.json              how token vectors become one vector
sentence_bert_config.json          the longest text
config_sentence_transformers.json  what is put before a question and before a passage
"""

import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrag.base.errors import ConfigError, ModelError
from jaxrag.base.types import HostArray
from jaxrag.library.embed.bert import (
    ACTIVATIONS,
    TENSORS,
    BertConfig,
    BertLayerParams,
    BertParams,
    Pooling,
)
from jaxrag.models.family import TensorRule
from jaxrag.models.hf import match_tensors
from jaxrag.models.hf_config import read_float, read_int
from jaxrag.models.spec import nested
from jaxrag.models.tensor_files import read_json, read_tensors

_LOG = logging.getLogger("jaxrag")

_POOLING_NAMES: dict[str, Pooling] = {
    "mean_tokens": "mean",
    "cls_token": "cls",
    "max_tokens": "max",
    "lasttoken": "last",
    # as newer files spell it in "pooling_mode"
    "mean": "mean",
    "cls": "cls",
    "max": "max",
}
_LENGTH_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_xlm-roberta_config.json",
)
_PASSAGE_PROMPTS = ("document", "passage", "corpus")
_NO_LIMIT = 1_000_000_000  # tokenizer_config.json says about 1e30 when it knows no limit


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


def load_params(directory: Path, family: EncoderFamily, config: BertConfig) -> BertParams:
    """Load the weights as float32; one of them at a time lies in host memory.

    Raises ModelError when tensors are missing, left over or of the wrong shape.
    """
    stored = read_tensors(directory)
    prefix = family.prefix if family.prefix + TENSORS[0].key in stored else ""
    sources = match_tensors(
        directory, stored,
        {it: (config.num_layers,) * it.repeats + _shape(it, config) for it in TENSORS},
        (family.model_type, "encoder"), _IGNORED, prefix,
    )  # fmt: skip
    leaves = {}
    for path, source in sources.items():
        shape = _shape(source.rule, config)
        block: HostArray = np.empty((len(source.tensors), *shape), np.float32)
        for layer, row in enumerate(block):
            row[...] = source.repetition(layer, shape)
        placed = jax.device_put(block if source.rule.repeats else block[0])
        leaves[path] = jax.block_until_ready(placed)
    return nested(BertParams, BertLayerParams, leaves)


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


@dataclasses.dataclass(frozen=True)
class Prefixes:
    """Text put before every question and before every passage."""

    query: str = ""
    passage: str = ""


# Model cards tell these, the files of the models do not. By a pattern of the model's name.
KNOWN_PREFIXES: tuple[tuple[str, Prefixes], ...] = (
    (r"e5-(small|base|large)(-v2)?", Prefixes("query: ", "passage: ")),
    (
        r"bge-(small|base|large)-en(-v1\.5)?",
        Prefixes("Represent this sentence for searching relevant passages: "),
    ),
    (
        r"bge-(small|base|large)-zh(-v1\.5)?",
        Prefixes("为这个句子生成表示以用于检索相关文章："),  # noqa: RUF001
    ),
)


@dataclasses.dataclass(frozen=True)
class EmbedderSettings:
    """How texts become vectors, apart from the weights."""

    encoder: Path  # the folder with config.json, weights and tokenizer
    pooling: Pooling
    normalize: bool
    prefixes: Prefixes
    max_tokens: int | None  # of a text, special tokens included; None = as the encoder can
    lower_case: bool  # before tokenisation


def read_settings(directory: Path) -> EmbedderSettings:
    """Read the settings of a model directory.

    A directory without modules.json is a plain encoder: mean pooling, vectors as they come.
    Raises ModelError for a step or a pooling that is not supported, or a malformed file.
    """
    encoder, normalize = directory, False
    pooling: Pooling = "mean"
    modules = directory / "modules.json"
    if modules.is_file():
        encoder, pooling, normalize = _read_modules(modules)
    else:
        _LOG.info("%s: no modules.json; mean pooling, vectors not normalised", directory)
    lengths = _optional(next(filter(Path.is_file, (encoder / n for n in _LENGTH_FILES)), None))
    limit = lengths.get("max_seq_length")
    if limit is None:
        limit = _optional(encoder / "tokenizer_config.json").get("model_max_length")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float)):
        raise ModelError(f"{encoder}: the longest text is {limit!r}: expected a number of tokens")
    return EmbedderSettings(
        encoder=encoder,
        pooling=pooling,
        normalize=normalize,
        prefixes=_read_prefixes(directory, encoder),
        max_tokens=None if limit is None or limit > _NO_LIMIT else int(limit),
        lower_case=bool(lengths.get("do_lower_case", False)),
    )


def known_prefixes(*names: str) -> Prefixes | None:
    """The prefixes of KNOWN_PREFIXES for the first of these names that is listed there."""
    for name in names:
        for pattern, prefixes in KNOWN_PREFIXES:
            if re.fullmatch(rf"(multilingual-)?{pattern}", name, re.IGNORECASE):
                return prefixes
    return None


def _read_modules(path: Path) -> tuple[Path, Pooling, bool]:
    """The encoder's folder, the pooling, and whether vectors are normalised."""
    try:
        steps = [
            (str(step["type"]).rsplit(".", 1)[-1], path.parent / str(step["path"]))
            for step in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(f"{path}: expected a list of objects with type and path") from None
    kinds = [kind for kind, _ in steps]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(
            f"{path}: steps {', '.join(kinds)}: supported are Transformer, Pooling and then "
            "Normalize or nothing; pass any function from texts to vectors instead"
        )
    return steps[0][1], _read_pooling(steps[1][1] / "config.json"), len(steps) == 3


def _read_pooling(path: Path) -> Pooling:
    config = read_json(path)
    named = config.get("pooling_mode")
    prefix = "pooling_mode_"
    chosen = [named] if isinstance(named, str) else []
    chosen += [key.removeprefix(prefix) for key in config if key.startswith(prefix) and config[key]]
    if len(chosen) != 1 or chosen[0] not in _POOLING_NAMES:
        raise ModelError(
            f"{path}: pooling {' and '.join(chosen) or 'none'}: expected exactly one of "
            f"{', '.join(_POOLING_NAMES)}"
        )
    if not config.get("include_prompt", True):
        raise ModelError(f"{path}: include_prompt=false is not supported: prefixes are pooled too")
    return _POOLING_NAMES[chosen[0]]


def _read_prefixes(directory: Path, encoder: Path) -> Prefixes:
    """What the files say, else what is known of a model of this name, else nothing."""
    config = _optional(directory / "config_sentence_transformers.json")
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, Mapping) or not all(isinstance(p, str) for p in prompts.values()):
        raise ModelError(
            f"{directory}/config_sentence_transformers.json: prompts={prompts!r}: expected an "
            "object of texts"
        )
    default = prompts.get(config.get("default_prompt_name") or "", "")
    passages = [prompts[name] for name in _PASSAGE_PROMPTS if name in prompts]
    stated = Prefixes(prompts.get("query", default), passages[0] if passages else default)
    if stated != Prefixes():
        return stated
    known = known_prefixes(*_names(directory, encoder))
    if known is None:
        return stated
    _LOG.info(
        "%s: query prefix %r and passage prefix %r, known from the model's name",
        directory, known.query, known.passage,
    )  # fmt: skip
    return known


def _names(directory: Path, encoder: Path) -> list[str]:
    """What the model may be called: its folder, its place in the hub's cache, its config."""
    path = directory.absolute()
    names = [path.name]
    if path.parent.name == "snapshots":  # models--ORGANISATION--NAME/snapshots/REVISION
        names.append(path.parent.parent.name.rsplit("--", 1)[-1])
    stated = _optional(encoder / "config.json").get("_name_or_path")
    if isinstance(stated, str):
        names.append(stated.rstrip("/").rsplit("/", 1)[-1].rsplit("_", 1)[-1])
    return names


def _optional(path: Path | None) -> dict[str, Any]:
    return read_json(path) if path is not None and path.is_file() else {}
