"""Token ids of chunks in, their KV out, in batches, by whatever encoder."""

import functools
from collections.abc import Iterator, Sequence

from jaxrag.base.types import HostArray
from jaxrag.models.backend import check_encoders
from jaxrag.models.model import Model
from jaxrag.reuse.attention_index.document import Indexing, build_arrays
from jaxrag.reuse.encode.apart import encode_apart
from jaxrag.reuse.encode.encoders import checked_neighbours, encoder_named, seen_prefix
from jaxrag.reuse.encode.joint import encode_jointly
from jaxrag.reuse.encode.neighbours import OwnKV, compute_own_kv, encode_behind
from jaxrag.reuse.encode.packed import encode_rows
from jaxrag.reuse.encode.with_queries import encode_observed


def encode_chunks(
    model: Model,
    encoder: str,
    prefix_ids: HostArray,
    chunks: Sequence[HostArray],
    neighbours: Sequence[Sequence[HostArray]] | None = None,
    own_kv: OwnKV | None = None,
    apart: bool = False,
) -> Iterator[tuple[int, HostArray]]:
    """Encode chunks in batches.

    Args:
      encoder: a key of ENCODERS.
      prefix_ids: [P] int32, read by encoders that see the prefix: under "primed" prefix and primer,
        as ``encoders.front`` has them. Rows hold it once, and many chunks.
      chunks: token ids, int32 [T] each.
      neighbours: for every chunk the chunks in front of it, in their order, int32 [T'] each;
        needed by encoders that see neighbours.
      own_kv: gives the neighbours' own KV to the encoder "neighbours", as ``StoredNeighbours`` of
        a store does; None computes it.
      apart: what one chunk's KV is does not depend on the others, to the bit (``encode_apart``);
        of encoders that see neighbours only where it is a single one.

    Yields:
      (index into chunks, kv [L, 2, T, K, H] in the model's dtype), each chunk once, in batch order.

    Raises RequestError for a chunk that is empty or does not fit the model's context with what it
    sees, and for neighbours that are missing or that the encoder does not see.
    """
    chosen = encoder_named(encoder)
    others = checked_neighbours(chosen, neighbours, len(chunks))
    prefix = seen_prefix(chosen, prefix_ids)
    if model.backend is not None:
        check_encoders(model.backend, [encoder])
        return model.backend.encode(prefix, chunks)
    if not chosen.sees_neighbours:
        return (encode_apart if apart else encode_rows)(model, prefix, chunks)
    if chosen.neighbours == "joint":
        return encode_jointly(model, prefix, chunks, others)
    own_kv = own_kv or functools.partial(compute_own_kv, model, prefix)
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
    apart: bool = False,
) -> Iterator[tuple[int, HostArray, dict[str, HostArray] | None]]:
    """Encode chunks with all that is stored of them; arguments and errors as ``encode_chunks``.

    Yields (index into chunks, kv [L, 2, T, K, H], auxiliary arrays or None): the indexes of chunks
    that get some by ``indexing``, built from queries that are kept while the chunk is encoded.
    """
    chosen = encoder_named(encoder)
    others = checked_neighbours(chosen, neighbours, len(chunks))
    indexed = [i for i, ids in enumerate(chunks) if gets_indexes(indexing, encoder, len(ids))]
    plain = sorted(set(range(len(chunks))) - set(indexed))
    rest, behind = [chunks[i] for i in plain], [others[i] for i in plain]
    for at, kv in encode_chunks(model, encoder, prefix_ids, rest, behind, own_kv, apart):
        yield plain[at], kv, None
    if not indexed or indexing is None:
        return
    prefix = seen_prefix(chosen, prefix_ids)
    long = [chunks[i] for i in indexed]
    layer_ropes = [model.config.rope_of(layer) for layer in range(model.config.num_kv_layers)]
    for at, kv, queries, keys in encode_observed(model, prefix, long, indexing.queries):
        yield indexed[at], kv, build_arrays(keys, queries, indexing, layer_ropes)
