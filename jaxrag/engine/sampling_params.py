"""What a request says of how its tokens are chosen."""

import dataclasses
import math

from jaxrag.base.errors import RequestError
from jaxrag.base.options import option
from jaxrag.base.tables import require_kind


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """One request's settings. Raises RequestError for a value out of range.

    Attributes:
      temperature: 0 is greedy.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: then keep the fewest whose probability reaches p; 1 keeps all.
      seed: 0 to 2**32 - 1.
    """

    temperature: float = option(0.0, "0 is greedy", "T")
    top_k: int = option(0, "0 keeps all", "N")
    top_p: float = option(1.0, "1 keeps all", "P")
    seed: int = option(0, "of sampling", "N")

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            require_kind(name, getattr(self, name), (int, float), "a number", optional=False)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(
                f"temperature={self.temperature}: expected a finite number, 0 (greedy) or more"
            )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise RequestError(f"top_k={self.top_k}: expected an integer, 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p={self.top_p}: expected a number above 0, up to 1 (all)")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise RequestError(f"seed={self.seed!r}: expected an integer")
        if not 0 <= self.seed < 2**32:
            raise RequestError(f"seed={self.seed}: expected 0 to {2**32 - 1}")
