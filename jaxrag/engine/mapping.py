"""Where the KV of a prompt comes from, and which of its tokens are still to be run.

The order of work (FusionRAG section 4.1): the longest run of leading parts whose KV is exact in
this very prompt, chunks whose KV is found whatever preceded it then, the gaps that are left, and at
last the tokens that are chosen to be computed again (jaxrag.engine.prefill).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrag.base.types import HostArray, on_host
from jaxrag.engine.admission import Need
from jaxrag.engine.kept import Context
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.staging import ChunkLoad, ChunkOrigin
from jaxrag.kv.cache import CachedChunk, PageTable, TableBuilder, pages_for
from jaxrag.kv.store import KVStore
from jaxrag.models.model import Model
from jaxrag.models.segments import Layout, lay_out
from jaxrag.reuse.decode import Carried
from jaxrag.reuse.encode import PREFIX_ENCODER, ChunkEncoding, ChunkInContext, encoder_named
from jaxrag.reuse.methods import Method
from jaxrag.reuse.names import Misses
from jaxrag.reuse.select import Selection, SelectionInput, Selector


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
      resident: what was found; None where it is computed in place.
      found: how the store answered; None where it was not asked.
      kept: it was found under ``kept_key``.
      exact: its KV is, or will be, what full attention computes here.
      slots: [T] int32 of its tokens; empty where they are run with the final block.
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
    found: ChunkOrigin | None = None
    kept: bool = False
    exact: bool = False
    slots: HostArray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    pages: tuple[int, ...] = ()
    copy: tuple[int, ...] = ()

    @property
    def positions(self) -> HostArray:
        """[T] int32 of its tokens."""
        return (self.position + np.arange(len(self.ids))).astype(np.int32)

    @property
    def key(self) -> str:
        """Under which its store gave it; "" where it was not asked, or had to say no."""
        return self.load.key if self.load and self.resident and not self.kept else ""


@dataclasses.dataclass
class RequestState:
    """One request mapped into the pool: what is reused, and which tokens are still to be run.

    ``prefill`` lets ``selector`` choose among the chunk tokens of ``scene`` first, adds its choice
    to the tokens to run and clears ``selector``; ``choice`` is None where nothing is recomputed.
    """

    table: TableBuilder
    parts: list[PromptPart]  # the prefix, then the chunks, turns that may be kept page by page
    ids: HostArray  # [n] the tokens to run, by position
    positions: HostArray  # [n] int32 of ids
    slots: HostArray  # [n] int32 of ids
    first_slot: int  # of the last pages, which hold the final block and what follows it
    own: list[int]  # pages of the request alone
    held: list[str]  # keys of the chunks that it holds in the pool
    keep: dict[str, PromptPart] = dataclasses.field(default_factory=dict)  # once they are computed
    scene: SelectionInput | None = None
    selector: Selector | None = None
    choice: Selection | None = None
    store: KVStore | None = None  # that ``key`` of a part is of

    @property
    def distinct(self) -> list[PromptPart]:
        """The parts that a store was asked for, each once."""
        return list(
            {part.load.key: part for part in self.parts if part.load and part.found}.values()
        )

    @property
    def next_position(self) -> int:
        """Position of the first generated token."""
        return int(self.positions[-1]) + 1

    @property
    def next_slot(self) -> int:
        """Slot of the first generated token."""
        return int(self.slots[-1]) + 1

    def use_copies(self) -> None:
        """Read the request's copies of its chunks from now on."""
        assert self.scene is not None
        for first, pages in self.scene.copied_pages.items():
            self.table.replace(first, pages)

    def recompute(self, choice: Selection) -> None:
        """Add the chosen chunk tokens to those to run, and hide their stored KV from the request.

        They take the first slots of the last pages, and the final block follows them.
        """
        scene, tokens = self.scene, choice.tokens
        assert scene is not None
        if choice.copied:
            self.use_copies()
        self.table.hide(scene.chunk_slots[tokens])
        chunk_ids = np.concatenate((scene.prefix[:0], *scene.chunks))
        ids = np.concatenate((chunk_ids[tokens], self.ids))
        positions = np.concatenate((len(scene.prefix) + tokens, self.positions))
        moved = self.slots + len(tokens) * (self.slots >= self.first_slot)
        slots = np.concatenate((self.first_slot + np.arange(len(tokens)), moved))
        order = np.argsort(positions, kind="stable")
        self.ids = ids[order]
        self.positions = positions[order].astype(np.int32)
        self.slots = slots[order].astype(np.int32)
        self.choice, self.selector = choice, None


