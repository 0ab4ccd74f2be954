"""What a request says of how its tokens are chosen."""

import dataclasses
import reprlib
from typing import Any

from jaxrag.base.errors import RequestError
from jaxrag.base.options import option
from jaxrag.base.tables import require_kind

_COLDEST, _HOTTEST = 1e-6, 1e6  # of a temperature; far inside of float32, with its logits, too
_LEAST_P = 1e-30  # the engine holds it as float32, where less may be 0, which keeps no token
MOST_K = 2**31 - 1  # the engine holds it as int32
MOST_SEED = 2**32 - 1
_LONG = 128  # bits of an integer that is not shown: Python refuses to write some out


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """One request's settings. Raises RequestError for a value out of range.

    Attributes:
      temperature: 0 is greedy; else 1e-6 to 1e6.
      top_k: keep the k most likely tokens, at most 2**31 - 1; 0 keeps all.
      top_p: then keep the fewest whose probability reaches p, at least 1e-30; 1 keeps all.
      seed: 0 to 2**32 - 1.
    """

    temperature: float = option(0.0, "0 is greedy", "T")
    top_k: int = option(0, "0 keeps all", "N")
    top_p: float = option(1.0, "1 keeps all", "P")
    seed: int = option(0, "of sampling", "N")

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            require_kind(name, getattr(self, name), (int, float), "a number", optional=False)
        if self.temperature != 0 and not _COLDEST <= self.temperature <= _HOTTEST:
            expected = f"0 (greedy), or a number from {_COLDEST:g} to {_HOTTEST:g}"
            raise _refused("temperature", self.temperature, expected)
        if not _LEAST_P <= self.top_p <= 1:
            raise _refused("top_p", self.top_p, f"a number from {_LEAST_P:g} to 1 (all)")
        _check_integer("top_k", self.top_k, MOST_K)
        _check_integer("seed", self.seed, MOST_SEED)


def _check_integer(name: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise _refused(name, value, f"an integer from 0 to {most}")


def _refused(name: str, value: Any, expected: str) -> RequestError:
    long = isinstance(value, int) and value.bit_length() > _LONG
    shown = f"a number of {value.bit_length()} bits" if long else reprlib.repr(value)
    return RequestError(f"{name}={shown}: expected {expected}")
