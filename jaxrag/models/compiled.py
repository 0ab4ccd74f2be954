"""Compiled programs: kept on disk for the next process, and counted."""

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxrag.models.digest import cache_directory

_COMPILED = "/jax/core/compile/backend_compile_duration"


def keep_compiled() -> None:
    """Keep compiled programs in this user's cache, so that only the first run of a shape waits.

    A directory that is set already, such as JAX_COMPILATION_CACHE_DIR, is left alone. Every number
    of processors has its own: a program for the CPU is compiled for that many threads, and the
    cache's keys do not say so.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(_programs()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _programs() -> Path:
    """Directory of the compiled programs."""
    usable = getattr(os, "sched_getaffinity", None)  # Linux
    processors = len(usable(0)) if usable else os.cpu_count() or 1
    return cache_directory() / "xla" / f"{processors}-processors"


@contextlib.contextmanager
def counting(compiled: Counter[str]) -> Iterator[None]:
    """Count the programs that this thread compiles, or reads from the disk, by function."""
    here = threading.get_ident()

    def count(event: str, duration_secs: float, **about: str | int) -> None:
        if event == _COMPILED and threading.get_ident() == here:
            compiled[str(about.get("fun_name"))] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
