"""GET /health and GET /ready."""

from starlette.requests import Request
from starlette.responses import JSONResponse

from jaxrag.server.errors import unavailable
from jaxrag.server.stall import is_stuck
from jaxrag.server.state import ServerState, state_of


async def health(request: Request) -> JSONResponse:
    """Whether the process serves: 503 where its engine is stuck."""
    state = state_of(request)
    check_moves(state)
    return JSONResponse({"status": "ok", "phase": state.phase})


async def ready(request: Request) -> JSONResponse:
    """Whether requests are taken: 200, or 503 while it starts or ends."""
    check_ready(state_of(request))
    return JSONResponse({"status": "ready"})


def check_moves(state: ServerState) -> None:
    """Problem 503 where the engine is stuck."""
    if is_stuck(state):
        silent, most = state.engine.silence, state.settings.stall_seconds
        raise unavailable(
            f"the engine has done nothing for {silent:.0f} s and may for {most:g}; ask another",
            code="engine_stuck",
        )


def check_ready(state: ServerState) -> None:
    """Problem 503 while the server starts or ends, or its engine is stuck."""
    if state.phase == "starting":
        raise unavailable("the server is starting; ask again in a moment", code="starting")
    if state.phase == "draining":
        raise unavailable("the server is ending; ask another, or again later", code="draining")
    check_moves(state)
