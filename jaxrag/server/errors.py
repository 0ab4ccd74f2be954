"""What goes wrong, as HTTP says it: a status, and OpenAI's object with one line of text."""

import asyncio
import dataclasses
import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from jaxrag.base.errors import (
    Cancelled,
    ConfigError,
    ContextExceeded,
    DeadlineExceeded,
    DocumentError,
    EngineError,
    EngineUnavailable,
    JaxragError,
    KnowledgeBaseError,
    Overloaded,
    RequestError,
    RetrievalError,
    StoreError,
    TokenizerError,
)
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.serve.ask import Ask

LEFT = 499  # the status of a client that left before its answer

_LOG = logging.getLogger("jaxrag.server")

_INVALID = "invalid_request_error"
_NO_RETRY = {"x-should-retry": "false"}
_AGAIN = 5  # seconds after which to ask again where nothing tells better
_PARAM = re.compile(r"([a-z_]+)(?:\[\d+\])?[=:. ]")
_ASKED = (
    "the question", "the last of messages", "the system message", "an earlier", "messages"
)  # fmt: skip
_NAMES = {  # of generate: of the request
    "max_new_tokens": "max_tokens", "question": "messages", "guide": "response_format",
}  # fmt: skip
_PARAMS = {field.name for cls in (Ask, SamplingParams) for field in dataclasses.fields(cls)} | {
    "documents", "messages", "priority", "question", "timeout", "tokens", "tools"
}  # fmt: skip


class Problem(Exception):
    """A request that is answered with an error.

    Attributes:
      status: of HTTP.
      message: one line.
      type: its kind, such as "invalid_request_error".
      code: its cause, such as "context_length_exceeded"; None where the kind says it all.
      param: the field of the request that is wrong.
      headers: of the answer, such as retry-after.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = _INVALID,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The object that is answered with."""
        shown = {n: getattr(self, n) for n in ("message", "type", "param", "code")}
        return {"error": shown}


class ClientLeft(Problem):
    """The client closed its connection; what is said of it is not read."""

    def __init__(self) -> None:
        super().__init__(LEFT, "the client left", type="client_error", code="client_left")


def invalid(message: str, param: str | None = None, code: str | None = None) -> Problem:
    """A request that cannot be meant: 400."""
    return Problem(400, message, param=param, code=code)


def unauthorized(message: str) -> Problem:
    """No key, or one that is not known: 401."""
    return Problem(401, message, type="authentication_error", code="invalid_api_key")


def forbidden(message: str) -> Problem:
    """A key that may not do this: 403."""
    return Problem(403, message, type="permission_error", code="permission_denied")


def not_found(message: str, param: str | None = None, code: str = "not_found") -> Problem:
    """What is not there, or not for this key: 404."""
    return Problem(404, message, code=code, param=param)


def too_large(message: str) -> Problem:
    """A body beyond the limit: 413."""
    return Problem(413, message, code="request_too_large")


def quota_exceeded(message: str) -> Problem:
    """A tenant stores as much as it may: 413."""
    return Problem(413, message, code="quota_exceeded")


def head_too_large(most: int) -> Problem:
    """A request line and headers beyond the limit: 431."""
    what = f"the head of the request has more than {most} bytes; send fewer or shorter headers"
    return Problem(431, what, code="head_too_large")


def too_slow(what: str, seconds: float) -> Problem:
    """Something did not come in time: 408, after which the connection is closed."""
    return Problem(
        408,
        f"{what} did not come within {seconds:g} s; send it again, faster",
        code="request_timeout",
        headers={"connection": "close"},
    )


def busy(message: str, seconds: float, code: str = "overloaded") -> Problem:
    """Too much is asked at once; the same request may be sent again after some seconds: 429."""
    return Problem(429, message, type="rate_limit_error", code=code, headers=retry_after(seconds))


def unavailable(message: str, seconds: float = _AGAIN, code: str = "unavailable") -> Problem:
    """Not now, through no fault of the request: 503."""
    return Problem(503, message, type="server_error", code=code, headers=retry_after(seconds))


def retry_after(seconds: float) -> dict[str, str]:
    """When to ask again, in the headers that clients read; 1 to 120 seconds."""
    seconds = min(max(seconds, 1.0), 120.0)
    return {"retry-after": str(-int(-seconds // 1)), "retry-after-ms": str(round(1000 * seconds))}


def problem_of(error: BaseException) -> Problem:
    """Any error as a problem; one that was not foreseen is logged, and shown without its text."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, HTTPException):
        return _of_http(error)
    if isinstance(error, ClientDisconnect | asyncio.CancelledError):
        return ClientLeft()
    if not isinstance(error, JaxragError):
        _LOG.error("a request failed", exc_info=error)
        what = "the server failed on this request; its log says why"
        return Problem(500, what, type="server_error", code="internal_error", headers=_NO_RETRY)
    text = " ".join(str(error).split())
    if isinstance(error, ContextExceeded):
        return invalid(text, "messages", "context_length_exceeded")
    if isinstance(error, RequestError | ConfigError | TokenizerError | KnowledgeBaseError):
        return invalid(text, _param(text))
    if isinstance(error, DocumentError):
        return invalid(text, code="invalid_document")
    if isinstance(error, Overloaded):
        return busy(text, _AGAIN)
    if isinstance(error, DeadlineExceeded):
        kind = "timeout_error"
        return Problem(504, text, type=kind, code="deadline_exceeded", headers=_NO_RETRY)
    if isinstance(error, Cancelled):
        return unavailable(text, code="cancelled")
    if isinstance(error, StoreError | RetrievalError):
        return unavailable(text)
    if isinstance(error, EngineUnavailable):
        return unavailable(text, code="engine_unavailable")
    code = "engine_error" if isinstance(error, EngineError) else "internal_error"
    return Problem(500, text, type="server_error", code=code, headers=_NO_RETRY)


def _param(text: str) -> str | None:
    """The field that a message begins with, as the project's messages do."""
    if text.startswith(_ASKED):
        return "messages"
    found = _PARAM.match(text)
    name = found[1] if found else None
    return _NAMES.get(name, name) if name in _PARAMS else None


def _of_http(error: HTTPException) -> Problem:
    """What the router refuses: no such path, no such method."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = " ".join(str(error.detail).split())
    return Problem(error.status_code, message, code=code, headers=error.headers)


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """The one exception handler."""
    problem = problem_of(error)
    if isinstance(error, HTTPException) and problem.status in (404, 405):
        problem.message = f"{request.method} {request.url.path}: {problem.message.lower()}"
    return JSONResponse(problem.body(), problem.status, headers=problem.headers)
