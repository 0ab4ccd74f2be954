"""Where the KV of a prompt comes from, and which of its tokens are still to be run.

The order of work (FusionRAG section 4.1): the longest run of leading parts whose KV is exact in
this very prompt, chunks whose KV is found whatever preceded it then, the gaps that are left, and at
last the tokens that are chosen to be computed again (jaxrag.engine.prefill).
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxrag.cache import CachedChunk, TableBuilder, pages_for
from jaxrag.encode import PREFIX_ENCODER, encoder_named
from jaxrag.engine.loader import Found, Loaded, load_chunks, release
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.methods import Method
from jaxrag.models.segments import lay_out
from jaxrag.select import Choice, SelectionInput, Selector
from jaxrag.store import KVStore, chunk_key, content_id, context_id
from jaxrag.types import HostArray

_KEPT = "in_place"  # the encoder that keys of kept leading parts name; no store holds such KV


@dataclasses.dataclass
class PromptPart:
    """The prefix (which may be empty) or a chunk of one prompt, and where its KV lies.

    Attributes:
      ids: [T] int32.
      position: of its first token.
      resident: what was found; None where it is computed in place.
      found: how the store answered; None where it was not asked.
      kept: it was found as an earlier prompt that began in the same way had computed it.
      exact: its KV is, or will be, what full attention computes here.
      slots: [T] int32 of its tokens; empty where they are run with the final block.
      pages: the request's own, where they hold nothing else.
      key: under which the store was asked for it; "" where it was not, or had to say no.
    """

    ids: HostArray
    position: int
    resident: CachedChunk | None = None
    found: Found | None = None
    kept: bool = False
    exact: bool = False
    slots: HostArray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    pages: tuple[int, ...] = ()
    key: str = ""

    @property
    def positions(self) -> HostArray:
        """[T] int32 of its tokens."""
        return (self.position + np.arange(len(self.ids))).astype(np.int32)


@dataclasses.dataclass
class RequestState:
    """One request mapped into the pool: what is reused, and which tokens are still to be run.

    ``prefill`` lets ``selector`` choose among the chunk tokens of ``scene`` first, adds its choice
    to the tokens to run and clears ``selector``; ``choice`` is None where nothing is recomputed.
    """

    table: TableBuilder
    parts: list[PromptPart]  # the prefix, then the chunks
    owned: list[int]  # pages to give back
    loaded: list[Loaded]
    ids: HostArray  # [n] the tokens to run, by position
    positions: HostArray  # [n] int32 of ids
    slots: HostArray  # [n] int32 of ids
    first_slot: int  # of the last pages, which hold the final block and what follows it
    keep: dict[str, PromptPart] = dataclasses.field(default_factory=dict)  # once they are computed
    borrowed: list[str] = dataclasses.field(default_factory=list)  # keys of kept parts
    scene: SelectionInput | None = None
    selector: Selector | None = None
    choice: Choice | None = None
    store: KVStore | None = None  # that ``key`` of a part is of

    @property
    def next_position(self) -> int:
        """Position of the first generated token."""
        return int(self.positions[-1]) + 1

    @property
    def next_slot(self) -> int:
        """Slot of the first generated token."""
        return int(self.slots[-1]) + 1

    def recompute(self, choice: Choice) -> None:
        """Add the chosen chunk tokens to those to run, and hide their stored KV from the request.

        They take the first slots of the last pages, and the final block follows them.
        """
        scene, tokens = self.scene, choice.tokens
        assert scene is not None
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


def map_request(runner: ModelRunner, request: Request, reserve_tokens: int) -> RequestState:
    """Bring a prompt's chunks into the pool and reserve pages for what must be computed.

    ``reserve_tokens`` is room for generated tokens. Undo with ``unmap``.
    """
    prompt, method, store = request.prompt, request.method, request.store
    lengths = [len(chunk) for chunk in prompt.chunks]
    layout = lay_out(len(prompt.prefix), lengths, len(prompt.final), method.positions)
    parts = [PromptPart(prompt.prefix, 0), *map(PromptPart, prompt.chunks, layout.chunk_offsets)]
    table, loaded, owned = TableBuilder(), list[Loaded](), list[int]()
    keys = _kept_keys(runner, store, prompt) if method.prefix_cache else []
    borrowed = _leading_hits(runner, method, parts, keys)
    try:
        if method.encoder is not None:
            _stored_hits(runner, request, parts, loaded)
        _mark_exact(method, parts)
        in_place = [part for part in parts if part.resident is None and len(part.ids)]
        if method.encoder is None and not method.prefix_cache:  # one run of tokens to the end
            final, in_place = np.concatenate([*(part.ids for part in parts), prompt.final]), []
        else:
            final = prompt.final
            _map_parts(runner, parts, table, owned)
        new_tokens = len(final) + method.room(lengths)
        why = f"a request of {new_tokens} new tokens and {reserve_tokens} to generate"
        last = runner.cache.allocator.allocate(pages_for(new_tokens + reserve_tokens), why)
        owned += last
    except BaseException:
        _let_go(runner, owned, loaded, borrowed)
        raise
    first_slot = table.reserve(last)
    end = layout.final_start + len(prompt.final)
    ids = [*(part.ids for part in in_place), final]
    positions = [*(part.positions for part in in_place), np.arange(end - len(final), end)]
    slots = [*(part.slots for part in in_place), first_slot + np.arange(len(final))]
    mapped = RequestState(
        table=table,
        parts=parts,
        owned=owned,
        loaded=loaded,
        ids=np.concatenate(ids),
        positions=np.concatenate(positions).astype(np.int32),
        slots=np.concatenate(slots).astype(np.int32),
        first_slot=first_slot,
        keep=_to_keep(method, store, keys, parts),
        borrowed=borrowed,
        store=store,
    )
    if method.recomputes:
        mapped.selector = method.selector
        mapped.scene = _scene(method, prompt, mapped)
    return mapped


def unmap(runner: ModelRunner, mapped: RequestState) -> None:
    """Give a request's pages back and let its chunks go."""
    _let_go(runner, mapped.owned, mapped.loaded, mapped.borrowed)