@dataclasses.dataclass(frozen=True, eq=False)
class RequestPlan:
    """What a request needs of the pool and of its store, before anything is asked for.

    Attributes:
      parts: the prefix and the chunks, each with how it is brought in.
      context: of the final block.
      gone: keys that the store does not have, of chunks that are computed in place then.
    """

    request: Request
    parts: list[PromptPart]
    context: Context
    reserve: int
    gone: set[str] = dataclasses.field(default_factory=set)

    @property
    def loads(self) -> dict[str, ChunkLoad]:
        """By key, all that may be asked for."""
        return {part.load.key: part.load for part in self.parts if part.load is not None}

    @property
    def looks(self) -> bool:
        """May anything of it be found as another request left it?"""
        return any(part.kept_key for part in self.parts)

    def need(self, held: Callable[[str], bool]) -> Need:
        """Pages of shared parts by key, and how many of its own, given which keys the pool has."""
        prompt, method = self.request.prompt, self.request.method
        if _one_run(method):
            return Need({}, pages_for(prompt.num_tokens + self.reserve))
        room = method.room(prompt.lengths)
        own = pages_for(len(prompt.final) + room + self.reserve)
        chunks: dict[str, int] = {}
        for part, (key, _) in zip(self.parts, self.keys(held), strict=True):
            if key:
                chunks[key] = pages_for(len(part.ids))
            if not key or (part.chunk >= 0 and method.rewrites):
                own += pages_for(len(part.ids))
        return Need(chunks, own)

    def keys(self, held: Callable[[str], bool]) -> list[tuple[str, bool]]:
        """Of every part the key under which it is shared, and whether it is a kept one's.

        "" for a part that is empty or computed in place. Kept leading parts are looked for as long
        as everything before them is exact; what the key of a turn says of that is enough.
        """
        keys, method = [], self.request.method
        looking = True
        for part in self.parts:
            kept = (looking or part.turn) and bool(part.kept_key) and held(part.kept_key)
            exact = kept or _stored_exact(method, self.parts, part)
            looking = looking and (exact or not len(part.ids))
            if kept:
                keys.append((part.kept_key, True))
            elif part.load is not None and part.load.key not in self.gone:
                keys.append((part.load.key, False))
            else:
                keys.append(("", False))
        return keys


def plan_request(model: Model, request: Request, reserve: int) -> RequestPlan:
    """Name what a request is to be served from; on any thread, nothing is touched.

    ``reserve`` is room for generated tokens.
    """
    prompt, method = request.prompt, request.method
    layout = _layout(prompt, method)
    tokenizer = "" if model.tokenizer is None else model.tokenizer.digest
    context = Context(request.store.fingerprint, tokenizer, request.tenant)
    leading = context.leading(prompt.prefix, prompt.chunks) if method.prefix_cache else []
    encoding = alone = None
    if method.encoder is not None:
        store = model.held(request.store)
        encoding = ChunkEncoding(model, store, prompt.prefix, request.indexing, apart=True)
        alone = dataclasses.replace(encoding, prefix=prompt.prefix[:0], indexing=None)
    parts = []
    whole = zip((prompt.prefix, *prompt.chunks), (0, *layout.chunk_offsets), strict=True)
    for chunk, (ids, position) in enumerate(whole, -1):
        part = PromptPart(ids, position, chunk, chunk in prompt.turns)
        if not len(ids):
            parts.append(part)
            continue
        if part.turn and request.keeps_turns:
            for key, piece in context.pieces(ids):
                parts.append(PromptPart(piece, position, chunk, turn=True, kept_key=key))
                position += len(piece)
        else:
            if chunk < 0 and alone is not None:  # its own context: nothing precedes it
                if alone.store.layout.drops:  # it is computed here: nothing computes it again
                    parts.append(part)
                    continue
                part.load = _load(alone, PREFIX_ENCODER, ids, None, "encode")
            elif encoding is not None and not part.turn:
                part.load = _chunk_load(request, encoding, chunk)
            if leading and not part.turn:
                part.kept_key = leading[chunk + 1]
            parts.append(part)
        context = context.behind(part.load.key if part.load is not None else context.name(ids))
    return RequestPlan(request, parts, context, reserve)


