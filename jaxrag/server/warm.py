"""Requests of the shapes that clients will ask for, so that none of them waits for a compiler."""

from collections.abc import Iterator

import numpy as np

from jaxrag.engine.prefilled import PREFILL_TOKENS
from jaxrag.engine.request import Prompt, Request
from jaxrag.methods import Method
from jaxrag.server.state import ServerState
from jaxrag.shapes import bucket
from jaxrag.store import MemoryStore
from jaxrag.types import HostArray

_QUESTIONS = (16, 32, 64, 128)  # tokens of final blocks, one a width
_ASKED = "What?"
_CHUNK_TOKENS = 512  # where there is no knowledge base
_BYTES = 1 << 30  # of the chunks, which nobody keeps
_NOTHING = np.zeros(0, np.int32)


def warm_up(state: ServerState) -> int:
    """Search every knowledge base once, and compile what the default method needs; how many.

    Questions of usual lengths over as many chunks as are retrieved, and prompts without any, in
    all widths; where files are uploaded, their encoding. Other methods and rules are compiled when
    they are first asked for.
    """
    for base in state.knowledge_bases.values():
        base.search(_ASKED, 1)
    programs = state.engine.warm_up(list(_requests(state)))
    state.library.warm_up()
    state.engine.forget()
    return programs


def _requests(state: ServerState) -> Iterator[Request]:
    settings, model = state.settings, state.model
    most = model.config.max_positions
    draw = np.random.default_rng(0)

    def ids(length: int) -> HostArray:
        return draw.integers(0, model.config.vocab_size, length, dtype=np.int32)

    method = next(iter(state.methods.values()))
    store = MemoryStore(model.fingerprint, model.kv_layout, max_tokens=most, max_bytes=_BYTES)
    prompts = []
    sizes = {base.chunking.chunk_tokens for base in state.knowledge_bases.values()}
    for size in sizes or {_CHUNK_TOKENS}:
        room = most - _QUESTIONS[-1] - settings.max_new_tokens
        count = min(settings.k, room // size)
        chunks = tuple(ids(size) for _ in range(count))
        prompts += [Prompt(_NOTHING, chunks, ids(length)) for length in _QUESTIONS if count]
    prompts += [Prompt(_NOTHING, (), ids(width)) for width in _widths(most)]
    for prompt in prompts:
        tokens = min(settings.max_new_tokens, most - prompt.num_tokens)
        yield _request(store, method, prompt, tokens, settings.rows)


def _widths(most: int) -> list[int]:
    """Lengths of prompts that are run in one piece each, one a width."""
    widths = [bucket(1)]
    while widths[-1] < min(most, PREFILL_TOKENS):
        widths.append(2 * widths[-1])
    return [min(width, most - 1) for width in widths]


def _request(store: MemoryStore, method: Method, prompt: Prompt, tokens: int, rows: int) -> Request:
    return Request(prompt, store, method, max(tokens, 1), rows=rows, watched=True)
