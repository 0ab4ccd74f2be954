"""Requests mapped and prefilled at once, without a scheduler: for measurements, the gate, tests.

For jobs that have the engine's thread to themselves (``Engine.call``).
"""

from collections.abc import Sequence

from jaxrag.base.types import Array
from jaxrag.engine.layerwise import start_prefill
from jaxrag.engine.mapping import RequestPlan, RequestState, map_planned, plan_request
from jaxrag.engine.prefill import Prefilled, select_tokens
from jaxrag.engine.request import Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.staging import (
    ChunkLoad,
    ChunkOrigin,
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


def map_request(runner: ModelRunner, request: Request, reserve_tokens: int) -> RequestState:
    """Bring a prompt's chunks into the pool and reserve pages for what must be computed.

    ``reserve_tokens`` is room for generated tokens. Undo with ``unmap``. Raises RequestError where
    the pool has no room for it now.
    """
    plan = plan_request(runner.model, request, reserve_tokens)
    found: dict[str, ChunkOrigin] = {}
    while (state := _try(runner, plan, found)) is None:
        pass
    return state


def unmap(runner: ModelRunner, mapped: RequestState) -> None:
    """Give a request's pages back and let its chunks go."""
    allocator = runner.cache.allocator
    allocator.free(mapped.own)
    for key in mapped.held:
        allocator.release(key)


def prefill(runner: ModelRunner, requests: Sequence[RequestState]) -> tuple[Array, PageTable]:
    """Select what is to be recomputed, then run every request's tokens.

    Returns logits [B', V] float32 after each request's last token, and the table with all prefilled
    slots shown (B' >= len(requests) is a power of two; padding rows hold nothing).
    """
    logits, table, _ = prefill_observed(runner, requests, None)
    return logits, table


def prefill_observed(
    runner: ModelRunner, requests: Sequence[RequestState], observe: Observe | None
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


def _keep_leading(runner: ModelRunner, mapped: RequestState) -> None:
    """The leading parts of a request are computed: later prompts may begin with them."""
    allocator = runner.cache.allocator
    for key, part in mapped.keep.items():
        if key not in allocator:  # another request may have been first
            allocator.insert(key, part.pages, len(part.ids))
            mapped.held.append(key)
            mapped.own = [page for page in mapped.own if page not in part.pages]
    mapped.keep = {}


def _try(
    runner: ModelRunner, plan: RequestPlan, found: dict[str, ChunkOrigin]
) -> RequestState | None:
    """Map a request; None where a chunk turned out to be computed in place, which needs others."""
    allocator = runner.cache.allocator
    held: dict[str, CachedChunk] = {}
    own: tuple[int, ...] = ()
    need = plan.need(allocator.__contains__)
    allocator.tick()
    try:
        for key in need.chunks:  # what is there is held before anything is evicted
            resident = allocator.acquire(key)
            if resident is not None:
                held[key] = resident
        for key in need.chunks:
            if key not in held:
                brought = _bring_in(runner, plan.loads[key], found)
                if brought is None:
                    plan.gone.add(key)
                    _let_go(runner, held, own)
                    return None
                held[key] = brought
        prompt = plan.request.prompt
        why = f"a request of {prompt.num_tokens} tokens and {plan.reserve} to generate"
        own = allocator.allocate(need.own, why)
        return map_planned(plan, held, own, found)
    except BaseException:
        _let_go(runner, held, own)
        raise


def _bring_in(
    runner: ModelRunner, load: ChunkLoad, found: dict[str, ChunkOrigin]
) -> CachedChunk | None:
    """Read or encode one chunk into pages of the pool; None where it is computed in place."""
    allocator = runner.cache.allocator
    pages = allocator.allocate(pages_for(load.tokens), f"a chunk of {load.tokens} tokens")
    try:
        fetched = fetch(runner, [load])
        if load.key in fetched.refused:
            drop(runner, fetched)
            found[load.key] = why_refused(load, fetched.refused[load.key])
            if load.misses == "in_place":
                allocator.free(pages)
                return None
            [made] = encode([load])
            fetched = keep(load, found[load.key], made)
        staged = stage(runner, runner.cache, fetched, [load], {load.key: pages})
        found[load.key] = fetched.found[load.key]
        place(runner, staged, {load.key: pages})
    except BaseException:
        allocator.free(pages)
        raise
    return allocator.insert(load.key, pages, load.tokens, staged.dropped.get(load.key))


def _let_go(runner: ModelRunner, held: dict[str, CachedChunk], own: tuple[int, ...]) -> None:
    runner.cache.allocator.free(own)
    for key in held:
        runner.cache.allocator.release(key)
