"""How much may wait, and how often a tenant may ask; and when to ask again."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable

from jaxrag.base.rates import WorkRate
from jaxrag.server.errors import busy
from jaxrag.server.settings import ServerSettings
from jaxrag.server.tenants import Access

_MINUTE = 60.0
_LEAST = 1e-3  # tokens that are left of a minute's where a tenant may ask
_SHORTEST, _LONGEST = 1.0, 120.0  # seconds that a client is asked to wait


@dataclasses.dataclass(eq=False)
class Ticket:
    """One request that was let in.

    Attributes:
      access: of its sender.
      prompts: that it has.
      tokens: of these, once they are known.
      waits: whether its first token is still to come.
    """

    access: Access
    prompts: int = 1
    tokens: int = 0
    waits: bool = True


class Bucket:
    """So many a minute, all of them at once at most."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._rate = per_minute / _MINUTE
        self._most = max(per_minute, 1.0)
        self._clock = clock
        self._left = self._most
        self._last = clock()

    def take(self, amount: float) -> None:
        """Take some, there or not: what is not there comes off what comes next."""
        self._fill()
        self._left -= amount

    def seconds_until(self, amount: float) -> float:
        """How long until so much is there; 0 where it is."""
        self._fill()
        return max(amount - self._left, 0.0) / self._rate

    def _fill(self) -> None:
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._last) * self._rate)
        self._last = now


class Limits:
    """What is let in. For the event loop's thread."""

    def __init__(
        self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._tickets: set[Ticket] = set()
        self._waiting = Counter[str]()
        self._tokens = 0
        self._first = WorkRate()  # tokens of prompts whose first token came
        self._requests: dict[str, Bucket] = {}
        self._spent: dict[str, Bucket] = {}

    @property
    def running(self) -> int:
        """Requests that were let in and have not left."""
        return len(self._tickets)

    @property
    def waiting(self) -> int:
        """Those of them whose first token is still to come."""
        return self._waiting.total()

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of these, as far as they are known."""
        return self._tokens

    def seconds_until_room(self) -> float:
        """How long what waits now will take, by the measured rate; 1 to 120 seconds."""
        rate = self._first.per_second
        if rate is None:
            return _SHORTEST
        return min(max(self._tokens / rate, _SHORTEST), _LONGEST)

    def enter(self, access: Access, prompts: int = 1) -> Ticket:
        """Let a request in; Problem 429 where too many wait, or its tenant asks too often.

        One with several prompts counts as so many, and is let in alone whatever their number.
        """
        self.check_rate(access)
        settings, waiting = self._settings, self.waiting
        if waiting and waiting + prompts > settings.max_waiting:
            raise busy(
                f"{waiting} requests wait and {settings.max_waiting} may; send it again later",
                self.seconds_until_room(),
            )
        own, most = self._waiting[access.tenant], settings.max_waiting_per_tenant
        if most is not None and own and own + prompts > most:
            raise busy(
                f"{own} of your requests wait and {most} may; send it again later",
                self.seconds_until_room(),
            )
        self._first.begin(self._clock())
        ticket = Ticket(access, prompts)
        self._tickets.add(ticket)
        self._waiting[access.tenant] += prompts
        return ticket

    def known(self, ticket: Ticket, tokens: int) -> None:
        """The length of its prompt is known; Problem 429 where too many tokens wait."""
        most, others = self._settings.max_waiting_tokens, self._tokens
        if others and others + tokens > most:
            raise busy(
                f"{others} prompt tokens wait, {tokens} more would be above {most}; send it again "
                "later",
                self.seconds_until_room(),
            )
        ticket.tokens = tokens
        self._tokens += tokens

    def started(self, ticket: Ticket) -> None:
        """Its first token is there."""
        if ticket.waits:
            self._first.work(self._clock(), ticket.tokens)
            self._stop_waiting(ticket)

    def leave(self, ticket: Ticket, generated: int = 0) -> None:
        """It is over, however it ended."""
        if ticket not in self._tickets:
            return
        self._stop_waiting(ticket)
        self._tickets.remove(ticket)
        if not self._tickets:
            self._first.work(self._clock(), 0.0)
            self._first.rest()
        bucket = self._spent.get(ticket.access.tenant)
        if bucket is not None:
            bucket.take(ticket.tokens + generated)

    def _stop_waiting(self, ticket: Ticket) -> None:
        if ticket.waits:
            ticket.waits = False
            self._tokens -= ticket.tokens
            self._waiting[ticket.access.tenant] -= ticket.prompts

    def check_rate(self, access: Access) -> None:
        """Count a request; Problem 429 where its tenant asks too often."""
        limits = access.limits
        for what, most, buckets, amount in (
            ("requests", limits.requests_per_minute, self._requests, 1.0),
            ("tokens", limits.tokens_per_minute, self._spent, _LEAST),
        ):
            if most is None:
                continue
            bucket = buckets.setdefault(access.tenant, Bucket(most, self._clock))
            seconds = bucket.seconds_until(amount)
            if seconds:
                raise busy(
                    f"your limit of {most:g} {what} a minute is reached; send it again later",
                    seconds,
                    "rate_limit_exceeded",
                )
            if buckets is self._requests:
                bucket.take(amount)
