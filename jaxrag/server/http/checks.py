"""What lies around all answers: refuses what is not to come in, and answers with errors."""

import asyncio
import zlib
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxrag.server.errors import Problem, answer_error, invalid, too_large, too_slow, unavailable
from jaxrag.server.http.hosts import check_name, check_site
from jaxrag.server.http.logs import PROBES
from jaxrag.server.state.entry import TENANT
from jaxrag.server.state.state import ServerState

_UPLOADS = "/v1/files"
_HELD = 1 << 20  # bytes of an upload that are in memory
_RATE = 1 << 16  # bytes for which a body may take a second more


class Checks:
    """Refuses what is not to come in, and answers with the error that a handler raised."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; reading its body raises Problem 413, 429 or 408."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False
        body = _Body(self._state, scope, receive)

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            self._check(scope)
            body.check_length()
            await self._app(scope, body.receive, watched)
        except Exception as error:
            if begun:
                raise
            response = await answer_error(Request(scope), error)
            await response(scope, receive, send)
        finally:
            body.release()

    def _check(self, scope: Scope) -> None:
        state = self._state
        most = state.max_requests
        if most is not None and state.requests > most and scope["path"] not in PROBES:
            raise unavailable(
                f"{most} requests are being answered, which is as many as may be; send it again "
                "later, or raise the server's `max_connections`",
                code="overloaded",
            )
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        check_name(hosts, state.settings)
        check_site(scope, state.settings)


def allowed_seconds(seconds: float, nbytes: int) -> float:
    """How long a body may take of which so much has come."""
    return seconds + nbytes / _RATE


class _Body:
    """The body of one request while it comes in, and as long as it is held."""

    def __init__(self, state: ServerState, scope: Scope, receive: Receive) -> None:
        settings = state.settings
        self._settings, self._bodies, self._scope = settings, state.bodies, scope
        self._receive = receive
        self._uploads = scope["path"].startswith(_UPLOADS)
        self._most = settings.max_upload_bytes if self._uploads else settings.max_body_bytes
        self._begun = asyncio.get_running_loop().time()
        self._came = self._received = self._held = 0
        self._unpack: Any = None
        self._tenant = ""
        self._whole = False

    def check_length(self) -> None:
        """Problem 413 for one that says that it is too long, 400 for one that cannot be read."""
        headers = dict(self._scope["headers"])
        packed = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
        if packed in ("gzip", "x-gzip", "deflate"):
            self._unpack = zlib.decompressobj(wbits=47)  # of either
        elif packed != "identity":
            raise invalid(f"content-encoding: {packed:.40}: expected gzip, deflate or none")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._most:
            raise self._beyond()

    async def receive(self) -> Message:
        """The next piece, or, behind the last, what happens to the connection."""
        if self._whole:
            return await self._receive()
        seconds = self._settings.body_seconds
        try:
            async with asyncio.timeout_at(self._begun + allowed_seconds(seconds, self._came)):
                message = await self._receive()
        except TimeoutError:
            raise too_slow("the body of the request", seconds) from None
        self._whole = not message.get("more_body")
        self._came += len(message.get("body", b""))
        if self._unpack is not None:
            unpacked = await asyncio.to_thread(self._unpacked, message.get("body", b""))
            message = {**message, "body": unpacked}
        self._received += len(message.get("body", b""))
        if self._received > self._most:
            raise self._beyond()
        holds = min(self._received, _HELD) if self._uploads else self._received
        self._tenant = self._scope.get(TENANT, "")
        self._bodies.hold(self._tenant, holds - self._held)
        self._held = holds
        return message

    def _unpacked(self, body: bytes) -> bytes:
        """A piece as it was before it was packed; one byte more than may be says that all is."""
        try:
            found: bytes = self._unpack.decompress(body, self._most - self._received + 1)
        except zlib.error as error:
            raise invalid(f"the body is not what content-encoding says ({error})") from None
        if self._whole and not self._unpack.eof and not self._unpack.unconsumed_tail:
            raise invalid("the body ends in the middle of what content-encoding says; send all")
        return found

    def release(self) -> None:
        """The request is over."""
        self._bodies.release(self._tenant, self._held)

    def _beyond(self) -> Problem:
        return too_large(f"the body has more than {self._most} bytes; send less")
