"""The process of a server: a socket, uvicorn on it, warm-up, signals and drain."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import uvicorn

from jaxrag.base.errors import ConfigError
from jaxrag.server.errors import unavailable
from jaxrag.server.http.app import make_app
from jaxrag.server.http.connections import ACCEPTS, BACKLOG, Connections
from jaxrag.server.http.handover import Predecessor, Successors
from jaxrag.server.http.health import fail_stuck, watchdog
from jaxrag.server.http.logs import logging_requests
from jaxrag.server.settings import ServerSettings
from jaxrag.server.state.state import ServerState
from jaxrag.server.state.warm import WarmUp
from jaxrag.server.tenants import check_host

_LOG = logging.getLogger("jaxrag.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TURN = 0.05  # seconds between two looks at what still runs
_LOOK = 0.2  # seconds between two looks at the other processes of the model
_PROBES = 8  # one of so many connections is kept for /health and for refusals
_GRACE = 2  # seconds for what was said last to reach its readers
_SHOWN = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where everybody is listened to


def address_of(settings: ServerSettings) -> tuple[Any, ...]:
    """Family, kind, protocol, name and address of the settings. Raises ConfigError."""
    host = settings.host
    check_host(host, settings.keys is not None, settings.open_to_all)
    try:
        found = socket.getaddrinfo(
            host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        why = f"host {host!r}: {error.strerror}; name an address of this machine"
        raise ConfigError(why) from None
    return found[0]


def bind(settings: ServerSettings) -> socket.socket:
    """A socket on the address of the settings. Raises ConfigError where it cannot be had."""
    host, port = settings.host, settings.port
    found = address_of(settings)
    try:
        # With its protocol, by which asyncio knows TCP and turns Nagle's algorithm off: a body in a
        # second write would wait 40 ms for the acknowledgement of the head.
        bound = socket.socket(*found[:3])
    except OSError as error:
        why = f"host {host!r}: {error.strerror}; name an address of this machine"
        raise ConfigError(why) from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(found[4])
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"port {port} on {host} cannot be had ({error.strerror}); choose another with --port"
        ) from None
    return bound


def url_of(bound: socket.socket) -> str:
    """Where clients on this machine find it."""
    host, port = bound.getsockname()[:2]
    host = _SHOWN.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server:
    """A server on a socket, from its start to its end.

    Attributes:
      state: what it serves.
      app: how.
    """

    def __init__(
        self,
        state: ServerState,
        bound: socket.socket,
        about: Mapping[str, Any] | None = None,
        before: Predecessor | None = None,
        room: Callable[[], bool] = lambda: False,
    ) -> None:
        """Takes no requests yet.

        Args:
          state: what it serves.
          bound: where it listens.
          about: what a process is told that takes over from this one, JSON-able.
          before: the process that this one takes over from, whose socket ``bound`` is.
          room: as of ``Successors``.
        """
        self.state = state
        self._room = room
        self._bound, self._about, self._before = bound, about or {}, before
        self.app = make_app(state)
        self._connections = Connections(state.settings)
        state.max_requests = self._connections.limit - self._connections.limit // _PROBES
        config = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE,
            server_header=False,
            http=self._connections.protocol,  # type: ignore[arg-type]
            ws="none",
            proxy_headers=False,  # no header says from which address a request comes
            backlog=ACCEPTS,
        )
        self._uvicorn = _Uvicorn(config)
        self._ends = 0  # how often its end was asked for
        self._ending: asyncio.Task[None] | None = None
        self._warm_up = WarmUp(state)
        self._warming: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where clients on this machine find it."""
        return url_of(self._bound)

    def run(self, ready: Callable[[], None]) -> None:
        """Serve until SIGTERM or SIGINT; ``ready`` is called once requests are taken.

        That is before it has warmed up: requests that come by then wait for what they need.

        Raises what warm-up raises. A process whose end is asked for twice, or while it warms up,
        ends here: what its threads wait for is not waited for.
        """
        with logging_requests(self.state), watchdog(self.state):
            asyncio.run(self.serve(ready, signals=True))
        if self._ends > 1 or (self._warming is not None and self._warming.is_alive()):
            logging.shutdown()
            os._exit(0)

    async def serve(self, ready: Callable[[], None], *, signals: bool = False) -> None:
        """As ``run``, in a loop that is there; ``signals``: in the main thread."""
        loop = asyncio.get_running_loop()
        if signals:
            for number in _SIGNALS:
                loop.add_signal_handler(number, self.end)
        if self._before is not None and not await self._warm_ahead():
            await self._close()
            return
        serving = asyncio.ensure_future(self._uvicorn.serve([self._bound]))
        warming: asyncio.Future[None] | None = None
        watching = [
            asyncio.ensure_future(it)
            for it in (fail_stuck(self.state), self._connections.watch(), self._end_when_lost())
        ]
        loop.set_exception_handler(self._connections.on_error)
        successors: Successors | None = None
        try:
            while not self._uvicorn.started and not serving.done():
                await asyncio.sleep(_TURN)
            if self._uvicorn.started:
                self._bound.listen(BACKLOG)
            if self._before is not None:
                await asyncio.to_thread(self._before.switch)
            if self._uvicorn.started:
                ready()
            if self._before is None and self.state.settings.warm_up:
                warming = self._warm()
                await asyncio.wait((warming, serving), return_when=asyncio.FIRST_COMPLETED)
                if warming.done():
                    warming.result()
            if self.state.phase == "starting":
                self.state.phase = "ready"
                self.state.metrics.started()
            self._compile_rest()
            successors = self._successors(loop)
            await serving
        finally:
            if successors is not None:
                successors.close()
            self._uvicorn.should_exit = True
            await serving
            for task in watching:
                task.cancel()
            await self._close()

    async def _warm_ahead(self) -> bool:
        """Be ready while another serves; False where the end was asked for meanwhile."""
        if self.state.settings.warm_up:
            warming = self._warm()
            while not warming.done() and not self._ends:
                await asyncio.sleep(_TURN)
            if warming.done():
                warming.result()
        if self._ends:
            return False
        self.state.phase = "ready"
        self.state.metrics.started()
        return True

    def _successors(self, loop: asyncio.AbstractEventLoop) -> Successors | None:
        """Let another process take over; None where it cannot be asked for that."""

        def switch() -> None:
            asyncio.run_coroutine_threadsafe(self._leave(), loop).result()

        try:
            return Successors(self._bound, self._about, switch, self._room)
        except OSError as error:
            host, port, *_ = self._bound.getsockname()
            _LOG.warning(
                "no other process can take over from this one: another has the name for that of "
                "%s:%s (%s); end that, or choose another --port", host, port, error.strerror,
            )  # fmt: skip
            return None

    async def _leave(self) -> None:
        """Accept no connections, answer those that there are and close each behind its answer."""
        for server in self._uvicorn.servers:
            server.close()
        self._uvicorn.server_state.default_headers.append((b"connection", b"close"))
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._drain(lambda: len(self._connections)))

    async def _end_when_lost(self) -> None:
        """Another process of the model died: whoever waits is told, and nothing more is served."""
        while (lost := self.state.engine.lost) is None:
            await asyncio.sleep(_LOOK)
        _LOG.critical("%s", lost)
        self.state.phase = "draining"
        for asking in list(self.state.asking):
            asking.fail(lost)
        self._uvicorn.should_exit = True

    async def _close(self) -> None:
        """Let go of the state; what is being indexed is waited for, unless asked to end twice."""
        closing = threading.Thread(target=self.state.close, name="jaxrag-close", daemon=True)
        closing.start()
        while closing.is_alive() and self._ends < 2 and self.state.engine.lost is None:
            await asyncio.sleep(_TURN)

    def end(self) -> None:
        """Take no more requests, let those that run complete, and end; the second time: now."""
        self._ends += 1
        self.state.phase = "draining"
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._drain(lambda: self.state.requests))

    async def _drain(self, left: Callable[[], int]) -> None:
        """Wait for what is left, as long as it may take; the rest fails, as the server ends."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.state.settings.drain_seconds
        while left() and self._ends < 2 and loop.time() < until:
            await asyncio.sleep(_TURN)
        self.state.phase = "draining"
        for asking in list(self.state.asking):
            asking.fail(unavailable("the server is ending; ask another, or again later"))
        self._uvicorn.should_exit = True

    def _warm(self) -> "asyncio.Future[None]":
        """Warm up on a thread that no exit waits for."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def work() -> None:
            error: BaseException | None = None
            try:
                _LOG.info("%d programs compiled", self._warm_up.ready())
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is over
                loop.call_soon_threadsafe(settle, error)

        self._warming = threading.Thread(target=work, name="jaxrag-warm-up", daemon=True)
        self._warming.start()
        return done

    def _compile_rest(self) -> None:
        """Compile what others than the default request need, while this one is served."""
        if self.state.settings.warm_up and self.state.phase == "ready":
            rest = self._warm_up.rest
            self._warming = threading.Thread(target=rest, name="jaxrag-warm-up", daemon=True)
            self._warming.start()


class _Uvicorn(uvicorn.Server):
    """uvicorn, without its signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever runs it."""
        yield
