"""How many engines a server is to have, by how long what waits for them will take."""

import dataclasses

UP_SECONDS = 5.0  # of work that waits, for each engine, above which one more is wanted
UP_AFTER = 10.0  # seconds for which that has to be so
DOWN_AFTER = 300.0  # seconds after which one fewer is wanted, where fewer had done as well


@dataclasses.dataclass
class Scaling:
    """Engines that are wanted, between two bounds. Slow to end one: its pool is lost with it.

    Attributes:
      least: of engines.
      most: likewise.
    """

    least: int
    most: int
    _busy_since: float | None = dataclasses.field(default=None, init=False)
    _idle_since: float | None = dataclasses.field(default=None, init=False)

    def wanted(self, now: float, queued_seconds: float, engines: int) -> int:
        """How many, after another look.

        Args:
          now: seconds, by any clock that does not go back.
          queued_seconds: of work of all engines together that is not done.
          engines: that there are, ready or not.
        """
        if engines < self.least:
            return self.least
        busy = queued_seconds > UP_SECONDS * engines
        idle = queued_seconds <= UP_SECONDS * (engines - 1) / 2
        self._busy_since = (self._busy_since or now) if busy else None
        self._idle_since = (self._idle_since or now) if idle else None
        if busy and engines < self.most and now - (self._busy_since or now) >= UP_AFTER:
            self._busy_since = None
            return engines + 1
        if idle and engines > self.least and now - (self._idle_since or now) >= DOWN_AFTER:
            self._idle_since = None
            return engines - 1
        return min(engines, self.most)
