"""The two ends that every other selector lies between."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.reuse.select.base import SelectionInput, Selector, check_range


@dataclasses.dataclass(frozen=True)
class NoTokens(Selector):
    """Nothing is recomputed: plain reuse (TurboRAG, Block-Attention, Full Reuse)."""

    name: str = dataclasses.field(default="none", init=False)
    reads_cache: ClassVar[bool] = False

    def check_ratio(self, ratio: float | None) -> None:
        """No ratio, or 0."""
        check_range(ratio)
        if ratio:
            raise RequestError(
                f"recompute_ratio={ratio}: this method recomputes nothing; take one with a "
                f"selector: fusionrag, cacheblend, cache_craft or epic"
            )

    def room(self, lengths: Sequence[int], ratio: float | None) -> int:
        """None."""
        return 0

    def score(self, scene: SelectionInput) -> HostArray:
        """All alike."""
        return np.zeros(scene.num_chunk_tokens)

    def count(self, scene: SelectionInput) -> int:
        """Nothing."""
        return 0


@dataclasses.dataclass(frozen=True)
class AllTokens(Selector):
    """Every chunk token whose KV is not exact already: equal to full attention."""

    name: str = dataclasses.field(default="all", init=False)
    reads_cache: ClassVar[bool] = False

    def check_ratio(self, ratio: float | None) -> None:
        """No ratio, 0 or 1."""
        check_range(ratio)
        if ratio not in (None, 0, 1):
            raise RequestError(
                f"recompute_ratio={ratio}: selector 'all' takes 0, 1 or nothing; choose another"
            )

    def room(self, lengths: Sequence[int], ratio: float | None) -> int:
        """Everything, whatever the ratio."""
        return sum(lengths)

    def score(self, scene: SelectionInput) -> HostArray:
        """All alike."""
        return np.zeros(scene.num_chunk_tokens)

    def count(self, scene: SelectionInput) -> int:
        """All candidates."""
        return int(scene.candidates.sum())
