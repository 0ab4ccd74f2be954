"""One line on stderr where somebody waits for more than a second: for a load, for compilation."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from jaxrag.cli.output import counted

AFTER = 1.0  # seconds in which nothing is said
_QUIET = 0.5  # without news, and with nothing under way, compilation is over
_TURN = 0.1
_LOST = 300.0  # what was lowered and not compiled since then never will be
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_TRACED = "/jax/core/compile/jaxpr_trace_duration"


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Say what is loaded, if that takes long."""
    timer = threading.Timer(AFTER, lambda: _write(f"loading {what}\n"))
    timer.daemon = True
    if AFTER < threading.TIMEOUT_MAX:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Compilation:
    """Says that programs are compiled, and in the same line, at its end, how many.

    A listener of jax.monitoring. ``done`` ends the line, for who writes the next.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = self._watched = False
        self._began = self._last = 0.0
        self._programs = self._lowered = 0

    def __call__(self, event: str, duration_secs: float, **about: str | int) -> None:
        """Something was traced, lowered or compiled, on any thread."""
        if event not in (_TRACED, _LOWERED, _COMPILED):
            return
        with self._lock:
            self._last = time.monotonic()
            if not self._watched:
                self._began, self._watched = self._last - duration_secs, True
                threading.Thread(target=self._watch, daemon=True).start()
            self._lowered += event == _LOWERED
            self._programs += event == _COMPILED

    def done(self) -> None:
        """End the line, if one was begun."""
        with self._lock:
            self._end()

    def _watch(self) -> None:
        while True:
            time.sleep(_TURN)
            with self._lock:
                now = time.monotonic()
                silent = now - self._last
                if silent > (_LOST if self._lowered > self._programs else _QUIET):
                    self._end()
                    self._watched = False
                    return
                if not self._told and now - self._began > AFTER:
                    self._told = True
                    _write("compiling, only this once: ")

    def _end(self) -> None:
        if self._told:
            _write(f"{counted(self._programs, 'program')}, {self._last - self._began:.1f} s\n")
        self._told = False
        self._programs = self._lowered = 0
        self._began = time.monotonic()


_COMPILATION = Compilation()


def tell_compilation() -> None:
    """From now on, say where programs are compiled for long; once a process is enough."""
    import jax

    with contextlib.suppress(AssertionError):  # it was not registered yet
        jax.monitoring.unregister_event_duration_listener(_COMPILATION)
    jax.monitoring.register_event_duration_secs_listener(_COMPILATION)


def compilation_told() -> None:
    """What was said of compilation ends its line: other output follows."""
    _COMPILATION.done()


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
