"""An engine that is stuck: seen from outside, told to those who wait, and the process ended."""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxrag.base.errors import EngineError
from jaxrag.server.state.entry import is_stuck
from jaxrag.server.state.state import ServerState

_LOG = logging.getLogger("jaxrag.server")

STUCK = 70  # exit status of a process whose engine was stuck
_LOOKS = 4  # at the engine in the time that it may be silent


async def tell_stuck(state: ServerState) -> None:
    """For as long as it runs: fail whoever waits for an engine that is stuck."""
    while True:
        await asyncio.sleep(state.settings.stall_seconds / _LOOKS)
        if not is_stuck(state):
            continue
        waiting = list(state.asking)
        if waiting:
            _LOG.error("the engine is stuck: %d requests that wait for it fail", len(waiting))
        for asking in waiting:
            asking.fail(EngineError("the engine is stuck and gives no answer; ask another server"))


@contextlib.contextmanager
def watchdog(
    state: ServerState, leave: Callable[[int], Any] = os._exit
) -> Iterator[threading.Thread | None]:
    """End the process at once where its engine is silent for ``watchdog_seconds``, if there are.

    From a thread of its own: whoever started the process starts it anew.
    """
    seconds = state.settings.watchdog_seconds
    if seconds is None:
        yield None
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(seconds / _LOOKS):
            silence = state.engine.silence
            if state.phase != "starting" and silence > seconds:
                _LOG.critical("the engine has been stuck for %.0f s: the process ends", silence)
                leave(STUCK)
                return

    thread = threading.Thread(target=watch, name="jaxrag-watchdog", daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        over.set()
