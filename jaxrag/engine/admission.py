"""Who waits for pages, in what order, and what every tenant was served."""

import dataclasses
import enum
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from itertools import islice, zip_longest

from jaxrag.base.errors import ConfigError, Overloaded


class RequestStatus(enum.Enum):
    """Status of a request."""

    WAITING = "waiting"  # holds nothing
    LOADING = "loading"  # holds all its pages; some chunks are on their way into theirs
    READY = "ready"  # its last chunk is there; no row yet
    PREFILL = "prefill"  # holds a row, from here on
    INDEXING = "indexing"  # what its decode rule searches is being built
    DECODE = "decode"
    SWAPPING = "swapping"  # preempted; its own pages are being copied to the host
    SWAPPED = "swapped"  # waiting again, with the content of its own pages on the host
    DONE = "done"


QUEUED = {RequestStatus.WAITING, RequestStatus.SWAPPED}
HUNGRY = QUEUED | {RequestStatus.LOADING, RequestStatus.READY}
RUNNING = {
    RequestStatus.PREFILL,
    RequestStatus.INDEXING,
    RequestStatus.DECODE,
    RequestStatus.SWAPPING,
}


@dataclasses.dataclass(frozen=True)
class Need:
    """Pages that a request must be given before it starts.

    Attributes:
      chunks: pages of every chunk by its key; shared with other requests.
      own: pages of the request alone: everything it will ever write.
    """

    chunks: Mapping[str, int]
    own: int

    @property
    def pages(self) -> int:
        """How many there are when nothing is in the pool yet."""
        return self.own + sum(self.chunks.values())


@dataclasses.dataclass(frozen=True)
class SchedulerSettings:
    """Bounds and policy.

    Attributes:
      static: the rows of a lane are filled only when all of them are empty: static batching.
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


@dataclasses.dataclass(eq=False)
class Entry:
    """A request as the scheduler knows it.

    Attributes:
      number: its name; never used again.
      need: asked with `is this key resident or loading`, what it needs now.
      lane: whose rows it needs from prefill on; None: it needs none (a single token).
      rows: how many rows that lane has.
      tokens: length of the prompt, for the bound of the queue.
      cost: virtual service of its prompt, charged to the tenant when it is first admitted.
      tenant: whom it is charged to.
      alone: it shares its lane with no other.
      swappable: whether it may be preempted.
      status: of it. This and all below is kept by the scheduler.
      arrival: its place in the order of submission.
      order: its place in the order of admission, kept when it waits again; None before.
      turn: when it would begin, in virtual service, were rows shared by weight; kept likewise.
      held: keys of the chunks that it maps.
      missing: those of them that are not there yet.
      row: its row of the lane.
      preemptions: how often it was preempted.
      blocked: since when it has been first and did not fit; None when it was not.
      bypassed: how often it was passed since then.
    """

    number: int
    need: Callable[[Callable[[str], bool]], Need]
    lane: Hashable | None
    rows: int
    tokens: int
    cost: float
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    alone: bool = False
    swappable: bool = True
    status: RequestStatus = dataclasses.field(default=RequestStatus.WAITING, init=False)
    arrived: float = dataclasses.field(default=0.0, init=False)
    arrival: int = dataclasses.field(default=0, init=False)
    order: int | None = dataclasses.field(default=None, init=False)
    turn: float = dataclasses.field(default=0.0, init=False)
    own: tuple[int, ...] = dataclasses.field(default=(), init=False)
    held: tuple[str, ...] = dataclasses.field(default=(), init=False)
    missing: set[str] = dataclasses.field(default_factory=set, init=False)
    row: int | None = dataclasses.field(default=None, init=False)
    preemptions: int = dataclasses.field(default=0, init=False)
    blocked: float | None = dataclasses.field(default=None, init=False)
    bypassed: int = dataclasses.field(default=0, init=False)


def admission(entry: Entry) -> tuple[int, int]:
    """Sorts admitted requests: the better class first, then as they were admitted."""
    assert entry.order is not None
    return entry.priority, entry.order


def turn(entry: Entry) -> tuple[int, float, int]:
    """Sorts those who are ready for a row: the better class first, then by their turns."""
    priority, order = admission(entry)
    return priority, entry.turn, order


class Turns:
    """Whose turn for a row it is: start-time fair queueing over tenants.

    A tenant that has many requests admitted does not keep another's from the next row that is free:
    each begins where its tenant's last one would have ended, and none before what was begun last.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._ends: dict[str, float] = {}  # of every tenant's last request
        self._now = 0.0  # the turn of the last who began

    def admit(self, entry: Entry) -> None:
        """Give a request its turn."""
        entry.turn = max(self._now, self._ends.get(entry.tenant, 0.0))
        self._ends[entry.tenant] = entry.turn
        self.charge(entry.tenant, entry.cost)

    def charge(self, tenant: str, amount: float) -> None:
        """What a tenant was served puts off its next turns."""
        self._ends[tenant] += amount / self._weights.get(tenant, 1.0)

    def begin(self, entry: Entry) -> None:
        """It gets its row."""
        self._now = max(self._now, entry.turn)