def most_pages(request: Request) -> int:
    """Pages that a request needs if nothing of it is in the pool; equal chunks share them."""
    prompt, method = request.prompt, request.method
    if _one_run(method):
        return pages_for(prompt.num_tokens + request.room)
    own = len(prompt.final) + method.room(prompt.lengths) + request.room
    parts = [prompt.prefix, *prompt.chunks]
    if method.encoder is not None and method.misses == "encode" and not prompt.turns:
        parts = [prompt.prefix, *{ids.tobytes(): ids for ids in prompt.chunks}.values()]
    copies = prompt.chunks if method.rewrites else ()
    return pages_for(own) + sum(pages_for(len(ids)) for ids in (*parts, *copies))


def _layout(prompt: Prompt, method: Method) -> Layout:
    lengths = [len(chunk) for chunk in prompt.chunks]
    return lay_out(len(prompt.prefix), lengths, len(prompt.final), method.positions)


def _chunk_load(request: Request, encoding: ChunkEncoding, chunk: int) -> ChunkLoad:
    """How a chunk of a request is brought in under the request's method."""
    prompt, method = request.prompt, request.method
    encoder = method.encoder_of(chunk)
    neighbours = None
    if prompt.neighbours is not None and encoder_named(encoder).sees_neighbours:
        neighbours = prompt.neighbours[chunk]
    return _load(encoding, encoder, prompt.chunks[chunk], neighbours, method.misses)


def _load(
    encoding: ChunkEncoding,
    encoder: str,
    ids: HostArray,
    neighbours: Sequence[HostArray] | None,
    misses: Misses,
) -> ChunkLoad:
    key = encoding.key(encoder, ids, neighbours)
    return ChunkLoad(key, encoder, ChunkInContext(ids, tuple(neighbours or ())), encoding, misses)


def map_planned(
    plan: RequestPlan,
    chunks: Mapping[str, CachedChunk],
    own: Sequence[int],
    found: Mapping[str, ChunkOrigin],
) -> RequestState:
    """Lay out a request whose chunks are in the pool, over them and pages of its own.

    Args:
      chunks: by key what its ``need`` named.
      own: as many pages as that said.
      found: by key where chunks came from; a chunk that is not named was in the pool.
    """
    request, pages = plan.request, list(own)
    prompt, method = request.prompt, request.method
    layout = _layout(prompt, method)
    parts = [dataclasses.replace(part) for part in plan.parts]
    for part, (key, kept) in zip(parts, plan.keys(chunks.__contains__), strict=True):
        part.kept = kept
        part.resident = chunks[key] if key else None
        if part.load is not None and not kept:
            part.found = found.get(part.load.key, ChunkOrigin("pool"))
    _mark_exact(method, parts)
    in_place = [part for part in parts if part.resident is None and len(part.ids)]
    table = TableBuilder()
    if _one_run(method):  # one run of tokens to the end
        final, in_place = np.concatenate([*(part.ids for part in parts), prompt.final]), []
    else:
        final = prompt.final
        _map_parts(parts, table, pages)
        if method.rewrites:
            _take_copies(parts[1:], pages)
    first_slot = table.reserve(pages)
    end = layout.final_start + len(prompt.final)
    ids = [*(part.ids for part in in_place), final]
    positions = [*(part.positions for part in in_place), np.arange(end - len(final), end)]
    slots = [*(part.slots for part in in_place), first_slot + np.arange(len(final))]
    mapped = RequestState(
        table=table,
        parts=parts,
        ids=np.concatenate(ids),
        positions=np.concatenate(positions).astype(np.int32),
        slots=np.concatenate(slots).astype(np.int32),
        first_slot=first_slot,
        own=list(own),
        held=list(chunks),
        keep=_to_keep(method, request.store, parts),
        store=request.store,
    )
    if method.recomputes:
        mapped.selector = method.selector
        mapped.scene = _scene(method, prompt, mapped)
    return mapped


def carried_chunks(request: RequestState) -> list[Carried]:
    """The chunks of a request that may have been stored with indexes."""
    if request.store is None:
        return []
    return [
        Carried(request.store, part.key, part.position, part.slots)
        for part in request.parts
        if part.key and not part.kept
    ]


