"""How a request comes in: who sends it, and whether requests are taken."""

from starlette.requests import Request

from jaxrag.server.errors import invalid, not_found, unavailable
from jaxrag.server.state.state import ServerState, state_of
from jaxrag.server.tenants import Access


def entered(request: Request) -> tuple[ServerState, Access]:
    """The server, and what the sender may do; what it sends counts among its requests.

    Raises Problem 401, 429 and 503.
    """
    state = state_of(request)
    access = state.access(request)
    check_ready(state)
    if request.method == "POST" and "entered" not in request.scope:
        request.scope["entered"] = True
        state.limits.check_rate(access)
    return state, access


def is_stuck(state: ServerState) -> bool:
    """Has the engine's thread been at one turn of its loop for longer than it may?

    Not while the server starts, when it compiles. A thread that waits, such as for storage, is not
    stuck: it hears whoever calls.
    """
    return state.phase != "starting" and state.engine.silence > state.settings.stall_seconds


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


def chosen(
    state: ServerState,
    model: str | None,
    knowledge_base: str | None = None,
    header: str | None = None,
) -> str | None:
    """The knowledge base that a request names, in whatever way; None where it names none.

    Raises Problem 404 for a model that is not served, 400 for two different knowledge bases. What
    is named is not looked for here.
    """
    named = {} if knowledge_base is None else {"knowledge_base": knowledge_base}
    if model is not None:
        name, at, behind = model.partition("@")
        if name != state.name:
            raise no_model(state, model)
        if at:
            named["model"] = behind
    if header:
        named["X-Knowledge-Base"] = header
    if len(set(named.values())) > 1:
        told = " and ".join(f"{name}={value!r}" for name, value in named.items())
        raise invalid(f"{told} name different knowledge bases; name one", "knowledge_base")
    return next(iter(named.values()), None)


def no_model(state: ServerState, name: str) -> Exception:
    """The problem of a model that is not served."""
    return not_found(
        f"there is no model {name!r}; this server has {state.name!r}, and GET /v1/models lists it "
        "with its knowledge bases",
        "model",
        "model_not_found",
    )
