"""jaxrag checkpoints: parameters saved with Orbax, the config and the tokenizer beside them.

DIR/jaxrag.json     config and weights digest
DIR/params/         the parameters by name, restorable onto any mesh
DIR/tokenizer.json  and the other files of the tokenizer, where there is one
DIR/prompt.toml     the prompt format of the model, where it has one
DIR/reading.toml    how it was trained to read chunks, where that is known
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import xxhash
from jax.sharding import Mesh

from jaxrag.base.config import DType, ModelConfig
from jaxrag.base.errors import ModelError
from jaxrag.models.digest import params_digest
from jaxrag.models.record import (
    CheckpointRecord,
    is_checkpoint,
    new_directory,
    read_record,
    write_record,
)
from jaxrag.models.spec import (
    Params,
    ParamSpec,
    by_name,
    from_names,
    param_shardings,
    param_specs,
    require_finite,
)
from jaxrag.models.text.tokenizer import Tokenizer, copy_tokenizer

__all__ = ["is_checkpoint", "load_checkpoint", "restore_params", "save_checkpoint"]

_PARAMS = "params"


def save_checkpoint(
    directory: str | Path,
    params: Params,
    config: ModelConfig,
    tokenizer_dir: str | Path | None = None,
) -> None:
    """Save parameters as they are (``config.dtype`` says how they are loaded), in a new directory.

    ``tokenizer_dir`` is a model directory whose tokenizer files and prompt format are copied.
    Raises ModelError when the directory exists and is not empty; it is complete or absent, never
    half-written.
    """
    with new_directory(Path(directory)) as temporary:
        import orbax.checkpoint as ocp  # a tenth of a second, for nothing in other directories

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(temporary / _PARAMS, by_name(params))
        if tokenizer_dir is not None:
            copy_tokenizer(Path(tokenizer_dir), temporary)
        files = {
            path.relative_to(temporary).as_posix(): _file_digest(path)
            for path in sorted((temporary / _PARAMS).rglob("*"))
            if path.is_file()
        }
        write_record(temporary, CheckpointRecord(config, params_digest(params), files))


def load_checkpoint(
    directory: str | Path, mesh: Mesh | None = None, dtype: str | None = None
) -> tuple[ModelConfig, Params, Tokenizer | None]:
    """Restore config, parameters and tokenizer (None when there is none), onto any mesh.

    ``mesh=None`` is the default device; ``dtype`` replaces that of the config. Raises ModelError
    when the directory is not a checkpoint, or parameters are missing, foreign, unreadable, NaN or
    infinite.
    """
    directory = Path(directory).absolute()
    config = read_record(directory).config
    if dtype is not None:
        config = dataclasses.replace(config, dtype=cast(DType, dtype))
    params = restore_params(directory, config, mesh=mesh, dtype=config.dtype)
    require_finite(directory, params, mesh)
    return config, params, Tokenizer.find(directory)


def restore_params(
    directory: str | Path,
    config: ModelConfig,
    *,
    mesh: Mesh | None = None,
    dtype: str | None = None,
) -> Params:
    """The parameters of a checkpoint, cast to ``dtype``, or each as it was saved (None).

    Raises ModelError as ``load_checkpoint`` does.
    """
    directory = Path(directory).absolute()
    _check_files(directory, read_record(directory).files)
    specs = by_name(param_specs(config))
    if mesh is None:
        shardings = dict.fromkeys(specs, jax.device_put(np.zeros(())).sharding)
    else:
        shardings = by_name(param_shardings(config, mesh))
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        path = directory / _PARAMS
        stored = dict(checkpointer.metadata(path).item_metadata.items())
        _check_stored(path, stored, specs)
        target = {
            name: jax.ShapeDtypeStruct(
                spec.shape, dtype or stored[name].dtype, sharding=shardings[name]
            )
            for name, spec in specs.items()
        }
        return from_names(checkpointer.restore(path, target))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _check_files(directory: Path, files: dict[str, str]) -> None:
    """Every recorded file is there, byte for byte: Orbax would restore flipped bits unnoticed."""
    for name, digest in files.items():
        path = directory / name
        if not path.is_file() or _file_digest(path) != digest:
            state = "damaged" if path.is_file() else "missing"
            raise ModelError(f"{path}: {state}; copy the checkpoint again")


def _check_stored(path: Path, stored: dict[str, Any], specs: dict[str, ParamSpec]) -> None:
    """Every parameter of the config is stored in its shape, and nothing else is."""
    for name in sorted(set(stored) | set(specs)):
        if name not in stored or name not in specs:
            state = "missing" if name in specs else "left over"
            raise ModelError(
                f"{path}: parameter {name!r} is {state}; is jaxrag.json of this model?"
            )
        if tuple(stored[name].shape) != specs[name].shape:
            raise ModelError(
                f"{path}: parameter {name!r} has shape {list(stored[name].shape)}, the config asks "
                f"for {list(specs[name].shape)}"
            )
