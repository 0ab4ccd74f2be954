"""StreamingLLM (section 3.2, arXiv:2309.17453): the first tokens, the newest ones, and no others.

Efficient Streaming Language Models with Attention Sinks.
"""

import dataclasses
from typing import Any, ClassVar, override

import jax.numpy as jnp

from jaxrag.base.types import Array, Partial
from jaxrag.reuse.decode.far import HostPrompt
from jaxrag.reuse.decode.rule import (
    DecodeRule,
    Positions,
    check_positions,
    require,
    require_zero_or_more,
)
from jaxrag.reuse.decode.view import View


@dataclasses.dataclass(frozen=True)
class StaticWindow(DecodeRule):
    """The first ``sink`` and the newest ``recent`` tokens, and nothing else.

    Attributes:
      sink: tokens from the start of the prompt.
      recent: newest tokens, the newest one included.
      positions: "original": as in the prompt; "cache": as published, the kept tokens stand one
        behind the other, so that no distance exceeds the size of the window.
    """

    sink: int = 128
    recent: int = 512
    positions: Positions = "original"
    name: str = dataclasses.field(default="static_window", init=False)
    reads_far: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_zero_or_more(self.name, sink=self.sink)
        require(self.name, recent=self.recent)
        check_positions(self.name, self.positions)

    @property
    @override
    def static_pattern(self) -> tuple[int, int] | None:
        return (self.sink, self.recent) if self.positions == "original" else None

    @override
    def far(self, prompt: HostPrompt) -> None:
        """Nothing else is read."""

    @override
    def tokens(self) -> dict[str, int]:
        return {"sink + recent": self.sink + self.recent}

    @override
    def attend(self, view: View, layer: Array, state: Any) -> tuple[Partial, Any]:
        where, counts = view.window(self.sink, self.recent)
        if self.positions == "original":
            return view.attend_at(where, counts), state
        query_at = jnp.minimum(view.position, self.sink + self.recent - 1)
        moved = (view.position - query_at)[:, None, None, None]  # how far recent ones are shifted
        at = jnp.where(jnp.arange(where.shape[-1]) < self.sink, where, where - moved)
        return view.attend_at(where, counts, jnp.maximum(at, 0), query_at), state
