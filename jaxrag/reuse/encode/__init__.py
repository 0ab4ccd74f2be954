"""Offline chunk encoders: token ids of a chunk in, its KV out (K before RoPE).

A chunk is encoded once; what it saw while it was encoded is part of its key.
"""

from jaxrag.reuse.encode.chunk_encoding import (
    ChunkEncoding,
    ChunkInContext,
    Encoded,
    StoredNeighbours,
)
from jaxrag.reuse.encode.chunks import encode_chunks, encode_for_store, gets_indexes
from jaxrag.reuse.encode.encoders import (
    ENCODERS,
    NEIGHBOUR_ENCODER,
    PREFIX_ENCODER,
    Encoder,
    chunk_key,
    encoder_named,
    prefix_key,
    prefix_provenance,
    provenance,
    seen_prefix,
)

__all__ = [
    "ENCODERS",
    "NEIGHBOUR_ENCODER",
    "PREFIX_ENCODER",
    "ChunkEncoding",
    "ChunkInContext",
    "Encoded",
    "Encoder",
    "StoredNeighbours",
    "chunk_key",
    "encode_chunks",
    "encode_for_store",
    "encoder_named",
    "gets_indexes",
    "prefix_key",
    "prefix_provenance",
    "provenance",
    "seen_prefix",
]
