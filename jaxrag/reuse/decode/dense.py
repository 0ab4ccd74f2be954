"""Dense: attention to every key, what all other rules are compared with."""

import dataclasses
from typing import Any, override

from jaxrag.base.config import ModelConfig
from jaxrag.base.types import Array, Partial
from jaxrag.reuse.decode.far import Everything, FarLayer, HostPrompt
from jaxrag.reuse.decode.rule import DecodeRule
from jaxrag.reuse.decode.view import View

_RECENT = 512  # newest tokens on the device, where all others are in host memory


@dataclasses.dataclass(frozen=True)
class Dense(DecodeRule):
    """Every key."""

    name: str = dataclasses.field(default="dense", init=False)

    @property
    @override
    def sparse(self) -> bool:
        return False

    @property
    @override
    def by_position(self) -> bool:
        return False

    @property
    @override
    def scores_every_key(self) -> bool:
        return True

    @property
    @override
    def static_pattern(self) -> tuple[int, int]:
        return 0, _RECENT

    @override
    def far(self, prompt: HostPrompt) -> FarLayer:
        """Everything else."""
        return Everything(prompt, *self.static_pattern)

    @override
    def check(self, config: ModelConfig) -> None:
        """Any model will do."""

    @override
    def tokens(self) -> dict[str, int]:
        return {}

    @override
    def attend(self, view: View, layer: Array, state: Any) -> tuple[Partial, Any]:
        return view.dense(), state
