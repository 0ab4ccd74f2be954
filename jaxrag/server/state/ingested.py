"""KV of pasted passages that a knowledge base holds, brought to the tenant that pastes them."""

from collections.abc import Sequence

import numpy as np

from jaxrag.engine.staging import ChunkLoad
from jaxrag.kv.store.record import Record
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.reuse.encode import provenance
from jaxrag.server.state.state import ServerState
from jaxrag.server.tenants import Access


def bring_ingested(state: ServerState, access: Access, loads: Sequence[ChunkLoad]) -> None:
    """Copy what the tenant's own store lacks from served knowledge bases that it may read.

    What it pastes it has; that a knowledge base has it too is told by time, to its readers alone.
    Raises StoreError for KV that cannot be read or kept.
    """
    bases = [it for name, it in state.knowledge_bases.items() if access.may_read(name)]
    bases = [it for it in bases if it.chunking.pasted]
    if not bases or not loads:
        return
    store = state.memory.store(access.tenant)
    found = store.find([load.key for load in loads])
    lacking = [load for load in loads if not isinstance(found[load.key], Record)]
    for base in bases:
        lacking = _bring(state, base, lacking)


def _bring(state: ServerState, base: KnowledgeBase, loads: Sequence[ChunkLoad]) -> list[ChunkLoad]:
    """What one knowledge base has of the chunks; those that it has not."""
    left = {load.key: load for load in loads}
    ways = {(load.encoder, load.encoding.prefix.tobytes()): load for load in loads}
    for (encoder, begins), one in ways.items():
        prefix = one.encoding.prefix
        wanted = [
            load
            for load in loads
            if (load.encoder, load.encoding.prefix.tobytes()) == (encoder, begins)
        ]
        ids = [load.chunk.ids for load in wanted]
        for index, kv in base.blocks_held(state.model, encoder, prefix, ids):
            load = wanted[index]
            made = provenance(state.model, encoder, prefix, load.chunk.ids)
            load.encoding.store.put(load.key, np.ascontiguousarray(kv), record=made)
            left.pop(load.key, None)
    return list(left.values())
