"""Several engines of one model behind the interface of one: each request goes to one of them."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from jaxrag.base.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    EngineUnavailable,
    JaxragError,
)
from jaxrag.engine.engine import Engine
from jaxrag.engine.jobs import SILENT_SECONDS, Job, ReplicaReport, StoreRef
from jaxrag.engine.progress import CommandedSink, Progress, Sink, Where
from jaxrag.engine.request import Request
from jaxrag.engine.routing import Candidate, RoutedRequest, Routing, ranked
from jaxrag.engine.scheduler import GENERATED
from jaxrag.engine.state import EngineSettings
from jaxrag.engine.status import EngineStatus, Tiers, all_status, all_tiers
from jaxrag.engine.wire import request_table
from jaxrag.models.model import Model
from jaxrag.server.state.members import (
    ReplicaLink,
    ReplicaMember,
    SentRequest,
    link_rates,
    pieces_of,
    rate_of,
)

_LOG = logging.getLogger("jaxrag")

REPORT_SECONDS = 1.0
_ANSWER_SECONDS = 5.0  # for a report
_LATE_SECONDS = 5.0  # after a request's deadline, which its engine is to see first
_CLOSE_SECONDS = 2.0  # until those who wait know that all ends
_RATE = 1000.0  # tokens a second of an engine that was not measured yet


class Replicas(Engine):
    """Engines of other processes, as one. Safe to share between threads.

    The model of this process makes prompts ready; it computes only what ``call`` and ``spare`` ask
    for: scores of texts, and KV of uploads.

    Attributes:
      routing: which engine gets a request.
    """

    def __init__(
        self,
        model: Model,
        settings: EngineSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        routing: Routing = "residency",
    ) -> None:
        super().__init__(model, settings, clock)
        self.routing = routing
        self._server = secrets.token_hex(8)
        self._about: Mapping[str, str] = {}
        self._refs: Callable[[Request], StoreRef] | None = None
        self._members: dict[str, ReplicaMember] = {}
        self._live: dict[int, SentRequest] = {}
        self._answered, self._generated = 0, 0
        self._served = 0  # requests that were given to an engine, and moved
        self._asyncio = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._asyncio.run_forever, name="jaxrag-replicas", daemon=True
        )
        self._changed = threading.Condition()

    def open(
        self,
        links: Iterable[ReplicaLink],
        refs: Callable[[Request], StoreRef],
        about: Mapping[str, str],
    ) -> None:
        """Serve with these engines from now on.

        Args:
          links: the ways to them.
          refs: names the store of a request.
          about: what each of them has to say of itself to be used, by name.
        """
        self._refs, self._about = refs, dict(about)
        self._thread.start()
        for link in links:
            self.join(link)

    def join(self, link: ReplicaLink) -> None:
        """Serve with one engine more, once it is ready."""

        async def add() -> None:
            member = self._members[link.name] = ReplicaMember(link, self._clock())
            member.watch = asyncio.ensure_future(self._watch(member))

        self._do(add())

    def leave(self, name: str, seconds: float) -> None:
        """Give an engine nothing more, and forget it once what it has is answered.

        After so many seconds what it still has fails.
        """

        async def go() -> None:
            member = self._members[name]
            member.leaving = True
            until = self._clock() + seconds
            while member.sent and self._clock() < until:
                await asyncio.sleep(0.05)
            del self._members[name]
            self._lose(member, f"replica {name} leaves")

        self._do(go())

    def wait(self, seconds: float, least: int | None = None) -> int:
        """Until every engine, or so many, are ready or have failed; how many are ready.

        Raises ConfigError where none is ready then, or after so many seconds.
        """
        until = self._clock() + seconds

        def settled() -> bool:
            over = [it.up or bool(it.refused) for it in list(self._members.values())]
            return all(over) or (least is not None and sum(over) >= least)

        with self._changed:
            while not settled() and (left := until - self._clock()) > 0:
                self._changed.wait(left)
        ready = sum(member.up for member in list(self._members.values()))
        if not ready:
            why = [member.refused for member in list(self._members.values()) if member.refused]
            said = why[0] if why else f"none was ready within {seconds:g} s"
            raise ConfigError(f"no replica serves: {said}")
        return ready

    def close(self) -> None:
        """Let go of the engines; what they still have fails."""

        async def end() -> None:
            tasks = [sent.task for sent in self._live.values() if sent.task is not None]
            for name in list(self._members):
                member = self._members.pop(name)
                self._lose(member, "the server ends")
            if tasks:
                await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)

        if self._thread.is_alive():
            self._do(end())
            self._asyncio.call_soon_threadsafe(self._asyncio.stop)
            self._thread.join()
            self._asyncio.close()

    @property
    def members(self) -> dict[str, dict[str, Any]]:
        """Every engine by name, JSON-able, for whoever looks after them."""
        shown = {}
        for name, member in list(self._members.items()):
            report = member.report
            shown[name] = {
                "up": member.up,
                "why": member.refused,
                "leaving": member.leaving,
                "pid": None if report is None else report.pid,
                "running": len(member.sent),
                "queued_cost": self._queued_cost(member),
                "chunks": len(member.in_pool),
            }
        return shown

    @property
    def queued_seconds(self) -> float:
        """Of work that was given to the engines and is not done; all of them together."""
        members = list(self._members.values())
        return sum(self._queued_cost(it) / self._rate(it) for it in members)

    # As one engine

    @property
    def num_pages(self) -> int:
        """Of the smallest pool of the engines."""
        pages = [it.report.num_pages for it in self._up() if it.report is not None]
        return min(pages, default=0) or super().num_pages

    def add_all(self, asked: Sequence[tuple[Request, Sink]]) -> list[int]:
        """As that of an engine. Raises EngineUnavailable where none is ready."""
        if not self._up():
            raise self._nobody()
        made = [self._made(request, sink) for request, sink in asked]

        def begin() -> None:
            for sent in made:
                self._live[sent.number] = sent
                sent.task = self._asyncio.create_task(self._serve(sent))
                sent.task.add_done_callback(functools.partial(self._over, sent))

        self._asyncio.call_soon_threadsafe(begin)
        return [sent.number for sent in made]

    def abort(self, number: int) -> None:
        """Nothing more is wanted of a request."""

        def act() -> None:
            sent = self._live.get(number)
            if sent is not None and sent.task is not None:
                sent.aborted = True
                sent.task.cancel()

        with contextlib.suppress(RuntimeError):  # closed: there is nothing to abort
            self._asyncio.call_soon_threadsafe(act)

    def stop(self, number: int) -> None:
        """No more tokens are wanted of a request; its outcome comes as if it had ended."""

        async def act() -> None:
            sent = self._live.get(number)
            if sent is not None and sent.at in self._members:
                with contextlib.suppress(JaxragError):  # who serves it finds the engine gone
                    await self._members[sent.at].link.stop(self._server, number)

        self._asyncio.call_soon_threadsafe(lambda: self._asyncio.create_task(act()))

    def drop(self, keys: Sequence[str]) -> None:
        """Let the KV of chunks leave all pools and arenas, where no request reads it now."""
        self._do(self._of_all(lambda link: link.drop(list(keys))))

    def forget_tenant(self, tenant: str) -> int:
        """Have all engines drop what a tenant brought with its requests; of how many chunks."""
        return sum(self._do(self._of_all(lambda link: link.forget(tenant))))

    async def _of_all[Found](
        self, ask: Callable[[ReplicaLink], Coroutine[Any, Any, Found]]
    ) -> list[Found]:
        """What every engine answers that is there; one that is gone holds nothing."""
        asked = [ask(it.link) for it in self._up()]
        answers: list[Found] = []
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if not isinstance(answer, BaseException):
                answers.append(answer)
            elif not isinstance(answer, EngineUnavailable):
                raise answer
        return answers

    def forget(self) -> None:
        """Nothing: an engine forgets by itself what it warmed up with."""

    def status(self) -> EngineStatus | None:
        """Of all engines together; None before the first of them served."""
        found = {name: it.status for name, it in self._reports().items() if it.status is not None}
        return all_status(found) if found else None

    def tiers(self) -> Tiers | None:
        """Of all engines together; None before the first of them served."""
        found = [it.tiers for it in self._reports().values() if it.tiers is not None]
        return all_tiers(found) if found else None

    @property
    def looked(self) -> float | None:
        """When the engine that was heard last reported."""
        return max((it.last for it in list(self._members.values()) if it.report), default=None)

    @property
    def compiles(self) -> bool:
        """Never: each replica does so by itself."""
        return False

    @property
    def silence(self) -> float:
        """0 while an engine is up; else seconds since one was."""
        if self._up():
            return 0.0
        return self._clock() - max((it.last for it in list(self._members.values())), default=0.0)

    def where(self, number: int) -> Where | None:
        """Where a request is, as its engine last said."""
        sent = self._live.get(number)
        return None if sent is None else sent.where

    def held(self) -> tuple[list[str], list[str]]:
        """Nothing: engines report names of 64 bits."""
        return [], []

    # Within the loop

    def _client_sink(self, sink: Sink) -> Sink:
        return CommandedSink(sink, self.abort, self.stop)

    def _do[Result](self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._asyncio).result()

    def _up(self) -> list[ReplicaMember]:
        return [it for it in list(self._members.values()) if it.up and not it.leaving]

    def _reports(self) -> dict[str, ReplicaReport]:
        members = list(self._members.items())
        return {name: it.report for name, it in members if it.report is not None}

    def _nobody(self) -> EngineUnavailable:
        refused = [member.refused for member in list(self._members.values()) if member.refused]
        why = f" ({refused[0]})" if refused else ""
        return EngineUnavailable(
            f"none of {len(self._members)} replicas serves now{why}; ask again"
        )

    def _made(self, request: Request, sink: Sink) -> SentRequest:
        sequence = self._new_sequence(request, self._client_sink(sink))
        private = request.store.private
        return SentRequest(
            number=sequence.number,
            request=sequence.request,
            sink=sequence.sink,
            pieces=pieces_of(sequence, private),
            prompt_cost=sequence.cost,
            since=self._clock(),
        )

    async def _serve(self, sent: SentRequest) -> None:
        """Have one engine after the other serve it, until one has begun to answer."""
        tried: set[str] = set()
        why = ""
        while True:
            left = None if sent.request.timeout is None else self._left(sent)
            if left is not None and left <= 0:
                self._tell(
                    sent, DeadlineExceeded("time was over before an engine began; ask later")
                )
                return
            member = self._choose(sent, tried)
            if member is None:
                lost = EngineUnavailable(f"{why}, and no other replica serves now; ask again")
                self._tell(sent, lost if why else self._nobody())
                return
            sent.at, sent.lost = member.link.name, ""
            member.give(sent)
            try:
                async with asyncio.timeout(None if left is None else left + _LATE_SECONDS):
                    await self._follow(sent, member, left)
                return
            except asyncio.CancelledError:
                if not sent.lost or sent.aborted:
                    raise
                why = sent.lost
                assert sent.task is not None
                sent.task.uncancel()
            except EngineUnavailable as error:
                why = str(error)
                self._lose(member, why)
            except TimeoutError:
                self._tell(sent, DeadlineExceeded("time was over before the answer was complete"))
                return
            finally:
                member.take_back(sent)
            if sent.begun:
                self._tell(sent, EngineUnavailable(f"{why} while it answered; ask again"))
                return
            tried.add(sent.at)
            self._served += 1

    def _over(self, sent: SentRequest, task: "asyncio.Task[None]") -> None:
        """Nothing more is done for a request; who waits for it is told, however that came."""
        del self._live[sent.number]
        if task.cancelled():
            self._tell(sent, Cancelled("the request was aborted"))
        elif (error := task.exception()) is not None:
            _LOG.error("a request failed on replica %s", sent.at, exc_info=error)
            self._tell(sent, EngineUnavailable(f"replica {sent.at}: {type(error).__name__}"))

    def _left(self, sent: SentRequest) -> float:
        assert sent.request.timeout is not None
        return sent.since + sent.request.timeout - self._clock()

    async def _follow(self, sent: SentRequest, member: ReplicaMember, left: float | None) -> None:
        """Tell what an engine says of a request, to its end."""
        assert self._refs is not None
        request = dataclasses.replace(sent.request, timeout=left)
        job = Job(self._server, sent.number, self._refs(sent.request), request_table(request))
        stream = member.link.serve(job)
        try:
            async for news in stream:
                for progress in news.progress:
                    self._hear(sent, progress, self._clock() - news.now)
                    if progress.last:
                        return
        finally:
            await stream.aclose()
        raise EngineUnavailable(f"replica {member.link.name} ended an answer without its end")

    def _hear(self, sent: SentRequest, progress: Progress, shift: float) -> None:
        sent.begun = True
        sent.heard += len(progress.new)
        if progress.last and progress.error is None:
            self._answered += 1
            self._generated += sent.heard
        outcome = progress.outcome
        if outcome is not None:  # by the clock of this process
            moments = {name: at + shift for name, at in outcome.moments.items()}
            outcome = dataclasses.replace(outcome, moments=moments)
            progress = dataclasses.replace(progress, outcome=outcome)
        sent.sink(progress)

    def _tell(self, sent: SentRequest, error: JaxragError) -> None:
        sent.sink(Progress(sent.number, error=error))

    def _choose(self, sent: SentRequest, tried: set[str]) -> ReplicaMember | None:
        up = {member.link.name: member for member in self._up() if member.link.name not in tried}
        if not up:
            return None
        number, self._served = self._served, self._served + 1
        location = str(getattr(sent.request.store, "location", ""))
        rates = {name: link_rates(member.report, location) for name, member in up.items()}
        candidates = [
            Candidate(
                name,
                pool=member,
                host=member.host,
                queued=self._queued_cost(member),
                rate=self._rate(member),
                store_rate=rates[name][0],
                host_rate=rates[name][1],
            )
            for name, member in sorted(up.items())
        ]
        routed = RoutedRequest(sent.pieces, self._cost(sent), number)
        return up[ranked(self.routing, routed, candidates)[0]]

    def _rate(self, member: ReplicaMember) -> float:
        own = rate_of(member.report)
        rates = [rate for it in self._reports().values() if (rate := rate_of(it))]
        return own or (sum(rates) / len(rates) if rates else _RATE)

    def _queued_cost(self, member: ReplicaMember) -> float:
        """Tokens that an engine has to compute for what it was given, the answers' included."""
        return sum(self._cost(sent) for sent in list(member.sent.values()))

    def _cost(self, sent: SentRequest) -> float:
        """Tokens to compute for a request: its prompt's, and as many more as answers have had."""
        most = sent.request.max_new_tokens
        mean = self._generated / self._answered if self._answered else most
        left = max(min(mean, most) - sent.heard, 0.0)
        return GENERATED * left + (0.0 if sent.heard else sent.prompt_cost)

    async def _watch(self, member: ReplicaMember) -> None:
        """Ask an engine how it is, for as long as it is one of these."""
        while True:
            begun = self._clock()
            before, member.since_report = member.since_report, set()
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    report = await member.link.report(self._server)
            except (EngineUnavailable, TimeoutError) as error:
                member.since_report |= before
                if isinstance(error, EngineUnavailable):
                    self._lose(member, str(error))
                elif member.up and self._clock() - member.last > SILENT_SECONDS:
                    silent = f"replica {member.link.name} has been silent for {SILENT_SECONDS:g} s"
                    self._lose(member, silent)
            except Exception:
                _LOG.exception("replica %s cannot be asked", member.link.name)
            else:
                self._take(member, report)
            await asyncio.sleep(max(REPORT_SECONDS - (self._clock() - begun), 0.05))

    def _take(self, member: ReplicaMember, report: ReplicaReport) -> None:
        """An engine said how it is."""
        name = member.link.name
        refused = f"replica {name}: {report.why}" if report.phase == "failed" else ""
        if report.phase == "ready":
            for what, mine in self._about.items():
                if report.about.get(what) != mine:
                    has = report.about.get(what)
                    refused = f"replica {name} has {what} {has}, the server {mine}; start all alike"
                    break
        if refused and refused != member.refused:
            _LOG.error("%s", refused)
        was = member.up, member.refused
        member.report, member.refused, member.last = report, refused, self._clock()
        member.up = report.phase == "ready" and not refused
        member.in_pool, member.host = set(report.pool.tolist()), set(report.host.tolist())
        for number, where in report.where.items():
            if number in member.sent:
                member.sent[number].where = where
        reports = self._reports().values()
        self.iterations = sum(it.iterations for it in reports)
        self.compiled = sum((Counter(it.compiled) for it in reports), Counter[str]())
        if (member.up, member.refused) != was:
            if member.up:
                _LOG.info("replica %s serves", name)
            with self._changed:
                self._changed.notify_all()

    def _lose(self, member: ReplicaMember, why: str) -> None:
        """An engine is gone: what it had goes to others, or fails where its answer had begun."""
        if self._members.get(member.link.name) is not member and member.watch is not None:
            member.watch.cancel()
        if member.up and member.link.name in self._members:
            _LOG.error("%s: it had %d requests", why, len(member.sent))
        member.up = False
        member.in_pool, member.host, member.since_report = set(), set(), set()
        current = asyncio.current_task()
        for sent in list(member.sent.values()):
            if not sent.lost and not sent.aborted and sent.task is not current:
                sent.lost = why
                assert sent.task is not None
                sent.task.cancel()
