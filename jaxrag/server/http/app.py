"""The table of routes, and what stands around all of them."""

import uuid
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxrag.server.answers.chat import chat_completions
from jaxrag.server.answers.completions import completions
from jaxrag.server.answers.models import get_model, list_models
from jaxrag.server.answers.scoring import get_tokenizer_info
from jaxrag.server.answers.tokenize import detokenize, tokenize
from jaxrag.server.errors import Problem, answer_error, forbidden, too_large
from jaxrag.server.http.engine_view import engine_state
from jaxrag.server.http.health import health, ready
from jaxrag.server.http.logs import AccessLog
from jaxrag.server.http.metrics import attach, metrics
from jaxrag.server.http.page import icon, page
from jaxrag.server.http.routes import ROUTES as DOCUMENTS
from jaxrag.server.settings import ServerSettings
from jaxrag.server.state.state import ServerState

_LONGEST_ID = 128  # characters of a request id that is taken over
_UPLOADS = "/v1/files"


def make_app(state: ServerState) -> Starlette:
    """The application over a state, which handlers find at ``request.app.state.server``."""
    routes = [
        Route("/", page),
        Route("/favicon.svg", icon),
        Route("/favicon.ico", icon),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/v1/engine", engine_state),
        Route("/tokenizer_info", get_tokenizer_info),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", get_model),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        *DOCUMENTS,
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(RequestId, state=state),
            Middleware(AccessLog),
            *_cors(state.settings),
            Middleware(Errors),
            Middleware(SameOrigin, allowed=state.settings.origins),
            Middleware(BodyLimit, settings=state.settings),
        ],
        exception_handlers={HTTPException: answer_error},
    )
    app.state.server = state
    attach(state)
    return app


def _cors(settings: ServerSettings) -> list[Middleware]:
    """What lets browsers ask from the pages that may."""
    if not settings.origins:
        return []
    return [
        Middleware(
            CORSMiddleware, allow_origins=settings.origins, allow_methods="*", allow_headers="*"
        )
    ]


class SameOrigin:
    """Refuses what a page of another origin has a browser send: its user did not ask for it.

    A browser sends a plain POST to any server, this machine's own included, and says whence.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or raise Problem 403."""
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            headers = dict(scope["headers"])
            origin = headers.get(b"origin", b"").decode("latin-1")
            host = headers.get(b"host", b"").decode("latin-1")
            if origin and origin not in self._allowed and origin.partition("://")[2] != host:
                raise forbidden(
                    f"pages of {origin[:100]} may not ask here; the server's `origins` lets them"
                )
        await self._app(scope, receive, send)


class RequestId:
    """Gives every request an id, the client's own where it sends one, and answers with it.

    Counts those that are being answered, too.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with ``scope["request_id"]``."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")[:_LONGEST_ID]
        shown = "".join(it for it in given.decode("latin-1") if it.isascii() and it.isprintable())
        name = scope["request_id"] = shown or uuid.uuid4().hex

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        self._state.requests += 1
        try:
            await self._app(scope, receive, told)
        finally:
            self._state.requests -= 1


class Errors:
    """Answers with the error that a handler raised."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if scope["type"] != "http" or begun:
                raise
            response = await answer_error(Request(scope), error)
            await response(scope, receive, send)


class BodyLimit:
    """Refuses a body beyond the limit, as soon as its length is known."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; reading its body raises Problem 413 where it is too long."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        uploads = scope["path"].startswith(_UPLOADS)
        most = self._settings.max_upload_bytes if uploads else self._settings.max_body_bytes
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > most:
            raise _beyond(most)
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > most:
                raise _beyond(most)
            return message

        await self._app(scope, counted, send)


def _beyond(most: int) -> Problem:
    return too_large(f"the body has more than {most} bytes; send less")
