"""Offline chunk encoders: token ids of a chunk in, its KV out (K before RoPE).

A chunk is encoded once; what it saw while it was encoded is part of its key.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxrag.encode.rows import encode_rows
from jaxrag.errors import RequestError
from jaxrag.models.model import Model
from jaxrag.store import Provenance, content_id, context_id
from jaxrag.store import chunk_key as store_key
from jaxrag.types import HostArray

__all__ = ["ENCODERS", "Encoder", "chunk_key", "encode_chunks", "encoder_named", "provenance"]


@dataclasses.dataclass(frozen=True)
class Encoder:
    """What a chunk may see while it is encoded, beside itself."""

    name: str
    sees_prefix: bool


ENCODERS: dict[str, Encoder] = {
    # TurboRAG section 3.4, Block-Attention section 2.1: the chunk alone.
    "isolated": Encoder("isolated", sees_prefix=False),
    # Full reuse: behind the prompt's prefix, as if it were the first chunk.
    "after_prefix": Encoder("after_prefix", sees_prefix=True),
}


def encoder_named(name: str) -> Encoder:
    """Look an encoder up; RequestError lists what exists."""
    if name not in ENCODERS:
        raise RequestError(f"encoder {name!r}: expected one of {', '.join(ENCODERS)}")
    return ENCODERS[name]


def provenance(
    model: Model, encoder: str, prefix_ids: HostArray, token_ids: HostArray
) -> Provenance:
    """What a chunk's KV is made from: its tokens, and what it saw while it was encoded."""
    tokenizer = "" if model.tokenizer is None else model.tokenizer.digest
    seen = prefix_ids if encoder_named(encoder).sees_prefix else prefix_ids[:0]
    return Provenance(encoder, content_id(tokenizer, token_ids), context_id(encoder, seen))


def chunk_key(
    fingerprint: str, model: Model, encoder: str, prefix_ids: HostArray, token_ids: HostArray
) -> str:
    """Deterministic key of a chunk's KV in a store.

    Args:
      fingerprint: the store's: model, how the KV is stored, and the tenant's salt.
      model: whose tokenizer the ids belong to. encoder: a key of ENCODERS.
      prefix_ids: [P] int32, what the encoder may see. token_ids: [T] int32, as they are encoded.
    """
    origin = provenance(model, encoder, prefix_ids, token_ids)
    return store_key(fingerprint, origin.content_id, origin.context_id)


def encode_chunks(
    model: Model, encoder: str, prefix_ids: HostArray, chunks: Sequence[HostArray]
) -> Iterator[tuple[int, HostArray]]:
    """Encode chunks in full packed batches.

    Args:
      model: the model. encoder: a key of ENCODERS.
      prefix_ids: [P] int32, read by encoders that see the prefix.
      chunks: token ids, int32 [T] each.

    Yields:
      (index into chunks, kv [L, 2, T, K, H] in the model's dtype), each chunk once, in batch order.
    """
    prefix = prefix_ids if encoder_named(encoder).sees_prefix else prefix_ids[:0]
    return encode_rows(model, prefix, chunks)
