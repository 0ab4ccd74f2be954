"""Garbage collection: chunks that no one needs and what dead writers left, beside live ones.

Everything is removed in the order that a reader or a writer at work can tell from the outside:

- A committed chunk loses its record first. Who found the record before gets the whole chunk or
  ChunkMissing. Then it is asked once more whether the chunk is live, and its record is put back if
  so. Who reuses a chunk makes it live first and looks for its record afterwards: either he does
  not find it, or it is found to be live here.
- An attempt without a record is marked first, and kept when a record names it after all. Its
  writer looks for the mark and for its files once it has committed (``Namespace.complete``), and
  takes the commit back when it finds the attempt taken.

Neither needs a clock. A key that a writer has announced (``busy``) is passed over whole, bytes
and folders, until the writer is done. The grace spares what was not announced: chunks that were put
a moment ago and are not referenced yet, and writers of other programs.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from jaxrag.base.errors import ChunkMissing, StoreError
from jaxrag.kv.store.census import Census
from jaxrag.kv.store.keys import ID_DIGITS, is_hex
from jaxrag.kv.store.ledger import PARTS
from jaxrag.kv.store.namespace import COMMIT, SWEPT, Namespace
from jaxrag.kv.store.reading import Lookup
from jaxrag.kv.store.record import ATTEMPT_DIGITS, Record, attempt_age, new_attempt

_RECORDS_AT_ONCE = 1024
_MARK_SECONDS = 3600.0  # for which a mark holds; taking one attempt is a matter of seconds


@dataclasses.dataclass(frozen=True)
class SweepReport:
    """What a collection removed, or would remove."""

    chunks: int = 0  # committed, not live
    damaged: int = 0  # commit records that were refused, with their bytes
    attempts: int = 0  # of writers that died or lost, and those that were replaced
    locks: int = 0  # lock files of writers that died
    folders: int = 0  # that were empty
    nbytes: int = 0  # of chunks; in a directory also of attempts

    def __add__(self, other: "SweepReport") -> "SweepReport":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return SweepReport(*(a + b for a, b in pairs))


def sweep(
    space: Namespace,
    live: Callable[[Record], bool],
    grace_seconds: float,
    dry_run: bool,
    busy: Callable[[str], bool],
    named: Callable[[str], bool] = lambda key: False,
    census: Census | None = None,
) -> SweepReport:
    """``ChunkStore.gc`` says what this does; without a census every chunk is looked at."""
    if not grace_seconds >= 0:
        raise StoreError(f"grace_seconds={grace_seconds!r}: expected a number of at least 0")
    report = SweepReport()
    for prefix, passed, paths in _listings(space, named, census):
        attempts: dict[str, set[str]] = defaultdict(set)
        committed = set()
        records: dict[str, Record] = {}
        for key, rest in paths:
            if rest == COMMIT:
                committed.add(key)
            attempt = rest.partition("/")[0]
            if is_hex(attempt, ATTEMPT_DIGITS):
                attempts[key].add(attempt)
        left = iter(sorted(attempts.keys() | committed))
        while keys := tuple(itertools.islice(left, _RECORDS_AT_ONCE)):
            found = space.find([key for key in keys if key in committed])
            records |= {key: it for key, it in found.items() if isinstance(it, Record)}
            for key in keys:
                if busy(key):  # asked after the listing: its writer had announced what is listed
                    continue
                collect = _Collect(space, key, grace_seconds, dry_run)
                report += collect.run(found.get(key), sorted(attempts[key]), live)
        locks, folders = space.backend.remove_stale(prefix, grace_seconds, dry_run, busy, passed)
        report += SweepReport(locks=locks, folders=folders)
        if census is not None:
            part = prefix.removeprefix(space.prefix).rstrip("/")
            census.learn(part, census.times(part), records)
    return report + SweepReport(locks=space.backend.remove_stale_locks(grace_seconds, dry_run))


def _listings(
    space: Namespace, named: Callable[[str], bool], census: Census | None
) -> Iterator[tuple[str, set[str], list[tuple[str, str]]]]:
    """As ``Namespace.listings``, but of the keys in the middle, which are passed over.

    These are keys that are needed and whose folders are as they were when they were clean.
    """
    if census is None:
        for prefix, paths in space.listings():
            yield prefix, set(), paths
        return
    for part in PARTS:
        prefix = f"{space.prefix}{part}/"
        times = census.times(part)
        passed = {key for key in census.known(part, times) if named(key)}
        some = times.keys() - passed
        if 4 * len(some) < len(times):
            paths = [
                (key, path)
                for key in sorted(some)
                for path in space.backend.paths(space.chunk(key))
            ]
        else:
            paths = [
                (key, rest)
                for key, _, rest in (path.partition("/") for path in space.backend.paths(prefix))
                if rest and is_hex(key, ID_DIGITS) and key not in passed
            ]
        yield prefix, passed, paths


@dataclasses.dataclass(frozen=True)
class _Collect:
    """The collection under one key."""

    space: Namespace
    key: str
    grace: float
    dry_run: bool

    def run(
        self, record: Lookup | None, attempts: Iterable[str], live: Callable[[Record], bool]
    ) -> SweepReport:
        orphans = set(attempts)
        report = SweepReport()
        if isinstance(record, Record):
            orphans.discard(record.attempt)
            if record.age <= self.grace:
                return report  # who found what this record replaced may be reading it
            if not live(record):
                report += self._chunk(record, live)
        elif record is not None and not isinstance(record, ChunkMissing):
            # Nothing tells when a damaged record was written, but not before its attempt began.
            if any(attempt_age(attempt) <= self.grace for attempt in orphans):
                return report
            report += self._damaged()
        for attempt in sorted(orphans):
            if attempt_age(attempt) > self.grace:
                report += self._attempt(attempt)
        return report

    def _chunk(self, record: Record, live: Callable[[Record], bool]) -> SweepReport:
        gone = SweepReport(chunks=1, nbytes=record.nbytes)
        if self.dry_run or self.space.delete(self.key, record.attempt, keep=live) is not None:
            return gone
        return SweepReport()  # replaced or removed by somebody else, or live after all

    def _damaged(self) -> SweepReport:
        if not self.dry_run:
            self.space.delete(self.key, attempt="")
        return SweepReport(damaged=1)

    def _attempt(self, attempt: str) -> SweepReport:
        path = self.space.attempt(self.key, attempt)
        gone = SweepReport(attempts=1, nbytes=self.space.backend.sizes(path) or 0)
        if self.dry_run:
            return gone
        try:
            return gone if self._take(path, attempt) else SweepReport()
        except StoreError:
            if self.space.backend.paths(path):
                raise
            return SweepReport()  # its writer removed it meanwhile

    def _take(self, path: str, attempt: str) -> bool:
        backend = self.space.backend
        mark = f"{SWEPT}{new_attempt()}"  # of our own: others may collect at the same time
        backend.write(path + mark, b"")
        record = self.space.find([self.key])[self.key]
        if isinstance(record, Record) and record.attempt == attempt:
            backend.delete(path + mark)
            return False
        # Only what is listed under the mark, and the mark last: a file that its writer adds
        # later is no longer covered by it.
        names = [name for name in backend.paths(path) if not _is_fresh_mark(name)]
        for name in names:
            backend.delete(path + name)
        if not set(names).isdisjoint(backend.paths(path)):
            return False  # its writer put some back: next time
        backend.delete(path + mark)
        backend.prune(path)
        return True


def _is_fresh_mark(name: str) -> bool:
    """Whether a collection may be at work behind this mark, or it died only recently."""
    attempt = name.removeprefix(SWEPT)
    sound = name.startswith(SWEPT) and is_hex(attempt, ATTEMPT_DIGITS)
    return sound and attempt_age(attempt) <= _MARK_SECONDS
