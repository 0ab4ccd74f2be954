"""One HTTP request to the model, from its arrival to its end, however it ends."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, get_args

from starlette.requests import Request
from starlette.types import Receive

from jaxrag.serve.answers import Result
from jaxrag.serve.ask import Plain
from jaxrag.server.answers.asking import Asking
from jaxrag.server.errors import LEFT, ClientLeft, Problem, invalid, problem_of
from jaxrag.server.fields import LONG_BODY, Generation
from jaxrag.server.state.entry import Call
from jaxrag.server.state.limits import Ticket
from jaxrag.server.state.state import Ended, Served
from jaxrag.server.tenants import Access

PLAIN_HEADER = "X-Jaxrag-Plain"


class Visit:
    """A request to the model.

    Attributes:
      call: as it came in; of no tenant before it is let in.
      state: of the server.
      arrived: when, by ``time.monotonic``.
      ticket: its place among those that were let in.
      knowledge_base: that it asks.
      stream: whether its answer comes piece by piece.
      askings: its prompts, which end with it.
      results: of those that have an answer.
    """

    def __init__(self, request: Request) -> None:
        """Nothing is checked yet."""
        self.call = Call(request, Access())
        self.state = self.call.state
        self.arrived = time.monotonic()
        self.ticket: Ticket | None = None
        self.knowledge_base: str | None = None
        self.stream = False
        self.askings: list[Asking] = []
        self.results: list[Result] = []
        self._first: float | None = None
        self._last = self.arrived
        self._between: list[float] = []
        self._ended = False

    @property
    def threads(self) -> Executor:
        """Those that prepare, for jobs of its tenant."""
        return self.state.prepare.of(self.call.access.tenant)

    async def read[T](self, read: Callable[[Mapping[str, Any]], T]) -> T:
        """What ``read`` makes of the body; on a thread where that is long."""
        call = self.call
        if len(call.raw) <= LONG_BODY:
            return read(call.body)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, lambda: read(call.body))

    def choose_base(self, fields: Generation, default: bool) -> str | None:
        """The knowledge base that is asked; with ``default`` one is, if nothing is named or given.

        Whether it is there is seen when the prompt is made ready. Raises Problem 404 for a model
        that is not served, 400 for two different knowledge bases.
        """
        name = self.call.named_base()
        blocks = fields.blocks
        if name is not None and (fields.documents or blocks):
            what = "documents" if fields.documents else "blocks"
            raise invalid(
                f"{what} and the knowledge base {name!r}: what requests bring is not kept there; "
                "name one of them",
                what,
            )
        given = fields.documents is not None or blocks
        if name is None and default and not given:
            name = self.state.default_base(self.call.access)
        self.knowledge_base = name
        return name

    def with_header(self, fields: Generation) -> Generation:
        """The fields with what a header says of plain prompts, for clients that send no fields.

        Raises Problem 400 for a header that says nothing known, or other than the field does.
        """
        header = self.call.request.headers.get(PLAIN_HEADER)
        if header is None:
            return fields
        if header not in get_args(Plain):
            known = ", ".join(get_args(Plain))
            raise invalid(f"{PLAIN_HEADER}: {header!r}: expected one of {known}", "plain")
        if fields.plain not in (None, header):
            raise invalid(f"plain={fields.plain!r} and {PLAIN_HEADER}: {header}; send one", "plain")
        return fields.model_copy(update={"plain": header})

    def enter(self, prompts: int) -> None:
        """Let it in, to wait for its first token. Raises Problem 429."""
        self.ticket = self.state.limits.enter(self.call.access, prompts)

    def known(self, tokens: int) -> None:
        """The length of its prompts is known. Raises Problem 429."""
        assert self.ticket is not None
        self.state.limits.known(self.ticket, tokens)

    @property
    def named(self) -> str:
        """The model as it answers, with its knowledge base."""
        at = "" if self.knowledge_base is None else f"@{self.knowledge_base}"
        return self.state.name + at

    def deadline(self, timeout: float | None) -> float:
        """When it fails, by ``time.monotonic``; ``timeout``: seconds that its client allows."""
        most = self.state.settings.max_seconds
        return self.arrived + min(timeout or most, most)

    def saw_tokens(self) -> None:
        """Tokens are there for the client."""
        now = time.monotonic()
        if self._first is None:
            self._first = now - self.arrived
            if self.ticket is not None:
                self.state.limits.started(self.ticket)
        else:
            self._between.append(now - self._last)
        self._last = now

    def end(self, error: BaseException | None = None) -> Problem | None:
        """It is over, and its prompts with it; what its client sees of an error. Counts once."""
        problem = None if error is None else problem_of(error)
        for asking in self.askings:
            asking.close()
        if self._ended:
            return problem
        self._ended = True
        generated = sum(len(result.token_ids) for result in self.results)
        if self.ticket is not None:
            self.state.limits.leave(self.ticket, generated)
        served = Served(
            endpoint=self.call.request.url.path,
            request_id=self.call.request.scope.get("request_id", ""),
            tenant=self.call.access.tenant,
            stream=self.stream,
            ended=_ended(problem),
            status=200 if problem is None else problem.status,
            code=None if problem is None else problem.code,
            seconds=time.monotonic() - self.arrived,
            first_seconds=self._first,
            between=tuple(self._between),
            prompt_tokens=0 if self.ticket is None else self.ticket.tokens,
            results=tuple(self.results),
            passages=tuple(span for asking in self.askings for span in asking.spans),
            moments={
                "arrived": self.arrived,
                **(self.askings[-1].moments if self.askings else {}),
                **({} if self._first is None else {"told": self.arrived + self._first}),
            },
        )
        for observe in self.state.observers:
            observe(served)
        return problem


def _ended(problem: Problem | None) -> Ended:
    if problem is None:
        return "finished"
    if problem.status == LEFT:
        return "cancelled"
    if problem.status == 504:
        return "expired"
    return "failed" if problem.status in (408, 500, 503) else "refused"


async def unless_left[T](request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What some work gives; it is cancelled, and ClientLeft raised, where the client leaves."""
    doing = asyncio.ensure_future(work)
    async with first_of(doing, asyncio.ensure_future(left(request.receive))):
        if not doing.done():
            raise ClientLeft
        return doing.result()


@contextlib.asynccontextmanager
async def first_of(*tasks: asyncio.Future[Any]) -> AsyncIterator[None]:
    """The block runs once one of the tasks is done; none of them is left when it ends."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def left(receive: Receive) -> None:
    """Returns when the client leaves."""
    with contextlib.suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass
