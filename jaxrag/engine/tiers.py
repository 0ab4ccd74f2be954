"""Where chunk KV comes from, counted: the pool, the host arena, the links to the stores."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from jaxrag.engine.arena import ArenaState
from jaxrag.engine.links import LinkState

Hits = Literal["pool", "host", "store", "encoded", "in place"]
Happening = Literal["prefetch", "admitted", "read", "placed"]


@dataclasses.dataclass(frozen=True)
class Event:
    """What happened to a chunk, and when.

    Attributes:
      time: by the engine's clock.
      what: "prefetch": it is to be read before anybody is admitted; "admitted": a request that has
        pages waits for it; "read": a store begins to read it; "placed": it is in the pool.
      key: of the chunk.
    """

    time: float
    what: Happening
    key: str


@dataclasses.dataclass(frozen=True)
class Tiers:
    """The tiers of an engine at one moment.

    Attributes:
      hits: chunks and prefixes that admitted requests were given since the engine began, by where
        their KV came from. "pool": it was there, or on its way for another request.
      pool_chunks: that lie in the pool or are on their way into it.
      pool_bytes: of the pool's pages that chunks have.
      max_pool_bytes: of all its pages.
      host: the arena.
      links: from the stores, and from the arena to the device.
    """

    hits: Mapping[Hits, int]
    pool_chunks: int
    pool_bytes: int
    max_pool_bytes: int
    host: ArenaState
    links: tuple[LinkState, ...]
