"""The table of routes, and the page for people."""

import functools
import secrets
from collections.abc import Callable, Mapping
from importlib.resources import files as files_of
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from jaxrag.server.answers import markdown, models, scoring, tokenize
from jaxrag.server.answers.chat import chat_completions
from jaxrag.server.answers.completions import completions
from jaxrag.server.answers.responses import (
    delete_response,
    get_response,
    list_input_items,
    responses,
)
from jaxrag.server.documents import embeddings, files, passages, vector_stores
from jaxrag.server.errors import answer_error
from jaxrag.server.http.checks import Checks
from jaxrag.server.http.engine_view import engine_state
from jaxrag.server.http.health import health, ready
from jaxrag.server.http.logs import AccessLog
from jaxrag.server.http.metrics import attach, metrics
from jaxrag.server.settings import ServerSettings
from jaxrag.server.state.entry import Call, endpoint
from jaxrag.server.state.state import ServerState

_STORE = "/v1/vector_stores/{store}"
_MEMBER = f"{_STORE}/files/{{file:path}}"
_BATCH = f"{_STORE}/file_batches/{{batch}}"
_MARK = "@NONCE@"  # in the file, where its style and its script say the nonce
_POLICY = (
    "default-src 'self'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" '
    'rx="3" fill="#0f685a"/><path d="M4 5h8M4 8h8M4 11h5" stroke="#fff" stroke-width="1.6" '
    'stroke-linecap="round"/></svg>'
)


def plain(
    path: str,
    answer: Callable[[Call], Mapping[str, Any] | Response],
    method: str = "GET",
    **how: bool,
) -> Route:
    """The route of a plain function; ``how`` as ``endpoint`` has it."""
    return Route(path, endpoint(answer, **how), methods=[method])


@functools.cache
def _text() -> str:
    return files_of("jaxrag.server.http").joinpath("page.html").read_text(encoding="utf-8")


async def page(request: Request) -> Response:
    """GET /: the page. It runs no script and takes no style but its own, from nowhere else."""
    nonce = secrets.token_urlsafe(16)
    headers = {
        "content-security-policy": _POLICY.format(nonce=nonce),
        "cache-control": "no-store",
        "referrer-policy": "same-origin",
        "x-content-type-options": "nosniff",
    }
    return HTMLResponse(_text().replace(_MARK, nonce), headers=headers)


async def icon(request: Request) -> Response:
    """GET /favicon.svg and /favicon.ico: the same picture."""
    return Response(
        _ICON, media_type="image/svg+xml", headers={"cache-control": "public, max-age=86400"}
    )


ROUTES = (
    Route("/", page),
    Route("/favicon.svg", icon),
    Route("/favicon.ico", icon),
    Route("/health", health),
    Route("/ready", ready),
    Route("/metrics", metrics),
    Route("/v1/engine", engine_state),
    plain("/tokenizer_info", scoring.tokenizer_info, ready=False),
    plain("/v1/models", models.list_models, ready=False),
    plain("/v1/models/{name:path}", models.get_model, ready=False),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    plain("/v1/responses/{response}", get_response),
    plain("/v1/responses/{response}", delete_response, "DELETE"),
    plain("/v1/responses/{response}/input_items", list_input_items),
    plain("/markdown", markdown.markdown, "POST", prepares=True),
    plain("/tokenize", tokenize.tokenize, "POST", prepares=True),
    plain("/detokenize", tokenize.detokenize, "POST", prepares=True),
    plain("/v1/plain", passages.forget_passages, "DELETE"),
    plain("/v1/files", files.list_files),
    Route("/v1/files", files.create_file, methods=["POST"]),
    plain("/v1/files/{file}", files.get_file),
    plain("/v1/files/{file}", files.delete_file, "DELETE"),
    plain("/v1/files/{file}/content", files.file_content),
    plain("/v1/vector_stores", vector_stores.list_stores),
    plain("/v1/vector_stores", vector_stores.create_store, "POST"),
    plain(_STORE, vector_stores.get_store),
    plain(_STORE, vector_stores.change_store, "POST"),
    plain(_STORE, vector_stores.delete_store, "DELETE"),
    plain(f"{_STORE}/search", vector_stores.search_store, "POST", prepares=True),
    plain(f"{_STORE}/files", vector_stores.list_members),
    plain(f"{_STORE}/files", vector_stores.add_member, "POST"),
    plain(f"{_MEMBER}/content", vector_stores.member_content),
    plain(_MEMBER, vector_stores.get_member),
    plain(_MEMBER, vector_stores.change_member, "POST"),
    plain(_MEMBER, vector_stores.delete_member, "DELETE"),
    plain(f"{_STORE}/file_batches", vector_stores.create_batch, "POST"),
    plain(_BATCH, vector_stores.get_batch),
    plain(f"{_BATCH}/cancel", vector_stores.cancel_batch, "POST"),
    plain(f"{_BATCH}/files", vector_stores.list_batch),
    plain("/v1/embeddings", embeddings.create_embeddings, "POST", prepares=True),
)


def make_app(state: ServerState) -> Starlette:
    """The application over a state, which handlers find at ``request.app.state.server``."""
    app = Starlette(
        routes=list(ROUTES),
        middleware=[
            Middleware(AccessLog, state=state),
            *_cors(state.settings),
            Middleware(Checks, state=state),
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
