"""The paged pool of cached KV on the device, and who owns which page.

Keys enter the pool rotated to their place inside their chunk; a request's PageTable says where in
its prompt each page stands. Pages of a chunk are immutable and shared by every request that uses
it; pages a request owns (final block, generated tokens, everything under full attention) are
released when it ends.
"""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrag.config import ModelConfig
from jaxrag.errors import RequestError
from jaxrag.offload import HostValues, StagingBuffers, host_buffer
from jaxrag.segments import bucket
from jaxrag.types import HIDDEN, Array, HostArray

PAGE = 16  # tokens a page
MIN_TABLE_PAGES = 256  # tables are padded to powers of two from here; hidden pages cost nothing


class PagePool(struct.PyTreeNode):
    """One buffer for all layers: page p of layer l is row p + l * P.

    Where V of some layers lies in host memory (``offload.HostValues``), ``v`` ends before them, and
    what is written there is dropped.
    """

    k: Array  # [L*P, page, K, H]
    v: Array  # [L*P, page, K, H]

    def write(self, pages: Array, slots: Array, k: Array, v: Array) -> "PagePool":
        """Write k, v [B, T, K, H] to the slots [B, T] of requests with these pages [B, M].

        ``pages`` are already those of one layer. Slots beyond the table are dropped (padding).
        """
        page = self.k.shape[1]
        inside = slots < pages.shape[1] * page
        which = jnp.take_along_axis(pages, jnp.where(inside, slots // page, 0), axis=1)
        which = jnp.where(inside, which, self.k.shape[0])
        return PagePool(
            k=self.k.at[which, slots % page].set(k.astype(self.k.dtype), mode="drop"),
            v=self.v.at[which, slots % page].set(v.astype(self.v.dtype), mode="drop"),
        )


class PageTable(struct.PyTreeNode):
    """The pages of each request of a batch, in the order of its slots."""

    pages: Array  # [B, M] int32
    offsets: Array  # [B, M] int32 position of each page's chunk in the prompt
    slot_position: Array  # [B, M*page] int32 absolute position, HIDDEN where nobody may look

    def reveal(self, slots: Array, positions: Array) -> "PageTable":
        """Show the slots [B, T] that are about to be written, at these positions [B, T]."""
        rows = jnp.arange(slots.shape[0])[:, None]
        return self.replace(
            slot_position=self.slot_position.at[rows, slots].set(positions, mode="drop")
        )


def empty_pool(
    config: ModelConfig, num_pages: int, sharding: Any = None, value_layers: int | None = None
) -> PagePool:
    """A pool of zeros with ``num_pages`` pages a layer; V of the first ``value_layers`` layers."""
    page = (PAGE, config.num_kv_heads, config.head_dim)
    rows = config.num_layers * num_pages
    v_rows = rows if value_layers is None else value_layers * num_pages
    make = jax.jit(
        lambda: PagePool(
            k=jnp.zeros((rows, *page), config.dtype), v=jnp.zeros((v_rows, *page), config.dtype)
        ),
        out_shardings=sharding,
    )
    return make()


def pages_for(tokens: int) -> int:
    """How many pages hold this many tokens."""
    return -(-tokens // PAGE)


@dataclasses.dataclass
class Resident:
    """A chunk whose KV lies in the pool."""

    pages: tuple[int, ...]
    tokens: int
    users: int = 0  # requests in flight that map it; never evicted while positive


class PageOwners:
    """Host-side bookkeeping: free pages, resident chunks (least recently used leaves first)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._resident: OrderedDict[str, Resident] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def __contains__(self, key: str) -> bool:
        return key in self._resident

    def take(self, count: int, why: str) -> tuple[int, ...]:
        """Reserve pages, evicting unused resident chunks; RequestError when they do not fit."""
        while len(self._free) < count:
            victim = next((k for k, r in self._resident.items() if r.users == 0), None)
            if victim is None:
                raise RequestError(
                    f"{why} needs {count * PAGE} tokens of cache and {len(self._free) * PAGE} of "
                    f"{self.num_pages * PAGE} are free; raise cache_tokens or ask fewer at once"
                )
            self._free.extend(reversed(self._resident.pop(victim).pages))
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, pages: Sequence[int]) -> None:
        """Return pages that a request owned."""
        self._free.extend(reversed(pages))

    def admit(self, key: str, pages: tuple[int, ...], tokens: int) -> Resident:
        """Record a chunk whose KV was written to these pages; it starts with one user."""
        self._resident[key] = Resident(pages, tokens, users=1)
        return self._resident[key]

    def borrow(self, key: str) -> Resident | None:
        """Map a resident chunk into a request; None when it is not in the pool."""
        found = self._resident.get(key)
        if found is not None:
            self._resident.move_to_end(key)
            found.users += 1
        return found

    def release(self, key: str) -> None:
        """A request no longer maps this chunk; it stays resident until space is needed."""
        found = self._resident.get(key)
        if found is not None:
            found.users -= 1

    def forget(self, key: str) -> None:
        """Drop a resident chunk that no request maps."""
        found = self._resident.get(key)
        if found is not None and found.users == 0:
            self._free.extend(reversed(self._resident.pop(key).pages))


@dataclasses.dataclass
class PagedCache:
    """A pool on the device and the record of who owns its pages.

    ``pool`` is replaced by every jitted call that writes to it (the buffer itself is donated).
    ``host`` [L - n, P, page, K, H] is the memory behind ``values``, V of the layers from n on; both
    are None where the pool holds V of all layers.
    """

    pool: PagePool
    owners: PageOwners
    host: HostArray | None = None
    values: HostValues | None = None
    staging: StagingBuffers = dataclasses.field(default_factory=StagingBuffers)

    def staging_buffer(self, config: ModelConfig, tokens: int) -> HostArray:
        """A reused host buffer [L, 2, tokens, K, H]: fresh pages cost more than the copy."""
        shape = (config.num_layers, 2, tokens, config.num_kv_heads, config.head_dim)
        return self.staging.take(shape, jnp.dtype(config.dtype))

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        tokens: int,
        sharding: Any = None,
        value_layers: int | None = None,
        max_host_bytes: int | None = None,
    ) -> "PagedCache":
        """A pool that holds this many tokens, rounded up to whole pages.

        With ``value_layers``, V of later layers lies in host memory. Raises RequestError, before
        anything is allocated, where that takes more than ``max_host_bytes``.
        """
        num_pages = pages_for(tokens)
        host, values = None, None
        if value_layers is not None and value_layers < config.num_layers:
            away = config.num_layers - value_layers
            shape = (away, num_pages, PAGE, config.num_kv_heads, config.head_dim)
            need = math.prod(shape) * jnp.dtype(config.dtype).itemsize
            if max_host_bytes is not None and need > max_host_bytes:
                raise RequestError(
                    f"V of {away} layers of {num_pages * PAGE} tokens takes {need} bytes of host "
                    f"memory, max_host_bytes={max_host_bytes}; raise it, or lower cache_tokens"
                )
            host = host_buffer(shape, jnp.dtype(config.dtype))
            values = HostValues(value_layers, host)
        pool = empty_pool(config, num_pages, sharding, value_layers if values else None)
        return cls(pool, PageOwners(num_pages), host, values)


class TableBuilder:
    """Collects one request's pages on the host; slots are numbered in the order pages are added."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self._offsets: list[int] = []
        self._positions: list[HostArray] = []

    @property
    def num_slots(self) -> int:
        """Slots added so far."""
        return len(self.pages) * PAGE

    def map_chunk(self, chunk: Resident, offset: int, turned: bool = False) -> int:
        """Map a shared chunk at a position: its slots are visible from there on.

        ``turned`` says that its keys were rotated to that very position when they were computed.
        Returns the first of its slots.
        """
        first = self.num_slots
        positions = np.full(len(chunk.pages) * PAGE, HIDDEN, np.int32)
        positions[: chunk.tokens] = np.arange(chunk.tokens) + offset
        self.pages += chunk.pages
        self._offsets += [0 if turned else offset] * len(chunk.pages)
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

    def copy(self) -> "TableBuilder":
        """The same pages; what is added to or hidden in one does not show in the other."""
        other = TableBuilder()
        other.pages, other._offsets = list(self.pages), list(self._offsets)
        other._positions = list(self._positions)
        return other

    def rows(self, num_pages: int) -> tuple[HostArray, HostArray, HostArray]:
        """pages [M], offsets [M], slot_position [M*page], padded to ``num_pages`` hidden pages."""
        pad = num_pages - len(self.pages)
        slot_position = np.concatenate([*self._positions, np.full(pad * PAGE, HIDDEN, np.int32)])
        return (
            np.pad(np.array(self.pages, np.int32), (0, pad)),
            np.pad(np.array(self._offsets, np.int32), (0, pad)),
            slot_position,
        )


def batch_table(
    builders: Sequence[TableBuilder], rows: int, put: Callable[[HostArray, int], Array]
) -> PageTable:
    """The table of a batch of ``rows`` requests, empty ones added, on the device.

    ``put(array, rows)`` places an array whose first axis is the batch (Model.put_batch).
    """
    num_pages = bucket(max(len(b.pages) for b in builders), MIN_TABLE_PAGES)
    table = stack_tables([*builders, *[TableBuilder()] * (rows - len(builders))], num_pages)
    return jax.tree.map(lambda x: put(np.asarray(x), rows), table)


def stack_tables(builders: Sequence[TableBuilder], num_pages: int) -> PageTable:
    """One PageTable for a batch, every row padded to ``num_pages``."""
    pages, offsets, slots = zip(*(b.rows(num_pages) for b in builders), strict=True)
    return PageTable(
        pages=jnp.asarray(np.stack(pages)),
        offsets=jnp.asarray(np.stack(offsets)),
        slot_position=jnp.asarray(np.stack(slots)),
    )
