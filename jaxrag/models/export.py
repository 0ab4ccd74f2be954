"""Write a Hugging Face model directory, and convert between it and a jaxrag checkpoint."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ConfigError, ModelError
from jaxrag.base.gguf import is_gguf
from jaxrag.base.types import Array, HostArray
from jaxrag.models import FAMILIES
from jaxrag.models.checkpoint import restore_params, save_checkpoint
from jaxrag.models.family import Family, TensorRule, rules_of
from jaxrag.models.hf import is_hf_directory, load_config, load_params
from jaxrag.models.reading import Reading, write_reading
from jaxrag.models.record import is_checkpoint, new_directory, read_record, refuse_existing
from jaxrag.models.spec import Params, by_name
from jaxrag.models.tensor_files import INDEX_FILE, SINGLE_FILE, NewTensor, write_file
from jaxrag.models.text.prompts import PromptTemplate, write_prompt
from jaxrag.models.text.tokenizer import copy_tokenizer

ModelForm = Literal["huggingface", "jaxrag"]
_MAX_FILE_BYTES = 5_000_000_000


def export_hf(
    directory: str | Path,
    params: Params,
    config: ModelConfig,
    tokenizer_dir: str | Path | None = None,
    max_file_bytes: int = _MAX_FILE_BYTES,
    template: PromptTemplate | None = None,
    reading: Reading | None = None,
) -> None:
    """Write ``config.json`` and safetensors that transformers loads, in a new directory.

    Tensors keep the dtype of ``params``. Weights above ``max_file_bytes`` are split over files with
    an index. ``tokenizer_dir`` is a model directory whose tokenizer files and prompt format are
    copied; ``template`` is written as the prompt format instead, and ``reading`` as what it says of
    its training. Raises ModelError when the directory exists and is not empty, ConfigError when the
    family's ``config.json`` cannot express the config.
    """
    family = FAMILIES[config.family]
    hf_config = _hf_config(family, config)
    shards = _split(list(_tensors(rules_of(family.tensors, config), params)), max_file_bytes)
    with new_directory(Path(directory)) as temporary:
        if len(shards) == 1:
            write_file(temporary / SINGLE_FILE, shards[0])
        else:
            _write_shards(temporary, shards)
        if tokenizer_dir is not None:
            copy_tokenizer(Path(tokenizer_dir), temporary)
        if template is not None:
            write_prompt(temporary, template)
        if reading is not None:
            write_reading(temporary, reading)
        _write_json(temporary / "config.json", hf_config)


def convert(source: str | Path, target: str | Path, to: ModelForm | None = None) -> ModelForm:
    """Convert a Hugging Face directory to a jaxrag checkpoint, or back; returns the form written.

    A GGUF file becomes a Hugging Face directory, or what ``to`` says; quantised tensors are written
    as float32. The values of the tensors are kept exactly; config and tokenizer files go with them.
    Works in host memory, whatever accelerators there are. Raises ModelError when the source is none
    of these, already has the form ``to``, or the target exists and is not empty.
    """
    source = Path(source)
    kept = is_checkpoint(source)
    if not source.exists():
        raise ModelError(f"{source}: no such model directory")
    if not (kept or is_gguf(source) or is_hf_directory(source)):
        raise ModelError(
            f"{source}: neither a Hugging Face directory nor a jaxrag checkpoint, nor a GGUF file"
        )
    form: ModelForm = "huggingface" if kept or is_gguf(source) else "jaxrag"
    if to is not None and to != form:
        if not is_gguf(source):
            raise ModelError(f"{source}: cannot convert to {to!r}; from here it can be {form!r}")
        form = to
    refuse_existing(Path(target))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        config = read_record(source).config if kept else load_config(source)
        params = restore_params(source, config) if kept else load_params(source, config)
        write = save_checkpoint if form == "jaxrag" else export_hf
        write(target, params, config, source)
    return form


def _hf_config(family: Family, config: ModelConfig) -> dict[str, object]:
    """The family's ``config.json``, refused unless reading it gives the config back."""
    written = family.write_config(config)
    again = family.read_config(written)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if getattr(again, field.name) != value:
            raise ConfigError(
                f"{field.name}={value!r}: a {family.name} config.json cannot say this"
            )
    return written


def _tensors(rules: Sequence[TensorRule], params: Params) -> Iterator[NewTensor]:
    """The tensors of the files, in the order of the table; nothing is copied yet."""
    leaves = by_name(params)
    for rule in rules:
        if rule.paths[0] not in leaves:
            continue
        parts = [leaves[path] for path in rule.paths]
        lead = rule.repeats
        for at in np.ndindex(parts[0].shape[:lead]):
            yield NewTensor(
                name=rule.name(at),
                dtype=np.dtype(parts[0].dtype),
                shape=rule.file_shape(parts[0].shape[lead:]),
                values=functools.partial(_file_tensor, rule, parts, at),
            )


def _file_tensor(rule: TensorRule, parts: list[Array], at: tuple[int, ...]) -> HostArray:
    return rule.joined([np.asarray(part[at]) for part in parts])


def _split(tensors: list[NewTensor], max_bytes: int) -> list[list[NewTensor]]:
    shards: list[list[NewTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _write_shards(directory: Path, shards: list[list[NewTensor]]) -> None:
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(directory / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    total = sum(tensor.num_bytes for shard in shards for tensor in shard)
    _write_json(
        directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
