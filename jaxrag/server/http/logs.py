"""Logs: one line an event, as key=value or JSON, under the id of its request.

What a client wrote is in none of them: no question, no document, no key, no error that may quote
them, and of a path only its pattern. Every request leaves a line; one to the model a second one,
with its tokens and times.
"""

import contextlib
import json
import logging
import sys
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxrag.engine.reuse import tokens_by_source
from jaxrag.server.state.state import Served, ServerState

_LOG = logging.getLogger("jaxrag.server")
_FIELDS = "fields"  # of a record, beside its message
PROBES = ("/health", "/ready", "/metrics")  # asked every few seconds by machines
_LEVELS = {"jaxrag": logging.INFO, "uvicorn": logging.WARNING, "asyncio": logging.WARNING}
_READY = "/ready"  # is 503 whenever a server starts or ends
_NOWHERE = "(none)"
_LEFT = 499  # where no answer was begun: its client had left
_LONGEST_ID = 128  # characters of a request id that is taken over


class Lines(logging.Formatter):
    """A record as one line: its time, level, event, and fields."""

    def __init__(self, form: str) -> None:
        """``form``: "json" or "text"."""
        super().__init__()
        self._json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        moment = datetime.fromtimestamp(record.created, UTC)
        values: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            # Of the server's own errors no text, which may be a client's; the engine knows no text.
            if record.name != _LOG.name:
                values["error"] = " ".join(str(error).split())
            values["error_type"] = type(error).__name__
            frames = traceback.extract_tb(error.__traceback__)
            values["at"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        if self._json:
            return json.dumps(values, ensure_ascii=True, default=str)
        return " ".join(f"{name}={_shown(value)}" for name, value in values.items())


def _shown(value: Any) -> str:
    """A value without blanks or line ends, or quoted as JSON has it."""
    if isinstance(value, float):
        value = round(value, 6)
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    plain = text and all(it.isprintable() and it not in ' "=' for it in text)
    return text if plain else json.dumps(text)


def note(event: str, fields: Mapping[str, Any], level: int = logging.INFO) -> None:
    """Log an event with its fields."""
    _LOG.log(level, event, extra={_FIELDS: dict(fields)})


@contextlib.contextmanager
def logging_requests(state: ServerState, stream: TextIO | None = None) -> Iterator[None]:
    """Write what the package and its server log to ``stream``, standard error if None."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Lines(state.settings.log_format))
    loggers = [logging.getLogger(name) for name in _LEVELS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger, level in zip(loggers, _LEVELS.values(), strict=True):
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(handler)
    state.observers.append(observe)
    try:
        yield
    finally:
        state.observers.remove(observe)
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.level, logger.propagate = level, propagate


def observe(served: Served) -> None:
    """Log a request to the model that has ended."""
    results = served.results
    rows = [row for result in results for row in result.reuse]
    fields: dict[str, Any] = {
        "request_id": served.request_id,
        "endpoint": served.endpoint,
        "tenant": served.tenant,
        "outcome": served.ended,
        "status": served.status,
        "code": served.code,
        "stream": served.stream,
        "seconds": round(served.seconds, 6),
        "first_seconds": None if served.first_seconds is None else round(served.first_seconds, 6),
        "prompt_tokens": served.prompt_tokens,
        "completion_tokens": sum(len(result.token_ids) for result in results),
    }
    if results:
        fields["method"] = results[0].method
        fields["tokens_from"] = tokens_by_source(rows, served.prompt_tokens)
        names = ("retrieve", "wait", "load", "compile", "prefill")
        fields["phases"] = {
            name: round(sum(result.timings[name] for result in results), 6) for name in names
        }
        in_order = sorted(served.moments.items(), key=lambda it: it[1])
        fields["moments"] = {name: round(at, 6) for name, at in in_order}
    note("answered", fields, logging.INFO if served.status < 500 else logging.ERROR)


class AccessLog:
    """Gives every HTTP request an id, counts those in flight, and logs each at its end.

    The id is the client's own where it sends one, and is answered with.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with ``scope["request_id"]``."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.monotonic(), _LEFT
        given = dict(scope["headers"]).get(b"x-request-id", b"")[:_LONGEST_ID]
        shown = "".join(it for it in given.decode("latin-1") if it.isascii() and it.isprintable())
        name = scope["request_id"] = shown or uuid.uuid4().hex

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        self._state.requests += 1
        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = 500
            raise
        finally:
            self._state.requests -= 1
            quiet = scope["path"] in PROBES and (status < 500 or scope["path"] == _READY)
            fields = {
                "request_id": name,
                "http_method": scope["method"],
                "path": pattern_of(scope),
                "status": status,
                "seconds": round(time.monotonic() - begun, 6),
            }
            note("http", fields, logging.DEBUG if quiet else logging.INFO)


def pattern_of(scope: Scope) -> str:
    """The path of a request with names in place of what its client filled in."""
    if "endpoint" not in scope:
        return _NOWHERE
    path = str(scope["path"])
    for name, value in scope.get("path_params", {}).items():
        head, found, tail = path.rpartition(f"/{value}")
        if found:
            path = f"{head}/{{{name}}}{tail}"
    return path
