"""Where the KV of a prompt comes from, and which of its tokens are still to be run.

The order of work (FusionRAG section 4.1): the longest run of leading parts whose KV is exact in
this very prompt, chunks whose KV is found whatever preceded it then, the gaps that are left, and at
last the tokens that are chosen to be computed again (jaxrag.engine.prefill).
"""

import dataclasses
from collections import abc
from collections.abc import Iterator, Mapping

import numpy as np

from jaxrag.base.types import HostArray, Step, on_host
from jaxrag.engine.kept import Context
from jaxrag.engine.request import Prompt, Request, batch_of
from jaxrag.engine.sequence import PromptPart, Sequence, is_one_run, stored_exact
from jaxrag.engine.staging import ChunkLoad, ChunkOrigin
from jaxrag.kv.cache import (
    PAGE,
    CachedChunk,
    PageTable,
    TableBuilder,
    chunk_pages,
    pages_for,
    whole_pages,
)
from jaxrag.models.model import Model
from jaxrag.models.segments import Layout, lay_out
from jaxrag.reuse.decode import Carried
from jaxrag.reuse.encode import PREFIX_ENCODER, ChunkEncoding, ChunkInContext, encoder_named
from jaxrag.reuse.methods import Method
from jaxrag.reuse.names import Misses
from jaxrag.reuse.select import Selection, SelectionInput


def sequence_of(model: Model, request: Request, number: int = 0) -> Sequence:
    """Name what a request is to be served from; on any thread, nothing is touched."""
    prompt, method = request.prompt, request.method
    layout, turns = _layout(prompt, method), prompt.turns
    context = _beginning(model, request)
    leading = context.leading(prompt.prefix, prompt.chunks) if method.prefix_cache else []
    encoding = alone = None
    if method.encoder is not None:
        store = model.held(request.store)
        encoding = ChunkEncoding(
            model, store, prompt.prefix, request.indexing, apart=True, primer=request.primer
        )
        alone = dataclasses.replace(encoding, prefix=prompt.prefix[:0], indexing=None)
    parts = []
    whole = zip((prompt.prefix, *prompt.chunks), (0, *layout.chunk_offsets), strict=True)
    for chunk, (ids, position) in enumerate(whole, -1):
        part = PromptPart(ids, position, chunk, chunk in turns)
        if not len(ids):
            parts.append(part)
            continue
        if part.turn and request.keeps_turns:
            for key, piece in context.pieces(ids):
                parts.append(PromptPart(piece, position, chunk, turn=True, kept_key=key))
                position += len(piece)
        else:
            if chunk < 0 and alone is not None:  # its own context: nothing precedes it
                if not alone.store.layout.drops:  # else computed here: nothing computes it again
                    part.load = _load(alone, PREFIX_ENCODER, ids, None, "encode")
            elif encoding is not None and not part.turn:
                part.load = _chunk_load(request, encoding, chunk)
            if leading and not part.turn and (encoding is None or part.load is not None):
                part.kept_key = leading[chunk + 1]
            parts.append(part)
        if request.keeps_turns:
            context = context.behind(
                part.load.stored_key if part.load is not None else context.name(ids)
            )
    made = Sequence(number, request, parts)
    made.batch = batch_of(request, made.need(lambda key: False).pages, model.placement)
    _read_in_part(model, request, parts, layout.final_start)
    if (grammar := model.grammar(request.sampling.guide)) is not None:
        made.matcher = grammar.matcher()
    return made


def _read_in_part(
    model: Model, request: Request, parts: abc.Sequence[PromptPart], final_start: int
) -> None:
    """Of chunks that no sliding window reaches back to load only the layers without a window.

    The first token that may be run sees W - 1 tokens back. Where tokens of chunks are chosen to be
    computed again, and by all queries of the question, that may be any: then all is brought in.
    So it is where host memory has some of the pool, whose pages have no parts.
    """
    config, method, layers = model.config, request.method, model.config.global_layers
    whole = method.recomputes or not model.placement.on_device
    if len(layers) == config.num_kv_layers or whole:
        return
    run = (
        other.position
        for other in parts
        if len(other.ids) and (other.load is None or other.load.misses == "in_place")
    )
    assert config.sliding_window is not None
    first_visible = min((*run, final_start)) - config.sliding_window + 1
    for part in parts:
        load = part.load
        if load is None or load.encoding.store.layout.drops:  # what it drops is read off all layers
            continue
        if part.position + len(part.ids) <= first_visible:
            part.load = dataclasses.replace(load, layers=layers)


