"""From a config to everything a run needs before its first step: model, mesh, data, programs."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrag.base.config import ModelConfig, config_from_dict
from jaxrag.base.errors import ConfigError, TrainError
from jaxrag.base.installed import located
from jaxrag.base.sharding import Rules, make_mesh, replicated
from jaxrag.base.tables import read_toml
from jaxrag.models.checkpoint import is_checkpoint, load_checkpoint
from jaxrag.models.digest import weights_digest
from jaxrag.models.hf import load_config, load_hf
from jaxrag.models.record import read_record
from jaxrag.models.rope import RopeTable, rope_tables
from jaxrag.models.spec import Params, init_params, param_shardings, require_trainable
from jaxrag.models.text.prompts import template_named
from jaxrag.models.text.tokenizer import Tokenizer, check_vocab
from jaxrag.train.checkpoints import abstract_state
from jaxrag.train.config import TrainConfig
from jaxrag.train.lora import init_adapters, merge_all
from jaxrag.train.packing import TrainBatch
from jaxrag.train.samples import response_end
from jaxrag.train.step import Program, TrainState, new_state, program_of, state_shardings

_SIZES = (
    "family", "vocab_size", "num_layers", "model_dim", "mlp_dim", "num_heads", "num_kv_heads",
    "head_dim", "experts",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run that could start; nothing is on the devices but the rotation table."""

    config: TrainConfig
    model: ModelConfig
    tokenizer: Tokenizer
    tokenizer_dir: Path
    end_id: int  # ends every response
    mesh: Mesh
    program: Program
    shardings: TrainState
    rope: RopeTable

    @property
    def weights_digest(self) -> str:
        """Identity of the weights the run starts from; "" for random ones."""
        path = self.config.model.path
        return "" if path is None else weights_digest(path)

    def frozen(self) -> Params | None:
        """The weights that adapters are added to; None where all weights are trained."""
        return None if self.config.lora is None else self._weights(self.config.compute.dtype)

    def first_state(self) -> TrainState:
        """The state before the first step, on the mesh."""
        key = jax.random.key(self.config.model.seed)
        if self.config.lora is not None:
            make: Any = functools.partial(init_adapters, self.model, self.config.lora, key)
            trained: Any = jax.jit(make, out_shardings=self.shardings.trained)()
        else:
            trained = self._weights("float32")
        make = functools.partial(new_state, self.config)
        return jax.jit(make, out_shardings=self.shardings, donate_argnums=0)(trained)

    def like_state(self) -> TrainState:
        """Shapes, dtypes and shardings of a state, to restore one."""
        key = jax.random.key(0)

        def make() -> TrainState:
            if self.config.lora is not None:
                return new_state(self.config, init_adapters(self.model, self.config.lora, key))
            return new_state(self.config, init_params(self.model, key, "float32"))

        return abstract_state(make, self.shardings)

    def merged(self, state: TrainState, frozen: Params | None) -> Params:
        """The whole model as it is, in the dtype of its config, on the mesh."""

        def merge(trained: Any, frozen: Params | None) -> Any:
            scale = self.program.lora_scale
            params = trained
            if scale is not None and frozen is not None:
                params = merge_all(frozen, trained, scale)
            return jax.tree.map(lambda x: x.astype(self.model.dtype), params)

        place = param_shardings(self.model, self.mesh)
        merged: Params = jax.jit(merge, out_shardings=place)(state.trained, frozen)
        return merged

    def on_host(self, params: Params) -> Params:
        """Parameters that this process can read as a whole."""
        if jax.process_count() == 1:
            return params
        gathered: Params = multihost_utils.process_allgather(params, tiled=True)
        return gathered

    def place(self, batch: TrainBatch, parts: int | None) -> TrainBatch:
        """Host rows [B, T] over the mesh: [A, B / A, T] in ``parts``, [B, T] for None.

        Every process has all rows and puts its own onto its devices.
        """
        spec = PartitionSpec(Rules().batch)
        if parts is not None:
            spec = PartitionSpec(None, *spec)
        place = NamedSharding(self.mesh, spec)

        def put(x: Any) -> Any:
            rows = x if parts is None else x.reshape(parts, -1, *x.shape[1:])
            return jax.make_array_from_callback(rows.shape, place, lambda index: rows[index])

        return jax.tree.map(put, batch)

    def _weights(self, dtype: str) -> Params:
        path = self.config.model.path
        if path is None:
            make = functools.partial(init_params, self.model, dtype=dtype, for_training=True)
            place = param_shardings(self.model, self.mesh)
            key = jax.random.key(self.config.model.seed)
            return jax.jit(make, out_shardings=place)(key)
        load = load_checkpoint if is_checkpoint(path) else load_hf
        return load(Path(path), mesh=self.mesh, dtype=dtype)[1]


