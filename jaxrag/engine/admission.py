"""Who waits for pages, in what order, and what every tenant was served."""

import dataclasses
import itertools
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping

from jaxrag.base.errors import ConfigError, Overloaded
from jaxrag.engine.sequence import RequestStatus, Sequence

QUEUED = {RequestStatus.WAITING, RequestStatus.SWAPPED}
HUNGRY = QUEUED | {RequestStatus.LOADING, RequestStatus.READY}
RUNNING = {
    RequestStatus.PREFILL,
    RequestStatus.INDEXING,
    RequestStatus.DECODE,
    RequestStatus.SWAPPING,
}


@dataclasses.dataclass(frozen=True)
class SchedulerSettings:
    """Bounds and policy.

    Attributes:
      static: the rows of a batch are filled only when all of them are empty: static batching.
      classes: priorities are 0 to classes - 1, 0 is served first; more than one turns preemption
        on.
      weights: of tenants, 1 where not named: with twice the weight a tenant gets twice the service.
      max_waiting: most requests that wait; None: any number.
      max_waiting_tokens: most prompt tokens that wait; a request that finds none waiting is let
        in whatever its length.
      max_waiting_per_tenant: most requests of one tenant that wait.
      max_bypass: how often a request that is first, and does not fit, is passed by smaller ones;
        also how many of those behind it are looked at.
      max_bypass_seconds: for how long it is.
      max_preemptions: how often one request is preempted.
    """

    static: bool = False
    classes: int = 1
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None
    max_waiting_per_tenant: int | None = None
    max_bypass: int = 16
    max_bypass_seconds: float = 2.0
    max_preemptions: int = 2

    def __post_init__(self) -> None:
        if self.classes < 1:
            raise ConfigError(f"{self.classes} priority classes; there is at least 1")
        for tenant, weight in self.weights.items():
            if not weight > 0:
                raise ConfigError(f"tenant {tenant!r} has weight {weight}; give it more than 0")


def admission(sequence: Sequence) -> tuple[int, int]:
    """Sorts admitted requests: the better class first, then as they were admitted."""
    assert sequence.start_tag is not None
    return sequence.request.priority, sequence.start_tag[1]


def row_order(sequence: Sequence) -> tuple[int, float, int]:
    """Sorts those who are ready for a row: the better class first, then by their start tags."""
    assert sequence.start_tag is not None
    return sequence.request.priority, *sequence.start_tag


