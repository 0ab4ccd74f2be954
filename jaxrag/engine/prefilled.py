"""What prefill leaves behind, and which of its tokens' queries are kept."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrag.base.shapes import bucket
from jaxrag.base.types import Array, HostArray
from jaxrag.engine.mapping import RequestState
from jaxrag.kv.cache import PageTable
from jaxrag.reuse.decode import Observe, PromptQueries

PREFILL_TOKENS = 1024  # of one pass; longer prompts run in pieces of this many


class Prefilled(NamedTuple):
    """A batch of B' rows after prefill; B' >= its requests is a power of two.

    Attributes:
      logits: [B', V] float32 after each request's last token; padding rows hold nothing.
      table: with all prefilled slots shown.
      bank: the queries that were asked for.
    """

    logits: Array
    table: PageTable
    bank: PromptQueries


def observed_tokens(
    requests: Sequence[RequestState], observe: Observe | None, rows: int
) -> tuple[HostArray, HostArray]:
    """Which of the tokens to run are observed, and their positions: [rows, W] each, -1: none.

    As many a row as asked for, fewer where all requests run fewer tokens (then the next power of
    two), none where ``observe`` is None.
    """
    width = 0
    if observe is not None:
        width = min(observe.count, bucket(max(len(r.ids) for r in requests)))
    observed = np.full((rows, width), -1, np.int64)
    positions = np.full((rows, width), -1, np.int32)
    for row, request in enumerate(requests):
        count = min(width, len(request.ids))
        if observe is None or not count:
            continue
        first = len(request.ids) - count if observe.which == "last" else 0
        chosen = np.linspace(first, len(request.ids) - 1, count).round().astype(np.int64)
        observed[row, :count] = chosen
        positions[row, :count] = request.positions[chosen]
    return observed, positions
