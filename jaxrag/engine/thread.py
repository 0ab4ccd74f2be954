"""The engine's one thread: started by what is posted to it, ended when there is nothing to do."""

import atexit
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

Event = Callable[[], None]  # called on the thread

_LINGER = 0.2  # seconds that an idle thread waits for the next event before it ends
_EXIT = 10.0  # seconds that the interpreter waits at exit for a step in flight


class Mailbox:
    """Events for one thread, from any. The thread lives while there is something to do.

    Attributes:
      looked: when the thread last looked at what was posted, by ``clock``, or came on as
        ``moved`` says; None before. It does after every piece of its work.
    """

    def __init__(
        self,
        name: str,
        serve: Callable[["Mailbox"], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``serve(mailbox)`` is what the thread does, until ``first`` gives it nothing."""
        self._name, self._serve, self._clock = name, serve, clock
        self.looked: float | None = None
        self._works = False  # and does not wait for events
        # Entered itself, in one instruction: a Ctrl-C within a Condition's own __enter__, which is
        # written in Python, would leave the lock held for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._events: deque[Event] = deque()
        self._thread: threading.Thread | None = None
        self.closed = False

    def post(self, event: Event) -> None:
        """Queue an event and start the thread where it does not run."""
        with self._lock:
            if self.closed:
                raise RuntimeError("the engine was closed, as its interpreter ends")
            self._events.append(event)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, args=(self,), name=self._name, daemon=True
                )
                self._thread.start()
                atexit.register(self.close)
            else:
                self._changed.notify()

    def first(self) -> list[Event]:
        """For a thread with nothing to do: what comes next; empty where the thread is to end."""
        with self._lock:
            self._works = False
            self._changed.wait_for(lambda: self._events or self.closed, _LINGER)
            if not self._events:
                self._thread = None
                atexit.unregister(self.close)
            return self._drain()

    def next(self, wait: float | None = 0.0) -> list[Event]:
        """What has come by now; with ``wait``, in at most so many seconds; None: in any time."""
        with self._lock:
            if wait != 0.0:
                self._works = False
                self._changed.wait_for(lambda: self._events or self.closed, wait)
            return self._drain()

    def moved(self) -> None:
        """The thread has come on within an iteration."""
        self.looked = self._clock()

    def mine(self) -> bool:
        """Is the caller the thread itself?"""
        return self._thread is threading.current_thread()

    def close(self) -> None:
        """Have the thread end, whatever it does, and wait for it a while."""
        with self._lock:
            self.closed = True
            thread = self._thread
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_EXIT)

    @property
    def silence(self) -> float:
        """Seconds since the thread began what it is at; 0 while it waits for events, or is not."""
        if not self._works:  # asked first: it is set after the time that it goes with
            return 0.0
        return 0.0 if self.looked is None else max(self._clock() - self.looked, 0.0)

    def _drain(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        self.looked, self._works = self._clock(), self._thread is not None
        return events


def result_of[Result](job: Callable[[], Result]) -> Result | BaseException:
    """What a job returns, or what it raised."""
    try:
        return job()
    except BaseException as error:
        return error


def ask[Result](post: Callable[[Callable[[], None]], None], job: Callable[[], Result]) -> Result:
    """Have a job done by the thread behind ``post``, and wait for its result or error."""
    answers: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
    post(lambda: answers.put(result_of(job)))
    answer = answers.get()
    if isinstance(answer, BaseException):
        raise answer
    return answer
