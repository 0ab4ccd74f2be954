"""The nearest keys of training queries, found once for several indexes over the same keys."""

import dataclasses
import hashlib
import time

from jaxrag.attention_index import nearest
from jaxrag.attention_index.knn import Neighbours
from jaxrag.types import HostArray


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Wall and processor time."""

    wall: float = 0.0
    processor: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall + other.wall, self.processor + other.processor)


class SharedNeighbours:
    """``nearest`` over one set of keys, which remembers what it found: the ``knn`` of ``build``.

    It always finds ``longest`` keys, of which a caller gets the first ones. ``taken`` says what
    finding would have cost where it was remembered, so that a build can be charged for it.
    """

    def __init__(self, longest: int) -> None:
        """``longest``: the most keys that anybody asks for; no more than there are."""
        self._longest = longest
        self._known: dict[bytes, tuple[Neighbours, Seconds]] = {}
        self._taken = Seconds()

    def __call__(self, queries: HostArray, keys: HostArray, k: int) -> Neighbours:
        """As ``nearest``; ``keys`` are the same in every call, ``k`` is at most ``longest``."""
        name = hashlib.blake2b(queries.tobytes()).digest()
        if name in self._known:
            found, cost = self._known[name]
            self._taken += cost
        else:
            start, used = time.perf_counter(), time.process_time()
            found = nearest(queries, keys, self._longest)
            cost = Seconds(time.perf_counter() - start, time.process_time() - used)
            self._known[name] = found, cost
        return Neighbours(found.ids[:, :k], found.scores[:, :k])

    def taken(self) -> Seconds:
        """What was saved since the last call."""
        taken, self._taken = self._taken, Seconds()
        return taken
