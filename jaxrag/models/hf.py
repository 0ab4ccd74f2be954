"""Load a Hugging Face model directory: ``config.json`` and safetensors, straight onto the mesh.

A GGUF file is loaded in the same way: ``jaxrag.models.gguf`` gives it the same names and config.

Loading is strict both ways: every tensor of the files is used exactly once, every parameter of
``param_specs`` is found, and every shape is the expected one. Host memory holds at most one shard
of one parameter at a time, read through a memory map.
"""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrag.base.config import DType, ModelConfig
from jaxrag.base.errors import ConfigError, ModelError
from jaxrag.base.gguf import is_gguf
from jaxrag.base.types import Array, HostArray
from jaxrag.models import FAMILIES
from jaxrag.models.family import Family, TensorRule, rules_of
from jaxrag.models.gguf import stored_tensors
from jaxrag.models.gguf_config import read_gguf_config
from jaxrag.models.hf_config import OF_OUTER, by_key, read_token_ids, text_part
from jaxrag.models.spec import (
    Params,
    ParamSpec,
    by_name,
    from_names,
    param_shardings,
    param_specs,
    require_finite,
)
from jaxrag.models.tensor_files import StoredTensor, read_json, read_tensors, require_weight
from jaxrag.models.text.tokenizer import Tokenizer

Index = tuple[slice, ...]

_LATENT = "it caches latents, from which K and V are made (MLA)"
# Why models whose ``model_type`` begins so are none of FAMILIES.
_WHY = {
    "llama4": "a token sees the tokens of its own 8192 positions, so that no chunk could be moved",
    "deepseek_v": _LATENT,
    "kimi_k2": _LATENT,
    "ministral3": "queries are multiplied by what depends on their position",
}