class Seats:
    """The rows of a lane: which requests hold one, and which are ready for one."""

    def __init__(self, rows: int | None) -> None:
        self.rows = rows  # None: of requests that need none
        self.members = 0  # live requests
        self.hungry = 0  # those of them that have no row yet
        self.ready: list[Entry] = []
        self.held: dict[int, Entry] = {}
        self._given = 0  # rows given since all were empty
        self._closed = False  # to more, until all are empty

    def room(self, leaving: Collection[Entry] = ()) -> int:
        """Rows to give, once those who leave are gone."""
        staying = [it for it in self.held.values() if it not in leaving]
        if self._closed or any(it.alone for it in staying):
            return 0
        return (self.rows or 0) - len(staying)

    def first(self, static: bool) -> Entry | None:
        """Who gets a row now; none overtakes one that waits to be alone."""
        entry = self.ready[0] if self.ready else None
        if self.rows is None:
            return entry
        able = entry is not None and self.room() > 0 and not (entry.alone and self.held)
        if static and self.held and (not able or self._given == self.rows):
            self._closed, able = True, False
        return entry if able else None

    def take(self, entry: Entry) -> None:
        """Its first ready request gets a row."""
        self.ready.remove(entry)
        if self.rows is not None:
            entry.row = next(row for row in range(self.rows) if row not in self.held)
            self.held[entry.row] = entry
            self._given += 1

    def leave(self, entry: Entry) -> None:
        """It gives its row back, or no longer wants one."""
        if entry.status is RequestStatus.READY:
            self.ready.remove(entry)
        if entry.row is not None:
            del self.held[entry.row]
            entry.row = None
            if not self.held:
                self._given, self._closed = 0, False


class _Class:
    """The queue of one priority class."""

    def __init__(self) -> None:
        self.returned: list[Entry] = []  # admitted before, in that order
        self.head: Entry | None = None  # the first of the others, once it was first and did not fit
        self.tenants: dict[str, OrderedDict[int, Entry]] = {}


