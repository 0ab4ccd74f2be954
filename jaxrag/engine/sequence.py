"""One request from the queue to its answer: what is asked, what it holds, how far it has come."""

import dataclasses
import enum
from collections import abc
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from jaxrag.base.errors import EngineError
from jaxrag.base.types import HostArray, Step, on_host
from jaxrag.engine.attribution import PartialAttribution
from jaxrag.engine.progress import Sink, unheard
from jaxrag.engine.request import FAILED, BatchKey, Prompt, Request
from jaxrag.engine.sampling_params import FinishReason
from jaxrag.engine.staging import ChunkLoad, ChunkOrigin
from jaxrag.kv.cache import CachedChunk, TableBuilder, pages_for, whole_pages
from jaxrag.models.text.guidance import Matcher
from jaxrag.reuse.encode import encoder_named
from jaxrag.reuse.methods import Method
from jaxrag.reuse.select import Selection, SelectionInput

Ending = Literal["finished", "cancelled", "expired", "failed"]

NOTHING = on_host(Step, *np.zeros((3, 0), np.int32))
_REUSED = 0.02  # of a computed token: what a chunk token costs a tenant that comes from the pool


class RequestStatus(enum.Enum):
    """Status of a request."""

    WAITING = "waiting"  # holds nothing
    LOADING = "loading"  # holds all its pages; some chunks are on their way into theirs
    READY = "ready"  # its last chunk is there; no row yet
    PREFILL = "prefill"  # holds a row, from here on
    INDEXING = "indexing"  # what its decode rule searches is being built
    DECODE = "decode"
    SWAPPING = "swapping"  # preempted; its own pages are being copied to the host
    SWAPPED = "swapped"  # waiting again, with the content of its own pages on the host
    DONE = "done"


@dataclasses.dataclass(frozen=True)
class Need:
    """Pages that a request must be given before it starts.

    Attributes:
      chunks: pages of every chunk by its key, below 0 parts of them; shared with other requests.
      own: pages of the request alone: everything it will ever write.
      page_parts: of the model's.
    """

    chunks: Mapping[str, int]
    own: int
    page_parts: int = 1

    @property
    def pages(self) -> int:
        """How many there are when nothing is in the pool yet."""
        return self.own + whole_pages(self.chunks.values(), self.page_parts)


@dataclasses.dataclass
class PromptPart:
    """The prefix (which may be empty), a chunk or a page of a turn, and where its KV lies.

    Attributes:
      ids: [T] int32.
      chunk: which of the prompt's it is, or a part of; -1 for the prefix.
      turn: it is of an earlier turn of the conversation.
      load: how its stored KV is brought in; None where no store is asked.
      kept_key: under which the pool keeps it as an earlier request computed it behind all that
        precedes it here; "" where it is not looked up.
      resident: what the pool has of it; None where it is computed in place.
      origin: where its KV came from; None where no store was asked, or none has answered yet.
      kept: it is in the pool under ``kept_key``.
      exact: its KV is, or will be, what full attention computes here.
      slots: [T] int32 of its tokens; empty where they are run with the final block.
      shared: pages of what is resident, as tables name them.
      pages: the request's own, where they hold nothing else.
      copy: as many of the request's own, for a selector that rewrites KV.
    """

    ids: HostArray
    position: int
    chunk: int = -1
    turn: bool = False
    load: ChunkLoad | None = None
    kept_key: str = ""
    resident: CachedChunk | None = None
    origin: ChunkOrigin | None = None
    kept: bool = False
    exact: bool = False
    slots: HostArray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    shared: abc.Sequence[int] = ()
    pages: tuple[int, ...] = ()
    copy: tuple[int, ...] = ()

    @property
    def positions(self) -> HostArray:
        """[T] int32 of its tokens."""
        return (self.position + np.arange(len(self.ids))).astype(np.int32)

    @property
    def key(self) -> str:
        """Under which its store gave it; "" where it was not asked, or had to say no."""
        return self.load.stored_key if self.load and self.resident and not self.kept else ""

    @property
    def asked_key(self) -> str:
        """Under which its store is asked for it; "" where it is not, or is known to lack it."""
        lacking = self.origin is not None and self.origin.how == "nowhere"
        return self.load.key if self.load is not None and not lacking else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Swapped:
    """What a request that was set aside had on the device.

    Attributes:
      pages: K and V of its own pages, [L, n, page, K, H] each.
      row: of its batch, and what its rule carried, as ``DecodeBatch.take_out`` gives them.
    """

    pages: tuple[HostArray, HostArray]
    row: Any


