"""Offline chunk encoders: token ids of a chunk in, its KV out (K before RoPE).

A chunk is encoded once; what it saw while it was encoded is part of its key.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from jaxrag.attention_index.document import Indexing, build_arrays
from jaxrag.encode.joint import encode_jointly
from jaxrag.encode.neighbours import OwnKV, encode_behind
from jaxrag.encode.packed import encode_rows
from jaxrag.encode.stored_neighbours import StoredNeighbours
from jaxrag.encode.with_queries import encode_observed
from jaxrag.errors import RequestError
from jaxrag.models.model import Model
from jaxrag.store import Provenance, content_id, context_id
from jaxrag.store import chunk_key as store_key
from jaxrag.types import HostArray

__all__ = [
    "ENCODERS",
    "Encoder",
    "StoredNeighbours",
    "chunk_key",
    "encode_chunks",
    "encode_for_store",
    "encoder_named",
    "gets_indexes",
    "provenance",
]


@dataclasses.dataclass(frozen=True)
class Encoder:
    """What a chunk may see while it is encoded, beside itself.

    Attributes:
      name: as keys and settings hold it. sees_prefix: whether the prompt's prefix stands in front.
      neighbours: whether other chunks stand between prefix and chunk: "none"; "stored", with the
        KV that each of them has under ``after_prefix``; "joint", prefilled together with the chunk.
    """

    name: str
    sees_prefix: bool
    neighbours: Literal["none", "stored", "joint"] = "none"

    @property
    def sees_neighbours(self) -> bool:
        """Whether the chunk is encoded behind other chunks."""
        return self.neighbours != "none"


ENCODERS: dict[str, Encoder] = {
    # TurboRAG section 3.4, Block-Attention section 2.1: the chunk alone.
    "isolated": Encoder("isolated", sees_prefix=False),
    # Full reuse: behind the prompt's prefix, as if it were the first chunk.
    "after_prefix": Encoder("after_prefix", sees_prefix=True),
    # FusionRAG section 3.1, equation 10: behind the prefix and the KV of the most similar chunks.
    "neighbours": Encoder("neighbours", sees_prefix=True, neighbours="stored"),
    # An ablation: as in a prompt under full attention, where the neighbours know of each other.
    "neighbours_joint": Encoder("neighbours_joint", sees_prefix=True, neighbours="joint"),
}


def encoder_named(name: str) -> Encoder:
    """Look an encoder up; RequestError lists what exists."""
    if name not in ENCODERS:
        raise RequestError(f"encoder {name!r}: expected one of {', '.join(ENCODERS)}")
    return ENCODERS[name]


def provenance(
    model: Model,
    encoder: str,
    prefix_ids: HostArray,
    token_ids: HostArray,
    neighbours: Sequence[HostArray] | None = None,
) -> Provenance:
    """What a chunk's KV is made from: its tokens, and what it saw while it was encoded.

    The arguments are those of ``chunk_key``.
    """
    tokenizer = "" if model.tokenizer is None else model.tokenizer.digest
    chosen = encoder_named(encoder)
    others = _checked(chosen, None if neighbours is None else [neighbours], 1)[0]
    seen = prefix_ids if chosen.sees_prefix else prefix_ids[:0]
    context = context_id(encoder, seen, [content_id(tokenizer, ids) for ids in others])
    return Provenance(encoder, content_id(tokenizer, token_ids), context)


def chunk_key(
    fingerprint: str,
    model: Model,
    encoder: str,
    prefix_ids: HostArray,
    token_ids: HostArray,
    neighbours: Sequence[HostArray] | None = None,
) -> str:
    """Deterministic key of a chunk's KV in a store.

    Args:
      fingerprint: the store's: model, how the KV is stored, and the tenant's salt.
      model: whose tokenizer the ids belong to. encoder: a key of ENCODERS.
      prefix_ids: [P] int32, what the encoder may see. token_ids: [T] int32, as they are encoded.
      neighbours: [T'] int32 each, the chunks in front of it in their order; content and order
        count. Needed by encoders that see neighbours, and refused by the others unless empty.
    """
    origin = provenance(model, encoder, prefix_ids, token_ids, neighbours)
    return store_key(fingerprint, origin.content_id, origin.context_id)


def encode_chunks(
    model: Model,
    encoder: str,
    prefix_ids: HostArray,
    chunks: Sequence[HostArray],
    neighbours: Sequence[Sequence[HostArray]] | None = None,
    own_kv: OwnKV | None = None,
) -> Iterator[tuple[int, HostArray]]:
    """Encode chunks in full packed batches.

    Args:
      model: the model. encoder: a key of ENCODERS.
      prefix_ids: [P] int32, read by encoders that see the prefix.
      chunks: token ids, int32 [T] each.
      neighbours: for every chunk the chunks in front of it, in their order, int32 [T'] each;
        needed by encoders that see neighbours.
      own_kv: gives the neighbours' own KV to the encoder "neighbours", as ``StoredNeighbours`` of
        a store does; None computes it.

    Yields:
      (index into chunks, kv [L, 2, T, K, H] in the model's dtype), each chunk once, in batch order.

    Raises RequestError for a chunk that is empty or does not fit the model's context with what it
    sees, and for neighbours that are missing or that the encoder does not see.
    """
    chosen = encoder_named(encoder)
    others = _checked(chosen, neighbours, len(chunks))
    prefix = prefix_ids if chosen.sees_prefix else prefix_ids[:0]
    if not chosen.sees_neighbours:
        return encode_rows(model, prefix, chunks)
    if chosen.neighbours == "joint":
        return encode_jointly(model, prefix, chunks, others)
    own_kv = own_kv or StoredNeighbours(model, prefix, None)
    return encode_behind(model, prefix, chunks, others, own_kv)


def gets_indexes(indexing: Indexing | None, encoder: str, tokens: int) -> bool:
    """Whether a chunk of so many tokens is stored with indexes; never behind neighbours."""
    if indexing is None or encoder_named(encoder).sees_neighbours:
        return False
    return indexing.covers(tokens)


def encode_for_store(
    model: Model,
    encoder: str,
    prefix_ids: HostArray,
    chunks: Sequence[HostArray],
    neighbours: Sequence[Sequence[HostArray]] | None = None,
    own_kv: OwnKV | None = None,
    indexing: Indexing | None = None,
) -> Iterator[tuple[int, HostArray, dict[str, HostArray] | None]]:
    """Encode chunks with all that is stored of them; arguments and errors as ``encode_chunks``.

    Yields (index into chunks, kv [L, 2, T, K, H], auxiliary arrays or None): the indexes of chunks
    that get some by ``indexing``, built from queries that are kept while the chunk is encoded.
    """
    chosen = encoder_named(encoder)
    others = _checked(chosen, neighbours, len(chunks))
    indexed = [i for i, ids in enumerate(chunks) if gets_indexes(indexing, encoder, len(ids))]
    plain = sorted(set(range(len(chunks))) - set(indexed))
    rest, behind = [chunks[i] for i in plain], [others[i] for i in plain]
    for at, kv in encode_chunks(model, encoder, prefix_ids, rest, behind, own_kv):
        yield plain[at], kv, None
    if not indexed or indexing is None:
        return
    prefix = prefix_ids if chosen.sees_prefix else prefix_ids[:0]
    long = [chunks[i] for i in indexed]
    for at, kv, queries in encode_observed(model, prefix, long, indexing.queries):
        yield indexed[at], kv, build_arrays(kv, queries, indexing, model.config.rope)


def _checked(
    encoder: Encoder, neighbours: Sequence[Sequence[HostArray]] | None, count: int
) -> Sequence[Sequence[HostArray]]:
    """The neighbours of ``count`` chunks, empty where the encoder sees none."""
    if neighbours is None:
        if encoder.sees_neighbours:
            raise RequestError(
                f"encoder {encoder.name!r} needs the neighbours of every chunk; pass neighbours=, "
                "empty for a chunk that has none"
            )
        return [()] * count
    if len(neighbours) != count:
        raise RequestError(f"neighbours of {len(neighbours)} chunks for {count}; give one of each")
    if not encoder.sees_neighbours and any(map(len, neighbours)):
        raise RequestError(
            f"encoder {encoder.name!r} sees no neighbours; leave them out, or use 'neighbours'"
        )
    return neighbours