def set_up(config: TrainConfig) -> Setup:
    """Read model config and tokenizer, and check that run, model and mesh fit each other.

    Raises ConfigError, ModelError or TokenizerError.
    """
    model = model_config(config)
    tokenizer_dir = located(config.model.tokenizer or config.model.path or "")
    tokenizer = Tokenizer.load(tokenizer_dir)
    check_vocab(tokenizer, model)
    template_named(config.data.template).check_markers(tokenizer)
    end_id = response_end(model, tokenizer, tokenizer_dir)
    c = config.compute
    mesh = make_mesh(c.data, c.fsdp, c.tensor)
    _check_mesh(model, config)
    schemes = {config.data.positions, *(part.positions for part in config.eval)} - {"reordered"}
    if schemes and model.sliding_window is not None:
        raise ConfigError(
            f"{min(schemes)} positions do not follow the order of the prompt, and this model's "
            f"sliding window ({model.sliding_window} tokens) is measured in order; use reordered "
            "positions"
        )
    table = rope_tables(model, min(config.data.row_tokens, model.max_positions))
    return Setup(
        config=config,
        model=model,
        tokenizer=tokenizer,
        tokenizer_dir=tokenizer_dir,
        end_id=end_id,
        mesh=mesh,
        program=program_of(config, model, mesh),
        shardings=state_shardings(config, model, mesh),
        rope=jax.device_put(jax.tree.map(np.asarray, table), replicated(mesh)),
    )


def model_config(config: TrainConfig, planned: bool = False) -> ModelConfig:
    """The model's config as it is trained; no weights are read. Raises as ``_stored_config``."""
    found = _stored_config(config, planned)
    positions = config.model.max_positions
    return found if positions is None else dataclasses.replace(found, max_positions=positions)


def _stored_config(config: TrainConfig, planned: bool) -> ModelConfig:
    """That of its directory or its TOML file.

    ``planned`` takes the file where the directory is not there yet. Raises ConfigError for a
    directory of other sizes than the file beside it says.
    """
    part = config.model
    stated = None
    if part.config is not None:
        stated = config_from_dict(read_toml(located(part.config)), part.config)
    if stated is not None and (part.path is None or (planned and not Path(part.path).exists())):
        return stated
    path = Path(part.path or "")
    if part.made_by is not None and not path.exists():
        raise TrainError(f"{path}: no such model directory; it is made by `{part.made_by}`")
    found = read_record(path).config if is_checkpoint(path) else load_config(path)
    for name in _SIZES if stated is not None else ():
        if getattr(found, name) != getattr(stated, name):
            raise ConfigError(
                f"{path} has {name}={getattr(found, name)}, {part.config} says "
                f"{getattr(stated, name)}; name the file of this model, or leave model.config out"
            )
    return found


def _check_mesh(model: ModelConfig, config: TrainConfig) -> None:
    """Refuse a mesh that would replicate what it should split, and a model that is not trained."""
    require_trainable(model)
    count = None if model.experts is None else model.experts.count
    if count is not None and count % config.compute.tensor:
        raise ConfigError(
            f"compute.tensor={config.compute.tensor} does not divide the model's {count} experts; "
            "choose a divisor of that"
        )
    split = ("num_heads", "num_kv_heads", "vocab_size") + (("mlp_dim",) if count is None else ())
    for axis, names in (
        ("tensor", split),
        ("fsdp", ("model_dim",)),
    ):
        ways = getattr(config.compute, axis)
        for name in names:
            if getattr(model, name) % ways:
                raise ConfigError(
                    f"compute.{axis}={ways} does not divide the model's {name}="
                    f"{getattr(model, name)}; choose a divisor of it"
                )
