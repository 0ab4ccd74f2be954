"""Dense: attention to every key, what all other rules are compared with."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, override

from jaxrag.base.config import ModelConfig
from jaxrag.base.types import Array, HostArray, Partial
from jaxrag.reuse.decode.far import FarAnswer, FarLayer, HostPrompt
from jaxrag.reuse.decode.far.memory import Stretch, merged
from jaxrag.reuse.decode.far.scan import Pair, Scan
from jaxrag.reuse.decode.rule import DecodeRule
from jaxrag.reuse.decode.view import View

_RECENT = 512  # newest tokens on the device, where all others are in host memory


@dataclasses.dataclass(frozen=True)
class Dense(DecodeRule):
    """Every key."""

    name: str = dataclasses.field(default="dense", init=False)
    sparse: ClassVar[bool] = False
    by_position: ClassVar[bool] = False

    @property
    @override
    def static_pattern(self) -> tuple[int, int]:
        return 0, _RECENT

    @override
    def far(self, prompt: HostPrompt) -> FarLayer:
        """Everything else."""
        return EveryKey(prompt, *self.static_pattern)

    @override
    def check(self, config: ModelConfig) -> None:
        """Any model will do."""

    @override
    def tokens(self) -> dict[str, int]:
        return {}

    @override
    def attend(self, view: View, layer: Array, state: Any) -> tuple[Partial, Any]:
        return view.dense(), state


class EveryKey(Scan):
    """On the host: attends to every key outside the static pattern."""

    @override
    def _part(
        self, head: int, asked: HostArray, stretches: Sequence[Stretch], answer: FarAnswer
    ) -> Pair:
        with answer.attending():
            return self.memory.attend(head, asked, stretches)

    @override
    def _end(self, head: int, answer: FarAnswer, parts: Sequence[Pair]) -> None:
        answer.out[head], answer.lse[head] = merged(parts)
