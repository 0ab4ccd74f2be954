"""KV of pasted passages that a knowledge base holds, brought to the tenant that pastes them."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxrag.engine.staging import ChunkLoad
from jaxrag.kv.store import KVStore
from jaxrag.kv.store.record import Record
from jaxrag.library.knowledge_base import KnowledgeBase


def bring_ingested(
    store: KVStore, bases: Iterable[KnowledgeBase], loads: Sequence[ChunkLoad]
) -> None:
    """Copy chunks that a tenant's own store lacks from knowledge bases that it may read.

    What it pastes it has; that a knowledge base has it too is told by time, to its readers alone.
    Raises StoreError for KV that cannot be read or kept.
    """
    found = store.find([load.stored_key for load in loads])
    lacking = [load for load in loads if not isinstance(found[load.stored_key], Record)]
    for base in bases:
        lacking = _bring(store, base, lacking)


def _bring(store: KVStore, base: KnowledgeBase, loads: Sequence[ChunkLoad]) -> list[ChunkLoad]:
    """Copy what one knowledge base has of the chunks; those that it has not."""
    alike: dict[tuple[str, str], list[ChunkLoad]] = {}
    for load in loads:
        made = load.encoding.provenance(load.encoder, load.chunk)
        alike.setdefault((load.encoder, made.context_id), []).append(load)
    brought = set[str]()
    for (encoder, _), group in alike.items():
        like, ids = group[0].encoding, [load.chunk.ids for load in group]
        held = base.blocks_held(like.model, encoder, like.prefix, ids, like.primer)
        for index, kv in held:
            load = group[index]
            made = load.encoding.provenance(encoder, load.chunk)
            store.put(load.stored_key, np.ascontiguousarray(kv), record=made)
            brought.add(load.stored_key)
    return [load for load in loads if load.stored_key not in brought]
