"""Guided answers: which tokens may come next, so that an answer is of a given form.

By llguidance, whose matchers run on the host, beside Python: they follow an answer token by token
and give one bit for each token of the vocabulary.
"""

import functools
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrag.base.errors import EngineError, RequestError
from jaxrag.base.guide import Guide
from jaxrag.base.types import HostArray
from jaxrag.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

_MOST_ERROR = 200


class Grammar:
    """A guide for the answers of one model.

    Attributes:
      guide: that it is of.
    """

    def __init__(
        self, tokenizer: Tokenizer, guide: Guide, vocab_size: int, eos_ids: frozenset[int]
    ) -> None:
        """Compile it; a second at worst, while other threads run.

        Raises RequestError for a guide that no answer satisfies, that is too large, or that the
        vocabulary cannot spell.
        """
        self.guide, self._vocab_size = guide, vocab_size
        self._words = _words(tokenizer, vocab_size, eos_ids)
        self._text = _grammar_of(guide)
        try:
            self.matcher().allowed()
        except EngineError as error:
            raise _refused(guide, str(error)) from None

    def matcher(self) -> "Matcher":
        """At the beginning of an answer."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._words, self._text, log_level=0)
        if matcher.is_error():
            raise _refused(self.guide, matcher.get_error())
        return Matcher(matcher, -(-self._vocab_size // 32))


class Matcher:
    """How far an answer has come in a grammar.

    Attributes:
      next: what may follow, as ``allowed``; None before the first token, and where it is complete.
    """

    def __init__(self, matcher: "llguidance.LLMatcher", size: int) -> None:
        """``size``: of what ``allowed`` gives."""
        self._matcher, self._size = matcher, size
        self.next: HostArray | None = None

    def restart(self) -> None:
        """Back to the beginning of an answer."""
        self._matcher.reset()
        self.next = None

    def take(self, token_id: int) -> bool:
        """The answer grows by a token; False: it is complete.

        Raises EngineError for a token that is not allowed, and where none may follow.
        """
        if not self._matcher.consume_token(token_id):
            raise EngineError(f"a guided answer left its form: {_line(self._matcher.get_error())}")
        self.next = None if self._matcher.is_stopped() else self.allowed()
        return self.next is not None

    def allowed(self) -> HostArray:
        """Bits of the tokens that may follow, those that end it as well: uint32 [ceil(V / 32)].

        Raises EngineError where there are none.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._size]
        if self._matcher.is_error() or not bits.any():
            why = self._matcher.get_error() or "the vocabulary has no token that may follow"
            raise EngineError(f"the answer cannot take the form that was asked for: {_line(why)}")
        return bits


@functools.lru_cache(maxsize=64)
def grammar_of(
    tokenizer: Tokenizer, guide: Guide, vocab_size: int, eos_ids: frozenset[int]
) -> Grammar:
    """A Grammar, and the same again for who asks again."""
    return Grammar(tokenizer, guide, vocab_size, eos_ids)


def _grammar_of(guide: Guide) -> str:
    from llguidance import LLMatcher

    if guide.kind == "regex":
        return str(LLMatcher.grammar_from_regex(guide.text))
    schema = _json_of(guide)
    if guide.kind == "json_schema":
        if not isinstance(schema, dict | bool):
            raise _refused(guide, "it is no object")
        # No white space that a model could go on with for ever.
        compact: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=compact))
    texts = schema if isinstance(schema, list) else []
    if not texts or not all(isinstance(it, str) and it for it in texts):
        raise _refused(guide, "it is no list of texts")
    return str(
        LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(map(json.dumps, texts)))
    )


def _json_of(guide: Guide) -> Any:
    try:
        return json.loads(guide.text)
    except (ValueError, RecursionError) as error:
        raise _refused(guide, f"it is not JSON ({error})") from None


@functools.lru_cache(maxsize=8)
def _words(
    tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]
) -> "llguidance.LLTokenizer":
    """The vocabulary as llguidance reads it."""
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise RequestError(
            "guide: answers of a form need llguidance; install it with: pip install llguidance"
        ) from None
    if not eos_ids:
        raise RequestError("guide: answers of a form need a model with a token that ends answers")
    try:
        return LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=sorted(eos_ids))
    except ValueError:
        raise RequestError(
            "guide: answers of a form need a vocabulary that spells any text, byte by byte; this "
            "model's does not"
        ) from None


def _refused(guide: Guide, why: str) -> RequestError:
    return RequestError(f"guide: {guide.kind} of {len(guide.text)} characters: {_line(why)}")


def _line(text: str) -> str:
    """The start of a message, in one line."""
    return " ".join(text.split("<state>")[0].split())[:_MOST_ERROR]
