"""Flat: exact top-k beside a static window, RetrievalAttention's baseline of perfect recall.

RetrievalAttention: Accelerating Long-Context LLM Inference via Vector Retrieval (arXiv:2409.10516),
section 4.1.
"""

import dataclasses
from typing import Any, override

import jax.numpy as jnp

from jaxrag.base.types import Array, Partial
from jaxrag.models.attention import merge
from jaxrag.reuse.decode.far import Best, FarLayer, HostPrompt
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
        """Refuse a window without the newest token, and k of zero."""
        require_zero_or_more(self.name, sink=self.sink)
        require(self.name, k=self.k, recent=self.recent)

    @property
    @override
    def scores_every_key(self) -> bool:
        return True

    @property
    @override
    def static_pattern(self) -> tuple[int, int]:
        return self.sink, self.recent

    @override
    def far(self, prompt: HostPrompt) -> FarLayer:
        """An exact scan."""
        return Best(prompt, self.sink, self.recent, self.k)

    @override
    def tokens(self) -> dict[str, int]:
        return {"k": self.k, "sink + recent": self.sink + self.recent}

    @override
    def attend(self, view: View, layer: Array, state: Any) -> tuple[Partial, Any]:
        window = view.attend_at(*view.window(self.sink, self.recent))
        rest = view.outside_window(self.sink, self.recent)[:, None, None]
        scores, slots = highest(jnp.where(rest, view.scores(), -jnp.inf), self.k)
        return merge([window, view.mix(scores, slots)]), state
