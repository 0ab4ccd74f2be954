"""What a model directory is understood as: from its small files and headers, weights unread."""

import dataclasses
import math
from pathlib import Path
from typing import Any, cast

from jax.sharding import Mesh

from jaxrag.base.config import (
    DType,
    InParts,
    ModelConfig,
    NoRotation,
    RopeConfig,
    YarnScaling,
    config_to_dict,
)
from jaxrag.base.errors import ModelError
from jaxrag.base.gguf import is_gguf
from jaxrag.kv.placement import ON_DEVICE
from jaxrag.models import FAMILIES
from jaxrag.models.gguf import stored_tensors
from jaxrag.models.hf import find_sources, ignored_keys
from jaxrag.models.hub import fetched, is_hub_name
from jaxrag.models.llama import read_config as read_llama
from jaxrag.models.memory import Memory, check_pool, memory_of
from jaxrag.models.model import read_config
from jaxrag.models.reading import Reading, read_reading
from jaxrag.models.record import is_checkpoint, read_record
from jaxrag.models.spec import num_params
from jaxrag.models.text.prompts import (
    DEFAULT_TEMPLATE,
    PromptTemplate,
    read_prompt,
    suited_template,
    template_named,
)
from jaxrag.models.text.tokenizer import Tokenizer, check_vocab

# What most people mean by "an 8B model"; Llama-3-8B as it is published.
LLAMA_3_8B = read_llama(
    {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
        "dtype": "bfloat16",
    }
)


@dataclasses.dataclass(frozen=True)
class WeightFiles:
    """The weights on disk.

    Attributes:
      kind: "Hugging Face directory", "GGUF file" or "jaxrag checkpoint".
      dtypes: that weights are stored in; of a GGUF file its own types.
      left_out: what nothing reads of a model that reads not only text, with its parameters.
    """

    kind: str
    count: int
    nbytes: int
    dtypes: tuple[str, ...]
    parameters: int
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokenizer.

    Attributes:
      size: one more than its largest id.
      added: tokens that are no words, by their text: special or not.
      ends: tokens that end an answer, ids by text; of config, generation config and tokenizer.
      leading: what precedes every prompt.
      chat: has it a chat template?
    """

    size: int
    added: dict[str, bool]
    ends: dict[str, int]
    leading: str
    chat: bool


@dataclasses.dataclass(frozen=True)
class DefaultPrompt:
    """The prompt where no template is named.

    Attributes:
      source: why it is this one.
      parts: prefix, chunk and final block as the model reads them.
      note: what is wrong with it here; None where nothing is.
    """

    template: str
    source: str
    parts: tuple[tuple[str, str], ...]
    note: str | None


@dataclasses.dataclass(frozen=True)
class Overview:
    """What a directory is understood as. Make one with ``overview``.

    Attributes:
      architecture: as ``config.json`` of its family names it.
      ignored: keys of ``config.json`` that nothing reads.
      vocabulary: None without a tokenizer.
      prompt: None without a tokenizer.
      reading: how the weights were trained to read chunks.
    """

    path: str
    architecture: str
    config: ModelConfig
    files: WeightFiles
    ignored: tuple[str, ...]
    vocabulary: Vocabulary | None
    prompt: DefaultPrompt | None
    reading: Reading
    memory: Memory

    @property
    def longest_context(self) -> int | None:
        """Tokens of one prompt and its answer: the model's, or what memory holds if that is less.

        None where the memory is not known.
        """
        most = self.memory.most_tokens
        return None if most is None else min(self.config.max_positions, most)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        values = dataclasses.asdict(dataclasses.replace(self, config=None))  # type: ignore[arg-type]
        values["memory"] |= {
            "missing": self.memory.missing,
            "most_tokens": self.memory.most_tokens,
            "longest_context": self.longest_context,
        }
        return {**values, "config": config_to_dict(self.config)}


def overview(
    path: str | Path,
    *,
    dtype: str | None = None,
    cache_tokens: int | None = None,
    mesh: Mesh | None = None,
) -> Overview:
    """Understand a directory, or ORG/NAME of the hub, as ``load_model`` would on this mesh.

    Every file but the weights is read, and of these the headers: their names, shapes and sizes are
    held against the config. Whether weights and pool fit is reported, not required.

    Raises ModelError, ConfigError and TokenizerError as ``load_model`` does.
    """
    path = fetched(str(path)) if is_hub_name(path) else Path(path)
    config = read_config(path, dtype)
    check_pool(config, mesh, cache_tokens, ON_DEVICE)
    kept = is_checkpoint(path)
    files = _checkpoint_files(path, config) if kept else _hf_files(path, config)
    tokenizer = Tokenizer.find(path)
    if tokenizer is not None:
        check_vocab(tokenizer, config)
    return Overview(
        path=str(path),
        architecture=FAMILIES[config.family].architecture,
        config=config,
        files=files,
        ignored=() if kept else ignored_keys(path),
        vocabulary=None if tokenizer is None else _vocabulary(tokenizer, config),
        prompt=None if tokenizer is None else _prompt(path, tokenizer),
        reading=read_reading(path),
        memory=memory_of(config, mesh=mesh, cache_tokens=cache_tokens),
    )


def eight_billion(dtype: DType = "bfloat16") -> Memory:
    """What a model of Llama-3-8B's sizes takes here."""
    return memory_of(dataclasses.replace(LLAMA_3_8B, dtype=dtype))


