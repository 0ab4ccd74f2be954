"""Connections: how many there are, and how long and how large what they send before a request is.

Everything here is done before a request is known, so it holds for clients without a key. A request
that came in whole is looked at by ``checks``.
"""

import asyncio
import json
import logging
import math
import os
import resource
import time
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jaxrag.base.errors import ConfigError
from jaxrag.server.errors import Problem, head_too_large, invalid, too_slow
from jaxrag.server.http.logs import note
from jaxrag.server.settings import ServerSettings

ACCEPTS = 8  # connections that are accepted in one iteration of the event loop
BACKLOG = 2048  # those that the kernel accepts meanwhile

_LEAST = 8  # connections with which a server can serve
_FREE = 4  # one of so many free descriptors is left to files, and to what is being accepted
_PIPELINED = 64  # requests behind one that is being answered
_LOOKS = 4  # at all connections in the shortest time that one may take
_LONGEST_PAUSE = 1.0  # seconds between two looks
_LINGER_SECONDS, _LINGER_BYTES = 2.0, 1 << 20  # what a refused client sends is dropped so far
_MINUTE = 60.0
_ACCEPT = "socket.accept() out of system resource"  # of asyncio, where no descriptor is free
_DESCRIPTORS = "/dev/fd"  # folder of this process's


