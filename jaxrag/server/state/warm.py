"""What a server compiles: for the default request first, and for others once it is ready."""

import functools
import logging
import time
from collections.abc import Callable, Iterator

from jaxrag.base.errors import JaxragError
from jaxrag.base.shapes import QUESTION_WIDTHS
from jaxrag.engine.mapping import sequence_of
from jaxrag.engine.request import Request
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.serve.ask import Ask
from jaxrag.serve.questions import prepare, resolve
from jaxrag.serve.warm import SHORT_TOKENS, of_lengths, requests_like
from jaxrag.server.state.recipe import warm_up_passages
from jaxrag.server.state.replicas import Replicas
from jaxrag.server.state.state import ServerState

_LOG = logging.getLogger("jaxrag.server")

_COMMON = "the of and is in a to"  # finds passages of most English documents
_SHORTEST, _LONGEST = QUESTION_WIDTHS  # tokens of the final blocks that are waited for
_TOKENS = 2  # of an answer: the first, and one of a step
_TURN = 0.1  # seconds between two looks for whether anybody is served


class WarmUp:
    """Programs of a server, compiled one shape of requests after the other.

    ``ready`` first, then ``rest``. ``ServerState.compiling`` says how far it is.
    """

    def __init__(self, state: ServerState) -> None:
        """Compiles nothing yet."""
        self._state = state

    def ready(self) -> int:
        """Search every base, and compile what the default request needs; how many programs.

        Questions of usual lengths over as many chunks as are retrieved, or without any where no
        knowledge base is served. They are compiled side by side, and one of them is run.
        """
        state = self._state
        if isinstance(state.engine, Replicas):  # each warms up by itself
            return 0
        asked = [sample for base in state.knowledge_bases.values() for sample in self._about(base)]
        asked = [*asked, *self._about_nothing()]
        first = [sample for sample in asked if sample.prompt.chunks] or asked
        usual = [sample for sample in first if _SHORTEST <= len(sample.prompt.final) <= _LONGEST]
        self._rest = [sample for sample in asked if sample not in usual]
        if state.settings.plain == "passages":
            self._rest += self._about_passages()
        state.compiling = (0, len(usual) + len(self._rest) + 2)
        before = sum(state.engine.compiled.values())
        programs = state.engine.compile_ahead(usual, done=self._done)
        for request in usual if usual and _varies(usual[0]) else usual[:1]:
            self._run(request)
        return programs + sum(state.engine.compiled.values()) - before

    def rest(self) -> None:
        """Compile what other requests need, while these are served; each in a moment of rest.

        Shorter and longer questions, and prompts without chunks; where files are uploaded or
        passages are read, their encoding, and prompts of every length that hold some. Other methods
        and rules are compiled when they are first asked for.
        """
        state = self._state
        if isinstance(state.engine, Replicas):
            state.library.warm_up()
            return
        for what in self._left():
            while self._serves() and state.phase != "draining":
                time.sleep(_TURN)
            if state.phase == "draining":
                return
            try:
                what()
            except Exception as error:  # whoever asks for it is told
                _LOG.warning("not compiled ahead: %s", error)
            self._done()
        state.compiling = None

    def _left(self) -> Iterator[Callable[[], object]]:
        state = self._state
        for request in self._rest:
            yield functools.partial(self._compile, request)
        yield state.library.warm_up
        if state.settings.plain == "passages":
            yield lambda: warm_up_passages(state.model, state.default_method(None))

    def _compile(self, request: Request) -> None:
        self._state.engine.compile_ahead([request], 1)
        if _varies(request):
            self._run(request)

    def _done(self) -> None:
        if self._state.compiling is not None:
            done, of = self._state.compiling
            self._state.compiling = (min(done + 1, of), of)

    def _run(self, request: Request) -> None:
        """Serve a request to its second token; not to its end where another comes meanwhile."""
        engine = self._state.engine
        for progress in engine.iterate([request], enough=_TOKENS):
            if progress.error is not None:
                raise progress.error
            if self._serves(1):
                break
        if not engine.leads:  # nothing stays in the pool that nobody asked for
            engine.call(lambda runner: None)  # behind the step in flight
            engine.drop(list(sequence_of(self._state.model, request).loads))

    def _serves(self, own: int = 0) -> bool:
        """Does anybody wait for the engine, beside so many requests of this?"""
        standing = self._state.engine.status()
        served = 0 if standing is None else sum(standing.requests.values())
        return bool(self._state.asking) or served > own

    def _about(self, base: KnowledgeBase) -> list[Request]:
        """Questions of usual lengths over chunks of the base, or over any where it has none."""
        state, settings = self._state, self._state.settings
        method = state.default_method(base)
        ask = Ask(
            k=settings.k,
            method=None if state.chooses(base) and settings.methods is None else method,
            decode=settings.decode,
            max_new_tokens=1,
        )
        try:
            ready = prepare(resolve(ask, kb=base), _COMMON)
        except JaxragError:  # ids only, or a base of a model of other words
            base.search(_COMMON, 1)
            ready = None
        if ready is not None and ready.found:
            prompt, most = ready.prompt, state.model.config.max_positions - SHORT_TOKENS
            room = max(most - prompt.num_tokens + len(prompt.final), 1)
            tokens = min(settings.max_new_tokens, room)
            request = Request(
                prompt, ready.store, ready.method, tokens, rows=settings.rows, watched=True,
                primer=ready.primer,
            )  # fmt: skip
            fits = state.model.config.max_positions - tokens
            made = of_lengths(state.model, request)
            return [example for example in made if example.prompt.num_tokens <= fits]
        sizes = {base.chunking.chunk_tokens}
        return [example for example in self._like(sizes) if example.prompt.chunks]

    def _about_nothing(self) -> Iterator[Request]:
        return (it for it in self._like(set()) if not it.prompt.chunks)

    def _about_passages(self) -> list[Request]:
        """Prompts whose tables have every width, most of it of passages."""
        most, k = self._state.model.config.max_positions, self._state.settings.k
        sizes = {(most >> halved) // k for halved in range(1, most.bit_length())} - {0}
        return [it for it in self._like(sizes) if it.prompt.chunks]

    def _like(self, sizes: set[int]) -> Iterator[Request]:
        state, settings = self._state, self._state.settings
        leads = state.engine.leads
        return requests_like(
            state.model,
            next(iter(state.methods.values())),
            sizes,
            settings.k,
            settings.max_new_tokens,
            settings.rows,
            watched=True,
            store=state.memory.store(state.tenants.names[0]) if leads else None,
        )


def _varies(request: Request) -> bool:
    """Is it known only from a run what its selection needs compiled?"""
    method = request.method
    if not request.prompt.chunks or not method.recomputes:
        return False
    return method.recompute_ratio is None or method.selector.reads_question
