"""How a request comes in: who sends it, whether requests are taken, and what it carries."""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrag.server.errors import invalid, not_found, unavailable
from jaxrag.server.fields import Fields, Named, body_of, ignored
from jaxrag.server.state.library import Library
from jaxrag.server.state.state import ServerState, state_of
from jaxrag.server.tenants import Access

_HEADER = "x-knowledge-base"
TENANT = "tenant"  # of a scope: who sends the request

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


@dataclasses.dataclass(frozen=True)
class Call:
    """A request that was let in.

    Attributes:
      request: of HTTP, with its query and headers.
      access: what its sender may do.
      raw: its body; b"" where its method has none.
      notes: on what it says.
    """

    request: Request
    access: Access
    raw: bytes = b""
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def state(self) -> ServerState:
        """The state of the server."""
        return state_of(self.request)

    @property
    def library(self) -> Library:
        """Files and vector stores of the tenants."""
        return self.state.library

    @property
    def path(self) -> Mapping[str, str]:
        """What its path fills in, by name."""
        return self.request.path_params

    @property
    def query(self) -> Mapping[str, str]:
        """What its address asks, by name."""
        return self.request.query_params

    @functools.cached_property
    def body(self) -> dict[str, Any]:
        """The JSON object that it carries. Raises Problem 400."""
        return body_of(self.raw)

    def read[T: Fields](self, kind: type[T]) -> T:
        """Its fields, and notes on the others. Raises Problem 400."""
        fields = kind.read(self.body)
        self.notes.extend(ignored(fields))
        return fields

    def named_base(self) -> str | None:
        """The knowledge base that the request names, in whatever way; None where it names none.

        Raises Problem 404 for a model that is not served, 400 for two different knowledge bases.
        What is named is not looked for here.
        """
        fields = Named.read(self.body)
        knowledge_base, model = fields.knowledge_base, fields.model
        named = {} if knowledge_base is None else {"knowledge_base": knowledge_base}
        if model is not None:
            name, at, behind = model.partition("@")
            if name != self.state.name:
                raise no_model(self.state, model)
            if at:
                named["model"] = behind
        if header := self.request.headers.get(_HEADER):
            named["X-Knowledge-Base"] = header
        if len(set(named.values())) > 1:
            shown = " and ".join(f"{name}={value!r}" for name, value in named.items())
            raise invalid(f"{shown} name different knowledge bases; name one", "knowledge_base")
        return next(iter(named.values()), None)


async def enter(
    request: Request, *, ready: bool = True, counts: bool = True, reads: bool = True
) -> Call:
    """Let a request in, and read its body.

    Args:
      request: of HTTP.
      ready: it is refused while the server ends.
      counts: a POST is one of those that its tenant may send in a minute.
      reads: a POST's body is JSON, read here.

    Raises Problem 401 for who is not known, 429 and 503 for what is not let in now.
    """
    state = state_of(request)
    access = state.access(request)
    request.scope[TENANT] = access.tenant
    if ready:
        check_takes(state)
    posts = request.method == "POST"
    if counts and posts:
        state.limits.check_rate(access)
    return Call(request, access, await request.body() if reads and posts else b"")


def endpoint(
    answer: Callable[[Call], Mapping[str, Any] | Response],
    *,
    ready: bool = True,
    prepares: bool = False,
) -> Endpoint:
    """An endpoint of a plain function, which runs on a thread, as it may wait for the disk.

    Args:
      answer: gives the JSON object that is answered, or another response.
      ready: as ``enter`` has it.
      prepares: it retrieves or tokenises, and takes one of the threads for that.
    """

    def respond(call: Call) -> Response:
        """The answer as bytes: to write a long one takes a while, too."""
        given = answer(call)
        return given if isinstance(given, Response) else JSONResponse(with_notes(given, call.notes))

    @functools.wraps(answer)
    async def handle(request: Request) -> Response:
        call = await enter(request, ready=ready)
        threads = call.state.prepare.of(call.access.tenant) if prepares else None
        return await asyncio.get_running_loop().run_in_executor(threads, respond, call)

    return handle


def with_notes(answer: Mapping[str, Any], notes: Sequence[str]) -> Mapping[str, Any]:
    """An answer whose account has these notes, too."""
    if not notes:
        return answer
    account = answer.get("jaxrag", {})
    return {**answer, "jaxrag": {**account, "notes": [*account.get("notes", ()), *notes]}}


def is_stuck(state: ServerState) -> bool:
    """Has the engine's thread been at one iteration for longer than it may?

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
    """Problem 503 while the server compiles what most requests need, and as ``check_takes``."""
    if state.phase == "starting":
        raise unavailable("the server is starting; ask again in a moment", code="starting")
    check_takes(state)


def check_takes(state: ServerState) -> None:
    """Problem 503 while the server ends, or its engine is stuck. While it starts, requests wait."""
    if state.phase == "draining":
        raise unavailable("the server is ending; ask another, or again later", code="draining")
    check_moves(state)


def no_model(state: ServerState, name: str) -> Exception:
    """The problem of a model that is not served."""
    return not_found(
        f"there is no model {name!r}; this server has {state.name!r}, and GET /v1/models lists it "
        "with its knowledge bases",
        "model",
        "model_not_found",
    )
