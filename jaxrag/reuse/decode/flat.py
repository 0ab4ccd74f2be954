"""Flat: exact top-k beside a static window, RetrievalAttention's baseline of perfect recall.

RetrievalAttention: Accelerating Long-Context LLM Inference via Vector Retrieval (arXiv:2409.10516),
section 4.1.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, override

import jax.numpy as jnp
import numpy as np

from jaxrag.base.types import Array, HostArray, Partial
from jaxrag.models.attention import merge
from jaxrag.reuse.decode.far import FarAnswer, FarLayer, HostPrompt
from jaxrag.reuse.decode.far.memory import Stretch
from jaxrag.reuse.decode.far.scan import Pair, Scan, best_of
from jaxrag.reuse.decode.rule import DecodeRule, highest, require, require_zero_or_more
from jaxrag.reuse.decode.view import View


@dataclasses.dataclass(frozen=True)
class Flat(DecodeRule):
    """The static pattern, and the ``k`` keys outside it with the highest scores, per query head.

    What an index that misses nothing would find. The two parts are merged by the paper's equations
    4 and 5 (its appendix B.1).

    Attributes:
      k: keys of a query head outside the window.
      sink: tokens of the window from the start of the prompt.
      recent: newest tokens of the window, the newest one included.
    """

    k: int = 100
    sink: int = 128
    recent: int = 512
    name: str = dataclasses.field(default="flat", init=False)

    def __post_init__(self) -> None:
        require_zero_or_more(self.name, sink=self.sink)
        require(self.name, k=self.k, recent=self.recent)

    @property
    @override
    def static_pattern(self) -> tuple[int, int]:
        return self.sink, self.recent

    @override
    def far(self, prompt: HostPrompt) -> FarLayer:
        """An exact scan."""
        return BestKeys(prompt, self)

    @override
    def tokens(self) -> dict[str, int]:
        return {"k": self.k, "sink + recent": self.sink + self.recent}

    @override
    def attend(self, view: View, layer: Array, state: Any) -> tuple[Partial, Any]:
        window = view.attend_at(*view.window(self.sink, self.recent))
        rest = view.outside_window(self.sink, self.recent)[:, None, None]
        scores, slots = highest(jnp.where(rest, view.scores(), -jnp.inf), self.k)
        return merge([window, view.mix(scores, slots)]), state


class BestKeys(Scan):
    """On the host: the ``k`` keys with the highest scores of every query head."""

    def __init__(self, prompt: HostPrompt, rule: Flat) -> None:
        super().__init__(prompt, rule.sink, rule.recent)
        self.k = rule.k

    @override
    def _part(
        self, head: int, asked: HostArray, stretches: Sequence[Stretch], answer: FarAnswer
    ) -> Pair:
        with answer.searching():
            return best_of(self.memory, head, asked, stretches, self.k)

    @override
    def _end(self, head: int, answer: FarAnswer, parts: Sequence[Pair]) -> None:
        with answer.attending():
            scores, positions = (np.concatenate(each, axis=1) for each in zip(*parts, strict=True))
            if len(parts) > 1 and scores.shape[1] > self.k:
                at = np.argpartition(scores, scores.shape[1] - self.k, axis=1)[:, -self.k :]
                scores, positions = _taken(at, scores, positions)
            # By position: sums over them do not depend on how they were found.
            pair = _taken(np.argsort(positions, axis=1, kind="stable"), scores, positions)
            answer.out[head], answer.lse[head] = self.memory.mix(head, *pair)


def _taken(at: HostArray, scores: HostArray, positions: HostArray) -> Pair:
    return np.take_along_axis(scores, at, 1), np.take_along_axis(positions, at, 1)
