"""Encodes chunks as ``encode_rows`` does, and keeps some of their queries for an index.

RetrievalAttention section 3.3 (arXiv:2409.10516) trains an index over keys with the queries of
prefill; here these are the queries of the chunk's own tokens.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxrag.base.shapes import bucket
from jaxrag.base.sharding import to_host
from jaxrag.base.types import HostArray
from jaxrag.models.model import Model
from jaxrag.reuse.encode.packed import (
    Places,
    check_context,
    packed_batches,
    run_packed,
    start_taking,
    take_places,
)


def encode_observed(
    model: Model, prefix: HostArray, chunks: Sequence[HostArray], count: int
) -> Iterator[tuple[int, HostArray, HostArray, HostArray]]:
    """Encode every chunk directly behind ``prefix``, and keep queries of ``count`` of its tokens.

    The tokens are evenly spread, the first one included; all of them where there are fewer.

    Yields (index, kv [L, 2, T, K, H], queries [L, N, m, H] and keys [L, T, K, H] before RoPE), all
    in the model's dtype; kv of the heads that this process holds, queries and keys of all heads.
    Raises RequestError for a chunk that is empty or does not fit the model's context.
    """
    check_context(model, prefix, chunks, [()] * len(chunks))
    for tokens, rope, places in packed_batches(model, prefix, chunks):
        columns, kept = _columns(places, len(tokens.ids), count)
        put = model.put_batch(columns, len(columns))
        k, v, q = run_packed(model.params, model.config, tokens, rope, asked=put)
        queries, keys = to_host(q), to_host(k)
        where = {index: (row, span) for index, row, span in places}
        for index, kv in take_places(*start_taking(model, places, k, v)):
            row, span = kept[index]
            own = np.ascontiguousarray(queries[:, row, span].swapaxes(1, 2))
            row, span = where[index]
            yield index, kv, own, keys[:, row, span]


def _columns(
    places: Places, rows: int, count: int
) -> tuple[HostArray, dict[int, tuple[int, slice]]]:
    """Columns [B, C] int32 to keep, padded with 0, and where each chunk's are among these."""
    chosen: list[list[int]] = [[] for _ in range(rows)]
    kept = {}
    for index, row, span in places:
        tokens = span.stop - span.start
        some = min(count, tokens)
        first = len(chosen[row])
        chosen[row] += (span.start + np.arange(some, dtype=np.int64) * tokens // some).tolist()
        kept[index] = row, slice(first, first + some)
    columns = np.zeros((rows, bucket(max(map(len, chosen)), 128)), np.int32)
    for row, some_columns in enumerate(chosen):
        columns[row, : len(some_columns)] = some_columns
    return columns, kept
