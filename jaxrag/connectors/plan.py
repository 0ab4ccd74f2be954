"""Which tokens at the beginning of a prompt are parts whose KV is stored, and their salt."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrag.connectors.manifest import FIRST, Manifest, start_of
from jaxrag.kv.store.keys import chunk_key, content_id, context_id

ISOLATED = "isolated"  # the encoder of what sees nothing but itself, as every prefix
_TOKENS = (1 << 32) - 1  # the bits of start_of that say how many


@dataclasses.dataclass(frozen=True)
class PartsPlan:
    """Parts at the beginning of a prompt whose KV is stored: (key, tokens), in order."""

    parts: tuple[tuple[str, int], ...]

    @property
    def end(self) -> int:
        """How many tokens they have."""
        return sum(tokens for _, tokens in self.parts)

    def salt(self, fingerprint: str) -> str:
        """A name of KV that is not what full attention computes for the same tokens.

        Of the whole plan: the same tokens cut elsewhere are other KV.
        """
        said = json.dumps([fingerprint, self.parts]).encode()
        return "jaxrag:" + hashlib.blake2b(said, digest_size=16).hexdigest()


class Planner:
    """Finds the parts of prompts, for one state of a manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._starts = np.unique(manifest.parts["start"])
        self._contents = np.ascontiguousarray(manifest.parts["content"])
        sizes = set((self._starts & _TOKENS).tolist())
        self._sizes = sorted({min(FIRST, size) for size in sizes}, reverse=True)

    def plan(
        self, prompt: NDArray[np.int32], spans: Sequence[int] | None, compute_last: int
    ) -> tuple[PartsPlan | None, str]:
        """The stored parts of a prompt; or None and the reason.

        Args:
          prompt: its token ids, int32 [T]. Keys are made from these, so that nobody can name KV of
            other tokens.
          spans: tokens of each part, the prefix first; None: parts are recognised.
          compute_last: parts at the end that the engine computes, never the prefix.

        Reasons: "unknown" (nothing is recognised), "spans" (which do not fit the prompt), "missing"
        (a part of the spans is not in the manifest), "computed" (compute_last leaves nothing).
        """
        engine, prefix = self.manifest.engine, self.manifest.prefix
        led = np.array_equal(prompt[: len(prefix)], prefix) and len(prompt) > len(prefix) > 0
        led = led and (spans is None or list(spans[:1]) == [len(prefix)])
        if len(prefix) and not led and engine.encoder != ISOLATED:
            return None, "unknown"  # its chunks have seen the prefix
        at = len(prefix) if led else 0
        parts = [(self.content(prefix), at)] if led else []
        if spans is None:
            while (one := self.longest(prompt, at)) is not None:
                parts.append(one)
                at += one[1]
        for length in (spans or ())[len(parts) :]:
            if length < 1 or at + length >= len(prompt):
                return None, "spans"
            content = self.content(prompt[at : at + length])
            if not self.holds(content):
                return None, "missing"
            parts.append((content, length))
            at += length
        chunks = len(parts) - led
        if not chunks:
            return None, "unknown"  # a prefix alone is exact, and the engine keeps it itself
        if chunks <= compute_last:
            return None, "computed"
        before = prefix[:0] if engine.encoder == ISOLATED else prefix
        of_chunk = context_id(engine.encoder, before, primer=engine.primer)
        contexts = of_chunk, context_id(ISOLATED, prefix[:0])
        return PartsPlan(
            tuple(
                (chunk_key(engine.fingerprint, content, contexts[led and not number]), length)
                for number, (content, length) in enumerate(parts[: len(parts) - compute_last])
            )
        ), ""

    def longest(self, prompt: NDArray[np.int32], at: int) -> tuple[str, int] | None:
        """The longest part that begins here and leaves a token to be computed."""
        for size in self._sizes:
            first = start_of(prompt[at : at + size]) & ~_TOKENS
            low, high = np.searchsorted(self._starts, np.array([first, first | _TOKENS], np.uint64))
            for length in (self._starts[low:high] & _TOKENS).tolist()[::-1]:
                if at + length < len(prompt):
                    content = self.content(prompt[at : at + length])
                    if self.holds(content):
                        return content, length
        return None

    def content(self, ids: NDArray[np.int32]) -> str:
        """The content id of token ids int32 [T]."""
        return content_id(self.manifest.engine.tokenizer, ids)

    def holds(self, content: str) -> bool:
        """Whether a part with this content id is stored."""
        digest = np.array(bytes.fromhex(content), self._contents.dtype)
        at = np.searchsorted(self._contents, digest)
        return bool(at < len(self._contents) and self._contents[at] == digest)


def spans_of(params: Any) -> tuple[bool, list[int] | None]:
    """Whether a request wants stored KV, and its spans, from ``kv_transfer_params["jaxrag"]``.

    Raises ValueError for parameters that are none.
    """
    params = {} if params is None else params
    if not isinstance(params, dict) or set(params) - {"spans", "off"}:
        raise ValueError(f'jaxrag={params!r}: expected {{"spans": [37, 241]}} or {{"off": true}}')
    spans = params.get("spans")
    if spans is not None and not (isinstance(spans, list) and all(type(it) is int for it in spans)):
        raise ValueError(f"spans={spans!r}: expected a list of numbers of tokens")
    return not params.get("off", False), spans
