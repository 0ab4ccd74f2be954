"""GET /v1/models, and what the names of models and knowledge bases in a request mean."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from jaxrag.server.state.entry import no_model
from jaxrag.server.state.state import ServerState, state_of
from jaxrag.server.tenants import Access


async def list_models(request: Request) -> JSONResponse:
    """The model, and ``model@kb`` for every knowledge base that the key may read."""
    state = state_of(request)
    access = state.access(request)
    return JSONResponse({"object": "list", "data": _entries(state, access)})


async def get_model(request: Request) -> JSONResponse:
    """One of them."""
    state = state_of(request)
    access = state.access(request)
    name = request.path_params["name"]
    for entry in _entries(state, access):
        if entry["id"] == name:
            return JSONResponse(entry)
    raise no_model(state, name)


def _entries(state: ServerState, access: Access) -> list[dict[str, Any]]:
    names = [None, *state.readable(access)]
    first = state.default_base(access)
    return [_entry(state, name, name == first) for name in names]


def _entry(state: ServerState, knowledge_base: str | None, first: bool) -> dict[str, Any]:
    at = "" if knowledge_base is None else f"@{knowledge_base}"
    return {
        "id": state.name + at,
        "object": "model",
        "created": state.created,
        "owned_by": "jaxrag",
        "max_model_len": state.model.config.max_positions,
        "knowledge_base": knowledge_base,
        "methods": list(state.methods),
        "method": next(iter(state.methods)),
        "decode_rules": list(state.decode_rules),
        "k": state.settings.k,
        "max_tokens": state.settings.max_new_tokens,
        "questions": list(state.settings.questions) if first else [],
    }