@dataclasses.dataclass(eq=False)
class Sequence:
    """One request from ``Engine.add`` until nothing of it is left. Make one with ``sequence_of``.

    Attributes:
      number: its name; never used again.
      parts: the prefix and the chunks, turns that may be kept page by page: how each is brought in,
        then where its KV lies.
      batch: whose rows it needs from prefill on; None: it needs none (a single token).
      sink: is told of its progress.
      moments: when what happened, of ``progress.MOMENTS``, by the engine's clock.
      status: this, and all up to ``held``, is kept by the scheduler.
      start_tag: when it would begin, in virtual service, were rows shared by weight, and its
        place in the order of admission; kept when it waits again, None before.
      own: pages of the request alone.
      held: keys of the chunks that it maps.
      table: pages of its prompt and its answer, once it is mapped.
      run: the tokens of its prompt to run, by position, [n] each on the host.
      choice: chunk tokens that are computed again; None where there are none, or none yet.
      tokens: its answer so far, as its client has it.
      read: tokens that were read since it was begun; fewer than ``tokens`` once it began again.
      search: its number in the host's search.
      alone: it shares its batch with no other, as a step broke while it took part.
      matcher: how far its answer has come in the form of ``sampling.guide``, if there is one.
      attribution: of its answer, if it is ``cited``.
    """

    number: int
    request: Request
    parts: list[PromptPart]
    batch: BatchKey | None = None
    sink: Sink = unheard
    moments: dict[str, float] = dataclasses.field(default_factory=dict)
    status: RequestStatus = RequestStatus.WAITING
    start_tag: tuple[float, int] | None = None
    own: tuple[int, ...] = ()
    held: tuple[str, ...] = ()
    table: TableBuilder = dataclasses.field(default_factory=TableBuilder)
    run: Step = NOTHING
    choice: Selection | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    read: int = 0
    search: int | None = None
    alone: bool = False
    swapped: Swapped | None = None
    matcher: Matcher | None = None
    attribution: PartialAttribution = dataclasses.field(default_factory=PartialAttribution)

    @property
    def num_tokens(self) -> int:
        """Length of its prompt."""
        return self.request.prompt.num_tokens

    @property
    def cost(self) -> float:
        """Virtual service of its prompt, charged to the tenant when it is first admitted."""
        reused = sum(len(part.ids) for part in self.parts if part.load is not None or part.turn)
        return self.num_tokens - reused + _REUSED * reused

    @property
    def deadline(self) -> float | None:
        """When its time is over, by the engine's clock; None: never."""
        timeout = self.request.timeout
        return None if timeout is None else self.moments["added"] + timeout

    @property
    def attends_kept(self) -> bool:
        """May anything of it be in the pool as another request left it?"""
        return any(part.kept_key for part in self.parts)

    @property
    def swappable(self) -> bool:
        """Whether it may be preempted: what others left it may be gone when it comes back."""
        return not self.attends_kept

    # What it needs, and where that lies.

    @property
    def loads(self) -> dict[str, ChunkLoad]:
        """By key, all that may be asked for."""
        return {part.load.key: part.load for part in self.parts if part.load is not None}

    def need(self, held: Callable[[str], bool]) -> Need:
        """Pages of shared parts by key, and how many of its own, given which keys the pool has."""
        request, method = self.request, self.request.method
        if is_one_run(method):
            return Need({}, pages_for(self.num_tokens + request.room))
        prompt = request.prompt
        own = pages_for(len(prompt.final) + method.room(prompt.lengths) + request.room)
        chunks: dict[str, int] = {}
        parts = [load.encoding.model.config.page_parts for load in self.loads.values()]
        for part, (key, _) in zip(self.parts, self.keys(held), strict=True):
            if key:
                load = part.load if part.load is not None and part.load.key == key else None
                chunks[key] = pages_for(len(part.ids)) if load is None else load.num_pages
            if not key or (part.chunk >= 0 and method.rewrites):
                own += pages_for(len(part.ids))
        return Need(chunks, own, max(parts, default=1))

    def keys(self, held: Callable[[str], bool]) -> list[tuple[str, bool]]:
        """Of every part the key under which it is shared, and whether it is a kept one's.

        "" for a part that is empty or computed in place. Kept leading parts are looked for as long
        as everything before them is exact; what the key of a turn says of that is enough.
        """
        keys = []
        looking = True
        for part in self.parts:
            kept = (looking or part.turn) and bool(part.kept_key) and held(part.kept_key)
            exact = kept or stored_exact(self.request.method, self.parts, part)
            looking = looking and (exact or not len(part.ids))
            key = part.asked_key
            if key and part.load is not None and held(part.load.stored_key):
                key = part.load.stored_key  # all layers are as good as some
            keys.append((part.kept_key, True) if kept else (key, False))
        return keys

    def came(self, key: str, origin: ChunkOrigin) -> None:
        """A store answered for a part, or another request had it."""
        for part in self.parts:
            if part.load is not None and part.load.key == key:
                part.origin = origin

    @property
    def kept_parts(self) -> dict[str, PromptPart]:
        """What is computed for it and may be kept, by key: pages of turns, and leading parts.

        Those only if they are exact, and not behind KV that was rounded.
        """
        request = self.request
        rounded = request.method.encoder is not None and request.store.layout.stored != "native"
        return {
            part.kept_key: part
            for part in self.parts
            if part.kept_key and part.pages and (part.turn or (part.exact and not rounded))
        }

    @property
    def distinct(self) -> list[PromptPart]:
        """The parts that a store was asked for, each once."""
        asked = (part for part in self.parts if part.load and part.origin and not part.kept)
        return list({part.load.key: part for part in asked if part.load}.values())

    @property
    def next_position(self) -> int:
        """Position of the first generated token."""
        return int(self.run.positions[-1]) + 1

    @property
    def next_slot(self) -> int:
        """Slot of the first generated token."""
        return int(self.run.slots[-1]) + 1

    @property
    def is_mapped(self) -> bool:
        """Does its table have its pages?"""
        return len(self.table.pages) > 0

    @property
    def first_slot(self) -> int:
        """Of the last pages, which hold what is computed again, the final block and the answer."""
        if is_one_run(self.request.method):
            return int(self.run.slots[0])
        chosen = 0 if self.choice is None else len(self.choice.tokens)
        return self.next_slot - len(self.request.prompt.final) - chosen

    @property
    def scene(self) -> SelectionInput:
        """What its selector is shown, once it is mapped."""
        prompt, method, chunks = self.request.prompt, self.request.method, self.parts[1:]
        return SelectionInput(
            prefix=prompt.prefix,
            chunks=prompt.chunks,
            final=prompt.final,
            question=prompt.question or (0, len(prompt.final)),
            table=self.table,
            chunk_slots=np.concatenate([np.zeros(0, np.int32), *(part.slots for part in chunks)]),
            scratch=self.first_slot,
            copies=tuple(part.copy for part in chunks),
            exact=tuple(part.exact for part in chunks),
            in_place=tuple(part.resident is None for part in chunks),
            seen=_seen(method, prompt),
            ratio=method.recompute_ratio,
            said=sum(len(prompt.chunks[turn]) for turn in prompt.turns),
        )

    # Its answer.

    def accept(self, ids: abc.Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """Take what was sampled, up to the end: what is new of it, and why the answer ends here.

        Raises EngineError for logits that hold a NaN, and for an answer that differs from what was
        sent before the request was begun again.
        """
        new: list[int] = []
        for token_id in ids:
            if token_id == FAILED:
                raise EngineError(
                    f"the logits of token {self.read} hold a NaN; check the model's weights, and "
                    "encode stored KV that is no numbers again with jaxrag kb verify --repair"
                )
            if token_id in self.request.eos_ids:
                return new, "stop"
            if self.read < len(self.tokens):
                if self.tokens[self.read] != token_id:
                    raise EngineError(
                        f"token {self.read} came out as {token_id} and was "
                        f"{self.tokens[self.read]} before the engine was restarted; ask again"
                    )
            else:
                self.tokens.append(token_id)
                new.append(token_id)
            self.read += 1
            if self.matcher is not None and not self.matcher.take(token_id):
                return new, "stop"
            if self.read == self.request.max_new_tokens:
                return new, "length"
        return new, None

    def restart(self) -> None:
        """Begin from the start; what was sent is not sent again."""
        self.table = TableBuilder()
        self.choice = self.swapped = self.search = None
        self.read = 0
        if self.matcher is not None:
            self.matcher.restart()
        self.attribution = PartialAttribution()
        for part in self.parts:
            part.origin = part.resident = None


def stored_exact(method: Method, parts: abc.Sequence[PromptPart], part: PromptPart) -> bool:
    """Is the stored KV of a part what full attention computes, with what precedes it here?"""
    if part.load is None or part.load.encoding.store.layout.drops:
        return False
    if part.chunk < 0:
        return True  # the prefix has nothing before it
    primer = part.load.encoding.primer
    num_primer = None if primer is None else len(primer)
    return method.exact(len(parts[0].ids), part.chunk + 1, num_primer)[part.chunk]


def is_one_run(method: Method) -> bool:
    """Is the whole prompt computed as one run of tokens in pages of the request?"""
    return method.encoder is None and not method.prefix_cache


def _seen(method: Method, prompt: Prompt) -> tuple[tuple[int, ...], ...]:
    """For each chunk: the chunks of this prompt that its KV saw, in the order they stood then."""
    place = {ids.tobytes(): index for index, ids in reversed(list(enumerate(prompt.chunks)))}
    seen = []
    for chunk in range(len(prompt.chunks)):
        others: abc.Sequence[HostArray] = ()
        if prompt.neighbours and encoder_named(method.encoder_of(chunk)).sees_neighbours:
            others = prompt.neighbours[chunk] or ()
        places = (place.get(ids.tobytes()) for ids in others)
        seen.append(tuple(index for index in places if index is not None))
    return tuple(seen)