class Queue:
    """Who waits, in what order, and what every tenant was served."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.waiting = Counter[str]()  # requests of every tenant that has some here
        self.service: dict[str, float] = {}
        self.tokens = 0
        self._settings = settings
        self._classes = [_Class() for _ in range(settings.classes)]
        self._last = ""  # the tenant that left last

    def check_room(self, entry: Entry) -> None:
        """Overloaded when so much waits that this request may not."""
        settings, requests = self._settings, self.waiting.total()
        most = settings.max_waiting
        if most is not None and requests >= most:
            raise Overloaded(
                f"{requests} requests wait and {most} may; send it again later or raise max_waiting"
            )
        most = settings.max_waiting_tokens
        if most is not None and requests and self.tokens + entry.tokens > most:
            raise Overloaded(
                f"{self.tokens} prompt tokens wait, {entry.tokens} more would be above {most}; "
                "send it again later or raise max_waiting_tokens"
            )
        of_tenant, most = self.waiting[entry.tenant], settings.max_waiting_per_tenant
        if most is not None and of_tenant >= most:
            raise Overloaded(
                f"{of_tenant} requests of tenant {entry.tenant!r} wait and {most} may; send it "
                "again later or raise max_waiting_per_tenant"
            )

    def charge(self, tenant: str, amount: float) -> None:
        """The tenant was served this much."""
        self.service[tenant] += amount / self._settings.weights.get(tenant, 1.0)

    def add(self, entry: Entry) -> None:
        """Behind its tenant's others; who was admitted before: in its old place, ahead of all."""
        tenant, row = entry.tenant, self._classes[entry.priority]
        if not self.waiting[tenant]:  # what it did not use while it was idle is gone
            others = (self.service[name] for name in self.waiting)
            least = min(others, default=self.service.get(self._last, 0.0))
            self.service[tenant] = max(self.service.get(tenant, 0.0), least)
        self.waiting[tenant] += 1
        self.tokens += entry.tokens
        if entry.order is None:
            row.tenants.setdefault(tenant, OrderedDict())[entry.number] = entry
        else:
            insort(row.returned, entry, key=admission)

    def remove(self, entry: Entry) -> None:
        """It is admitted, or will never be."""
        tenant, row = entry.tenant, self._classes[entry.priority]
        if entry.order is None:
            del row.tenants[tenant][entry.number]
            if not row.tenants[tenant]:
                del row.tenants[tenant]
        else:
            row.returned.remove(entry)
        entry.blocked, entry.bypassed = None, 0
        if row.head is entry:
            row.head = None
        self.tokens -= entry.tokens
        self.waiting[tenant] -= 1
        if not self.waiting[tenant]:
            del self.waiting[tenant]
            self._last = tenant

    def block(self, entry: Entry, now: float) -> None:
        """It is first and does not fit: from now on it stays ahead of other tenants' requests."""
        if entry.blocked is None:
            entry.blocked, entry.bypassed = now, 0
        if entry.order is None:
            self._classes[entry.priority].head = entry

    def __iter__(self) -> Iterator[tuple[Entry, bool]]:
        """Those to look at, in the order of admission, and whether each is first of its class."""
        for row in self._classes:
            first = True
            for entry in self._look(row):
                yield entry, first
                first = False

    def heads(self) -> list[Entry]:
        """The first of every class that has some."""
        firsts = (next(self._look(row), None) for row in self._classes)
        return [it for it in firsts if it is not None]

    def __contains__(self, entry: Entry) -> bool:
        row = self._classes[entry.priority]
        if entry.order is not None:
            return entry in row.returned
        return entry.number in row.tenants.get(entry.tenant, ())

    def _look(self, row: _Class) -> Iterator[Entry]:
        """The head of the class, and a bounded number of those behind it.

        Behind it: the first of every tenant, the least served first, then the second of every one.
        """
        for place, entry in enumerate(row.returned):
            if place <= self._settings.max_bypass or entry.blocked is not None:
                yield entry
        tenants = row.tenants
        if not tenants:
            return

        def turn(name: str) -> tuple[float, int]:
            return self.service[name], next(iter(tenants[name].values())).arrival

        head = row.head
        if head is None:
            head = next(iter(tenants[min(tenants, key=turn)].values()))
        yield head
        first = [
            islice(tenants[it].values(), self._settings.max_bypass + 1)
            for it in sorted(tenants, key=turn)
        ]
        behind = (it for rank in zip_longest(*first) for it in rank if it not in (None, head))
        yield from islice(behind, self._settings.max_bypass)