@dataclasses.dataclass(frozen=True)
class StoredParam:
    """Where one parameter lies: its rule, its place among the fused ones, its tensors in order."""

    rule: TensorRule
    part: int
    tensors: tuple[StoredTensor, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest dtype that holds every tensor exactly."""
        return functools.reduce(jax.numpy.promote_types, (t.dtype for t in self.tensors))

    def repetition(self, number: int, shape: tuple[int, ...]) -> HostArray:
        """One of the parameter, of this shape, as a view of the mapped file."""
        return self.rule.taken(self.tensors[number].view(), self.part, shape)


def is_hf_directory(directory: Path) -> bool:
    """Whether the directory looks like a Hugging Face model: a ``config.json`` that names one."""
    path = Path(directory) / "config.json"
    return path.is_file() and bool({"architectures", "model_type"} & read_json(path).keys())


def names_dtype(directory: Path) -> bool:
    """Does ``config.json`` say in which dtype the weights are?"""
    return bool({"dtype", "torch_dtype"} & read_json(Path(directory) / "config.json").keys())


def find_family(hf: Mapping[str, Any], where: str) -> Family:
    """The family of a ``config.json``. Raises ModelError listing what is supported."""
    architectures, model_type = hf.get("architectures") or [], hf.get("model_type")
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise ModelError(f"{where}: architectures={architectures!r:.200}: expected a list of names")
    if not (model_type is None or isinstance(model_type, str)):
        raise ModelError(f"{where}: model_type={model_type!r:.200}: expected a name")
    inner = text_part(hf).get("model_type")
    for family in FAMILIES.values():
        if family.architecture in architectures:
            return family
        known = inner in (None, model_type, family.model_type)
        if known and {*family.within} & {*architectures}:
            return family
        if not architectures and family.model_type == model_type:
            return family
    found = ", ".join(architectures) or model_type
    why = next((said for name, said in _WHY.items() if str(inner).startswith(name)), "")
    if not why:
        ends = "ForCausalLM"
        names = (it.architecture.removesuffix(ends) for it in FAMILIES.values())
        why = f"supported are those of {ends}: {', '.join(names)}"
    raise ModelError(f"{where}: architecture {found} is not supported; {why}")


def load_config(directory: Path) -> ModelConfig:
    """Read ``config.json``, and the end-of-sequence ids that ``generation_config.json`` adds.

    A config without a dtype takes that of the first tensor. Raises ModelError when the directory or
    the file is missing or the architecture is not supported, ConfigError for a refused key.
    """
    directory = Path(directory)
    if is_gguf(directory):
        return _read_config(directory, read_gguf_config(directory), None)
    if not directory.is_dir():
        raise ModelError(
            f"{directory}: no such model directory; name a Hugging Face directory, a checkpoint or "
            "a GGUF file"
        )
    path = directory / "config.json"
    if not path.is_file():
        files = sorted(directory.glob("*.gguf"))
        if files:
            raise ModelError(
                f"{directory}: no config.json; name the GGUF file to load, as {files[0]}"
            )
        if (directory / "adapter_config.json").is_file():
            raise ModelError(
                f"{directory}: an adapter alone is no model; merge it into its model first, such "
                "as with peft's merge_and_unload, and name the directory of the result"
            )
        raise ModelError(f"{directory}: no config.json; expected a Hugging Face model directory")
    hf = read_json(path)
    if hf.get("dtype") is None and hf.get("torch_dtype") is None:
        find_family(hf, str(path))
        hf = {**hf, "dtype": next(iter(read_tensors(directory).values())).dtype.name}
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else None
    return _read_config(directory, hf, generation)


def _read_config(
    directory: Path, hf: Mapping[str, Any], generation: Mapping[str, Any] | None
) -> ModelConfig:
    """A config of what ``config.json`` and ``generation_config.json`` hold."""
    family = find_family(hf, str(directory / "config.json"))
    try:
        config = family.read_config(text_part(hf))
        if generation is not None:
            config = _add_generation_ids(config, generation)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {by_key(error)}") from None
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        # a value of a type that no config has
        kind = type(error).__name__
        raise ConfigError(f"{directory}: config.json is malformed ({kind}: {error})") from None
    return config


def ignored_keys(directory: Path) -> tuple[str, ...]:
    """Keys of ``config.json`` that nothing reads, none of a GGUF file's. As ``load_config``."""
    if is_gguf(directory):
        return ()
    hf = read_json(Path(directory) / "config.json")
    read = _Noting(text_part(hf))
    find_family(hf, str(directory)).read_config(read)
    named = read.asked | {"architectures", "model_type", "text_config", *OF_OUTER}
    return tuple(key for key in {**hf, **read} if key not in named)


class _Noting(dict[str, Any]):
    """A mapping that notes which of its keys are asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked = {"dtype", "torch_dtype"}

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


def load_hf(
    directory: Path, mesh: Mesh | None = None, dtype: str | None = None
) -> tuple[ModelConfig, Params, Tokenizer | None]:
    """Load config, weights and tokenizer; the tokenizer is None when the directory has none.

    ``dtype`` replaces that of the config. Raises as ``load_config``, ``load_params`` and
    ``Tokenizer.load`` do, and ModelError for weights that hold NaN or infinity.
    """
    config = load_config(directory)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=cast(DType, dtype))
    shardings = None if mesh is None else param_shardings(config, mesh)
    params = load_params(directory, config, shardings=shardings, dtype=config.dtype)
    require_finite(directory, params, mesh)
    return config, params, Tokenizer.find(directory)


def load_params(
    directory: Path,
    config: ModelConfig,
    *,
    shardings: Params | None = None,
    dtype: str | None = None,
) -> Params:
    """Load the weights of a Hugging Face directory.

    ``shardings`` is a ``Params`` of ``jax.sharding.Sharding``; None puts everything on the default
    device. Weights are cast to ``dtype`` while they are copied, or keep the dtype they are stored
    in (None). Raises ModelError when tensors are missing, left over or of the wrong shape.
    """
    sources = find_sources(Path(directory), config)
    specs = by_name(param_specs(config))
    targets = {} if shardings is None else by_name(shardings)
    return from_names(
        {
            name: place(
                spec.shape,
                functools.partial(_read_slice, sources[name], spec, dtype),
                targets.get(name),
            )
            for name, spec in specs.items()
        }
    )


def place(
    shape: tuple[int, ...],
    read: Callable[[Index], HostArray],
    sharding: jax.sharding.Sharding | None,
) -> Array:
    """Build an array from slices of the host's data: ``read`` is called once per distinct shard.

    One host buffer is alive at a time, also for a large sharded parameter.
    """
    if sharding is None:
        return jax.block_until_ready(jax.device_put(read(tuple(slice(0, n) for n in shape))))
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(n)[:2] for part, n in zip(index or (), shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    shards = []
    for bounds, replicas in devices.items():
        block = read(tuple(slice(start, stop) for start, stop in bounds))
        shards.extend(jax.block_until_ready([jax.device_put(block, d) for d in replicas]))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def find_sources(directory: Path, config: ModelConfig) -> dict[str, StoredParam]:
    """Match the tensors of the files with the parameters, strictly both ways, by parameter path."""
    family = FAMILIES[config.family]
    stored: Mapping[str, StoredTensor]
    stored = {family.own_name(name): tensor for name, tensor in stored_tensors(directory).items()}
    if family.arrange is not None:
        stored = family.arrange(stored, config)
    specs = by_name(param_specs(config))
    rules = rules_of((is_gguf(directory) and family.apart) or family.tensors, config)
    shapes = {rule: specs[rule.paths[0]].shape for rule in rules if rule.paths[0] in specs}
    tied = config.tie_embeddings and "lm_head.weight" in stored
    ignored = (*family.ignored, "lm_head.weight") if tied else family.ignored
    stored = {name: it for name, it in stored.items() if not family.beside(name)}
    found = match_tensors(directory, stored, shapes, (family.name, "model"), ignored)
    if tied:
        _check_tied(directory, stored)
    return found


def match_tensors(
    directory: Path,
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[TensorRule, tuple[int, ...]],
    what: tuple[str, str],
    ignored: Sequence[str],
    prefix: str = "",
) -> dict[str, StoredParam]:
    """Every parameter with its tensors, by path.

    Args:
      directory: where the tensors are, for errors.
      stored: all of them by name.
      shapes: of each rule's parameter, all repetitions.
      what: the family, and what it is of, for errors.
      ignored: patterns of names that may be left over.

    Raises ModelError for a tensor that is missing, left over or of another shape.
    """
    unused = set(stored)
    found: dict[str, StoredParam] = {}
    for rule, whole in shapes.items():
        counts, shape = whole[: rule.repeats], whole[rule.repeats :]
        names = [prefix + rule.name(at) for at in np.ndindex(counts)]
        for name in names:
            if name not in stored:
                raise ModelError(
                    f"{directory}: tensor {name!r} is missing; the {what[0]} config asks for it"
                )
            require_weight(stored[name], rule.file_shape(shape), directory)
        unused.difference_update(names)
        tensors = tuple(stored[name] for name in names)
        found |= {path: StoredParam(rule, part, tensors) for part, path in enumerate(rule.paths)}
    leftover = sorted(
        name
        for name in unused
        if not any(fnmatch.fnmatchcase(name.removeprefix(prefix), it) for it in ignored)
    )
    if leftover:
        raise ModelError(
            f"{directory}: {len(leftover)} tensors have no place in this {' '.join(what)}, "
            f"first {leftover[0]!r}; does config.json belong to these weights?"
        )
    return found


def _read_slice(source: StoredParam, spec: ParamSpec, dtype: str | None, index: Index) -> HostArray:
    """Copy one slice of a parameter, casting on the way; only its bytes are read."""
    sizes = [len(range(n)[part]) for n, part in zip(spec.shape, index, strict=True)]
    block = np.empty(sizes, source.dtype if dtype is None else jax.numpy.dtype(dtype))
    with np.errstate(over="ignore"):  # what a narrower dtype cannot hold is found when all is there
        lead = source.rule.repeats
        counts, shape = spec.shape[:lead], spec.shape[lead:]
        numbers = np.arange(math.prod(counts)).reshape(counts)[index[:lead]]
        for at in np.ndindex(numbers.shape):
            block[at] = source.repetition(int(numbers[at]), shape)[index[lead:]]
    return block


def _check_tied(directory: Path, stored: Mapping[str, StoredTensor]) -> None:
    head, embed = stored["lm_head.weight"], stored["model.embed_tokens.weight"]
    if head.dtype != embed.dtype or not np.array_equal(head.raw, embed.raw):
        raise ModelError(
            f"{directory}: lm_head.weight differs from the embedding, but tie_word_embeddings is "
            "true; set it to false in config.json"
        )


def _add_generation_ids(config: ModelConfig, generation: Mapping[str, Any]) -> ModelConfig:
    """The generation config's ids come first; those of ``config.json`` still end a text."""
    eos = read_token_ids(generation, "eos_token_id", ())
    bos = read_token_ids(generation, "bos_token_id", ())
    return dataclasses.replace(
        config,
        eos_ids=tuple(dict.fromkeys(eos + config.eos_ids)),
        bos_id=bos[0] if config.bos_id is None and bos else config.bos_id,
    )