def rope_words(config: ModelConfig) -> str:
    """The rotary embedding in a few words; of each kind of layers, where there are several."""
    words, kinds = [_rope_words(it, config.head_dim) for it in config.ropes], config.rope_layers
    if kinds is None:
        return words[0]
    return "; ".join(f"{kinds.count(at)} layers {it}" for at, it in enumerate(words))


def _rope_words(rope: RopeConfig, head_dim: int) -> str:
    scaling = rope.scaling
    if isinstance(scaling, NoRotation):
        return "without positions"
    words = f"theta {rope.theta:g}"
    if rope.rotary_dim != head_dim:
        words += f", {rope.rotary_dim} of {head_dim} dimensions"
    if rope.interleaved:
        words += ", interleaved"
    if scaling is None:
        return words
    if isinstance(scaling, InParts):
        pairs = rope.rotary_dim // 2 // scaling.parts
        words += f", heads of {head_dim // scaling.parts}"
        return words + (f", of which {2 * scaling.turning} turn" if scaling.turning < pairs else "")
    kind = type(scaling).__name__.removesuffix("Scaling").lower()
    words += f", {kind} x {scaling.factor:g}"
    original = getattr(scaling, "original_max_positions", None)
    words += "" if original is None else f" from {original}"
    if isinstance(scaling, YarnScaling):
        words += f", attention factor {scaling.attention_factor:.4g}"
    return words


def scale_words(config: ModelConfig) -> str:
    """The constants of a model that are none in others, in a few words; "" where it has none."""
    scales = {
        "embeddings": config.embedding_scale,
        "scores": config.attention_scale,
        "residuals": config.residual_scale,
        "logits": config.logit_scale,
    }
    caps = {"scores": config.score_cap, "logits": config.logit_cap}
    words = [f"{name} x {by:.4g}" for name, by in scales.items() if by not in (None, 1)]
    words += [f"{name} within {cap:.4g}" for name, cap in caps.items() if cap is not None]
    return ", ".join(words)


def _hf_files(path: Path, config: ModelConfig) -> WeightFiles:
    sources = find_sources(path, config)
    tensors = stored_tensors(path)
    used = {tensor.name for source in sources.values() for tensor in source.tensors}
    found = {tensor.path for tensor in tensors.values()}
    left_out: dict[str, int] = {}
    for name, tensor in tensors.items():
        if part := FAMILIES[config.family].beside(name):
            left_out[part] = left_out.get(part, 0) + math.prod(tensor.shape)
    return WeightFiles(
        kind="GGUF file" if is_gguf(path) else "Hugging Face directory",
        count=len(found),
        nbytes=sum(file.stat().st_size for file in found),
        dtypes=tuple(sorted({tensors[name].identity[1] for name in used})),
        parameters=sum(math.prod(tensors[name].shape) for name in used),
        left_out=left_out,
    )


def _checkpoint_files(path: Path, config: ModelConfig) -> WeightFiles:
    files = [path / name for name in read_record(path).files]
    lost = [file for file in files if not file.is_file()]
    if lost:
        raise ModelError(f"{lost[0]}: missing; copy the checkpoint again")
    return WeightFiles(
        kind="jaxrag checkpoint",
        count=len(files),
        nbytes=sum(file.stat().st_size for file in files),
        dtypes=(cast(str, config.dtype),),
        parameters=num_params(config),
    )


def _vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> Vocabulary:
    ends = dict.fromkeys((*config.eos_ids, *tokenizer.eos_ids))
    return Vocabulary(
        size=tokenizer.vocab_size,
        added=tokenizer.added_tokens,
        ends={tokenizer.decode([end], skip_special=False): end for end in ends},
        leading=tokenizer.decode(tokenizer.leading_ids, skip_special=False),
        chat=tokenizer.has_chat_template,
    )


def _prompt(path: Path, tokenizer: Tokenizer) -> DefaultPrompt:
    own, default = read_prompt(path), template_named(DEFAULT_TEMPLATE)
    chosen: PromptTemplate = own or suited_template(tokenizer, default)
    if own is not None:
        source = "the directory's prompt.toml"
    elif chosen.chat:
        source = "the model has a chat template"
    elif chosen == default:
        source = "the tokenizer has its markers, and no chat template"
    else:
        source = f"no chat template, and no tokens for the markers of {default.name!r}"
    return DefaultPrompt(
        chosen.name, source, chosen.parts(tokenizer), chosen.split_marker(tokenizer)
    )