def keep_leading(runner: ModelRunner, mapped: RequestState) -> None:
    """The leading parts of a request are computed: later prompts may begin with them."""
    allocator = runner.cache.allocator
    given: set[int] = set()
    for key, part in mapped.keep.items():
        if key not in allocator:  # another request of the batch may have been first
            allocator.insert(key, part.pages, len(part.ids))
            mapped.borrowed.append(key)
            given.update(part.pages)
    mapped.owned = [page for page in mapped.owned if page not in given]
    mapped.keep = {}


def _let_go(
    runner: ModelRunner, owned: Sequence[int], loaded: Sequence[Loaded], borrowed: Sequence[str]
) -> None:
    runner.cache.allocator.free(owned)
    for part in loaded:
        release(runner, part)
    for key in borrowed:
        runner.cache.allocator.release(key)


def _kept_keys(runner: ModelRunner, store: KVStore, prompt: Prompt) -> list[str]:
    """Per part the key of its KV behind all that precedes it in this prompt; "" if it is empty."""
    tokenizer = "" if runner.model.tokenizer is None else runner.model.tokenizer.digest
    named = functools.partial(content_id, tokenizer)
    before: list[str] = []
    keys = []
    for index, ids in enumerate((prompt.prefix, *prompt.chunks)):
        if not len(ids):
            keys.append("")
            continue
        context = context_id(_KEPT, prompt.prefix[: 0 if index == 0 else None], before)
        keys.append(chunk_key(store.fingerprint, named(ids), context))
        if index:
            before.append(named(ids))
    return keys


def _to_keep(
    method: Method, store: KVStore, keys: Sequence[str], parts: Sequence[PromptPart]
) -> dict[str, PromptPart]:
    """The parts that are computed here and exact, by key; none behind KV that was rounded."""
    if method.encoder is not None and store.layout.stored != "native":
        return {}
    both = zip(keys, parts, strict=False)  # no keys where nothing is kept
    return {key: part for key, part in both if part.pages and part.exact}


