"""How prompts with pasted passages are answered, and what a prefix cache would find in them."""

import hashlib
import time
from typing import Any

import numpy as np
from script import Result
from stack_prompts import Messages

from jaxrag.models.model import Model
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.serve.generate import generate
from jaxrag.serve.plain import plain_prompt

_PAGE = 16  # tokens of a block of a prefix cache


class Found:
    """Answers with reuse and without: tokens from KV, and seconds to the first token."""

    def __init__(self, model: Model, method: str) -> None:
        self._model, self._method = model, method
        self._tokens = self._from_kv = self._of_passages = 0
        self.seconds, self._full = list[float](), list[float]()

    def ask(self, messages: Messages, first: bool) -> None:
        """Both ways, with reuse first or last."""
        for reuse in (first, not first):
            (self._ask if reuse else self._ask_plainly)(messages)

    def _ask(self, messages: Messages) -> None:
        result, seconds = self._timed(messages, method=self._method, plain="passages")
        rows = [it for it in result.reuse if it.part.startswith("chunk")]
        found = sum(it.tokens for it in rows if it.how == "chunk hit")
        self._of_passages += sum(it.tokens for it in rows)
        self._from_kv += found
        self._tokens += len(ids_of(self._model.text_tokenizer(), messages))
        self.seconds.append(seconds)

    def _ask_plainly(self, messages: Messages) -> None:
        self._full.append(self._timed(messages, method="full_attention")[1])

    def told(self) -> Result:
        """Shares of tokens from KV, seconds, and how many times sooner reuse was."""
        spent = {"reuse": self.seconds, "full_attention": self._full}
        seconds = {
            name: {f"p{at}": round(float(np.percentile(it, at)), 4) for at in (50, 95)}
            for name, it in spent.items()
        }
        ratio = float(np.median(np.array(self._full) / np.array(self.seconds)))
        return {
            "prompts": len(self.seconds),
            "prompt_tokens": round(self._tokens / len(self.seconds)),
            "of_prompts": round(self._from_kv / self._tokens, 4),
            "of_passages": round(self._from_kv / max(self._of_passages, 1), 4),
            "seconds": seconds,
            "sooner": round(ratio, 2),
        }

    def _timed(self, messages: Messages, **how: Any) -> tuple[Any, float]:
        begun = time.perf_counter()
        given: Any = {"messages": messages, "max_new_tokens": 1} | how
        result = generate(model=self._model, **given)
        return result, time.perf_counter() - begun


class PrefixCache:
    """What a prefix cache without bound finds: whole blocks of tokens behind equal ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._seen = tokenizer, set[bytes]()
        self._found = self._tokens = 0

    def ask(self, messages: Messages) -> None:
        """The next prompt: its blocks are kept."""
        ids = ids_of(self._tokenizer, messages)
        name, matches = b"", True
        for at in range(0, len(ids) - _PAGE + 1, _PAGE):
            name = hashlib.blake2b(name + ids[at : at + _PAGE].tobytes()).digest()
            matches = matches and name in self._seen
            self._found += _PAGE * matches
            self._seen.add(name)
        self._tokens += len(ids)

    def share(self) -> float:
        """Of all tokens, those that were kept before."""
        return round(self._found / self._tokens, 4)


def ids_of(tokenizer: Tokenizer, messages: Messages) -> Any:
    """Token ids of the prompt that messages make, [T]."""
    prompt, _ = plain_prompt(tokenizer, messages, None)
    return np.concatenate([prompt.prefix, *prompt.chunks, prompt.final])
