"""A chunk store behind a slow link, to measure what loading beside computation is worth."""

import threading
import time
from collections.abc import Callable, Sequence

from jaxrag.base.errors import RequestError
from jaxrag.kv.store import KVStore, Refused
from jaxrag.kv.store.reading import ReadRequest
from jaxrag.kv.store.wrapper import StoreWrapper


class SlowLink:
    """So many bytes a second, one after the other, whoever asks. Safe to share between threads.

    Attributes:
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


class Throttled(StoreWrapper):
    """Another store whose KV comes over a link: who reads sleeps until its bytes have arrived.

    What the inner store takes for the read counts as part of that. Records, auxiliary arrays and
    puts are not slowed.
    """

    def __init__(self, inner: KVStore, link: SlowLink) -> None:
        super().__init__(inner)
        self.link = link

    def _load(self, requests: Sequence[ReadRequest]) -> Sequence[Refused | None]:
        until = self.link.book(sum(map(_stored_bytes, requests)))
        answers = self.inner._load(requests)
        self.link.wait(until)
        return answers


def _stored_bytes(request: ReadRequest) -> int:
    """Of the files of the layers that are asked for."""
    record, layers = request.record, len(request.layers)
    of_files = record.layout.stored_nbytes(record.tokens) * len(request.ranks) // record.ways
    return of_files * layers // record.layout.num_layers
