"""The host's side of retrieval: indexes over the keys of the requests in decode, and their search.

The compiled step asks through one callback a layer. It knows requests by a number, so that nothing
of a request is part of a compiled program. Compiled programs name a ``HostSearch`` and outlive the
model; it holds nothing of one.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxrag.attention_index import (
    AttentionIndex,
    Exact,
    Found,
    Searcher,
    build,
    open_index,
    rotated,
    search_heads,
)
from jaxrag.attention_index.spec import Trained
from jaxrag.config import RopeConfig
from jaxrag.decode.stored import StoredIndexes
from jaxrag.types import Array, HostArray

NOBODY = -1  # the number of a padding row


@dataclasses.dataclass(frozen=True)
class Account:
    """What the indexes of some requests cost, and what was asked of them.

    Attributes:
      keys: that were indexed, summed over layers and KV heads.
      index_bytes: of these keys and of what is built over them on the host.
      stored: of these keys, those in indexes that their chunks were stored with.
      trained: indexes that were built from queries for these requests.
      searches: queries of single heads; this and what follows only where ``HostSearch.measure`` is
        set.
      scanned: keys whose score these computed.
      wanted: keys that an exact search in float32 gives.
      found: how many of the wanted ones were found.
      notes: why an index became an exact scan or was not used, each reason once.
    """

    keys: int = 0
    index_bytes: int = 0
    stored: int = 0
    trained: int = 0
    searches: int = 0
    scanned: int = 0
    wanted: int = 0
    found: int = 0
    notes: tuple[str, ...] = ()

    def __add__(self, other: "Account") -> "Account":
        both = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in dataclasses.fields(self)
        }
        return Account(**{**both, "notes": tuple(dict.fromkeys(both["notes"]))})


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some keys of one layer of a request, indexed.

    Attributes:
      searchers: one a KV head.
      positions: [S] int32 where their keys stand in the prompt; -1 where a key is not to be found.
      offset: a key at position p is rotated to p less this, and so is a query that asks for it.
      exact: searchers that find exactly what there is, to compare with; empty where nobody does.
    """

    searchers: Sequence[Searcher]
    positions: HostArray
    offset: int = 0
    exact: Sequence[Searcher] = ()

    @functools.cached_property
    def hidden(self) -> int:
        """How many keys are not to be found."""
        return int((self.positions < 0).sum())

    def best(
        self,
        q: HostArray,
        k: int,
        threads: ThreadPoolExecutor,
        *,
        count: bool = False,
        exact: bool = False,
    ) -> Found:
        """Positions of the best keys for q [K, G, H], rotated as they are: at least k of each head.

        Fewer where there are fewer, or the index finds no more; -1 where there is none.
        """
        searchers = self.exact if exact else self.searchers
        keys = len(searchers[0])
        most = min(keys, k + self.hidden)
        # Hidden keys take places. A graph's search finds up to ef keys at no further cost; only
        # where some head misses keys then is a wider one worth it.
        free = [each.kept for each in searchers if each.kept is not None]
        asked = min(most, max(k, min(free))) if free else most
        while True:
            found = search_heads(searchers, q, asked, threads, count=count)
            there = found.ids >= 0
            where = np.where(there, self.positions[found.ids], -1)
            short = ((where >= 0).sum(-1) < min(k, keys - self.hidden)) & there.all(-1)
            if asked == most or not short.any():
                scores = np.where(where >= 0, found.scores, np.float32(-np.inf))
                return Found(where, scores, found.scanned)
            asked = most


@dataclasses.dataclass(eq=False)
class _Request:
    """What is held of a request in decode: the parts of every layer so far, and its account."""

    layers: list[Sequence[Part]] = dataclasses.field(default_factory=list)
    account: Account = dataclasses.field(default_factory=Account)


