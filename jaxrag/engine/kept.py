"""Names of KV that stays in the pool after the request that computed it.

What stays was computed behind all that precedes it, so its name says all of that: it is found again
only where everything before it is equal, for the same tenant.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.kv.cache import PAGE
from jaxrag.kv.store import chunk_key, content_id, context_id

_LEADING = "in_place"  # the encoders that these keys name; no store holds such KV
_TURN = "turn"


@dataclasses.dataclass(frozen=True)
class Context:
    """All that precedes some token of a prompt, by name.

    Attributes:
      fingerprint: of the store that the prompt's chunks are in.
      tokenizer: its digest; "" where there is none.
      before: digest of what precedes it, part by part.
    """

    fingerprint: str
    tokenizer: str
    tenant: str
    before: tuple[str, ...] = ()

    def name(self, ids: HostArray) -> str:
        """Of tokens, int32 [T], T > 0, wherever they stand."""
        return content_id(self.tokenizer, ids)

    def behind(self, name: str) -> "Context":
        """Of what follows another part."""
        context = context_id(self._encoder(_TURN), np.zeros(0, np.int32), (*self.before, name))
        return dataclasses.replace(self, before=(context,))

    def pieces(self, ids: HostArray) -> Iterator[tuple[str, HostArray]]:
        """A turn of this context, page by page: the key and the ids of each."""
        context = self
        for at in range(0, len(ids), PAGE):
            piece = ids[at : at + PAGE]
            context = context.behind(context.name(piece))
            yield chunk_key(self.fingerprint, context.name(piece), context.before[0]), piece

    def leading(self, prefix: HostArray, chunks: Sequence[HostArray]) -> list[str]:
        """Of the prefix and of every chunk the key of its exact KV; "" if it is empty."""
        before: list[str] = []
        keys = []
        for index, ids in enumerate((prefix, *chunks)):
            if not len(ids):
                keys.append("")
                continue
            visible = prefix[: 0 if index == 0 else None]
            context = context_id(self._encoder(_LEADING), visible, before)
            keys.append(chunk_key(self.fingerprint, self.name(ids), context))
            if index:
                before.append(self.name(ids))
        return keys

    def _encoder(self, kind: str) -> str:
        return f"{kind} of {self.tenant}" if self.tenant else kind
