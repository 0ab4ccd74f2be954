"""How fast things go of late: what was done and the time it took, older of both counting less."""

import dataclasses


@dataclasses.dataclass
class Rate:
    """Something per second."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float, keep: float) -> None:
        """So much more was done in so much time; ``keep`` of all that was before counts on."""
        self.amount = keep * self.amount + amount
        self.seconds = keep * self.seconds + seconds

    @property
    def per_second(self) -> float | None:
        """The rate; None before anything was done, and where no time passed."""
        return self.amount / self.seconds if self.amount and self.seconds else None


@dataclasses.dataclass
class WorkRate(Rate):
    """Something per second of work: time without work does not count.

    Attributes:
      half_life: seconds of work after which what was done counts half as much.
    """

    half_life: float = 30.0
    _last: float | None = dataclasses.field(default=None, init=False)

    def begin(self, now: float) -> None:
        """There is work from now on."""
        if self._last is None:
            self._last = now

    def work(self, now: float, amount: float) -> None:
        """So much was done since the last time."""
        passed = 0.0 if self._last is None else max(now - self._last, 0.0)
        self.add(amount, passed, 0.5 ** (passed / self.half_life))
        self._last = now

    def rest(self) -> None:
        """There is no work from the last time until the next."""
        self._last = None
