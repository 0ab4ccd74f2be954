"""Requests to the model: prompts handed to the engine, and their answers whole or as a stream."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrag.base.errors import DeadlineExceeded, Overloaded
from jaxrag.serve.answers import Piece, Result
from jaxrag.serve.conversation import Conversation, Text
from jaxrag.server.answers.asking import LATE, Asking, Inbox, usage
from jaxrag.server.answers.sse import EventStream, comment, event
from jaxrag.server.answers.visit import Visit, unless_left
from jaxrag.server.answers.writers import AnswerWriter
from jaxrag.server.errors import busy, invalid
from jaxrag.server.fields import MOST_CHOICES, Generation, ignored
from jaxrag.server.state.entry import Call, Endpoint, enter

_TOGETHER = 64  # events that are sent at once, where so many are there


def model_endpoint(
    asked: str,
) -> Callable[[Callable[[Visit], Coroutine[Any, Any, Response]]], Endpoint]:
    """An endpoint that asks the model; the server hears how every request to it ended.

    ``asked`` is the field of what is asked, in errors.
    """

    def made(answer: Callable[[Visit], Coroutine[Any, Any, Response]]) -> Endpoint:
        @functools.wraps(answer)
        async def handle(request: Request) -> Response:
            visit = Visit(request)
            try:
                visit.call = Call(request, visit.state.access(request))
                visit.call = await enter(request, counts=False)
                response = await unless_left(request, answer(visit))
            except asyncio.CancelledError as error:
                visit.end(error)
                raise
            except Exception as error:
                shown: Exception = error
                if isinstance(error, Overloaded):  # by the engine's own bounds
                    shown = busy(str(error), visit.state.limits.seconds_until_room())
                problem = visit.end(shown)
                assert problem is not None
                if problem.param == "messages":
                    problem.param = asked
                raise problem from error
            if not isinstance(response, EventStream):
                visit.end()
            return response

        return handle

    return made


async def respond(
    visit: Visit, fields: Generation, prompts: Sequence[Text | Conversation], writer: AnswerWriter
) -> Response:
    """Ask the engine, with the knowledge base of the visit, and answer by a writer.

    A stream begins with the first news, or after a while; what fails before is raised.
    """
    settings = visit.state.settings
    visit.stream = fields.stream
    count = len(prompts) * fields.choices
    if count > MOST_CHOICES:
        raise invalid(
            f"n={fields.choices} for {len(prompts)} prompts: expected at most {MOST_CHOICES} "
            "answers to a request",
            "n",
        )
    visit.enter(count)
    inbox = Inbox(settings.stream_events * count if fields.stream else None)
    visit.askings = [Asking(visit.state, inbox, place) for place in range(count)]
    await _begin(visit, fields, prompts)
    if not fields.stream:
        results = await _whole(visit, inbox)
        pieces = [asking.pieces for asking in visit.askings]
        account = _account(visit, fields, results)
        await writer.settle(results, account)
        return JSONResponse(writer.whole(results, pieces, account))
    first = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(settings.hold_seconds):
            first = await inbox.next()
    events = _events(visit, fields, inbox, writer, first)
    return EventStream(events, visit.end, inbox.cut, writer.failed)


async def _begin(visit: Visit, fields: Generation, prompts: Sequence[Text | Conversation]) -> None:
    """Make all prompts ready, then hand them to the engine."""
    deadline = visit.deadline(fields.timeout)
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            for place, prompt in enumerate(prompts):
                start = place * fields.choices
                first, *others = visit.askings[start : start + fields.choices]
                access, base = visit.call.access, visit.knowledge_base
                await first.ready(access, fields, prompt, base, visit.threads, deadline)
                for choice, asking in enumerate(others, 1):
                    asking.ready_as(first, choice)
            visit.known(sum(asking.prompt_tokens for asking in visit.askings))
            for asking in visit.askings:
                await asking.begin(deadline)
    except TimeoutError:
        raise DeadlineExceeded(LATE) from None


async def _whole(visit: Visit, inbox: Inbox) -> list[Result]:
    results: dict[int, Result] = {}
    while len(results) < len(visit.askings):
        place, item = await inbox.next()
        if isinstance(item, Result):
            await visit.askings[place].check_current()
            results[place] = item
        else:
            visit.saw_tokens()
    visit.results += (results[place] for place in range(len(results)))
    return visit.results


async def _events(
    visit: Visit,
    fields: Generation,
    inbox: Inbox,
    writer: AnswerWriter,
    first: tuple[int, Piece | Result] | None,
) -> AsyncGenerator[bytes, None]:
    """Everything from the first event to the account, as it comes."""
    count = len(visit.askings)
    by_place: dict[int, Result] = {}
    out = [event(opening) for opening in writer.opening()]
    last = None
    while len(by_place) < count:
        if out and first is None and (not len(inbox) or len(out) >= _TOGETHER):
            yield b"".join(out)
            out.clear()
        try:
            async with asyncio.timeout(visit.state.settings.keepalive_seconds):
                place, item = first or await inbox.next()
        except TimeoutError:
            now = visit.state.engine.iterations, [asking.where for asking in visit.askings]
            if now != last:  # one that does not move is to look so
                yield comment(", ".join(now[1]))
            last = now
            continue
        first = None
        if isinstance(item, Result):
            await visit.askings[place].check_current()
            by_place[place] = item
            visit.results.append(item)
            if len(by_place) < count:
                out += map(event, writer.ended(place, item, None))
        else:
            visit.saw_tokens()
            out += map(event, writer.piece(place, item))
    results = [by_place[place] for place in range(count)]
    account = _account(visit, fields, results)
    await writer.settle(results, account)
    out += map(event, writer.ended(place, by_place[place], account))
    yield b"".join(out)


def _account(visit: Visit, fields: Generation, results: Sequence[Result]) -> dict[str, Any]:
    """Usage and account of an answer; of several prompts or choices a list of accounts."""
    accounts = [
        asking.account(result, fields.return_text, visit.call.access)
        for asking, result in zip(visit.askings, results, strict=True)
    ]
    notes = ignored(fields)
    for account in accounts:
        account["notes"] = [*account["notes"], *notes]
    body = {
        "usage": usage(visit.askings, results, fields.choices),
        "jaxrag": accounts[0] if len(accounts) == 1 else accounts,
    }
    fingerprint = visit.askings[0].fingerprint
    return body if fingerprint is None else body | {"system_fingerprint": fingerprint}
