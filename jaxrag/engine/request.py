"""What the engine is asked: token ids, how to reuse their KV, and how many to generate."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxrag.attention_index.document import Indexing
from jaxrag.cache import pages_for
from jaxrag.engine.sampling import SamplingParams
from jaxrag.errors import RequestError
from jaxrag.methods import Method
from jaxrag.models.model import Model
from jaxrag.store import KVStore
from jaxrag.types import HostArray

FinishReason = Literal["stop", "length"]

DECODE_BLOCK = 8  # tokens between two waits for the device when nobody watches


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids of the parts, int32 each, tokenised separately.

    ``neighbours`` holds for each chunk the chunks it was encoded behind, in their order; read by
    encoders that see them, None where that is not known.
    """

    prefix: HostArray
    chunks: tuple[HostArray, ...]
    final: HostArray
    neighbours: tuple[tuple[HostArray, ...], ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the whole prompt."""
        return len(self.prefix) + sum(map(len, self.chunks)) + len(self.final)


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to be continued.

    Attributes:
      prompt: its token ids, in parts.
      store: where the KV of its parts is kept.
      method: how that is reused, and how generated tokens attend.
      max_new_tokens: upper bound of the answer.
      sampling: how its tokens are drawn.
      eos_ids: tokens that end it and are not part of it.
      indexing: what indexes chunks that are encoded on the way are stored with.
      encoders: those under which a knowledge base keeps these very chunks, which tells a chunk
        whose KV is gone from one that never had any; None where nobody keeps them.
    """

    prompt: Prompt
    store: KVStore
    method: Method
    max_new_tokens: int
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    eos_ids: frozenset[int] = frozenset()
    indexing: Indexing | None = None
    encoders: tuple[str, ...] | None = None


def check_length(model: Model, prompt: Prompt, max_new_tokens: int) -> None:
    """RequestError when prompt and answer do not fit the model's context."""
    need, limit = prompt.num_tokens + max_new_tokens, model.config.max_positions
    if need > limit:
        parts = f"{len(prompt.prefix)} prefix + {sum(map(len, prompt.chunks))} chunk"
        raise RequestError(
            f"the prompt has {parts} + {len(prompt.final)} question tokens and {max_new_tokens} "
            f"may be generated: {need} in all, the model's context is {limit}; ask a shorter "
            f"question, retrieve fewer chunks or generate fewer tokens"
        )


def reserved(max_new_tokens: int, block: int) -> int:
    """Slots to reserve: the first token comes from prefill, the rest in whole blocks."""
    return -(-(max_new_tokens - 1) // block) * block if max_new_tokens > 1 else 0


def pages_of(requests: Sequence[Request]) -> int:
    """Pages of the pool that requests served as one batch need at most; equal chunks share them."""
    shared: dict[tuple[str, bytes], int] = {}
    owned = 0
    for request in requests:
        prompt, method = request.prompt, request.method
        reserve = reserved(request.max_new_tokens, DECODE_BLOCK)
        if method.encoder is None and not method.prefix_cache:
            owned += pages_for(prompt.num_tokens + reserve)
            continue
        room = method.room([len(chunk) for chunk in prompt.chunks])
        owned += pages_for(len(prompt.final) + room + reserve)
        if method.encoder is None or method.misses == "in_place":  # what is missed is not shared
            owned += sum(map(pages_for, map(len, (prompt.prefix, *prompt.chunks))))
            continue
        shared["prefix", prompt.prefix.tobytes()] = len(prompt.prefix)
        shared |= {("chunk", ids.tobytes()): len(ids) for ids in prompt.chunks}
    return owned + sum(map(pages_for, shared.values()))
