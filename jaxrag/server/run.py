"""The process of a server: a socket, uvicorn on it, warm-up, signals and drain."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from jaxrag.errors import ConfigError
from jaxrag.server.app import make_app
from jaxrag.server.logs import logging_requests
from jaxrag.server.settings import ServerSettings
from jaxrag.server.stall import tell_stuck, watchdog
from jaxrag.server.state import ServerState

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TURN = 0.05  # seconds between two looks at what still runs
_GRACE = 5  # seconds for connections to close once everything was answered


def bind(settings: ServerSettings) -> socket.socket:
    """A socket on the address of the settings. Raises ConfigError where it cannot be had."""
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        bound = socket.socket(found[0][0], socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"host {host!r}: {error.strerror}; name an address of this machine"
        ) from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(found[0][4])
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"port {port} on {host} cannot be had ({error.strerror}); choose another with --port"
        ) from None
    return bound


def url_of(bound: socket.socket) -> str:
    """Where clients find it."""
    host, port = bound.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


class Server:
    """A server on a socket, from its start to its end.

    Attributes:
      state: what it serves.
    """

    def __init__(self, state: ServerState, bound: socket.socket) -> None:
        self.state = state
        self._bound = bound
        config = uvicorn.Config(
            make_app(state),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE,
            server_header=False,
        )
        self._uvicorn = _Uvicorn(config)
        self._told = 0  # how often it was told to end

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM or SIGINT; ``ready`` is called once requests are taken."""
        with logging_requests(self.state), watchdog(self.state):
            asyncio.run(self.serve(ready, signals=True))

    async def serve(self, ready: Callable[[], None] = lambda: None, signals: bool = False) -> None:
        """As ``run``, in a loop that is there; ``signals``: in the main thread."""
        loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(self._uvicorn.serve([self._bound]))
        if signals:
            for number in _SIGNALS:
                loop.add_signal_handler(number, self.end)
        watching = asyncio.ensure_future(tell_stuck(self.state))
        try:
            while not self._uvicorn.started and not serving.done():
                await asyncio.sleep(_TURN)
            if self.state.phase == "starting":
                self.state.phase = "ready"
            self.state.metrics.started()
            ready()
            await serving
        finally:
            watching.cancel()
            self.state.prepare.shutdown(wait=False, cancel_futures=True)

    def end(self) -> None:
        """Take no more requests, let those that run complete, and end; the second time: now."""
        self._told += 1
        self.state.phase = "draining"
        if self._told == 1:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self._uvicorn.should_exit = self._uvicorn.force_exit = True

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.state.settings.drain_seconds
        while self.state.limits.running and loop.time() < until:
            await asyncio.sleep(_TURN)
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """uvicorn, without its signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever runs it."""
        yield
