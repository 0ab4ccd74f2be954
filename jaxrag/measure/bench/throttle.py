"""A chunk store behind a slow link, to measure what loading beside computation is worth."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from jaxrag.base.errors import RequestError
from jaxrag.kv.store.base import Aux, KVStore, Stats
from jaxrag.kv.store.reading import Found, Refused, Wanted
from jaxrag.kv.store.record import AuxArray, Provenance, Record
from jaxrag.kv.store.writer import PutResult


class Link:
    """So many bytes a second, one after the other, whoever asks. Safe to share between threads.

    Attributes:
      bytes_per_second: its rate.
      carried: bytes so far.
    """

    def __init__(
        self,
        bytes_per_second: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Nothing is on its way. Raises RequestError for a rate that is not positive."""
        if not bytes_per_second > 0:
            raise RequestError(f"a link of {bytes_per_second} bytes/s: expected more than 0")
        self.bytes_per_second = bytes_per_second
        self.carried = 0
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free = -float("inf")  # when what was asked for before is through

    def book(self, nbytes: int) -> float:
        """Send bytes behind all that were sent before; when they will have arrived."""
        with self._lock:
            self.carried += nbytes
            self._free = max(self._free, self._clock()) + nbytes / self.bytes_per_second
            return self._free

    def wait(self, until: float) -> None:
        """Sleep, on the caller's thread, until then."""
        left = until - self._clock()
        if left > 0:
            self._sleep(left)


class Throttled(KVStore):
    """Another store whose KV comes over a link: who reads sleeps until its bytes have arrived.

    What the inner store takes for the read counts as part of that. Records, auxiliary arrays and
    puts are not slowed.
    """

    def __init__(self, inner: KVStore, link: Link) -> None:
        """Read ``inner`` over ``link``."""
        super().__init__(inner.fingerprint, inner.layout, inner.max_tokens)
        self.inner = inner
        self.link = link

    @property
    def writable(self) -> bool:
        """As of the inner store."""
        return self.inner.writable

    @property
    def private(self) -> bool:
        """As of the inner store."""
        return self.inner.private

    def keys(self) -> Iterator[str]:
        """As of the inner store."""
        return self.inner.keys()

    def records(self) -> Iterator[Record]:
        """As of the inner store."""
        return self.inner.records()

    def stats(self) -> Stats:
        """As of the inner store."""
        return self.inner.stats()

    def _put(
        self,
        key: str,
        kv: NDArray[Any],
        record: Provenance,
        aux: Aux,
        described: Mapping[str, AuxArray],
        replace: bool,
    ) -> PutResult:
        return self.inner._put(key, kv, record, aux, described, replace)

    def _find(self, keys: Sequence[str]) -> dict[str, Found]:
        return self.inner._find(keys)

    def _nearest(self, keys: Sequence[str]) -> dict[str, Found]:
        return self.inner._nearest(keys)

    def _load(self, wanted: Sequence[Wanted]) -> Sequence[Refused | None]:
        until = self.link.book(sum(map(_stored_bytes, wanted)))
        answers = self.inner._load(wanted)
        self.link.wait(until)
        return answers

    def _read_aux(self, record: Record, name: str) -> NDArray[Any] | Refused:
        return self.inner._read_aux(record, name)

    def _delete(self, key: str) -> bool:
        return self.inner._delete(key)


def _stored_bytes(wanted: Wanted) -> int:
    """Of the files of the layers that are wanted."""
    record, layers = wanted.record, wanted.layers[1] - wanted.layers[0]
    of_files = record.layout.stored_nbytes(record.tokens) * len(wanted.ranks) // record.ways
    return of_files * layers // record.layout.num_layers
