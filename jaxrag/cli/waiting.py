"""A line on stderr where somebody waits for more than a second: for a load, for programs."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from jaxrag.cli.output import counted

AFTER = 1.0  # seconds in which nothing is said
_LONG = 5.0  # seconds after which the end is said, too
_QUIET = 0.5  # without news, and with nothing under way, all programs are there
_TURN = 0.1
_LOST = 300.0  # what was lowered and not compiled since then never will be
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_TRACED = "/jax/core/compile/jaxpr_trace_duration"
_FOUND = "/jax/compilation_cache/cache_hits"


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Say what is loaded, if that takes long."""
    timer = threading.Timer(AFTER, _say, (f"loading {what}",))
    timer.daemon = True
    if AFTER < threading.TIMEOUT_MAX:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Programs:
    """Says that programs are made ready, if that takes long; of what takes longer, the end too.

    Attributes:
      muted: nothing is said, as an answer is being printed.
    """

    def __init__(self) -> None:
        self.muted = False
        self._lock = threading.Lock()
        self._told = self._watched = False
        self._began = self._last = 0.0
        self._programs = self._lowered = self._found = 0
        self._stopped = threading.Event()

    def took(self, event: str, duration_secs: float, **about: str | int) -> None:
        """A listener: something was traced, lowered or compiled, on any thread."""
        if event not in (_TRACED, _LOWERED, _COMPILED):
            return
        with self._lock:
            self._last = time.monotonic()
            if not self._watched:
                self._began, self._watched = self._last - duration_secs, True
                threading.Thread(target=self._watch, daemon=True).start()
            self._lowered += event == _LOWERED
            self._programs += event == _COMPILED

    def found(self, event: str, **about: str | int) -> None:
        """A listener: a program was on the disk."""
        self._found += event == _FOUND

    def _watch(self) -> None:
        while not self._stopped.wait(_TURN):
            with self._lock:
                now = time.monotonic()
                silent = now - self._last
                if silent > (_LOST if self._lowered > self._programs else _QUIET):
                    self._end()
                    return
                if not self._told and not self.muted and now - self._began > AFTER:
                    self._told = True
                    _say(
                        f"making programs ready, {self._programs} so far: what is compiled is "
                        "kept, so only once"
                    )

    def _end(self) -> None:
        seconds = self._last - self._began
        if self._told and not self.muted and seconds > _LONG:
            compiled = max(self._programs - self._found, 0)
            _say(f"{counted(self._programs, 'program')} in {seconds:.1f} s, {compiled} compiled")
        self._told = self._watched = False
        self._programs = self._lowered = self._found = 0

    def stop(self) -> None:
        """Say nothing more."""
        self._stopped.set()


_PROGRAMS: Programs | None = None  # that are told now


def tell_programs() -> None:
    """Say where programs take long, until ``stop_telling``."""
    global _PROGRAMS
    import jax

    stop_telling()
    _PROGRAMS = Programs()
    jax.monitoring.register_event_duration_secs_listener(_PROGRAMS.took)
    jax.monitoring.register_event_listener(_PROGRAMS.found)


def stop_telling() -> None:
    """Say nothing more of programs."""
    global _PROGRAMS
    if _PROGRAMS is None:
        return
    import jax

    _PROGRAMS.stop()
    with contextlib.suppress(AssertionError, ValueError):  # all listeners were cleared
        jax.monitoring.unregister_event_duration_listener(_PROGRAMS.took)
        jax.monitoring.unregister_event_listener(_PROGRAMS.found)
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


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
