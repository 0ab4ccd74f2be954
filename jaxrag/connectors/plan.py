"""Which tokens at the beginning of a prompt are parts whose KV is stored, and their salt."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrag.connectors.manifest import FIRST, Manifest, running, span_hash
from jaxrag.kv.store.keys import chunk_key, content_id, context_id

ISOLATED = "isolated"  # the encoder of what sees nothing but itself, as every prefix


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
        self._manifest = manifest
        first, self._whole, *rest = manifest.parts
        self._first = first
        packed = np.ascontiguousarray(np.stack(rest, 1)).view(np.uint8).reshape(-1, 24)
        self._contents = packed[:, :20]
        self._lengths = np.ascontiguousarray(packed[:, 20:]).view("<u4")[:, 0].astype(np.int64)
        self._short = sorted(set(self._lengths[self._lengths < FIRST].tolist()), reverse=True)

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
        sums, prefix = running(prompt), len(self._manifest.prefix)
        led = bool(prefix) and (spans is None or list(spans[:1]) == [prefix])
        led = led and np.array_equal(prompt[:prefix], self._manifest.prefix)
        if prefix and not led and self._manifest.engine.encoder != ISOLATED:
            return None, "unknown"  # its chunks have seen the prefix
        found: list[tuple[str, int]] = []
        if spans is None:
            found += self._recognised(prompt, sums, prefix if led else 0)
        else:
            at = 0
            for length in spans:
                if type(length) is not int or length < 1 or at + length >= len(prompt):
                    return None, "spans"
                if not at and led and length == prefix:
                    content: str | None = self._prefix_id(prompt)
                else:
                    content = self.find(prompt, sums, at, length)
                if content is None:
                    return None, "missing"
                found.append((content, length))
                at += length
        chunks = len(found) - led
        if not chunks:
            return None, "unknown"  # a prefix alone is exact, and the engine keeps it itself
        if chunks <= compute_last:
            return None, "computed"
        found = found[: len(found) - compute_last]
        return PartsPlan(tuple(self._keyed(prompt, found, led))), ""

    def _recognised(
        self, prompt: NDArray[np.int32], sums: NDArray[np.uint64], prefix: int
    ) -> Iterator[tuple[str, int]]:
        """Content ids and tokens of the parts, up to the first place that none begins at."""
        at = 0
        if 0 < prefix < len(prompt):
            yield self._prefix_id(prompt), prefix
            at = prefix
        while (one := self.longest(prompt, sums, at)) is not None:
            yield one
            at += one[1]

    def longest(
        self, prompt: NDArray[np.int32], sums: NDArray[np.uint64], at: int
    ) -> tuple[str, int] | None:
        """The longest part that begins here and leaves a token to be computed."""
        for size in (FIRST, *self._short):
            if at + size >= len(prompt):
                continue
            rows = self._rows(span_hash(sums, at, at + size))
            lengths = self._lengths[rows]
            fit = (lengths >= size) & (at + lengths < len(prompt))
            if size < FIRST:
                fit &= lengths == size
            rows, lengths = rows[fit], lengths[fit]
            rows = rows[self._whole[rows] == span_hash(sums, at, at + lengths)]
            for row in rows[np.argsort(-self._lengths[rows], kind="stable")]:
                length = int(self._lengths[row])
                content = content_id(self._tokenizer, prompt[at : at + length])
                if content == self._contents[row].tobytes().hex():
                    return content, length
        return None

    def find(
        self, prompt: NDArray[np.int32], sums: NDArray[np.uint64], at: int, length: int
    ) -> str | None:
        """The content id of a part with so many tokens; None where there is no such part."""
        rows = self._rows(span_hash(sums, at, at + min(FIRST, length)))
        rows = rows[self._lengths[rows] == length]
        content = content_id(self._tokenizer, prompt[at : at + length])
        known = (self._contents[row].tobytes().hex() for row in rows)
        return content if content in known else None

    def _rows(self, first: np.uint64) -> NDArray[np.int64]:
        """The rows of parts that begin with tokens of this hash."""
        start = int(np.searchsorted(self._first, first, "left"))
        end = int(np.searchsorted(self._first, first, "right"))
        return np.arange(start, end)

    def _keyed(
        self, prompt: NDArray[np.int32], found: Sequence[tuple[str, int]], led: bool
    ) -> Iterator[tuple[str, int]]:
        engine, nothing = self._manifest.engine, prompt[:0]
        seen = nothing if engine.encoder == ISOLATED else self._manifest.prefix
        for number, (content, length) in enumerate(found):
            is_prefix = led and not number
            context = context_id(
                ISOLATED if is_prefix else engine.encoder, nothing if is_prefix else seen
            )
            yield chunk_key(engine.fingerprint, content, context), length

    def _prefix_id(self, prompt: NDArray[np.int32]) -> str:
        return content_id(self._tokenizer, prompt[: len(self._manifest.prefix)])

    @property
    def _tokenizer(self) -> str:
        return self._manifest.engine.tokenizer


def spans_of(params: Any) -> tuple[bool, list[int] | None]:
    """Whether a request wants stored KV, and its spans, from ``kv_transfer_params["jaxrag"]``.

    Raises ValueError for parameters that are none.
    """
    if params is None:
        return True, None
    if not isinstance(params, dict) or set(params) - {"spans", "off"}:
        raise ValueError(f'jaxrag={params!r}: expected {{"spans": [37, 241]}} or {{"off": true}}')
    spans = params.get("spans")
    if spans is not None and not (isinstance(spans, list) and all(type(it) is int for it in spans)):
        raise ValueError(f"spans={spans!r}: expected a list of numbers of tokens")
    return not params.get("off", False), spans
