"""GET /health and GET /ready."""

from starlette.requests import Request
from starlette.responses import JSONResponse

from jaxrag.server.state.entry import check_moves, check_ready
from jaxrag.server.state.state import state_of


async def health(request: Request) -> JSONResponse:
    """Whether the process serves: 503 where its engine is stuck."""
    state = state_of(request)
    check_moves(state)
    return JSONResponse({"status": "ok", "phase": state.phase})


async def ready(request: Request) -> JSONResponse:
    """Whether requests are taken: 200, or 503 while it starts or ends."""
    check_ready(state_of(request))
    return JSONResponse({"status": "ready"})