class FairStart:
    """Who gets a row next: start-time fair queueing over tenants.

    A tenant that has many requests admitted does not keep another's from the next row that is free:
    each begins where its tenant's last one would have ended, and none before what was begun last.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._ends: dict[str, float] = {}  # of every tenant's last request
        self._now = 0.0  # the start tag of the last who began
        self._admitted = itertools.count()

    def admit(self, sequence: Sequence) -> None:
        """Give a request its start tag."""
        start = max(self._now, self._ends.get(sequence.request.tenant, 0.0))
        sequence.start_tag = start, next(self._admitted)
        self._ends[sequence.request.tenant] = start
        self.charge(sequence.request.tenant, sequence.cost)

    def charge(self, tenant: str, amount: float) -> None:
        """What a tenant was served puts off its next requests."""
        self._ends[tenant] += amount / self._weights.get(tenant, 1.0)

    def begin(self, sequence: Sequence) -> None:
        """It gets its row."""
        assert sequence.start_tag is not None
        self._now = max(self._now, sequence.start_tag[0])


class Seats:
    """The rows of a batch: which requests hold one, and which are ready for one."""

    def __init__(self, rows: int | None) -> None:
        self.rows = rows  # None: of requests that need none
        self.members = 0  # live requests
        self.hungry = 0  # those of them that have no row yet
        self.ready: list[Sequence] = []
        self.held: dict[int, Sequence] = {}
        self._given = 0  # rows given since all were empty
        self._closed = False  # to more, until all are empty

    def room(self, leaving: Collection[Sequence] = ()) -> int:
        """Rows to give, once those who leave are gone."""
        staying = [holder for holder in self.held.values() if holder not in leaving]
        if self._closed or any(holder.alone for holder in staying):
            return 0
        return (self.rows or 0) - len(staying)

    def first(self, static: bool) -> Sequence | None:
        """Who gets a row now; none overtakes one that waits to be alone."""
        sequence = self.ready[0] if self.ready else None
        if self.rows is None:
            return sequence
        able = sequence is not None and self.room() > 0 and not (sequence.alone and self.held)
        if static and self.held and (not able or self._given == self.rows):
            self._closed, able = True, False
        return sequence if able else None

    def take(self, sequence: Sequence) -> None:
        """Its first ready request gets a row."""
        self.ready.remove(sequence)
        if self.rows is not None:
            row = next(row for row in range(self.rows) if row not in self.held)
            self.held[row] = sequence
            self._given += 1

    def row_of(self, sequence: Sequence) -> int | None:
        """The row that it has."""
        return next((row for row, holder in self.held.items() if holder is sequence), None)

    def leave(self, sequence: Sequence) -> None:
        """It gives its row back, or no longer wants one."""
        if sequence.status is RequestStatus.READY:
            self.ready.remove(sequence)
        if (row := self.row_of(sequence)) is not None:
            del self.held[row]
            if not self.held:
                self._given, self._closed = 0, False


class _Class:
    """The queue of one priority class."""

    def __init__(self) -> None:
        self.returned: list[Sequence] = []  # admitted before, in that order
        self.head: Sequence | None = None  # of the others, once it was first and did not fit
        self.tenants: dict[str, OrderedDict[int, Sequence]] = {}


class Queue:
    """Who waits, in what order, and what every tenant was served."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.waiting = Counter[str]()  # requests of every tenant that has some here
        self.service: dict[str, float] = {}
        self.tokens = 0
        self._settings = settings
        self._classes = [_Class() for _ in range(settings.classes)]
        self._last = ""  # the tenant that left last
        # Who was first and did not fit: since when, and how often it was passed.
        self.blocked: dict[Sequence, tuple[float, int]] = {}

    def check_room(self, sequence: Sequence) -> None:
        """Overloaded when so much waits that this request may not."""
        settings, requests = self._settings, self.waiting.total()
        most = settings.max_waiting
        if most is not None and requests >= most:
            raise Overloaded(
                f"{requests} requests wait and {most} may; send it again later or raise max_waiting"
            )
        most = settings.max_waiting_tokens
        if most is not None and requests and self.tokens + sequence.num_tokens > most:
            raise Overloaded(
                f"{self.tokens} prompt tokens wait, {sequence.num_tokens} more would be above "
                f"{most}; send it again later or raise max_waiting_tokens"
            )
        of_tenant, most = self.waiting[sequence.request.tenant], settings.max_waiting_per_tenant
        if most is not None and of_tenant >= most:
            raise Overloaded(
                f"{of_tenant} requests of tenant {sequence.request.tenant!r} wait and {most} may; "
                "send it again later or raise max_waiting_per_tenant"
            )

    def charge(self, tenant: str, amount: float) -> None:
        """The tenant was served this much."""
        self.service[tenant] += amount / self._settings.weights.get(tenant, 1.0)

    def add(self, sequence: Sequence) -> None:
        """Behind its tenant's others; who was admitted before: in its old place, ahead of all."""
        tenant, row = sequence.request.tenant, self._classes[sequence.request.priority]
        if not self.waiting[tenant]:  # what it did not use while it was idle is gone
            others = (self.service[name] for name in self.waiting)
            least = min(others, default=self.service.get(self._last, 0.0))
            self.service[tenant] = max(self.service.get(tenant, 0.0), least)
        self.waiting[tenant] += 1
        self.tokens += sequence.num_tokens
        if sequence.start_tag is None:
            row.tenants.setdefault(tenant, OrderedDict())[sequence.number] = sequence
        else:
            insort(row.returned, sequence, key=admission)

    def remove(self, sequence: Sequence) -> None:
        """It is admitted, or will never be."""
        tenant, row = sequence.request.tenant, self._classes[sequence.request.priority]
        if sequence.start_tag is None:
            del row.tenants[tenant][sequence.number]
            if not row.tenants[tenant]:
                del row.tenants[tenant]
        else:
            row.returned.remove(sequence)
        self.blocked.pop(sequence, None)
        if row.head is sequence:
            row.head = None
        self.tokens -= sequence.num_tokens
        self.waiting[tenant] -= 1
        if not self.waiting[tenant]:
            del self.waiting[tenant]
            self._last = tenant

    def block(self, sequence: Sequence, now: float) -> None:
        """It is first and does not fit: from now on it stays ahead of other tenants' requests."""
        self.blocked.setdefault(sequence, (now, 0))
        if sequence.start_tag is None:
            self._classes[sequence.request.priority].head = sequence

    def passed(self, sequence: Sequence) -> None:
        """A smaller one is admitted before it."""
        since, times = self.blocked[sequence]
        self.blocked[sequence] = since, times + 1

    def exhausted(self, sequence: Sequence, now: float) -> bool:
        """Whether no request may pass it any more."""
        since, times = self.blocked.get(sequence, (now, 0))
        settings = self._settings
        return times >= settings.max_bypass or now - since >= settings.max_bypass_seconds

    def __iter__(self) -> Iterator[tuple[Sequence, bool]]:
        """Those to look at, in the order of admission, and whether each is first of its class."""
        for row in self._classes:
            first = True
            for sequence in self._look(row):
                yield sequence, first
                first = False

    def heads(self) -> list[Sequence]:
        """The first of every class that has some."""
        firsts = (next(self._look(row), None) for row in self._classes)
        return [sequence for sequence in firsts if sequence is not None]

    def __contains__(self, sequence: Sequence) -> bool:
        row = self._classes[sequence.request.priority]
        if sequence.start_tag is not None:
            return sequence in row.returned
        return sequence.number in row.tenants.get(sequence.request.tenant, ())

    def _look(self, row: _Class) -> Iterator[Sequence]:
        """The head of the class, and a bounded number of those behind it.

        Behind it: the first of every tenant, the least served first, then the second of every one.
        """
        for place, sequence in enumerate(row.returned):
            if place <= self._settings.max_bypass or sequence in self.blocked:
                yield sequence
        tenants = row.tenants
        if not tenants:
            return

        def least_served(name: str) -> tuple[float, int]:
            return self.service[name], next(iter(tenants[name].values())).number

        head = row.head
        if head is None:
            head = next(iter(tenants[min(tenants, key=least_served)].values()))
        yield head
        first = [
            itertools.islice(tenants[tenant].values(), self._settings.max_bypass + 1)
            for tenant in sorted(tenants, key=least_served)
        ]
        behind = (
            seq for rank in itertools.zip_longest(*first) for seq in rank if seq not in (None, head)
        )
        yield from itertools.islice(behind, self._settings.max_bypass)
