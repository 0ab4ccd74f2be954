"""Requests to the model: prompts handed to the engine, and their answers whole or as a stream."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrag.base.errors import DeadlineExceeded, Overloaded
from jaxrag.serve.answers import Result
from jaxrag.serve.questions import ReadyQuestion
from jaxrag.server.answers.asking import LATE, Asking, Inbox, Piece, usage
from jaxrag.server.answers.sse import EventStream, comment, event
from jaxrag.server.answers.visit import Visit, unless_left
from jaxrag.server.errors import busy, invalid
from jaxrag.server.fields import Body, Generation, read_body
from jaxrag.server.state.entry import chosen

_HEADER = "x-knowledge-base"
_TOGETHER = 64  # events that are sent at once, where so many are there

Make = Callable[[], ReadyQuestion]


class Form(Protocol):
    """How an endpoint writes an answer. Choices are numbered as their prompts."""

    def opening(self) -> Iterator[dict[str, Any]]:
        """The first events of a stream."""
        ...

    def piece(self, place: int, piece: Piece) -> dict[str, Any] | None:
        """The event of what is new of a choice; None where it shows nothing."""
        ...

    def finish(self, place: int, result: Result) -> dict[str, Any]:
        """The last event of a choice."""
        ...

    def closing(self) -> dict[str, Any]:
        """An event of no choice, for what is to be said at last."""
        ...

    def whole(self, results: Sequence[Result], logprobs: Sequence[list[float]]) -> dict[str, Any]:
        """All choices at once."""
        ...


async def visited(
    request: Request, handle: Callable[[Visit, Body], Coroutine[Any, Any, Response]], asked: str
) -> Response:
    """Have a request to the model handled, and the server told how it ended.

    ``asked`` is the field of what is asked, in errors.
    """
    visit = Visit(request)
    try:
        visit.knock()
        body = await read_body(request)
        response = await unless_left(request, handle(visit, body))
    except asyncio.CancelledError as error:
        visit.end(error)
        raise
    except Exception as error:
        told: Exception = error
        if isinstance(error, Overloaded):  # by the engine's own bounds
            told = busy(str(error), visit.state.limits.seconds_until_room())
        problem = visit.end(told)
        assert problem is not None
        if problem.param == "messages":
            problem.param = asked
        raise problem from error
    if not isinstance(response, EventStream):
        visit.end()
    return response


def base_of(visit: Visit, fields: Generation, default: bool) -> str | None:
    """The knowledge base that is asked; with ``default`` one is, if nothing is named or given.

    Whether it is there is seen when the prompt is made ready. Raises Problem 404 for a model that
    is not served, 400 for two different knowledge bases.
    """
    assert visit.access is not None
    state = visit.state
    name = chosen(state, fields.model, fields.knowledge_base, visit.request.headers.get(_HEADER))
    blocks = fields.said.get("blocks")
    if name is not None and (fields.documents or blocks):
        what = "documents" if fields.documents else "blocks"
        raise invalid(
            f"{what} and the knowledge base {name!r}: what requests bring is not kept there; name "
            "one of them",
            what,
        )
    given = fields.documents is not None or blocks
    if name is None and default and not given:
        name = state.default_base(visit.access)
    visit.knowledge_base = name
    return name


async def respond(
    visit: Visit, fields: Generation, prompts: Sequence[Make], form: Form
) -> Response:
    """Ask the engine, and answer in a form.

    A stream begins with the first news, or after a while; what fails before is raised.
    """
    settings = visit.state.settings
    visit.stream = fields.stream
    visit.enter(len(prompts))
    inbox = Inbox(settings.stream_events * len(prompts) if fields.stream else None)
    visit.askings = [Asking(visit.state, inbox, place) for place in range(len(prompts))]
    await _open(visit, fields, prompts)
    if not fields.stream:
        results = await _whole(visit, inbox)
        shown = form.whole(results, [asking.logprobs for asking in visit.askings])
        return JSONResponse(shown | _told(visit, fields, results))
    first = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(settings.hold_seconds):
            first = await inbox.next()
    return EventStream(_events(visit, fields, inbox, form, first), visit.end, inbox.cut)


async def _open(visit: Visit, fields: Generation, prompts: Sequence[Make]) -> None:
    """Make all prompts ready, then hand them to the engine."""
    assert visit.ticket is not None
    most = visit.state.settings.max_seconds
    deadline = visit.arrived + min(fields.timeout or most, most)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout_at(loop.time() + visit.seconds_left(deadline)):
            for asking, make in zip(visit.askings, prompts, strict=True):
                await asking.ready(make)
            tokens = sum(asking.prompt_tokens for asking in visit.askings)
            visit.state.limits.known(visit.ticket, tokens)
            for asking in visit.askings:
                await asking.begin(deadline)
    except TimeoutError:
        raise DeadlineExceeded(LATE) from None


async def _whole(visit: Visit, inbox: Inbox) -> list[Result]:
    found: dict[int, Result] = {}
    while len(found) < len(visit.askings):
        place, item = await inbox.next()
        if isinstance(item, Result):
            found[place] = item
        else:
            visit.saw_tokens()
    visit.results += (found[place] for place in range(len(found)))
    return visit.results


async def _events(
    visit: Visit,
    fields: Generation,
    inbox: Inbox,
    form: Form,
    first: tuple[int, Piece | Result] | None,
) -> AsyncGenerator[bytes, None]:
    """Everything from the first event to the account, as it comes."""
    count = len(visit.askings)
    found: dict[int, Result] = {}
    out = [event(it) for it in form.opening()]
    seen = None
    while len(found) < count:
        if out and first is None and (not len(inbox) or len(out) >= _TOGETHER):
            yield b"".join(out)
            out.clear()
        try:
            async with asyncio.timeout(visit.state.settings.keepalive_seconds):
                place, item = first or await inbox.next()
        except TimeoutError:
            now = visit.state.engine.turns, [asking.where for asking in visit.askings]
            if now != seen:  # one that stands still is to look so
                yield comment(", ".join(now[1]))
            seen = now
            continue
        first = None
        if isinstance(item, Result):
            found[place] = item
            visit.results.append(item)
            if len(found) < count or fields.include_usage:
                out.append(event(form.finish(place, item)))
        else:
            visit.saw_tokens()
            told = form.piece(place, item)
            out += [] if told is None else [event(told)]
    told = _told(visit, fields, [found[it] for it in range(count)])
    if fields.include_usage:
        out.append(event(form.closing() | told))
    else:
        out.append(event(form.finish(place, found[place]) | {"jaxrag": told["jaxrag"]}))
    yield b"".join(out)


def _told(visit: Visit, fields: Generation, results: Sequence[Result]) -> dict[str, Any]:
    """Usage and account of an answer; of several prompts a list of accounts."""
    lengths = [asking.prompt_tokens for asking in visit.askings]
    accounts = [
        asking.account(result, fields.return_text)
        for asking, result in zip(visit.askings, results, strict=True)
    ]
    return {
        "usage": usage(list(zip(lengths, results, strict=True))),
        "jaxrag": accounts[0] if len(accounts) == 1 else accounts,
    }
