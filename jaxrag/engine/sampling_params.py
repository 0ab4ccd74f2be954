"""What a request says of how its tokens are chosen."""

import dataclasses
import hashlib
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator
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
MOST_WORDS = 128
MOST_OF_WORDS = 2 * MOST_WORDS, 32  # as tokens: each with a space before it too, and their length
_LONGEST_WORD = 1024  # characters
_MOST_BIAS = 100
_BETWEEN = (
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),
    ("min_p", 0.0, 1.0),
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
      min_p: 0 to 1; keep the tokens whose probability is at least this share of the largest.
      bad_words: texts, or token ids of each, that no answer comes to hold: the last token of one
        is not chosen behind the others of it. At most 128, and 32 tokens of each.
      allowed_token_ids: no other token is chosen; not with ``guide``. None: any.
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
    min_p: float = option(0.0, shown=False)
    bad_words: tuple[str | tuple[int, ...], ...] = option((), shown=False)
    allowed_token_ids: tuple[int, ...] | None = option(None, shown=False)

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
        for name, least, most in _BETWEEN:
            value = getattr(self, name)
            require_kind(name, value, (int, float), "a number", optional=False)
            if not least <= value <= most:
                raise _refused(name, value, f"a number from {least:g} to {most:g}")
        for name, held in (("logit_bias", MOST_BIASES), ("bad_words", MOST_OF_WORDS[0])):
            if (count := len(getattr(self, name))) > held:
                raise RequestError(f"{name} has {count} entries: expected at most {held}")
        for _, bias in self.logit_bias:
            require_kind("logit_bias", bias, (int, float), "a number", optional=False)
            if not -_MOST_BIAS <= bias <= _MOST_BIAS:
                raise _refused("logit_bias", bias, f"numbers from -{_MOST_BIAS} to {_MOST_BIAS}")
        for word in self.bad_words:
            held = _LONGEST_WORD if isinstance(word, str) else MOST_OF_WORDS[1]
            if not isinstance(word, str | tuple) or not 0 < len(word) <= held:
                raise _refused("bad_words", word, f"texts, or tuples of token ids, of 1 to {held}")
        if self.allowed_token_ids is not None and (not self.allowed_token_ids or self.guide):
            value = self.allowed_token_ids
            raise _refused("allowed_token_ids", value, "one or more, and no form of the answer")
        for name, token_id in self._ids():
            _check_integer(name, token_id, MOST_K)

    def _ids(self) -> Iterator[tuple[str, int]]:
        """All token ids, and the field of each."""
        yield from (("logit_bias", token_id) for token_id, _ in self.logit_bias)
        words = (word for word in self.bad_words if not isinstance(word, str))
        yield from (("bad_words", token_id) for word in words for token_id in word)
        yield from (("allowed_token_ids", token_id) for token_id in self.allowed_token_ids or ())

    @property
    def processes(self) -> bool:
        """Does it ask for more than to draw from the model's own logits?"""
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        more = self.logit_bias or self.min_tokens or self.top_logprobs or self.guide
        kept = self.bad_words or self.allowed_token_ids or self.floor > -math.inf
        return bool(penalised or more or kept)

    @property
    def floor(self) -> float:
        """How far a logit may be from the largest, by ``min_p``; -inf: any way."""
        if not self.min_p or not self.temperature:
            return -math.inf
        return self.temperature * math.log(self.min_p)

    def spelled(self, encode: Callable[[str], Iterable[Any]]) -> "SamplingParams":
        """With ``bad_words`` as the token ids that they are given, and those behind a space.

        As vLLM has it: the second where it begins with another token and is not longer. Raises
        RequestError for words of too many tokens.
        """
        words = list[str | tuple[int, ...]]()
        for word in self.bad_words:
            if isinstance(word, str):
                word, spaced = (tuple(map(int, encode(it + word.lstrip()))) for it in ("", " "))
                if len(spaced) == len(word) > 0 and spaced[0] != word[0]:
                    words.append(spaced)
            words.append(word)
        return dataclasses.replace(self, bad_words=tuple(words))

    def of_choice(self, index: int) -> "SamplingParams":
        """Of one of several answers to a prompt: its index joins the seed; that of 0 is its own."""
        if not index:
            return self
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=4).digest()
        return dataclasses.replace(self, seed=int.from_bytes(digest, "big"))

    def check_ids(self, vocab_size: int, eos_ids: Iterable[int] = ()) -> None:
        """RequestError for tokens that a model of so many has not, and where none may be chosen.

        ``eos_ids``: those that end the answer.
        """
        for name, token_id in self._ids():
            if token_id >= vocab_size:
                raise _refused(name, token_id, f"token ids from 0 to {vocab_size - 1}")
        never: set[int | str] = set(eos_ids) if self.min_tokens else set()
        for word in self.bad_words:
            if isinstance(word, str):
                raise _refused("bad_words", word, "token ids, as there is no tokenizer here")
            never.add(word[-1])
        if self.allowed_token_ids is not None and never.issuperset(self.allowed_token_ids):
            what = "some beside the ends of bad_words, and with min_tokens those of the answer"
            raise _refused("allowed_token_ids", self.allowed_token_ids, what)


def _check_integer(name: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise _refused(name, value, f"an integer from 0 to {most}")


def _refused(name: str, value: Any, expected: str) -> RequestError:
    long = isinstance(value, int) and value.bit_length() > _LONG
    shown = f"a number of {value.bit_length()} bits" if long else reprlib.repr(value)
    return RequestError(f"{name}={shown}: expected {expected}")
