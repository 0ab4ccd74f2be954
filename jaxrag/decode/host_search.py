"""The host's side of retrieval: indexes over the keys of the requests in decode, and their search.

The compiled step asks through one callback a layer. It knows requests by a number, so that nothing
of a request is part of a compiled program.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxrag import attention_index
from jaxrag.attention_index import Exact, Found, Searcher, Spec, build, open_index, search_heads
from jaxrag.config import ModelConfig
from jaxrag.types import Array, HostArray

NOBODY = -1  # the number of a padding row


@dataclasses.dataclass(frozen=True)
class Account:
    """What the indexes of some requests cost, and what was asked of them.

    Attributes:
      keys, index_bytes: keys indexed, and bytes of them and of what is built over them on the host.
      searches, scanned: queries of single heads, and keys whose score they computed. wanted, found:
        keys that an exact search in float32 gives, and how many of them were found. Only where
        ``HostSearch.measure`` is set.
      notes: why an index became an exact scan, each reason once.
    """

    keys: int = 0
    index_bytes: int = 0
    searches: int = 0
    scanned: int = 0
    wanted: int = 0
    found: int = 0
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(eq=False)
class HostSearch:
    """The indexes of all requests in decode with one model: [layer][KV head] by request number.

    ``measure`` counts the keys that are scanned and compares what was found with an exact search:
    slower, and with one more copy of the keys of requests that are admitted then.
    """

    threads: int | None = None
    measure: bool = False
    account: Account = dataclasses.field(default_factory=Account)
    _indexes: dict[int, list[list[Searcher]]] = dataclasses.field(default_factory=dict)
    _exact: dict[int, list[list[Searcher]]] = dataclasses.field(default_factory=dict)
    _numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    _pool: ThreadPoolExecutor | None = None

    def admit(self) -> int:
        """A number for a request; its layers are added in order."""
        number = next(self._numbers)
        self._indexes[number] = []
        self._exact[number] = []
        return number

    def add_layer(
        self, number: int, keys: HostArray, queries: HostArray | None, spec: Spec
    ) -> None:
        """Index one layer's keys [K, S, H] with training queries [K, G, m, H], both rotated."""
        searchers = []
        if keys.shape[1]:
            heads = range(len(keys))
            made = [build(keys[h], None if queries is None else queries[h], spec) for h in heads]
            notes = dict.fromkeys((*self.account.notes, *(index.note for index in made)))
            searchers = [open_index(index) for index in made]
            self.account = dataclasses.replace(
                self.account,
                keys=self.account.keys + sum(map(len, searchers)),
                index_bytes=self.account.index_bytes + sum(s.nbytes for s in searchers),
                notes=tuple(filter(None, notes)),
            )
        self._indexes[number].append(searchers)
        exact = Exact("float32")
        asked = keys if searchers and self.measure else keys[:0]
        self._exact[number].append([open_index(build(head, None, exact)) for head in asked])

    def release(self, numbers: Sequence[int]) -> None:
        """The requests are done."""
        for number in numbers:
            self._indexes.pop(number, None)
            self._exact.pop(number, None)

    def find(self, numbers: Array, layer: Array, q: Array, k: int) -> Array:
        """Rows of the best k keys for q [B, K, G, H], rotated: [B, K, G, k] int32, -1 where none.

        ``numbers`` [B] are the requests'. Runs inside a compiled program; search is on the host.
        """
        shape = jax.ShapeDtypeStruct((*q.shape[:3], k), jnp.int32)

        def search(numbers: HostArray, layer: HostArray, q: HostArray) -> HostArray:
            return self._search(np.asarray(numbers), int(layer), np.asarray(q), k)

        found: Array = io_callback(search, shape, numbers, layer, q, ordered=False)
        return found

    def _search(self, numbers: HostArray, layer: int, q: HostArray, k: int) -> HostArray:
        out = np.full((*q.shape[:3], k), -1, np.int32)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, "search")
        for row, number in enumerate(numbers):
            if number == NOBODY or not (searchers := self._indexes[int(number)][layer]):
                continue
            most = min(k, len(searchers[0]))
            found = search_heads(searchers, q[row], most, self._pool, count=self.measure)
            out[row, ..., :most] = found.ids
            if self.measure and (exact := self._exact[int(number)][layer]):
                wanted = search_heads(exact, q[row], most, self._pool).ids
                self._count(found, wanted)
        return out

    def _count(self, found: Found, wanted: HostArray) -> None:
        """Add searches of [K, G] heads to the account."""
        both = (found.ids[..., :, None] == wanted[..., None, :]).any(-2)
        self.account = dataclasses.replace(
            self.account,
            searches=self.account.searches + found.scanned.size,
            scanned=self.account.scanned + int(found.scanned.sum()),
            wanted=self.account.wanted + wanted.size,
            found=self.account.found + int(both.sum()),
        )


def training_queries(
    queries: HostArray, positions: HostArray, config: ModelConfig, at: int | None
) -> HostArray | None:
    """Queries [m, N, H] of a prompt's tokens, rotated to ``at``: [K, G, m, H]; None without any.

    ``positions`` [m] are their own; -1 where there is none. With ``at`` None they stay there.
    """
    there = positions >= 0
    if not there.any():
        return None
    grouped = queries[there].astype(np.float32)
    grouped = grouped.reshape(-1, config.num_kv_heads, config.group_size, config.head_dim)
    banks = (
        attention_index.QueryBank(heads, positions[there])
        for heads in grouped.transpose(1, 2, 0, 3)
    )
    placed = (bank.own(config.rope) if at is None else bank.at(config.rope, at) for bank in banks)
    return np.stack(list(placed))
