"""GET /v1/engine: rows, queues, tiers, links and programs, for admins."""

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from jaxrag.server.errors import forbidden
from jaxrag.server.http.metrics import link_name, link_names
from jaxrag.server.state.replicas import Replicas
from jaxrag.server.state.state import ServerState, state_of


async def engine_state(request: Request) -> JSONResponse:
    """What the engine holds and has done, at this moment. Problem 403 for who is no admin."""
    state = state_of(request)
    if not state.access(request).admin:
        raise forbidden("the state of the engine is for admins; ask with a key that has admin")
    return JSONResponse(view(state))


def view(state: ServerState) -> dict[str, Any]:
    """All of it, JSON-able; "standing" and "tiers" are None before the first request."""
    engine = state.engine
    standing, tiers = engine.status(), engine.tiers()
    shown = None if tiers is None else dataclasses.asdict(tiers)
    if tiers is not None and shown is not None:
        names = link_names(state)
        shown["links"] = [
            dataclasses.asdict(link) | {"name": link_name(link, names)} for link in tiers.links
        ]
    status = None
    if standing is not None:
        status = dataclasses.asdict(standing) | {"queued_seconds": standing.queued_seconds}
    found = {
        "phase": state.phase,
        "silence_seconds": engine.silence,
        "http": {
            "running": state.limits.running,
            "waiting": state.limits.waiting,
            "waiting_tokens": state.limits.waiting_tokens,
        },
        "standing": status,
        "tiers": shown,
        "programs": dict(sorted(engine.compiled.copy().items())),
        "compilations": state.metrics.compilations(),
    }
    return found | ({"replicas": engine.members} if isinstance(engine, Replicas) else {})
