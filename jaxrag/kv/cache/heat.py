"""How warm chunks are: uses that count less with every request since, and who is the coldest."""

import heapq
import math
from collections.abc import Hashable

from jaxrag.base.errors import ConfigError

HALF_LIFE = 1000.0  # requests after which a use counts half as much
NEVER = (-math.inf, 0)  # used, or so long ago that it is forgotten

_FORGOTTEN = 10.0  # half-lives: what is colder than one use so long ago counts as never used
_FEWEST = 1024  # names that are kept in any case


class DecayedHeat[Name: Hashable]:
    """Uses of every name, each halved with every ``half_life`` requests since.

    All uses decay at one rate, so the order of two names changes only when one of them is used:
    heat is the logarithm of their sum relative to the first request, and is never aged (forward
    decay: Cormode, Shkapenyuk, Srivastava and Xu 2009, section 3). Names are remembered when what
    they stand for is gone, until they are colder than one use ten half-lives ago.
    """

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        """Raises ConfigError for a half-life that is not above 0."""
        if not 0 < half_life < math.inf:
            raise ConfigError(f"half_life={half_life}: expected requests, more than 0")
        self._half_life = half_life
        self._requests = self._uses = 0
        self._heat: dict[Name, tuple[float, int]] = {}
        self._most = _FEWEST

    def __len__(self) -> int:
        return len(self._heat)

    def tick(self) -> None:
        """One more request."""
        self._requests += 1

    def use(self, name: Name) -> None:
        """It is used by the latest request."""
        self._uses += 1
        now = self._requests / self._half_life
        before, _ = self.of(name)
        self._heat[name] = (now + math.log2(1 + 2 ** (before - now)), self._uses)
        if len(self._heat) > self._most:
            self._forget(now - _FORGOTTEN)

    def of(self, name: Name) -> tuple[float, int]:
        """Sorts names, the coldest first; of equally warm ones, what was not used for longer."""
        return self._heat.get(name, NEVER)

    def _forget(self, cold: float) -> None:
        self._heat = {name: it for name, it in self._heat.items() if it[0] >= cold}
        self._most = max(2 * len(self._heat), _FEWEST)


class Coldest[Name: Hashable]:
    """A set of names that gives its coldest; none of them is used while it is in it."""

    def __init__(self, heat: DecayedHeat[Name]) -> None:
        self._heat = heat
        self._of: dict[Name, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], Name]] = []  # with some that left

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def add(self, name: Name) -> None:
        """It may be taken from now on."""
        self._of[name] = self._heat.of(name)
        heapq.heappush(self._heap, (self._of[name], name))
        if len(self._heap) > 2 * len(self._of) + 64:
            self._heap = [(heat, it) for it, heat in self._of.items()]
            heapq.heapify(self._heap)

    def discard(self, name: Name) -> bool:
        """It may not be taken any more; was it here?"""
        return self._of.pop(name, None) is not None

    def first(self) -> Name:
        """The coldest; IndexError where there is none."""
        while self._of.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def check(self) -> None:
        """AssertionError unless heat is what it was, and the first is the coldest of all."""
        assert all(self._heat.of(name) in (heat, NEVER) for name, heat in self._of.items())
        if self._of:
            assert self.first() == min(self._of, key=lambda name: self._of[name])
