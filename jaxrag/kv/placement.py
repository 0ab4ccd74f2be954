"""Where K and V of a model's tokens are: on the device, or some or all of them in host memory."""

import dataclasses
import reprlib
from typing import Literal, get_args

import numpy as np
from jax.sharding import Mesh

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.base.sharding import Rules

KVHome = Literal["device", "host"]


@dataclasses.dataclass(frozen=True)
class KVPlacement:
    """One of three: all on the device, V of the later layers in host memory, or K and V there.

    Attributes:
      kv: "host": the pool is in host memory, K and V; prompts are prefilled layer by layer, and
        generated tokens attend to what their rule keeps on the device, and on the host to the rest
        (RetrievalAttention section 3).
      value_layers: V of so many first layers is on the device, of the others in host memory (KCache
        section 3.1), where only the decode rule "topn" reads it; None: of all.
      max_host_bytes: ceiling of that host memory.
    """

    kv: KVHome = "device"
    value_layers: int | None = None
    max_host_bytes: int | None = None

    def __str__(self) -> str:
        """As arguments of ``load_model``, without the ceiling."""
        if self.value_layers is not None:
            return f"value_layers={self.value_layers}"
        return f"kv={self.kv!r}"

    @property
    def on_device(self) -> bool:
        """Are K and V of all layers on the device?"""
        return self.kv == "device" and self.value_layers is None

    @property
    def away(self) -> bool:
        """Are K and V of all layers in host memory?"""
        return self.kv == "host"

    def layers_on_device(self, config: ModelConfig) -> int:
        """The number of first layers whose V is on the device."""
        if self.away:
            return 0
        layers = config.num_kv_layers
        return layers if self.value_layers is None else min(self.value_layers, layers)

    def host_bytes(self, config: ModelConfig, tokens: int) -> int:
        """Of K and V of so many tokens in host memory."""
        rows = config.num_kv_layers - self.layers_on_device(config)
        return tokens * config.kv_row_bytes * (rows + (config.num_kv_layers if self.away else 0))

    def device_bytes(self, config: ModelConfig, tokens: int) -> int:
        """Of K and V of so many tokens on the device."""
        return tokens * config.kv_bytes_per_token - self.host_bytes(config, tokens)

    def on_host(self, config: ModelConfig) -> str:
        """What is in host memory, for messages."""
        layers = config.num_kv_layers - self.layers_on_device(config)
        return "K and V" if self.away else f"V of {layers} layers"

    def check(self, config: ModelConfig, mesh: Mesh | None) -> None:
        """Refuse what no model of this config and mesh can have: RequestError, ConfigError."""
        check_size("value_layers", self.value_layers, 0)
        check_size("max_host_bytes", self.max_host_bytes, 1)
        layers = config.num_kv_layers
        if self.value_layers is not None and self.value_layers >= layers:
            raise RequestError(
                f"{self}, the model has {layers} layers; choose fewer, "
                "or leave it out to keep V of all of them on the device"
            )
        homes = get_args(KVHome)
        if self.kv not in homes:
            raise RequestError(f"kv={reprlib.repr(self.kv)}: expected one of {', '.join(homes)}")
        if self.away and self.value_layers is not None:
            raise RequestError(
                f"{self} with kv='host': K and V are both in host memory then; leave one out"
            )
        if self.on_device:
            return
        if config.shared_layers or config.input_dim or config.recurrent:
            raise ConfigError(
                f"{self}: prompts that go through the model layer by layer take no inputs of each "
                "layer, no K and V of another and no state; leave it out"
            )
        if config.kernels not in ("xla", "measured"):
            raise ConfigError(
                f"kernels={config.kernels!r} read K and V on the device, and {self} keeps "
                "them in host memory; choose 'xla', or leave it out"
            )
        check_owners(str(self), config, mesh)


ON_DEVICE = KVPlacement()
AWAY = KVPlacement("host")


def check_owners(what: str, config: ModelConfig, mesh: Mesh | None) -> None:
    """Refuse a mesh on which a KV head has no owner, or several processes (RequestError).

    ``what`` reads KV in host memory, that of the process which has the head's device.
    """
    if mesh is None:
        return
    heads = Rules().kv_heads
    ways = 1 if heads is None else mesh.shape[heads]
    if config.num_kv_heads % ways:
        raise RequestError(
            f"{what}: the {config.num_kv_heads} KV heads of the model do not divide over {ways} "
            f"devices of the axis {heads!r}, and each needs an owner; choose another mesh"
        )
    owners = mesh.devices.reshape(-1, mesh.devices.shape[-1])  # by rows, and by KV heads
    if len({tuple(device.process_index for device in row) for row in owners}) > 1:
        raise RequestError(
            f"{what}: a KV head has devices in several processes, and is to be in the memory of "
            f"one; split the axis {heads!r} over the processes, and no other"
        )


def check_size(name: str, count: int | None, least: int) -> None:
    """Refuse what is not None, nor an integer of at least ``least`` (RequestError)."""
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int | np.integer):
        raise RequestError(f"{name}={reprlib.repr(count)}: expected an integer")
    if count < least:
        raise RequestError(f"{name}={count}: expected at least {least}")
