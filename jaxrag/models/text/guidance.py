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
_MOST_WIDE = 1000  # beyond it a token takes as long as it is wide squared, with Python's lock
_TRIED = 12  # tokens of an answer, before it is asked for
_REASONS = {"NoExtensionBias": "no text satisfies it, as a $ref to itself"}


class Grammar:
    """A guide for the answers of one model.

    Attributes:
      guide: that it is of.
      notes: on what of it no answer is held to.
    """

    def __init__(
        self, tokenizer: Tokenizer, guide: Guide, vocab_size: int, eos_ids: frozenset[int]
    ) -> None:
        """Compile it; a second at worst, while other threads run.

        Raises RequestError for a guide that no answer satisfies, that is too large, or that the
        vocabulary cannot spell.
        """
        self.guide, self._vocab_size, self._eos_ids = guide, vocab_size, eos_ids
        self._words = _words(tokenizer, vocab_size, eos_ids)
        try:
            self._text = _grammar_of(guide)
            for place in (0, -1):
                self._try(place)
        except ValueError as error:
            raise _refused(guide, str(error)) from None
        what = "response_format: not held to"
        said = self._new().get_grammar_warnings()
        self.notes = tuple(f"{what}: {_line(it)}" for it in said)

    def _try(self, place: int) -> None:
        """RequestError where an answer whose tokens are at this place soon gets too complex."""
        matcher = self.matcher()
        allowed: HostArray | None = matcher.allowed()
        for _ in range(_TRIED):
            if allowed is None:
                return
            ids = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
            if int(ids[place]) in self._eos_ids:
                return
            allowed = matcher.next if matcher.take(int(ids[place])) else None

    def matcher(self) -> "Matcher":
        """At the beginning of an answer."""
        return Matcher(self._new(), -(-self._vocab_size // 32))

    def _new(self) -> "llguidance.LLMatcher":
        from llguidance import LLMatcher

        matcher = LLMatcher(self._words, self._text, log_level=0)
        if matcher.is_error():
            raise _refused(self.guide, matcher.get_error())
        return matcher


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

        Raises EngineError for a token that is not allowed, and RequestError where the form is too
        complex to go on.
        """
        if not self._matcher.consume_token(token_id):
            why = _line(self._matcher.get_error())
            if "satisfy the grammar" in why:
                raise EngineError(f"a guided answer left its form: {why}")
            raise RequestError(f"guide: too complex for its answer to go on ({why}); make it less")
        ended = self._matcher.is_stopped() and self._matcher.is_accepting()
        self.next = None if ended else self.allowed()
        return self.next is not None

    def allowed(self) -> HostArray:
        """Bits of the tokens that may follow, those that end it as well: uint32 [ceil(V / 32)].

        Raises RequestError where there are none.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._size]
        if self._matcher.is_error() or not bits.any():
            why = self._matcher.get_error() or "the vocabulary has no token that may follow"
            what = "guide: the answer cannot take the form that was asked for"
            raise RequestError(f"{what}: {_REASONS.get(_line(why), _line(why))}")
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
        if (wide := _width(schema)) > _MOST_WIDE:
            why = "properties that may be left out, a branch being two: expected at most"
            raise _refused(guide, f"it has {wide} {why} {_MOST_WIDE}")
        # No white space that a model could go on with for ever.
        how: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        how["lenient"] = True  # what is not done is noted
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=how))
    texts = schema if isinstance(schema, list) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise _refused(guide, "it is no list of texts")
    return str(
        LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(map(json.dumps, texts)))
    )


def _width(schema: Any) -> int:
    """Properties that may be left out, wherever they are, and twice the branches."""
    width, rest = 0, [schema]
    while rest:
        node = rest.pop()
        if isinstance(node, list):
            rest += node
        if not isinstance(node, dict):
            continue
        rest += node.values()
        named, needed = node.get("properties"), node.get("required")
        needed = [it for it in needed if isinstance(it, str)] if isinstance(needed, list) else []
        width += len(named.keys() - set(needed)) if isinstance(named, dict) else 0
        branches = (node.get(name) for name in ("anyOf", "oneOf"))
        width += sum(2 * len(branch) for branch in branches if isinstance(branch, list))
    return width


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
        text = _unspelled(tokenizer.to_json())
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=sorted(eos_ids))
    except ValueError:
        raise RequestError(
            "guide: answers of a form need a vocabulary that spells any text, byte by byte; this "
            "model's does not"
        ) from None


def _unspelled(text: str) -> str:
    """A tokenizer.json whose special tokens no text spells, as forms are of ordinary tokens."""
    spec = json.loads(text)
    names = {it["content"]: f"\U000f0000{it['id']}" for it in spec["added_tokens"] if it["special"]}
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = spec["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(it, it): number for it, number in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(it, it), score] for it, score in model["vocab"]]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return json.dumps(spec | {"post_processor": None})


def _refused(guide: Guide, why: str) -> RequestError:
    return RequestError(f"guide: {guide.kind} of {len(guide.text)} characters: {_line(why)}")


def _line(text: str) -> str:
    """The start of a message, in one line."""
    return " ".join(text.split("<state>")[0].split())[:_MOST_ERROR]