def _beginning(model: Model, request: Request) -> Context:
    tokenizer = "" if model.tokenizer is None else model.tokenizer.digest
    return Context(request.store.fingerprint, tokenizer, request.tenant)


def turn_pages(model: Model, sequence: Sequence) -> Iterator[tuple[str, int, int]]:
    """Key, page and number of tokens of every page with question and answer, if they stay.

    The answer's last token is not among them, as it may never have been run. Under a sparse decode
    rule no answer is: its KV is not what prefill computes.
    """
    request, prompt = sequence.request, sequence.request.prompt
    stays = request.keeps_turns and sequence.is_mapped and sequence.swapped is None
    if not stays or not sequence.read:
        return
    loads = {part.chunk: part.load for part in sequence.parts}
    context = _beginning(model, request)
    for chunk, ids in enumerate((prompt.prefix, *prompt.chunks), -1):
        if len(ids):
            load = loads[chunk]
            context = context.behind(load.stored_key if load is not None else context.name(ids))
    sparse = request.method.decode.sparse
    answer = np.array([] if sparse else sequence.tokens[: sequence.read - 1], np.int32)
    turn = np.concatenate((prompt.final, answer)).astype(np.int32)
    pages = sequence.table.pages[sequence.first_slot // PAGE :]
    for page, (key, piece) in zip(pages, context.pieces(turn), strict=False):
        if not sparse or len(piece) == PAGE:  # a shorter one would begin another page
            yield key, page, len(piece)


def most_pages(model: Model, request: Request) -> int:
    """Pages that a request needs if nothing of it is in the pool; equal chunks share them."""
    whole = _most_pages(request)
    if model.config.sliding_window is None:
        return whole
    sequence = sequence_of(model, request)
    parts = [load for load in sequence.loads.values() if load.layers is not None]
    held = whole_pages((part.num_pages for part in parts), model.config.page_parts)
    saved = sum(pages_for(part.tokens) for part in parts) - held
    return max(whole - saved, sequence.need(lambda key: False).pages)  # a chunk may be there twice


def _most_pages(request: Request) -> int:
    prompt, method = request.prompt, request.method
    if is_one_run(method):
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
    neighbours: abc.Sequence[HostArray] | None,
    misses: Misses,
) -> ChunkLoad:
    key = encoding.key(encoder, ids, neighbours)
    return ChunkLoad(key, encoder, ChunkInContext(ids, tuple(neighbours or ())), encoding, misses)


