"""Requests mapped and prefilled at once, without a scheduler: for measurements, the gate, tests.

For jobs that have the engine's thread to themselves (``Engine.call``).
"""

import dataclasses
from collections import abc

from jaxrag.base.types import Array
from jaxrag.engine.layerwise import start_prefill
from jaxrag.engine.mapping import map_sequence, sequence_of
from jaxrag.engine.prefill import Prefilled, select_tokens
from jaxrag.engine.request import Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import Sequence
from jaxrag.engine.staging import (
    ChunkLoad,
    drop,
    encode,
    fetch,
    keep,
    place,
    stage,
    why_refused,
)
from jaxrag.kv.cache import CachedChunk, PageTable, pages_for
from jaxrag.reuse.decode import Observe


def map_request(runner: ModelRunner, request: Request, reserve_tokens: int) -> Sequence:
    """Bring a prompt's chunks into the pool and reserve pages for what must be computed.

    ``reserve_tokens`` is room for generated tokens. Undo with ``unmap``. Raises RequestError where
    the pool has no room for it now.
    """
    request = dataclasses.replace(request, max_new_tokens=reserve_tokens + 1)
    sequence = sequence_of(runner.model, request)
    while not _try(runner, sequence):
        pass
    return sequence


def unmap(runner: ModelRunner, mapped: Sequence) -> None:
    """Give a request's pages back and let its chunks go."""
    allocator = runner.cache.allocator
    allocator.free(mapped.own)
    for key in mapped.held:
        allocator.release(key)


def prefill(runner: ModelRunner, requests: abc.Sequence[Sequence]) -> tuple[Array, PageTable]:
    """Select what is to be recomputed, then run every request's tokens.

    Returns logits [B', V] float32 after each request's last token, and the table with all prefilled
    slots shown (B' >= len(requests) is a power of two; padding rows hold nothing).
    """
    logits, table, _ = prefill_observed(runner, requests, None)
    return logits, table


def prefill_observed(
    runner: ModelRunner, requests: abc.Sequence[Sequence], observe: Observe | None
) -> Prefilled:
    """As ``prefill``, and keep queries of tokens that were run: the last, or evenly spread ones.

    The bank holds as many queries a row as asked for, fewer where all requests run fewer tokens
    (then the next power of two), none where ``observe`` is None.
    """
    select_tokens(runner, requests)
    run = start_prefill(runner, requests, observe)
    while run.left:
        run.next_piece()
    for request in requests:
        _keep_leading(runner, request)
    return run.prefilled


def _keep_leading(runner: ModelRunner, mapped: Sequence) -> None:
    """The leading parts of a request are computed: later prompts may begin with them."""
    allocator = runner.cache.allocator
    for key, part in mapped.kept_parts.items():
        if key not in allocator:  # another request may have been first
            allocator.insert(key, part.pages, len(part.ids))
            mapped.held = (*mapped.held, key)
            mapped.own = tuple(page for page in mapped.own if page not in part.pages)


def _try(runner: ModelRunner, sequence: Sequence) -> bool:
    """Map a request; False where a chunk turned out to be computed in place, which needs others."""
    allocator = runner.cache.allocator
    held: dict[str, CachedChunk] = {}
    own: tuple[int, ...] = ()
    need = sequence.need(allocator.__contains__)
    allocator.tick()
    try:
        for key in need.chunks:  # what is there is held before anything is evicted
            resident = allocator.acquire(key)
            if resident is not None:
                held[key] = resident
        for key in need.chunks:
            if key not in held:
                brought = _bring_in(runner, sequence, sequence.loads[key])
                if brought is None:
                    _let_go(runner, held, own)
                    return False
                held[key] = brought
        room = sequence.request.room
        why = f"a request of {sequence.num_tokens} tokens and {room} to generate"
        own = allocator.allocate(need.own, why)
        sequence.own, sequence.held = own, tuple(held)
        map_sequence(sequence, held)
    except BaseException:
        _let_go(runner, held, own)
        raise
    return True


def _bring_in(runner: ModelRunner, sequence: Sequence, load: ChunkLoad) -> CachedChunk | None:
    """Read or encode one chunk into pages of the pool; None where it is computed in place."""
    allocator = runner.cache.allocator
    pages = allocator.allocate(pages_for(load.tokens), f"a chunk of {load.tokens} tokens")
    try:
        fetched = fetch(runner, [load])
        if load.key in fetched.refused:
            drop(runner, fetched)
            why = why_refused(load, fetched.refused[load.key])
            if load.misses == "in_place":
                sequence.came(load.key, why)
                allocator.free(pages)
                return None
            [made] = encode([load])
            fetched = keep(load, why, made)
        staged = stage(runner, runner.cache, fetched, [load], {load.key: pages})
        sequence.came(load.key, fetched.found[load.key])
        place(runner, staged, {load.key: pages})
    except BaseException:
        allocator.free(pages)
        raise
    return allocator.insert(load.key, pages, load.tokens, staged.dropped.get(load.key))


def _let_go(runner: ModelRunner, held: dict[str, CachedChunk], own: tuple[int, ...]) -> None:
    runner.cache.allocator.free(own)
    for key in held:
        runner.cache.allocator.release(key)