def batch_tables(requests: Sequence[RequestState], rows: int, num_pages: int) -> PageTable:
    """The tables of prefilled requests, on the host: rows behind them are empty."""
    tables = [request.table.rows(num_pages) for request in requests]
    for request, (_, _, slot_position) in zip(requests, tables, strict=True):
        slot_position[request.slots] = request.positions
    tables += [TableBuilder().rows(num_pages)] * (rows - len(requests))
    return on_host(PageTable, *(np.stack(part) for part in zip(*tables, strict=True)))


def _one_run(method: Method) -> bool:
    """Is the whole prompt computed as one run of tokens in pages of the request?"""
    return method.encoder is None and not method.prefix_cache


def _to_keep(method: Method, store: KVStore, parts: Sequence[PromptPart]) -> dict[str, PromptPart]:
    """What is computed here and may be kept, by key: pages of turns, and leading parts.

    Those only if they are exact, and not behind KV that was rounded.
    """
    rounded = method.encoder is not None and store.layout.stored != "native"
    return {
        part.kept_key: part
        for part in parts
        if part.kept_key and part.pages and (part.turn or (part.exact and not rounded))
    }


def _stored_exact(method: Method, parts: Sequence[PromptPart], part: PromptPart) -> bool:
    """Is the stored KV of a part what full attention computes, with what precedes it here?"""
    if part.load is None or part.load.encoding.store.layout.drops:
        return False
    if part.chunk < 0:
        return True  # the prefix has nothing before it
    return method.exact(len(parts[0].ids), part.chunk + 1)[part.chunk]


def _mark_exact(method: Method, parts: Sequence[PromptPart]) -> None:
    """A part is exact if all before it are, and it is computed here or is stored as it is here."""
    exact = True
    for part in parts:
        here = part.resident is None or part.kept or _stored_exact(method, parts, part)
        exact = part.exact = exact and here


def _map_parts(parts: Sequence[PromptPart], table: TableBuilder, pages: list[int]) -> None:
    """Lay the parts out in the table, each in pages of its own.

    Gaps take theirs from the front of ``pages``, where the rest stays.
    """
    for part in parts:
        if not len(part.ids):
            continue
        if part.resident is not None:
            first = table.map_chunk(part.resident, part.position, turned=part.kept)
        else:
            count = pages_for(len(part.ids))
            part.pages = tuple(pages[:count])
            del pages[:count]
            first = table.reserve(part.pages)
        part.slots = (first + np.arange(len(part.ids))).astype(np.int32)


def _take_copies(chunks: Sequence[PromptPart], pages: list[int]) -> None:
    """Give each shared chunk that is not exact pages for a copy, from the front of ``pages``."""
    for part in chunks:
        if part.resident is not None and not part.exact:
            count = len(part.resident.pages)
            part.copy = tuple(pages[:count])
            del pages[:count]


def _scene(method: Method, prompt: Prompt, mapped: RequestState) -> SelectionInput:
    chunks = mapped.parts[1:]
    return SelectionInput(
        prefix=prompt.prefix,
        chunks=prompt.chunks,
        final=prompt.final,
        question=prompt.question or (0, len(prompt.final)),
        table=mapped.table,
        chunk_slots=np.concatenate([np.zeros(0, np.int32), *(part.slots for part in chunks)]),
        scratch=mapped.first_slot,
        copies=tuple(part.copy for part in chunks),
        exact=tuple(part.exact for part in chunks),
        in_place=tuple(part.resident is None for part in chunks),
        seen=_seen(method, prompt),
        ratio=method.recompute_ratio,
        said=sum(len(prompt.chunks[turn]) for turn in prompt.turns),
    )


def _seen(method: Method, prompt: Prompt) -> tuple[tuple[int, ...], ...]:
    """For each chunk: the chunks of this prompt that its KV saw, in the order they stood then."""
    place = {ids.tobytes(): index for index, ids in reversed(list(enumerate(prompt.chunks)))}
    seen = []
    for chunk in range(len(prompt.chunks)):
        others: Sequence[HostArray] = ()
        if prompt.neighbours and encoder_named(method.encoder_of(chunk)).sees_neighbours:
            others = prompt.neighbours[chunk]
        found = (place.get(ids.tobytes()) for ids in others)
        seen.append(tuple(index for index in found if index is not None))
    return tuple(seen)
