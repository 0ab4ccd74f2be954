"""Work that is begun now and waited for later: one pool of threads, tasks in one flat list."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxrag.reuse.attention_index.faiss_objects import faiss_module, one_thread
from jaxrag.reuse.decode.far.layer import HostTask


def crew(threads: int) -> ThreadPoolExecutor:
    """Threads that run tasks. FAISS starts none of its own in them: there is one a task."""

    def alone() -> None:
        faiss_module().omp_set_num_threads(1)  # of the calling thread

    return ThreadPoolExecutor(threads, "attend", initializer=alone)


class HostWork:
    """Tasks under way. Where one fails the others are dropped, and ``wait`` raises its error.

    Attributes:
      elapsed: seconds from the start to the end of the last task.
      waited: seconds that ``wait`` blocked.
    """

    def __init__(self) -> None:
        self._tasks: deque[HostTask] = deque()
        self._open = 0  # tasks that are queued or run
        self._running = 0  # threads that take tasks
        self._dropped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._began = time.perf_counter()
        self.elapsed = 0.0
        self.waited = 0.0

    def run(self, tasks: Sequence[HostTask]) -> None:
        """Do all of it now, in this thread."""
        self._add(tasks)
        self._running = 1
        with one_thread():
            self._take()

    def submit(self, tasks: Sequence[HostTask], threads: ThreadPoolExecutor, most: int) -> None:
        """Begin, on at most so many of the threads."""
        self._add(tasks)
        count = min(most, len(tasks))
        self._running = count
        for begun in range(count):
            try:
                threads.submit(self._take)
            except RuntimeError as error:  # the pool was shut down
                with self._changed:
                    self._running -= count - begun
                self.fail(error)
                return

    def fail(self, error: BaseException) -> None:
        """What has not begun is not done, and ``wait`` raises this error unless it has another."""
        with self._changed:
            self._error = self._error or error
            self._tasks.clear()
            self._open = 0
            self._changed.notify_all()

    def drop(self) -> None:
        """What has not begun is not done."""
        with self._changed:
            self._dropped = True
            self._open -= len(self._tasks)
            self._tasks.clear()
            self._changed.notify_all()

    def wait(self) -> None:
        """Until nothing is under way; raises the error of the task that failed first."""
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        self.waited = time.perf_counter() - start
        if self._error is not None:
            raise self._error

    def _add(self, tasks: Sequence[HostTask]) -> None:
        self._tasks.extend(tasks)
        self._open += len(tasks)

    def _take(self) -> None:
        """Do tasks until none is left, and none runs that may bring more."""
        while (task := self._next()) is not None:
            try:
                more = task() or ()
            except BaseException as error:
                self.fail(error)
                continue
            with self._changed:
                if self._error is None:
                    more = () if self._dropped else more
                    self._add(more)
                    self._open -= 1
                    if more or not self._open:
                        self._changed.notify_all()

    def _next(self) -> HostTask | None:
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or not self._open)
            if self._open:
                return self._tasks.popleft()
            self._running -= 1
            if not self._running:
                self.elapsed = time.perf_counter() - self._began
                self._changed.notify_all()
            return None
