"""GET /health and /ready; and an engine that is stuck: those who wait are failed, or all ends."""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from jaxrag.base.errors import EngineError
from jaxrag.server.state.entry import check_moves, check_ready, is_stuck
from jaxrag.server.state.state import ServerState, state_of

_LOG = logging.getLogger("jaxrag.server")

STUCK = 70  # exit status of a process whose engine was stuck
_LOOKS = 4  # at the engine in the time that it may be silent


async def health(request: Request) -> JSONResponse:
    """Whether the process serves, and how many wait while it compiles: 503 for a stuck engine."""
    state = state_of(request)
    check_moves(state)
    said: dict[str, Any] = {"status": "ok", "phase": state.phase}
    if state.compiling is not None or state.engine.compiles:
        done, of = state.compiling or (0, 1)  # one, for who asked for it
        said["compiling"] = {"done": done, "of": of, "waiting": len(state.asking)}
    return JSONResponse(said)


async def ready(request: Request) -> JSONResponse:
    """Whether requests are answered at once: 200, or 503 while it starts or ends."""
    check_ready(state_of(request))
    return JSONResponse({"status": "ready"})


async def fail_stuck(state: ServerState) -> None:
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