@dataclasses.dataclass(eq=False)
class HostSearch:
    """The indexes of all requests in decode with one model, and what they cost, by request number.

    Attributes:
      threads: that search the heads of a layer; None: as many as there are cores, and a few.
      measure: count the keys that are scanned and compare what was found with an exact search:
        slower, and with one more copy of the keys of requests that are indexed then.
      documents: indexes that chunks were stored with.
    """

    threads: int | None = None
    measure: bool = False
    documents: StoredIndexes = dataclasses.field(default_factory=StoredIndexes)
    _requests: dict[int, _Request] = dataclasses.field(default_factory=dict)
    _numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    _pool: ThreadPoolExecutor | None = None

    def admit(self) -> int:
        """A number for a request, until it is released."""
        number = next(self._numbers)
        self._requests[number] = _Request()
        return number

    def release(self, numbers: Iterable[int]) -> None:
        """The requests are done: their indexes go, and their accounts."""
        for number in numbers:
            self._requests.pop(number, None)

    def close(self) -> None:
        """Nobody asks any more: indexes that were kept go, and the threads end.

        Compiled programs name this object and outlive the model whose requests it served.
        """
        self.release(list(self._requests))
        self.documents = StoredIndexes()
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def account_of(self, numbers: Iterable[int]) -> Account:
        """What these requests cost so far, summed; KeyError for one that was released."""
        return sum((self._requests[number].account for number in numbers), Account())

    def open(
        self,
        number: int,
        made: Sequence[AttentionIndex],
        keys: HostArray,
        positions: HostArray,
    ) -> Part:
        """Indexes that were made for one layer of a request.

        Args:
            number: of the request.
            made: one a KV head.
            keys: [K, S, H] that they are over, rotated to their positions.
            positions: [S] int32 where the keys stand in the prompt.
        """
        trained = sum(isinstance(index.spec, Trained) for index in made)
        searchers = [open_index(index) for index in made]
        self._add(number, searchers, trained=trained)
        return Part(searchers, positions, exact=self._exact_of(keys))

    def adopt(
        self, number: int, searchers: Sequence[Searcher], positions: HostArray, offset: int
    ) -> Part:
        """Indexes that were there already, as a part of one layer of a request."""
        self._add(number, searchers, stored=sum(map(len, searchers)))
        keys = [each.all_keys() for each in searchers] if self.measure else ()
        return Part(searchers, positions, offset, self._exact_of(keys))

    def note(self, number: int, text: str) -> None:
        """Why an index of a request was not used."""
        self._requests[number].account += Account(notes=(text,))

    def add_layer(self, number: int, parts: Sequence[Part]) -> None:
        """The next layer of a request: its parts, which have no position in common."""
        self._requests[number].layers.append(parts)

    def find(
        self, numbers: Array, layer: Array, q: Array, position: Array, k: int, rope: RopeConfig
    ) -> Array:
        """Positions of the best k keys for q [B, K, G, H] before rotation: [B, K, G, k] int32.

        -1 where there are fewer. ``numbers`` [B] are the requests', ``position`` [B] the queries'.
        Runs inside a compiled program; search is on the host.
        """
        shape = jax.ShapeDtypeStruct((*q.shape[:3], k), jnp.int32)

        def search(
            numbers: HostArray, layer: HostArray, q: HostArray, position: HostArray
        ) -> HostArray:
            q, position = np.asarray(q), np.asarray(position)
            return self._search(int(layer), np.asarray(numbers), q, position, k, rope)

        found: Array = io_callback(search, shape, numbers, layer, q, position, ordered=False)
        return found

    def _search(
        self,
        layer: int,
        numbers: HostArray,
        q: HostArray,
        position: HostArray,
        k: int,
        rope: RopeConfig,
    ) -> HostArray:
        out = np.full((*q.shape[:3], k), -1, np.int32)
        for row, number in enumerate(numbers):
            if number == NOBODY or position[row] < 0:  # nobody has the row, or it is done
                continue
            if not (parts := self._requests[int(number)].layers[layer]):
                continue
            asked = [
                rotated(q[row], np.full(q.shape[2], position[row] - part.offset), rope)
                for part in parts
            ]
            found = self._best(parts, asked, k, exact=False)
            out[row, ..., : found.ids.shape[-1]] = found.ids
            if self.measure and all(part.exact for part in parts):
                self._count(int(number), found, self._best(parts, asked, k, exact=True).ids)
        return out

    def _best(
        self, parts: Sequence[Part], asked: Sequence[HostArray], k: int, *, exact: bool
    ) -> Found:
        """The k best of what all parts find for their queries [K, G, H], best first."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, "search")
        count = self.measure and not exact
        each = [
            part.best(q, k, self._pool, count=count, exact=exact)
            for part, q in zip(parts, asked, strict=True)
        ]
        scores = np.concatenate([found.scores for found in each], axis=-1)
        order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
        ids = np.concatenate([found.ids for found in each], axis=-1)
        return Found(
            np.take_along_axis(ids, order, -1),
            np.take_along_axis(scores, order, -1),
            np.sum([found.scanned for found in each], axis=0),
        )

    def _exact_of(self, keys: Iterable[HostArray]) -> list[Searcher]:
        """Exact searchers of the keys [S, H] of every head, where it is measured."""
        if not self.measure:
            return []
        return [open_index(build(head, None, Exact("float32"))) for head in keys]

    def _add(self, number: int, searchers: Sequence[Searcher], **more: Any) -> None:
        """Add a part to the account of a request."""
        self._requests[number].account += Account(
            keys=sum(map(len, searchers)),
            index_bytes=sum(each.nbytes for each in searchers),
            notes=tuple(dict.fromkeys(each.index.note for each in searchers if each.index.note)),
            **more,
        )

    def _count(self, number: int, found: Found, wanted: HostArray) -> None:
        """Add searches of [K, G] heads to the account of a request."""
        both = (found.ids[..., :, None] == wanted[..., None, :]) & (wanted[..., None, :] >= 0)
        self._requests[number].account += Account(
            searches=found.scanned.size,
            scanned=int(found.scanned.sum()),
            wanted=int((wanted >= 0).sum()),
            found=int(both.any(-2).sum()),
        )