def _leading_hits(
    runner: ModelRunner, method: Method, parts: Sequence[PromptPart], keys: Sequence[str]
) -> list[str]:
    """Find kept parts, as long as everything before is exact; the keys that were borrowed."""
    borrowed = []
    for index, (part, key) in enumerate(zip(parts, keys, strict=False)):
        found = runner.cache.allocator.acquire(key)
        if found is not None:
            part.resident, part.kept = found, True
            borrowed.append(key)
        elif len(part.ids) and not _stored_exact(method, parts, index):
            break
    return borrowed


def _stored_exact(method: Method, parts: Sequence[PromptPart], index: int) -> bool:
    """Is the stored KV of a part what full attention computes, with what stands before it here?"""
    if method.encoder is None:
        return False
    if index == 0:
        return True  # the prefix has nothing before it
    return method.exact(len(parts[0].ids), len(parts) - 1)[index - 1]


def _stored_hits(
    runner: ModelRunner, request: Request, parts: Sequence[PromptPart], loaded: list[Loaded]
) -> None:
    """Bring in what is not found yet; chunks that are missed stay without KV or are encoded."""
    prompt, method, store = request.prompt, request.method, request.store

    def take(wanted: Sequence[PromptPart], answer: Loaded) -> None:
        loaded.append(answer)
        keys = iter(answer.keys)
        for part, resident, found in zip(wanted, answer.residents, answer.found, strict=True):
            part.resident, part.found = resident, found
            part.key = "" if resident is None else next(keys)

    prefix = parts[0]
    if len(prefix.ids) and prefix.resident is None:  # its own context: nothing stands before it
        take([prefix], load_chunks(runner, store, PREFIX_ENCODER, prefix.ids[:0], [prefix.ids]))
    for encoder, indices in _by_encoder(method, len(prompt.chunks)):
        wanted = [i for i in indices if parts[i + 1].resident is None]
        if not wanted:
            continue
        neighbours = None
        if prompt.neighbours is not None and encoder_named(encoder).sees_neighbours:
            neighbours = [prompt.neighbours[i] for i in wanted]
        chunks = [prompt.chunks[i] for i in wanted]
        answer = load_chunks(
            runner, store, encoder, prefix.ids, chunks, neighbours, method.misses, request.indexing
        )
        take([parts[i + 1] for i in wanted], answer)


def _by_encoder(method: Method, num_chunks: int) -> list[tuple[str, range]]:
    """Which encoder serves which run of chunks."""
    if not num_chunks:
        return []
    first, rest = method.encoder_of(0), method.encoder_of(1)
    if first == rest:
        return [(rest, range(num_chunks))]
    parts = [(first, range(1)), (rest, range(1, num_chunks))]
    return [(encoder, indices) for encoder, indices in parts if indices]


def _mark_exact(method: Method, parts: Sequence[PromptPart]) -> None:
    """A part is exact if all before it are, and it is computed here or is stored as it is here."""
    exact = True
    for index, part in enumerate(parts):
        here = part.resident is None or part.kept or _stored_exact(method, parts, index)
        exact = part.exact = exact and here


def _map_parts(
    runner: ModelRunner, parts: Sequence[PromptPart], table: TableBuilder, owned: list[int]
) -> None:
    """Lay the parts out in the table, each in pages of its own; gaps in new ones of the request."""
    for part in parts:
        if not len(part.ids):
            continue
        if part.resident is not None:
            first = table.map_chunk(part.resident, part.position, turned=part.kept)
        else:
            why = f"a chunk of {len(part.ids)} tokens, computed in place,"
            part.pages = runner.cache.allocator.allocate(pages_for(len(part.ids)), why)
            owned += part.pages
            first = table.reserve(part.pages)
        part.slots = (first + np.arange(len(part.ids))).astype(np.int32)


def _scene(method: Method, prompt: Prompt, mapped: RequestState) -> SelectionInput:
    chunks = mapped.parts[1:]
    return SelectionInput(
        prefix=prompt.prefix,
        chunks=prompt.chunks,
        final=prompt.final,
        table=mapped.table,
        chunk_slots=np.concatenate([np.zeros(0, np.int32), *(part.slots for part in chunks)]),
        scratch=mapped.first_slot,
        exact=tuple(part.exact for part in chunks),
        in_place=tuple(part.resident is None for part in chunks),
        seen=_seen(method, prompt),
        ratio=method.recompute_ratio,
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
