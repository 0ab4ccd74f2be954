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
    front,
    prefix_key,
    prefix_provenance,
    primer_id,
    provenance,
    seen_prefix,
    seen_primer,
)
from jaxrag.reuse.encode.packets import wrapped
from jaxrag.reuse.encode.primer import Primer, default_primer, primer_from_dict, primer_named

__all__ = [
    "ENCODERS",
    "NEIGHBOUR_ENCODER",
    "PREFIX_ENCODER",
    "ChunkEncoding",
    "ChunkInContext",
    "Encoded",
    "Encoder",
    "Primer",
    "StoredNeighbours",
    "chunk_key",
    "default_primer",
    "encode_chunks",
    "encode_for_store",
    "encoder_named",
    "front",
    "gets_indexes",
    "prefix_key",
    "prefix_provenance",
    "primer_from_dict",
    "primer_id",
    "primer_named",
    "provenance",
    "seen_prefix",
    "seen_primer",
    "wrapped",
]