class HttpConnection(HttpToolsProtocol):
    """One connection, with a bound on the size of heads and on the time that it takes.

    Attributes:
      head_since: when the head that is awaited began, by ``time.monotonic``; None: none is.
      late_since: when a request was answered whose body still comes; None: none does.
      stalled_since: when its client stopped to read what is written; None: it reads.
      closing_since: when it was found closing; None: it was not.
      refused_since: when it was refused; None: it was not.
    """

    def __init__(self, door: "Connections", **parts: Any) -> None:
        """``parts`` are uvicorn's."""
        super().__init__(**parts)
        self._door = door
        self._between = 0  # bytes since the last piece of a body, or since the last request
        self._dropped = 0  # bytes that nobody reads
        self._in_body = False
        self.head_since: float | None = None
        self.late_since: float | None = None
        self.stalled_since: float | None = None
        self.closing_since: float | None = None
        self.refused_since: float | None = None

    @property
    def is_idle(self) -> bool:
        """No request of it is being answered."""
        return self.cycle is None or (self.cycle.response_complete and not self.pipeline)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It is there; another may have to go."""
        super().connection_made(transport)
        self.head_since = time.monotonic()
        self._door.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._door.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, so much at a time that a head beyond the limit is never held."""
        if self.refused_since is not None:
            self._drop(len(data), _LINGER_BYTES)
            return
        if self.head_since is None and not self._in_body and self.is_idle:
            self.head_since = time.monotonic()
        most = self._door.settings.max_head_bytes
        left = memoryview(data)
        while left and self.refused_since is None and not self.transport.is_closing():
            room = most - self._between
            if room <= 0:
                self.refuse(head_too_large(most), "too_large")
                return
            piece, left = left[:room], left[room:]
            self._between += len(piece)
            super().data_received(piece)  # type: ignore[arg-type]

    def on_headers_complete(self) -> None:
        """A request begins; ValueError, which closes, where too many wait for their turn."""
        if len(self.pipeline) >= _PIPELINED:
            raise ValueError("too many requests behind each other")
        self._between, self._in_body, self.head_since = 0, True, None
        self._door.wakes(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of its body, which nobody reads once it is answered."""
        self._between = 0
        if self.late_since is not None:
            self._drop(len(body), self._door.settings.max_body_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it is there."""
        self._between, self._dropped, self._in_body, self.late_since = 0, 0, False, None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """It was answered."""
        super().on_response_complete()
        if self._in_body:
            self.late_since = time.monotonic()
        if self.is_idle:
            self._door.rests(self)

    def pause_writing(self) -> None:
        """Its client does not read as fast as is written."""
        self.stalled_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Its client has read on."""
        self.stalled_since = None
        super().resume_writing()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: a request to upgrade is answered like any other."""

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; ``msg`` is uvicorn's."""
        self.refuse(invalid("this is no HTTP request; send one", code="malformed_request"), "bad")

    def look(self, now: float) -> None:
        """Close it if something of it takes too long."""
        settings = self._door.settings
        if self.transport.is_closing() and self.closing_since is None:
            self.closing_since = now
        for since, seconds in (
            (self.closing_since, settings.body_seconds),
            (self.stalled_since, settings.body_seconds),
            (self.late_since, settings.body_seconds),
            (self.refused_since, _LINGER_SECONDS),
        ):
            if since is not None and now - since > seconds:
                self.abort()
                return
        if self.head_since is not None and now - self.head_since > settings.head_seconds:
            self.refuse(too_slow("the head of a request", settings.head_seconds), "too_slow")

    def refuse(self, problem: Problem, why: str) -> None:
        """Answer with a problem and read no more; ``why``: under which the log counts it."""
        self._door.count(why)
        if not self.is_idle:
            if self.cycle.response_started or self.pipeline:
                self.abort()
                return
            self.cycle.disconnected = True  # what would be answered is not sent any more
            self.cycle.message_event.set()
        self._dropped, self.head_since, self.refused_since = 0, None, time.monotonic()
        body = json.dumps(problem.body()).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(STATUS_LINE[problem.status] + head % len(body) + body)
        # Closed at once, what the client still sends would destroy the answer on its way.
        self.transport.write_eof()

    def abort(self) -> None:
        """Close it at once; what its client has not read is lost."""
        self._door.forget(self)
        self.transport.abort()

    def _drop(self, nbytes: int, most: int) -> None:
        self._dropped += nbytes
        if self._dropped > most:
            self.abort()


class Connections:
    """All connections of a server: for the event loop's thread.

    Attributes:
      settings: of the server.
      limit: most of them.
    """

    def __init__(self, settings: ServerSettings) -> None:
        """Raises ConfigError where too few descriptors are free."""
        self.settings = settings
        self.limit = int(min(_room(), settings.max_connections))
        self._open: set[HttpConnection] = set()
        self._resting: dict[HttpConnection, None] = {}  # no request of them runs; oldest first
        self._closed = Counter[str]()  # since the last line, by why
        self._last_logged = -_MINUTE

    def protocol(self, **parts: Any) -> HttpConnection:
        """A new connection, for uvicorn."""
        return HttpConnection(self, **parts)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._open)

    def admit(self, connection: HttpConnection) -> None:
        """One more; where there are too many, that goes whose request is waited for longest."""
        self._open.add(connection)
        self._resting[connection] = None
        if len(self._open) > self.limit:
            self.count("too_many")
            next(iter(self._resting)).abort()

    def forget(self, connection: HttpConnection) -> None:
        """One less."""
        self._open.discard(connection)
        self._resting.pop(connection, None)

    def wakes(self, connection: HttpConnection) -> None:
        """A request of it begins."""
        self._resting.pop(connection, None)

    def rests(self, connection: HttpConnection) -> None:
        """None runs any more."""
        if connection in self._open:
            self._resting[connection] = None

    async def watch(self) -> None:
        """For as long as it runs: close what takes too long. Says where descriptors are few."""
        if self.limit < self.settings.max_connections:
            shown = {"connections": self.limit, "max_connections": self.settings.max_connections}
            note("few descriptors: raise ulimit -n", shown, logging.WARNING)
        shortest = min(self.settings.head_seconds, self.settings.body_seconds)
        while True:
            await asyncio.sleep(min(_LONGEST_PAUSE, shortest / _LOOKS))
            now = time.monotonic()
            for connection in list(self._open):
                connection.look(now)
            self._tell(now)

    def count(self, why: str) -> None:
        """One was closed, or could not be accepted; the log tells how many, once a minute."""
        self._closed[why] += 1
        self._tell(time.monotonic())

    def on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's handler of errors: without descriptors it has thousands a second."""
        if context.get("message") == _ACCEPT:
            self.count("no_descriptor")
        else:
            loop.default_exception_handler(context)

    def _tell(self, now: float) -> None:
        if self._closed and now - self._last_logged >= _MINUTE:
            self._last_logged = now
            note("connections closed", dict(self._closed), logging.WARNING)
            self._closed.clear()


def _room() -> float:
    """Connections for which there are descriptors. Raises ConfigError where these are too few."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return math.inf
    free = allowed - len(os.listdir(_DESCRIPTORS))
    room = free - free // _FREE
    if room < _LEAST:
        raise ConfigError(
            f"{free} of {allowed} file descriptors are free: too few for connections; raise the "
            "limit with `ulimit -n`"
        )
    return room