def map_sequence(sequence: Sequence, chunks: Mapping[str, CachedChunk]) -> None:
    """Lay out a request whose chunks are in the pool, over them and pages of its own.

    One that was set aside keeps its tokens, and goes on over pages that may be others.

    Args:
      sequence: has the pages of its own that its ``need`` named.
      chunks: by key what that named.
    """
    method, parts = sequence.request.method, sequence.parts
    pages = list(sequence.own)
    for part, (key, kept) in zip(parts, sequence.keys(chunks.__contains__), strict=True):
        part.kept, part.pages, part.copy = kept, (), ()
        part.resident = chunks[key] if key else None
        part.shared = part.resident.pages if part.resident is not None else ()
        if part.load is not None and key == part.load.key:
            part.shared = part.load.table_pages(part.shared)
        if part.load is not None and part.origin is None:
            part.origin = ChunkOrigin("pool")
    _mark_exact(method, parts)
    sequence.table = table = TableBuilder()
    if not is_one_run(method):
        _map_parts(parts, table, pages)
        if method.rewrites:
            _take_copies(parts[1:], pages)
    first_slot = table.reserve(pages)
    if method.chunk_attention is not None:
        held = [part.slots for part in parts if part.chunk >= 0 and not part.turn]
        table.attention = method.chunk_attention
        table.chunk_pages = np.unique(np.concatenate([table.chunk_pages, *held]) // PAGE)
    if sequence.swapped is None:
        _lay_tokens(sequence, first_slot)
    elif sequence.choice is not None and sequence.choice.copied:
        read_copies(sequence)


def _lay_tokens(sequence: Sequence, first_slot: int) -> None:
    """The tokens to run: parts that are nowhere in the pool, then the final block."""
    parts, prompt = sequence.parts, sequence.request.prompt
    in_place = [part for part in parts if part.resident is None and len(part.ids)]
    final = prompt.final
    if is_one_run(sequence.request.method):  # one run of tokens to the end
        final, in_place = np.concatenate([*(part.ids for part in parts), final]), []
    end = _layout(prompt, sequence.request.method).final_start + len(prompt.final)
    positions = [*(part.positions for part in in_place), np.arange(end - len(final), end)]
    slots = [*(part.slots for part in in_place), first_slot + np.arange(len(final))]
    ids = [*(part.ids for part in in_place), final]
    sequence.run = _run(*map(np.concatenate, (ids, positions, slots)))


def _run(ids: HostArray, positions: HostArray, slots: HostArray) -> Step:
    return on_host(Step, ids, positions.astype(np.int32), slots.astype(np.int32))


def read_copies(sequence: Sequence) -> None:
    """Have a request read its copies of its chunks from now on."""
    for first, pages in sequence.scene.copied_pages.items():
        sequence.table.replace(first, pages)


def recompute(sequence: Sequence, scene: SelectionInput, choice: Selection) -> None:
    """Add chosen chunk tokens to those to run, and hide their stored KV from the request.

    They take the first slots of the last pages, and the final block follows them.
    """
    tokens = choice.tokens
    if choice.copied:
        read_copies(sequence)
    sequence.table.hide(scene.chunk_slots[tokens])
    chunk_ids = np.concatenate((scene.prefix[:0], *scene.chunks))
    run = sequence.run
    ids = np.concatenate((chunk_ids[tokens], run.ids))
    positions = np.concatenate((len(scene.prefix) + tokens, run.positions))
    moved = run.slots + len(tokens) * (run.slots >= scene.scratch)
    slots = np.concatenate((scene.scratch + np.arange(len(tokens)), moved))
    order = np.argsort(positions, kind="stable")
    sequence.run = _run(ids[order], positions[order], slots[order])
    sequence.choice = choice


def carried_chunks(sequence: Sequence) -> list[Carried]:
    """The chunks of a request that may have been stored with indexes."""
    return [
        Carried(sequence.request.store, part.key, part.position, part.slots)
        for part in sequence.parts
        if part.key
    ]


def batch_tables(sequences: abc.Sequence[Sequence], rows: int, num_pages: int) -> PageTable:
    """The tables of prefilled requests, on the host: rows behind them are empty."""
    tables = [sequence.table.rows(num_pages) for sequence in sequences]
    for sequence, (_, _, slot_position) in zip(sequences, tables, strict=True):
        slot_position[sequence.run.slots] = sequence.run.positions
    tables += [TableBuilder().rows(num_pages)] * (rows - len(sequences))
    chunks = chunk_pages([sequence.table for sequence in sequences], rows, num_pages)
    return on_host(PageTable, *(np.stack(part) for part in zip(*tables, strict=True)), chunks)


def _mark_exact(method: Method, parts: abc.Sequence[PromptPart]) -> None:
    """A part is exact if all before it are, and it is computed here or is stored as it is here."""
    exact = True
    for part in parts:
        own_exact = part.resident is None or part.kept or stored_exact(method, parts, part)
        exact = part.exact = exact and own_exact


def _map_parts(parts: abc.Sequence[PromptPart], table: TableBuilder, pages: list[int]) -> None:
    """Lay the parts out in the table, each in pages of its own.

    Gaps take theirs from the front of ``pages``, where the rest stays.
    """
    for part in parts:
        if not len(part.ids):
            continue
        if part.resident is not None:
            first = table.map_chunk(part.resident, part.position, part.kept, part.shared)
        else:
            count = pages_for(len(part.ids))
            part.pages = tuple(pages[:count])
            del pages[:count]
            first = table.reserve(part.pages)
        part.slots = (first + np.arange(len(part.ids))).astype(np.int32)


def _take_copies(chunks: abc.Sequence[PromptPart], pages: list[int]) -> None:
    """Give each shared chunk that is not exact pages for a copy, from the front of ``pages``."""
    for part in chunks:
        if part.resident is not None and not part.exact:
            count = len(part.resident.pages)
            part.copy = tuple(pages[:count])
            del pages[:count]
