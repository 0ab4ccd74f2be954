"""The sizes of layers that keep a state: one part of a model's configuration."""

import dataclasses

from jaxrag.base.errors import ConfigError

_LARGEST = 1 << 14  # as of heads in ModelConfig


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """Gated DeltaNet: layers that keep one state [Dk, Dv] of each value head, and no KV of tokens.

    ``fused``: queries, keys, values and gates are one projection, by key head (Qwen3-Next).
    """

    layers: tuple[bool, ...]  # [L] which layers are such; the others attend
    key_heads: int  # Hk, each of Hv / Hk value heads
    value_heads: int  # Hv
    key_dim: int  # Dk
    value_dim: int  # Dv
    width: int  # W tokens that the convolution before them sees
    fused: bool = False

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "width"):
            size = getattr(self, name)
            if not 1 <= size <= _LARGEST:
                raise ConfigError(f"recurrent {name}={size}: expected 1 to {_LARGEST}")
        if self.value_heads % self.key_heads or self.width < 2:
            raise ConfigError(
                f"recurrent value_heads={self.value_heads}, key_heads={self.key_heads}, width="
                f"{self.width}: expected a multiple of the key heads, and a width of 2 or more"
            )
        if all(self.layers) or not any(self.layers):
            raise ConfigError("recurrent layers: expected some, and some that attend")

    @property
    def channels(self) -> int:
        """C, of the convolution: of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def check_layers(self, num_layers: int) -> None:
        """Raise ConfigError where these are not so many layers."""
        if len(self.layers) != num_layers:
            raise ConfigError(f"recurrent layers: {len(self.layers)} for {num_layers} layers")
