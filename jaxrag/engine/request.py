"""What the engine is asked: token ids, how to reuse their KV, and how many to generate."""

import dataclasses
from collections.abc import Collection

import numpy as np

from jaxrag.base.errors import ContextExceeded, RequestError
from jaxrag.base.shapes import bucket
from jaxrag.base.types import HostArray
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.kv.cache import MIN_TABLE_PAGES, ChunkAttention
from jaxrag.kv.placement import ON_DEVICE, KVPlacement
from jaxrag.kv.store import KVStore
from jaxrag.models.model import Model
from jaxrag.reuse.attention_index.document import Indexing
from jaxrag.reuse.decode import DecodeRule
from jaxrag.reuse.encode import wrapped
from jaxrag.reuse.methods import Method

FAILED = -1  # in the place of a token whose logits hold a NaN
FEWEST_ROOM = 64  # slots for generated tokens that a rule's state is made for; more in powers of 2
DECODE_BLOCK = 8  # tokens of a row between two looks at it, when no client watches


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids of the parts, int32 each, tokenised separately.

    ``neighbours`` holds for each chunk the chunks it was encoded behind, in their order, read by
    encoders that see them; None for one that is none but what was said before, in a conversation:
    it sees all that precedes it, and no store is asked for it. None where nothing is known.
    ``question`` is where the question's own tokens stand in the final block, the first and one past
    the last; None: all of it is the question.
    """

    prefix: HostArray
    chunks: tuple[HostArray, ...]
    final: HostArray
    neighbours: tuple[tuple[HostArray, ...] | None, ...] | None = None
    question: tuple[int, int] | None = None

    def with_turns(self, turns: Collection[int]) -> "Prompt":
        """Some of the chunks are what was said before."""
        known = self.neighbours or ((),) * len(self.chunks)
        neighbours = tuple(None if at in turns else others for at, others in enumerate(known))
        return dataclasses.replace(self, neighbours=neighbours) if turns else self

    def in_packets(self, vocab_size: int, header: int, count: int) -> "Prompt":
        """Every chunk but turns between the ids of vectors; arguments as of ``encode.wrapped``."""
        chunks = list(self.chunks)
        for at in self.places:
            chunks[at] = wrapped(chunks[at], vocab_size, header, count)
        return dataclasses.replace(self, chunks=tuple(chunks))

    @property
    def turns(self) -> tuple[int, ...]:
        """Which of the chunks are what was said before."""
        return tuple(at for at, others in enumerate(self.neighbours or ()) if others is None)

    @property
    def places(self) -> list[int]:
        """Which of the chunks are no turns."""
        turns = self.turns
        return [index for index in range(len(self.chunks)) if index not in turns]

    @property
    def lengths(self) -> list[int]:
        """Tokens of every chunk, without the turns."""
        return [len(self.chunks[index]) for index in self.places]

    @property
    def ids(self) -> HostArray:
        """The whole prompt, [num_tokens] int32."""
        return np.concatenate((self.prefix, *self.chunks, self.final)).astype(np.int32)

    @property
    def num_tokens(self) -> int:
        """Length of the whole prompt."""
        return len(self.prefix) + sum(map(len, self.chunks)) + len(self.final)


@dataclasses.dataclass(frozen=True, eq=False)
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
      rows: of the program that decodes it; requests share one in which their rows are as many. Its
        logits are bit-equal at equal ``rows``, whoever has the others.
      keeps: turns of its prompt are looked for in the pool, and its final block and its answer
        stay there as the next, for prompts that go on from here.
      watched: somebody reads its tokens as they come, so that they are not gathered into blocks.
      priority: class of its turn, 0 before 1 before 2.
      tenant: whose turn it is within a class.
      timeout: seconds from when it is added after which it fails; None: never.
      cited: its outcome says which chunks each token was chosen for.
      primer: token ids [R] int32 or vectors [R, D] float32 that chunks are encoded behind, in no
        prompt; None: none is known, and the method may not read such chunks. Of packets vectors,
        which the prompt's chunks hold by ids (``encode.wrapped``).
    """

    prompt: Prompt
    store: KVStore
    method: Method
    max_new_tokens: int
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    eos_ids: frozenset[int] = frozenset()
    indexing: Indexing | None = None
    rows: int = 1
    keeps: bool = False
    watched: bool = False
    priority: int = 0
    tenant: str = ""
    timeout: float | None = None
    cited: bool = False
    primer: HostArray | None = None

    def over(self, ways: int) -> "Request":
        """With rows in as many equal parts, which is as many as the devices need at least."""
        rows = -(-self.rows // ways) * ways
        return self if rows == self.rows else dataclasses.replace(self, rows=rows)

    def __post_init__(self) -> None:
        """RequestError for turns where positions do not say what precedes them.

        And for a method that reads chunks behind a primer, without one.
        """
        if self.method.sees_primer and self.primer is None:
            raise RequestError(
                f"method {self.method.name!r} reads chunks that are encoded behind a primer: pass "
                "primer=, its tokens"
            )
        if self.method.wraps and self.primer is not None and self.primer.ndim != 2:
            raise RequestError(
                f"method {self.method.name!r} reads vectors around chunks: pass primer=, [R, D]"
            )
        if self.prompt.turns and self.method.overlapping:
            raise RequestError(
                f"method {self.method.name!r}: earlier turns see all that precedes them by "
                f"position, and {self.method.positions} positions overlap; use a method with "
                "reordered positions"
            )

    @property
    def keeps_turns(self) -> bool:
        """Do earlier turns, and this one, stay in the pool?

        Only where their KV depends on nothing but what precedes them: not on the tokens that a
        question has computed again, nor on which chunks happened to be missing, nor on how the
        method attends to chunks, which their keys do not say.
        """
        method = self.method
        if method.chunk_attention is not None:
            return False
        if not self.keeps or method.encoder is None:
            return self.keeps and method.prefix_cache
        return not (method.recomputes or method.prefix_cache or method.misses == "in_place")

    @property
    def room(self) -> int:
        """Slots for generated tokens: all but the last are run, which nothing follows."""
        return self.max_new_tokens - 1


def check_length(model: Model, prompt: Prompt, max_new_tokens: int) -> None:
    """ContextExceeded when prompt and answer do not fit the model's context."""
    need, limit = prompt.num_tokens + max_new_tokens, model.config.max_positions
    if need > limit:
        chunks, turns = sum(prompt.lengths), sum(len(prompt.chunks[turn]) for turn in prompt.turns)
        parts = f"{len(prompt.prefix)} prefix + {chunks} chunk"
        earlier = f" + {turns} earlier turn" if prompt.turns else ""
        fewer = "leave earlier turns out, " if prompt.turns else ""
        raise ContextExceeded(
            f"the prompt has {parts}{earlier} + {len(prompt.final)} question tokens and "
            f"{max_new_tokens} may be generated: {need} in all, the model's context is {limit}; "
            f"ask a shorter question, {fewer}use fewer or shorter chunks, or generate fewer tokens"
        )


@dataclasses.dataclass(frozen=True)
class BatchKey:
    """What a batch's program is compiled for.

    Attributes:
      pages: of every row's table; 0 where KV is in host memory.
      room: for generated tokens in the state of a sparse rule; 0 for others.
      rows: how many requests it serves at once.
      attention: how they attend to their chunks; None: as to all else.
    """

    rule: DecodeRule
    pages: int
    room: int
    rows: int
    attention: ChunkAttention | None = None


def batch_of(
    request: Request, num_pages: int, placement: KVPlacement = ON_DEVICE
) -> BatchKey | None:
    """The batch of a request with so many pages; None where a single token is all it asks for.

    Where its KV is in host memory the batch is the same whatever its length.
    """
    if not request.room:
        return None
    rule = request.method.decode
    if placement.away:
        return BatchKey(rule, 0, 0, request.rows)
    room = bucket(request.room, FEWEST_ROOM) if rule.sparse else 0
    pages = bucket(num_pages, MIN_TABLE_PAGES)
    return BatchKey(rule, pages, room, request.rows, request.method.chunk_attention)
