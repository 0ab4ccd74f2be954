"""Writing chunks behind the encoder's back: a few puts at once, bounded in bytes."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from jaxrag.base.errors import StoreError
from jaxrag.kv.store.record import Provenance

_THREADS = 4  # a put mostly waits for the disk


@dataclasses.dataclass(frozen=True)
class PutResult:
    """Outcome of a put; the chunk is durable either way."""

    won: bool  # False: a chunk was committed under this key before, and stays
    attempt: str | None  # the directory this put committed; None when it did not win


class ChunkWriter:
    """Puts chunks in the background. Use as a context manager: leaving it waits for every put.

    A failed put is raised by the next ``submit`` and, at the latest, on leaving.
    """

    def __init__(self, put: Callable[..., PutResult], max_inflight_bytes: int) -> None:
        """Call a store's ``put`` from a few threads, at most ``max_inflight_bytes`` under way."""
        if max_inflight_bytes < 1:
            raise StoreError(f"max_inflight_bytes={max_inflight_bytes}: expected a positive number")
        self._put = put
        self._limit = max_inflight_bytes
        self._inflight = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "jaxrag-writer")

    def submit(
        self,
        key: str,
        kv: NDArray[Any],
        record: Provenance,
        *,
        aux: Mapping[str, NDArray[Any]] | None = None,
        replace: bool = False,
    ) -> concurrent.futures.Future[PutResult]:
        """Queue one put; waits while the chunks under way leave no room for this one.

        ``kv`` and ``aux`` must not change until the future is done. A chunk larger than the bound
        is written alone. The future is for callers who want to know which puts won.

        Raises:
            StoreError: an earlier put failed, or the writer was left.
        """
        nbytes = kv.nbytes + sum(array.nbytes for array in (aux or {}).values())
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or not self._inflight or self._inflight + nbytes <= self._limit
            )
            self._raise_error()
            self._inflight += nbytes

        def run() -> PutResult:
            try:
                return self._put(key, kv, record=record, aux=aux, replace=replace)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                raise
            finally:
                with self._changed:
                    self._inflight -= nbytes
                    self._changed.notify_all()

        try:
            return self._threads.submit(run)
        except RuntimeError:
            raise StoreError(f"chunk {key}: submitted to a writer that was left") from None

    def __enter__(self) -> "ChunkWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for every put; raise the first that failed unless the body raised already."""
        self._threads.shutdown(wait=True)
        if error is None:
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
