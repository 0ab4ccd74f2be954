"""Server-sent events: a response ends with [DONE] or with an error, never with neither."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxrag.server.answers.asking import SlowReader
from jaxrag.server.answers.visit import first_of, left
from jaxrag.server.errors import Problem

_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy is not to gather what is to be seen at once
}
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One event with an object; named, if the object says its type."""
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return name + b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients skip."""
    return b": " + " ".join(text.split()).encode() + b"\n\n"


class EventStream(Response):
    """Streams what a generator yields, and closes the generator whatever happens.

    ``end`` is called with None after the last event, else with what was raised: by the generator,
    or as the client left or read too slowly; it gives the problem that the client is to see, of
    which ``failed`` makes the last event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        end: Callable[[BaseException | None], Problem | None],
        cut: asyncio.Event,
        failed: Callable[[Problem], dict[str, Any]] = Problem.body,
    ) -> None:
        super().__init__(None, headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._end = end
        self._cut = cut
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end, the client leaves, or it is cut off."""
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(left(receive))
        cutting = asyncio.ensure_future(self._cut.wait())
        try:
            async with first_of(writing, leaving, cutting):
                pass
        finally:
            await self._events.aclose()
            self._end(SlowReader() if self._cut.is_set() else asyncio.CancelledError())

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            problem = self._end(error)
            assert problem is not None
            last = event(self._failed(problem))
        else:
            self._end(None)
            last = DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})
