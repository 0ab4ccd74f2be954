"""Where in its prompt each page of a request is, collected on the host, read on the device."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base import struct
from jaxrag.base.shapes import bucket
from jaxrag.base.types import HIDDEN, Array, HostArray, on_host
from jaxrag.kv.cache.pages import CachedChunk
from jaxrag.kv.cache.pool import PAGE

MIN_TABLE_PAGES = 256  # tables are padded to powers of two from here; hidden pages cost nothing


@dataclasses.dataclass(frozen=True)
class ChunkAttention:
    """How tokens attend to chunks, beside all else (APE, arXiv:2502.05431).

    Attributes:
      temperature: scores of their keys are divided by it.
      scale: that log-sum-exp is multiplied by temperature x scale where the parts are merged.
    """

    temperature: float
    scale: float


class ChunkPages(struct.PyTreeNode):
    """Which pages of a batch hold chunks that are attended to in a way of their own."""

    held: Array | HostArray  # [B, M] bool
    attention: ChunkAttention = struct.static()


class PageTable(struct.PyTreeNode):
    """The pages of each request of a batch, in the order of its slots."""

    pages: Array  # [B, M] int32
    offsets: Array  # [B, M] int32 position of each page's chunk in the prompt
    slot_position: Array  # [B, M*page] int32 absolute position, HIDDEN where no token may attend
    chunks: ChunkPages | None = None  # None: tokens attend to all keys alike

    def reveal(self, slots: Array, positions: Array) -> "PageTable":
        """Show the slots [B, T] that are about to be written, at these positions [B, T]."""
        rows = jnp.arange(slots.shape[0])[:, None]
        return self.replace(
            slot_position=self.slot_position.at[rows, slots].set(positions, mode="drop")
        )


class TableBuilder:
    """Collects one request's pages on the host; slots are numbered in the order pages are added.

    Attributes:
      pages: of the pool.
      attention: how chunks are attended to; None: as all else.
      chunk_pages: which of its pages hold these chunks, ascending; of no use without ``attention``.
    """

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.attention: ChunkAttention | None = None
        self.chunk_pages = np.zeros(0, np.int64)
        self._offsets: list[int] = []
        self._positions: list[HostArray] = []

    @property
    def num_slots(self) -> int:
        """Slots added so far."""
        return len(self.pages) * PAGE

    def map_chunk(
        self,
        chunk: CachedChunk,
        offset: int,
        turned: bool = False,
        pages: Sequence[int] | None = None,
    ) -> int:
        """Map a shared chunk at a position: its slots are visible from there on.

        Those of dropped tokens are hidden, and of a chunk without pages. ``pages`` are those of the
        table; None: its own.

        ``turned`` says that its keys were rotated to that very position when they were computed.
        Returns the first of its slots.
        """
        first = self.num_slots
        pages = chunk.pages if pages is None else pages
        positions = np.full(len(pages) * PAGE, HIDDEN, np.int32)
        if chunk.pages:
            positions[: chunk.tokens] = np.arange(chunk.tokens) + offset
        if chunk.dropped is not None:
            positions[chunk.dropped] = HIDDEN
        self.pages += pages
        self._offsets += [0 if turned else offset] * len(pages)
        self._positions.append(positions)
        return first

    def reserve(self, pages: Sequence[int]) -> int:
        """Add pages the request owns, hidden until written; returns the first of their slots."""
        first = self.num_slots
        self.pages += pages
        self._offsets += [0] * len(pages)
        self._positions.append(np.full(len(pages) * PAGE, HIDDEN, np.int32))
        return first

    def hide(self, slots: HostArray) -> None:
        """Nobody sees these slots of this request any more; the pages stay as they are."""
        positions = np.concatenate(self._positions)
        positions[slots] = HIDDEN
        self._positions = [positions]

    def hidden(self, slots: HostArray) -> HostArray:
        """Whether nobody sees each of these slots, bool [slots]."""
        hidden: HostArray = np.concatenate(self._positions)[slots] == HIDDEN
        return hidden

    def replace(self, first: int, pages: Sequence[int]) -> None:
        """Other pages from page ``first`` of the table on, at the same positions."""
        self.pages[first : first + len(pages)] = pages

    def copy(self) -> "TableBuilder":
        """The same pages; what is added to or hidden in one does not show in the other."""
        other = TableBuilder()
        other.pages, other._offsets = list(self.pages), list(self._offsets)
        other.attention, other.chunk_pages = self.attention, self.chunk_pages
        other._positions = list(self._positions)
        return other

    def rows(self, num_pages: int) -> tuple[HostArray, HostArray, HostArray]:
        """pages [M], offsets [M], slot_position [M*page], padded to ``num_pages`` hidden pages."""
        pages, offsets = np.zeros((2, num_pages), np.int32)
        pages[: len(self.pages)] = self.pages
        offsets[: len(self.pages)] = self._offsets
        slot_position = np.full(num_pages * PAGE, HIDDEN, np.int32)
        start = 0
        for positions in self._positions:
            slot_position[start : start + len(positions)] = positions
            start += len(positions)
        return pages, offsets, slot_position


def batch_table(
    builders: Sequence[TableBuilder], rows: int, put: Callable[[HostArray, int], Array]
) -> PageTable:
    """The table of a batch of ``rows`` requests, empty ones added, on the device.

    ``put(array, rows)`` places an array whose first axis is the batch (Model.put_batch).
    """
    num_pages = max(table_width(b) for b in builders)
    padded = [b.rows(num_pages) for b in (*builders, *[TableBuilder()] * (rows - len(builders)))]
    chunks = jax.tree.map(lambda x: put(x, rows), chunk_pages(builders, rows, num_pages))
    pages, offsets, positions = (put(np.stack(part), rows) for part in zip(*padded, strict=True))
    return PageTable(pages, offsets, positions, chunks)


def chunk_pages(builders: Sequence[TableBuilder], rows: int, num_pages: int) -> ChunkPages | None:
    """What requests, which have one ``attention``, share a ``PageTable`` with; on the host."""
    ways = {builder.attention for builder in builders}
    assert len(ways) <= 1, f"requests of one batch attend to their chunks in ways: {ways}"
    attention = next(iter(ways), None)
    if attention is None:
        return None
    held = np.zeros((rows, num_pages), bool)
    for row, builder in enumerate(builders):
        held[row, builder.chunk_pages] = True
    return on_host(ChunkPages, held, attention)


def table_width(builder: TableBuilder) -> int:
    """Pages of the table that a request is served with: of its own, rounded up to a bucket."""
    return bucket(len(builder.pages), MIN_TABLE_PAGES)
