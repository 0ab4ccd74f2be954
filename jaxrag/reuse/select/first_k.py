"""EPIC's LegoLink: the first tokens of every chunk.

EPIC: Efficient Position-Independent Caching for Serving Large Language Models, arXiv:2410.15332.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.reuse.select.base import SelectionInput, Selector, budget_of, check_range


@dataclasses.dataclass(frozen=True)
class FirstK(Selector):
    """The first k tokens of every chunk, which a chunk encoded alone uses as its attention sink.

    No pass over the tokens is needed. A ratio replaces ``k`` by ceil(ratio x chunk) in every chunk.
    """

    k: int = 16
    name: str = dataclasses.field(default="first_k", init=False)
    reads_cache: ClassVar[bool] = False

    def __post_init__(self) -> None:
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

    def score(self, scene: SelectionInput) -> HostArray:
        """By place alone."""
        return -scene.local

    def count(self, scene: SelectionInput) -> list[int]:
        """As many of every chunk."""
        return self._counts(scene.lengths, scene.ratio)
