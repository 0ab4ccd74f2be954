"""GET /health and GET /ready."""

from starlette.requests import Request
from starlette.responses import JSONResponse

from jaxrag.server.errors import unavailable
from jaxrag.server.state import ServerState, state_of


async def health(request: Request) -> JSONResponse:
    """Whether the process serves."""
    return JSONResponse({"status": "ok", "phase": state_of(request).phase})


async def ready(request: Request) -> JSONResponse:
    """Whether requests are taken: 200, or 503 while it starts or ends."""
    check_ready(state_of(request))
    return JSONResponse({"status": "ready"})


def check_ready(state: ServerState) -> None:
    """Problem 503 while the server starts or ends."""
    if state.phase == "starting":
        raise unavailable("the server is starting; ask again in a moment", code="starting")
    if state.phase == "draining":
        raise unavailable("the server is ending; ask another, or again later", code="draining")
