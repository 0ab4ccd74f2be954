"""Threads that tenants share in turn, so that nobody waits behind all that another one sent."""

import functools
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

_Job = tuple[Future[Any], Callable[[], Any]]


class FairThreads:
    """So many threads; their next job is of the tenant that waited longest."""

    def __init__(self, count: int, name: str, most: int | None = None) -> None:
        """``name`` begins those of the threads; ``most``: that one tenant may hold at once."""
        self._pool = ThreadPoolExecutor(count, name)
        self._free, self._most = count, count if most is None else max(most, 1)
        self._lock = threading.Lock()  # of what follows, and of the number that are free
        self._waiting: dict[str, deque[_Job]] = {}  # by tenant; who is next comes first
        self._running = Counter[str]()

    def of(self, tenant: str) -> Executor:
        """The threads, for the jobs of a tenant."""
        return _Share(self, tenant)

    def submit(self, tenant: str, job: Callable[[], Any]) -> Future[Any]:
        """Have a job of a tenant done; one that is cancelled while it waits is not begun."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((future, job))
            self._begin()
        return future

    def shutdown(self, *, wait: bool = False) -> None:
        """Begin no more; what runs is waited for where that is asked."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future, _ in (job for jobs in waiting.values() for job in jobs):
            future.cancel()
        self._pool.shutdown(wait, cancel_futures=True)

    def _begin(self) -> None:
        """Hand out what may run; under the lock."""
        while self._free and (tenant := self._next()) is not None:
            jobs = self._waiting.pop(tenant)
            future, job = jobs.popleft()
            if jobs:
                self._waiting[tenant] = jobs  # behind the others
            self._free -= 1
            self._running[tenant] += 1
            self._pool.submit(self._run, tenant, future, job)

    def _next(self) -> str | None:
        """Who is next; None where nobody may have one now."""
        return next((name for name in self._waiting if self._running[name] < self._most), None)

    def _run(self, tenant: str, future: Future[Any], job: Callable[[], Any]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        finally:
            with self._lock:
                self._free += 1
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
                self._begin()


class _Share(Executor):
    """What a tenant sees of the threads."""

    def __init__(self, threads: FairThreads, tenant: str) -> None:
        self._threads, self._tenant = threads, tenant

    def submit[**P, T](self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As of ``Executor``."""
        return self._threads.submit(self._tenant, functools.partial(fn, *args, **kwargs))
