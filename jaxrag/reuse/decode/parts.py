"""Some keys of a layer of a request, in indexes that hold copies of them."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.reuse.attention_index import FoundKeys, Searcher
from jaxrag.reuse.attention_index.spec import Exact, Trained
from jaxrag.reuse.decode.footprint import Account


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some keys of one layer of a request, indexed.

    Attributes:
      positions: [S] int32 where their keys stand in the prompt; -1 where a key is not to be found.
      offset: a key at position p is rotated to p less this, and so is a query that asks for it.
      exact: searchers that find exactly what there is, to compare with; empty where none is.
    """

    searchers: Sequence[Searcher]
    positions: HostArray
    offset: int = 0
    exact: Sequence[Searcher] = ()

    @functools.cached_property
    def hidden(self) -> int:
        """How many keys are not to be found."""
        return int((self.positions < 0).sum())

    @property
    def misses(self) -> bool:
        """Whether any of its indexes may miss a key."""
        return any(not isinstance(each.index.spec, Exact) for each in self.searchers)

    def account(self, *, stored: bool = False) -> Account:
        """Keys and bytes; ``stored`` says that the indexes were there already."""
        indexes = [each.index for each in self.searchers]
        keys = sum(map(len, self.searchers))
        return Account(
            keys=keys,
            index_bytes=sum(each.nbytes for each in self.searchers),
            stored=keys if stored else 0,
            trained=0 if stored else sum(isinstance(index.spec, Trained) for index in indexes),
            notes=tuple(dict.fromkeys(index.note for index in indexes if index.note)),
        )

    def scan(self, kv_head: int, q: HostArray, k: int) -> FoundKeys:
        """``best`` by a scan of every key."""
        searcher = self.searchers[kv_head]
        keys = searcher.scan(q, min(len(searcher), k + self.hidden))
        where = self.positions[keys.ids]
        scores = np.where(where >= 0, keys.scores, np.float32(-np.inf))
        return FoundKeys(where, scores, keys.scanned)

    def best(
        self,
        kv_head: int,
        head: int,
        q: HostArray,
        k: int,
        *,
        count: bool = False,
        exact: bool = False,
        times: int = 1,
    ) -> FoundKeys:
        """Positions of the best keys for ``q`` [H] of one query head of the group: at least k.

        ``q`` is rotated as the keys are; ``times`` multiplies the effort. Fewer where there are
        fewer, or the index finds no more; -1 where there is none. Ids and scores [n], scanned [].
        """
        searcher = (self.exact if exact else self.searchers)[kv_head]
        keys = len(searcher)
        most = min(keys, k + self.hidden)
        # Hidden keys take places. A graph's search finds up to ef keys at no further cost; only
        # where it misses keys then is a wider one worth it.
        free = searcher.kept_of(head)
        free = None if free is None else free * times
        effort = searcher.chosen_effort(head) * times
        asked = most if free is None or not self.hidden else min(most, max(k, free))
        while True:
            found = searcher.search_head(head, q[None], asked, effort=effort, count=count)
            ids, scores = found.ids[0], found.scores[0]
            there = ids >= 0
            where = np.where(there, self.positions[ids], -1)
            short = (where >= 0).sum() < min(k, keys - self.hidden) and there.all()
            if asked == most or not short:
                scores = np.where(where >= 0, scores, np.float32(-np.inf))
                return FoundKeys(where, scores, found.scanned[0])
            asked = most
