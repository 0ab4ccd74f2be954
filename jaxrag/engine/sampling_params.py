"""What a request says of how its tokens are chosen."""

import dataclasses
import hashlib
import reprlib
from typing import Any, Literal

from jaxrag.base.errors import RequestError
from jaxrag.base.guide import Guide
from jaxrag.base.options import option
from jaxrag.base.tables import require_kind

FinishReason = Literal["stop", "length"]

_COLDEST, _HOTTEST = 1e-6, 1e6  # of a temperature; far inside of float32, with its logits, too
_LEAST_P = 1e-30  # the engine holds it as float32, where less may be 0, which keeps no token
MOST_K = 2**31 - 1  # the engine holds it as int32
MOST_SEED = 2**32 - 1
MOST_TOP = 20  # likeliest tokens that are told with each
MOST_BIASES = 1024
_MOST_BIAS = 100
_PENALTIES = (
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),
)
_LONG = 128  # bits of an integer that is not shown: Python refuses to write some out


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """One request's settings. Raises RequestError for a value out of range.

    Attributes:
      temperature: 0 is greedy; else 1e-6 to 1e6.
      top_k: keep the k most likely tokens, at most 2**31 - 1; 0 keeps all.
      top_p: then keep the fewest whose probability reaches p, at least 1e-30; 1 keeps all.
      seed: 0 to 2**32 - 1.
      presence_penalty: -2 to 2; taken from the logits of tokens that are in the answer already.
      frequency_penalty: -2 to 2; the same as often as they are.
      repetition_penalty: 0.01 to 100; divides the logits of tokens in prompt and answer.
      logit_bias: pairs of a token id and what is added to its logit, -100 to 100.
      min_tokens: before which the answer does not end, but where its room does.
      top_logprobs: likeliest tokens that the engine tells with every token, at most 20.
      guide: what the text of the answer has to be; not with ``min_tokens``.
    """

    temperature: float = option(0.0, "0 is greedy", "T")
    top_k: int = option(0, "0 keeps all", "N")
    top_p: float = option(1.0, "1 keeps all", "P")
    seed: int = option(0, "of sampling", "N")
    presence_penalty: float = option(0.0, shown=False)
    frequency_penalty: float = option(0.0, shown=False)
    repetition_penalty: float = option(1.0, shown=False)
    logit_bias: tuple[tuple[int, float], ...] = option((), shown=False)
    min_tokens: int = option(0, shown=False)
    top_logprobs: int = option(0, shown=False)
    guide: Guide | None = option(None, shown=False)

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
        _check_integer("min_tokens", self.min_tokens, MOST_K)
        _check_integer("top_logprobs", self.top_logprobs, MOST_TOP)
        if self.guide is not None and self.min_tokens:
            raise _refused("min_tokens", self.min_tokens, "0 with a guide, whose answers may end")
        for name, least, most in _PENALTIES:
            value = getattr(self, name)
            require_kind(name, value, (int, float), "a number", optional=False)
            if not least <= value <= most:
                raise _refused(name, value, f"a number from {least:g} to {most:g}")
        if len(self.logit_bias) > MOST_BIASES:
            count = len(self.logit_bias)
            raise RequestError(f"logit_bias has {count} entries: expected at most {MOST_BIASES}")
        for token_id, bias in self.logit_bias:
            _check_integer("logit_bias", token_id, MOST_K)
            require_kind("logit_bias", bias, (int, float), "a number", optional=False)
            if not -_MOST_BIAS <= bias <= _MOST_BIAS:
                raise _refused("logit_bias", bias, f"numbers from -{_MOST_BIAS} to {_MOST_BIAS}")

    @property
    def processes(self) -> bool:
        """Does it ask for more than to draw from the model's own logits?"""
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        more = self.logit_bias or self.min_tokens or self.top_logprobs or self.guide
        return bool(penalised or more)

    def of_choice(self, index: int) -> "SamplingParams":
        """Of one of several answers to a prompt: its index joins the seed; that of 0 is its own."""
        if not index:
            return self
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=4).digest()
        return dataclasses.replace(self, seed=int.from_bytes(digest, "big"))

    def check_ids(self, vocab_size: int) -> None:
        """RequestError for a bias of a token that a model of so many has not."""
        for token_id, _ in self.logit_bias:
            if token_id >= vocab_size:
                raise _refused("logit_bias", token_id, f"token ids from 0 to {vocab_size - 1}")


def _check_integer(name: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise _refused(name, value, f"an integer from 0 to {most}")


def _refused(name: str, value: Any, expected: str) -> RequestError:
    long = isinstance(value, int) and value.bit_length() > _LONG
    shown = f"a number of {value.bit_length()} bits" if long else reprlib.repr(value)
    return RequestError(f"{name}={shown}: expected {expected}")
