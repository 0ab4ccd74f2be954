"""Compiled programs: kept on disk for the next process, and counted."""

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
from jax.stages import Compiled, Lowered

from jaxrag.models.digest import cache_directory

_COMPILING = "/jax/core/compile/"  # tracing, lowering, compiling
_COMPILED = f"{_COMPILING}backend_compile_duration"
_SPANS = 4096
_CPUINFO = Path("/proc/cpuinfo")
_STACK = 64 << 20  # bytes: XLA's passes recurse deeper than a thread's usual stack allows


def keep_compiled() -> None:
    """Keep compiled programs in this user's cache, so that only the first run of a shape waits.

    A directory that is set already, such as JAX_COMPILATION_CACHE_DIR, is left alone. Every number
    of processors has its own: a program for the CPU is compiled for that many threads, and the
    cache's keys do not say so.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(_programs()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _programs() -> Path:
    """Directory of the compiled programs."""
    return cache_directory() / "xla" / f"{processors()}-processors"


def processors() -> int:
    """How many this process may use."""
    usable = getattr(os, "sched_getaffinity", None)  # Linux
    return len(usable(0)) if usable else os.cpu_count() or 1


def multiplies_bfloat16() -> bool:
    """Has the processor instructions for products of bfloat16? True where nothing tells."""
    try:
        lines = _CPUINFO.read_text("utf-8").splitlines()
    except OSError:
        return True
    flags = next((line.split() for line in lines if line.startswith("flags")), None)
    return flags is None or not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags)


def compile_beside(
    programs: Iterable[Lowered], at_a_time: int | None = None
) -> list[Future[Compiled]]:
    """Compile each in a thread; does not wait. None: as many at a time as there are processors."""
    threads = ThreadPoolExecutor(at_a_time or os.cpu_count(), "compile")
    before = threading.stack_size(_STACK)
    try:
        return [threads.submit(program.compile) for program in programs]
    finally:
        threading.stack_size(before)
        threads.shutdown(wait=False)


class CompileTimes:
    """When a thread traced, lowered and compiled, or read programs from the disk.

    Attributes:
      under_way: how many of these it is at now, one within the other.
    """

    def __init__(self, ended: Callable[[], None] = lambda: None) -> None:
        """``ended`` is called as often as one has ended."""
        self.under_way = 0
        self._ended = ended
        self._spans: deque[tuple[float, float]] = deque(maxlen=_SPANS)  # ascending, disjoint

    def add(self, start: float, end: float) -> None:
        """A span that ends now; those within it, of functions that it calls, are part of it."""
        while self._spans and self._spans[-1][0] >= start:
            self._spans.pop()
        self._spans.append((start, end))
        self._ended()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """What the thread waits for is compiled by another."""
        start = time.monotonic()
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            self.add(start, time.monotonic())

    def between(self, start: float, end: float) -> float:
        """Seconds of it between two moments of ``time.monotonic``."""
        spans = list(self._spans)
        return sum(max(0.0, min(end, last) - max(start, first)) for first, last in spans)


@contextlib.contextmanager
def counting(compiled: Counter[str], times: CompileTimes) -> Iterator[None]:
    """Count the programs that this thread compiles, or reads from the disk, by function."""
    this_thread = threading.get_ident()

    def begin(event: str, value: float, **about: str | int) -> None:
        if event.startswith(_COMPILING) and threading.get_ident() == this_thread:
            times.under_way += 1

    def count(event: str, duration_secs: float, **about: str | int) -> None:
        if not event.startswith(_COMPILING) or threading.get_ident() != this_thread:
            return
        now = time.monotonic()
        times.under_way = max(times.under_way - 1, 0)
        times.add(now - duration_secs, now)
        if event == _COMPILED:
            compiled[str(about.get("fun_name"))] += 1

    jax.monitoring.register_scalar_listener(begin)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield
    finally:
        jax.monitoring.unregister_scalar_listener(begin)
        jax.monitoring.unregister_event_duration_listener(count)
