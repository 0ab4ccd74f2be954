"""Full attention to every key, and to a static pattern of them."""

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp

from jaxrag.config import ModelConfig
from jaxrag.decode.base import DecodeRule, View, require, require_zero_or_more
from jaxrag.errors import RequestError
from jaxrag.types import Array, Partial

Positions = Literal["original", "cache"]


@dataclasses.dataclass(frozen=True)
class Dense(DecodeRule):
    """Every key."""

    name: str = dataclasses.field(default="dense", init=False)

    @property
    def by_position(self) -> bool:
        """It leaves nothing out."""
        return False

    def check(self, config: ModelConfig) -> None:
        """Any model."""

    def tokens(self) -> dict[str, int]:
        """None."""
        return {}

    def attend(self, view: View, layer: Array, state: Any) -> tuple[Partial, Any]:
        """Attention to all that is visible."""
        return view.dense(), state


@dataclasses.dataclass(frozen=True)
class StaticWindow(DecodeRule):
    """StreamingLLM: the first ``sink`` and the newest ``recent`` tokens, and nothing else.

    Attributes:
      positions: "original": as in the prompt; "cache": as published, the kept tokens stand one
        behind the other, so that no distance exceeds the size of the window.
    """

    sink: int = 128
    recent: int = 512
    positions: Positions = "original"
    name: str = dataclasses.field(default="static_window", init=False)

    def __post_init__(self) -> None:
        """Refuse a window without the newest token."""
        require_zero_or_more(self.name, sink=self.sink)
        require(self.name, recent=self.recent)
        check_positions(self.name, self.positions)

    def tokens(self) -> dict[str, int]:
        """The window."""
        return {"sink + recent": self.sink + self.recent}

    def attend(self, view: View, layer: Array, state: Any) -> tuple[Partial, Any]:
        """Attention to the window."""
        where, counts = view.window(self.sink, self.recent)
        if self.positions == "original":
            return view.attend_at(where, counts), state
        query_at = jnp.minimum(view.position, self.sink + self.recent - 1)
        moved = (view.position - query_at)[:, None, None, None]  # by so much the recent ones are
        at = jnp.where(jnp.arange(where.shape[-1]) < self.sink, where, where - moved)
        return view.attend_at(where, counts, jnp.maximum(at, 0), query_at), state


def check_positions(rule: str, positions: str) -> None:
    """RequestError unless ``positions`` is a known scheme."""
    if positions not in get_args(Positions):
        raise RequestError(
            f"decode rule {rule!r}: positions={positions!r}: expected one of "
            f"{', '.join(get_args(Positions))}"
        )
