"""A line on stderr where somebody waits for more than a second: for a load, for programs."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

AFTER = 1.0  # seconds in which nothing is said
_QUIET = 0.5  # without news, and with nothing under way, all is compiled
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Say what is loaded, if that takes long."""
    timer = _soon(_say, f"loading {what}")
    try:
        yield
    finally:
        timer.cancel()


class Programs:
    """Says that programs are compiled, if that takes long; once, or how far it is.

    Attributes:
      muted: nothing is said, as an answer is being printed.
      count: how many are there, and of how many; None where that is not known.
    """

    def __init__(self) -> None:
        self.muted = False
        self.count: Callable[[], tuple[int, int] | None] = lambda: None
        self._lowered = self._compiled = 0
        self._last = 0.0
        self._said = ""
        self._timer: threading.Timer | None = None

    def took(self, event: str, duration_secs: float, **about: str | int) -> None:
        """A listener: something was lowered or compiled, on any thread."""
        if event not in (_LOWERED, _COMPILED):
            return
        self._lowered += event == _LOWERED
        self._compiled += event == _COMPILED
        self._last = time.monotonic()
        if self._timer is None or not self._timer.is_alive():
            self._timer = _soon(self._look)

    def _look(self) -> None:
        busy = self._lowered > self._compiled or time.monotonic() - self._last < _QUIET
        count = self.count()
        how = " (kept for the next start)" if count is None else f", {count[0]} of {count[1]}"
        if busy and not self.muted and how != self._said:
            self._said = how
            _say(f"Compiling for this machine{how}")

    def stop(self) -> None:
        """Say nothing more."""
        if self._timer is not None:
            self._timer.cancel()


_PROGRAMS: Programs | None = None  # that are told now


def tell_programs() -> None:
    """Say where compiling takes long, until ``stop_telling``."""
    global _PROGRAMS
    import jax

    stop_telling()
    _PROGRAMS = Programs()
    jax.monitoring.register_event_duration_secs_listener(_PROGRAMS.took)


def counted(count: Callable[[], tuple[int, int] | None]) -> None:
    """Say of programs how many are there, and of how many; None from ``count``: not known."""
    if _PROGRAMS is not None:
        _PROGRAMS.count = count


def stop_telling() -> None:
    """Say nothing more of programs."""
    global _PROGRAMS
    if _PROGRAMS is None:
        return
    import jax

    _PROGRAMS.stop()
    with contextlib.suppress(AssertionError, ValueError):  # all listeners were cleared
        jax.monitoring.unregister_event_duration_listener(_PROGRAMS.took)
    _PROGRAMS = None


@contextlib.contextmanager
def untold() -> Iterator[None]:
    """Say nothing of programs while an answer is printed."""
    programs = _PROGRAMS
    if programs is not None:
        programs.muted = True
    try:
        yield
    finally:
        if programs is not None:
            programs.muted = False


def _soon(function: Callable[..., None], *given: str) -> threading.Timer:
    """Call a function when somebody has waited for long enough."""
    timer = threading.Timer(AFTER, function, given)
    timer.daemon = True
    if AFTER < threading.TIMEOUT_MAX:
        timer.start()
    return timer


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
