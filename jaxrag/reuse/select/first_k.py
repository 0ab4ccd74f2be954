"""EPIC's LegoLink: the first tokens of every chunk.

EPIC: Efficient Position-Independent Caching for Serving Large Language Models, arXiv:2410.15332.
"""

import dataclasses
from collections.abc import Sequence
from typing import override

import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.kv.cache import PagedCache
from jaxrag.models.model import Model
from jaxrag.reuse.select.base import Choice, SelectionInput, Selector, budget_of, check_range


@dataclasses.dataclass(frozen=True)
class FirstK(Selector):
    """The first k tokens of every chunk, which a chunk encoded alone uses as its attention sink.

    No pass over the tokens is needed. A ratio replaces ``k`` by ceil(ratio x chunk) in every chunk.
    """

    k: int = 16
    name: str = dataclasses.field(default="first_k", init=False)

    @property
    @override
    def reads_cache(self) -> bool:
        return False

    def __post_init__(self) -> None:
        """Refuse a negative k."""
        if self.k < 0:
            raise RequestError(f"first_k: k={self.k}: expected a number of tokens, 0 or more")

    def check_ratio(self, ratio: float | None) -> None:
        """Any ratio, or none for ``k``."""
        check_range(ratio)

    def room(self, lengths: Sequence[int], ratio: float | None) -> int:
        """The chosen tokens."""
        return sum(self._counts(lengths, ratio))

    def _counts(self, lengths: Sequence[int], ratio: float | None) -> list[int]:
        if ratio is None:
            return [min(self.k, length) for length in lengths]
        return [budget_of(ratio, length) for length in lengths]

    def select(
        self, model: Model, cache: PagedCache, scenes: Sequence[SelectionInput]
    ) -> list[Choice]:
        """Choose by place alone."""
        return [
            Choice(
                np.flatnonzero(
                    scene.candidates
                    & (
                        scene.local
                        < np.repeat(self._counts(scene.lengths, scene.ratio), scene.lengths)
                    )
                )
            )
            for scene in scenes
        ]
