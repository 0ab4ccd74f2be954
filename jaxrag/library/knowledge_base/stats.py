"""What a knowledge base holds and how it was made, as numbers."""

import collections
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrag.kv.store import ChunkStore, ReadThrough
from jaxrag.library.catalog import Catalog
from jaxrag.library.knowledge_base.upkeep import Claim
from jaxrag.library.knowledge_base.vectors import ChunkVectors
from jaxrag.reuse.attention_index.document import indexes_nbytes


def collect_stats(
    folder: Path,
    catalog: Catalog,
    settings: Mapping[str, Any],
    store: ChunkStore | ReadThrough,
    vectors: ChunkVectors | None,
) -> dict[str, Any]:
    """Counts and settings, JSON-able; reads every commit record of the store."""
    counts = catalog.counts()
    claim = Claim.of(catalog, settings)
    variants: collections.Counter[str] = collections.Counter()
    orphans: collections.Counter[str] = collections.Counter()
    indexed: collections.Counter[str] = collections.Counter()
    for record in store.records():
        variants[record.encoder] += 1
        if nbytes := indexes_nbytes(record):
            indexed["chunks"] += 1
            indexed["bytes"] += nbytes
        if not claim.holds(record):
            orphans["chunks"] += 1
            orphans["bytes"] += store.layout.nbytes(record.tokens)
    stored = store.stats()
    known = settings["vectors"]
    indexing = settings.get("attention_index")
    return {
        "path": str(folder),
        "id": settings["id"],
        "model": settings["model"]["path"],
        "model_digest": settings["model"]["digest"],
        "template": settings["template"]["name"],
        "chunk_by": settings["chunking"]["by"],
        "chunk_tokens": settings["chunking"]["chunk_tokens"],
        "overlap": settings["chunking"]["overlap"],
        "documents": counts["documents"],
        "chunks": counts["chunks"],
        "tokens": counts["tokens"],
        "encoders": {name: counts["encoded"].get(name, 0) for name in settings["encoders"]},
        "neighbours": settings["neighbours"],
        "stored": {
            "kv": settings["layout"]["stored"],
            "location": settings["store"] or str(folder),
            "salted": bool(settings["salt"]),
            "sealed": settings.get("sealed") is not None,
            "max_bytes": settings["max_bytes"],
            "chunks": stored.chunks,
            "tokens": stored.tokens,
            "bytes": stored.nbytes,
            "corrupt": stored.corrupt,
            "unsealed": stored.unsealed,
            "variants": dict(sorted(variants.items())),
            "orphans": orphans["chunks"],
            "orphan_bytes": orphans["bytes"],
        },
        "attention_index": None
        if indexing is None
        else {
            "kind": indexing["kind"],
            "from_tokens": indexing["exact_below"],
            "chunks": indexed["chunks"],
            "bytes": indexed["bytes"],
        },
        "vectors": None
        if known is None or vectors is None
        else {
            "index": known["index"],
            "embedder": known["embedder"]["path"],
            "embedder_digest": known["embedder"]["digest"],
            "dim": known["embedder"]["dim"],
            "vectors": len(vectors.index),
            "complete": settings["vectors_complete"] and not len(vectors.compared(catalog).lost),
        },
        "last_gc": settings["last_gc"],
    }
