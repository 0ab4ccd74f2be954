"""One prompt with the engine: made ready on a thread, its answer brought to the event loop."""

import asyncio
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.errors import DeadlineExceeded
from jaxrag.base.types import HostArray
from jaxrag.engine.mapping import sequence_of
from jaxrag.engine.progress import Progress
from jaxrag.models.model import Model, as_token_ids
from jaxrag.reuse.methods import METHODS
from jaxrag.serve.answers import Growing, News, Piece, Result, abstained
from jaxrag.serve.ask import Ask
from jaxrag.serve.conversation import Conversation, Source, Text, check_size
from jaxrag.serve.output import AnswerText
from jaxrag.serve.plain import PlainSpan, answer_fingerprint, spans
from jaxrag.serve.questions import ReadyQuestion, prepare, resolve
from jaxrag.serve.thoughts import thinks
from jaxrag.server.answers.calling import Calling, CallReader
from jaxrag.server.errors import ClientLeft, Problem, invalid, unavailable
from jaxrag.server.fields import Generation
from jaxrag.server.state.ingested import bring_ingested
from jaxrag.server.state.replicas import Replicas
from jaxrag.server.state.state import ServerState
from jaxrag.server.tenants import Access

LATE = "time was over before the prompt was ready; allow more, or ask later"
DEFAULT_CLASS = 1  # of priority, where there are several


class SlowReader(Problem):
    """A stream whose reader is too far behind."""

    def __init__(self) -> None:
        text = "the reader of this stream was too far behind and was cut off"
        super().__init__(408, text, type="timeout_error", code="slow_reader")


def make_ready(
    state: ServerState,
    access: Access,
    fields: Generation,
    asked: Text | Conversation,
    knowledge_base: str | None,
    check_cancelled: Callable[[], None],
) -> ReadyQuestion:
    """What the engine is to be asked; on a thread, as it retrieves.

    ``check_cancelled`` is that of ``Settings``. A prompt that is no conversation and brings no
    knowledge stands alone, without a template.
    Raises Problem 404 for a knowledge base that is not there, 400 for what this server does not
    offer, and what ``resolve`` and ``prepare`` do.
    """
    server = state.settings
    bare = knowledge_base is None and not fields.documents and not fields.blocks
    if bare and not isinstance(asked, Conversation):
        plain = (fields.plain or server.plain) == "passages"
        text = asked if plain and isinstance(asked, str) else None
        asked = Conversation((prompt_ids(state.model, asked),), prompt=text)
    base = None if knowledge_base is None else state.library.knowledge_base(access, knowledge_base)
    asked_for, most = fields.said.get("max_new_tokens"), server.max_answer_tokens
    if asked_for is not None and asked_for > most:
        raise invalid(f"max_tokens={asked_for}: this server gives at most {most}", "max_tokens")
    sampling = fields.said["sampling"]
    if sampling.min_tokens > (least := asked_for or server.max_new_tokens):
        raise invalid(
            f"min_tokens={sampling.min_tokens}: expected at most max_tokens, which is {least}",
            "min_tokens",
        )
    _check_offered(state, fields.said)
    name = fields.said.get("method")
    method = state.default_method(base) if name is None else state.methods[name]
    usual = {
        "k": server.k,
        "decode": None if "method" in fields.said else server.decode,
        "max_new_tokens": 1,
        "plain": server.plain,
        "passage_rules": server.passage_rules,
        "template": state.template if base is None else None,
    }
    named: dict[str, Any] = {"method": method}
    if METHODS.get(method.name) is method:
        named["method"] = method.name
    if name is None and state.chooses(base) and server.methods is None:
        named["method"] = None  # that of model, knowledge base and prompt
    limits = {} if base is None else {"groups": access.groups}
    settings = resolve(
        Ask(**usual | dict(fields.said) | named | limits),
        kb=base,
        model=state.model if base is None else None,
        store=state.memory.store(access.tenant) if base is None else None,
        neighbours=fields.neighbours,
    )
    encode = None
    if (tokenizer := state.model.tokenizer) is not None:
        encode = functools.partial(state.token_cache.ids, access.tenant, encode=tokenizer.encode)
    tools = asked.framing.tools if isinstance(asked, Conversation) else ()
    reader = CallReader(state.model, Calling(tools, "auto", True)) if tools else None
    ends, notes = frozenset(fields.stop_token_ids), settings.notes
    if any(end >= state.model.config.vocab_size for end in ends):
        raise invalid(f"stop_token_ids={sorted(ends)}: expected ids of tokens", "stop_token_ids")
    if ends and sampling.guide is not None:
        ends = frozenset()
        notes += ("stop_token_ids: not looked for, as the answer is of a form",)
    settings = dataclasses.replace(
        settings,
        encode=encode,
        check_cancelled=check_cancelled,
        notes=notes,
        shown=AnswerText(
            None if reader is None else reader.sure,
            stop_too=fields.include_stop_str_in_output,
            special=not fields.skip_special_tokens,
        ),
    )
    ready = prepare(settings, asked, fields.passages, sampling)
    if base is None and server.plain == "passages" and not isinstance(state.engine, Replicas):
        bases = [
            base
            for name, base in state.knowledge_bases.items()
            if access.may_read(name) and base.chunking.pasted
        ]
        if bases:
            loads = list(sequence_of(state.model, ready).loads.values())
            bring_ingested(state.memory.store(access.tenant), bases, loads)
    room = state.model.config.max_positions - ready.prompt.num_tokens
    return dataclasses.replace(
        ready,
        max_new_tokens=asked_for or min(server.max_new_tokens, room),
        eos_ids=ends | (frozenset() if fields.ignore_eos else ready.eos_ids),
        rows=server.rows,
        watched=fields.stream,
        priority=_priority(state, access, fields.priority),
        tenant=access.tenant,
    )


def text_ids(model: Model, text: str, *, leading: bool = True) -> HostArray:
    """A text alone as token ids; ``leading``: behind those that the model expects first."""
    tokenizer = model.text_tokenizer()
    ids: HostArray = tokenizer.encode(text, special=True)
    first = tokenizer.leading_ids
    if leading and not np.array_equal(ids[: len(first)], first):
        ids = np.concatenate((first, ids))
    return ids


def prompt_ids(model: Model, prompt: Text) -> HostArray:
    """A prompt that stands alone as token ids; a text is led by what the model expects first."""
    check_size(model, (prompt,))
    if not isinstance(prompt, str):
        return as_token_ids(prompt, model.config, "question")
    ids = text_ids(model, prompt)
    if not len(ids):
        raise invalid("prompt is empty: expected a text, or token ids", "prompt")
    return ids.astype(np.int32)


def _priority(state: ServerState, access: Access, asked: int | None) -> int:
    """The class of a request: what it asks for, and no better than its key allows."""
    worst = state.settings.classes - 1
    if asked is not None and asked > worst:
        raise invalid(f"priority={asked}: expected 0 to {worst}", "priority")
    chosen = min(DEFAULT_CLASS, worst) if asked is None else asked
    return min(max(chosen, access.limits.priority), worst)


def _check_offered(state: ServerState, said: Mapping[str, Any]) -> None:
    for name, offered in (("method", state.methods), ("decode", state.decode_rules)):
        if name in said and said[name] not in offered:
            raise invalid(f"{name}={said[name]!r}: this server offers {', '.join(offered)}", name)
    if said.get("plain") == "passages" and state.settings.plain != "passages":
        raise invalid("plain='passages': this server was started without --plain", "plain")
    if state.settings.allow_history_dependent:
        return
    for name, asked in (
        ("prefix_cache", said.get("prefix_cache") is True),
        ("misses", said.get("misses") == "in_place"),
    ):
        if asked:
            raise invalid(
                f"{name}: answers would depend on what was asked before; this server has to be "
                "started with --allow-history-dependent for that",
                name,
            )


class Inbox:
    """What is new of the prompts of one request, in the order it comes. For the event loop.

    Attributes:
      cut: set when the reader is too far behind; nothing more comes then.
    """

    def __init__(self, most: int | None = None) -> None:
        """``most``: news that a reader may be behind; None: any number."""
        self.cut = asyncio.Event()
        self._news = asyncio.Queue[tuple[int, News]](most or 0)

    def __len__(self) -> int:
        return self._news.qsize()

    def put(self, place: int, item: News) -> None:
        """There is something new of the prompt at this place."""
        if self.cut.is_set():
            return
        try:
            self._news.put_nowait((place, item))
        except asyncio.QueueFull:
            self._news = asyncio.Queue()
            self.cut.set()

    async def next(self) -> tuple[int, Piece | Result]:
        """The place of a prompt, and what is new of it; its Result is the last.

        Raises what a prompt failed with.
        """
        place, item = await self._news.get()
        if isinstance(item, BaseException):
            raise item
        return place, item


class Asking:
    """One prompt, from when it is made ready to its last token. For the event loop.

    Attributes:
      prompt_tokens: length of the prompt, once it is ready.
      pieces: of the answer so far.
      spans: passages that were found in its messages, once it has an answer.
      thinks: whether its answer begins in the middle of a thought; None: it can hold none.
      moments: when what happened, by ``time.monotonic``: those of the engine, and before them
        "preparing", on a thread, "retrieved" and "prepared".
    """

    def __init__(self, state: ServerState, inbox: Inbox, place: int = 0) -> None:
        """Its news go to the inbox, under its place."""
        self.prompt_tokens = 0
        self.pieces: list[Piece] = []
        self.thinks: bool | None = None
        self.spans: list[PlainSpan] = []
        self.moments: dict[str, float] = {}
        self._state, self._inbox, self._place = state, inbox, place
        self._loop = asyncio.get_running_loop()
        self._asked: ReadyQuestion | None = None
        self._growing: Growing | None = None
        self._lock = threading.Lock()  # of the two below
        self._number: int | None = None
        self._closed = False
        self._failed: BaseException | None = None
        self._over = False  # nothing more will come
        state.asking.add(self)

    async def ready(
        self,
        access: Access,
        fields: Generation,
        asked: Text | Conversation,
        knowledge_base: str | None,
        threads: Executor,
        deadline: float,
    ) -> None:
        """Make the prompt ready on a thread; given up once nobody wants it, or at the deadline.

        The arguments are those of ``make_ready``; raises what that raises.
        """

        def check_cancelled() -> None:
            if self._closed:
                raise self._failed or ClientLeft
            if time.monotonic() > deadline:
                raise DeadlineExceeded(LATE)

        def prepared() -> ReadyQuestion:
            begun = time.monotonic()
            ready = make_ready(self._state, access, fields, asked, knowledge_base, check_cancelled)
            retrieved = begun + ready.retrieve_seconds
            ended = time.monotonic()
            self.moments = {"preparing": begun, "retrieved": retrieved, "prepared": ended}
            return ready

        self._asked = await self._loop.run_in_executor(threads, prepared)
        self.thinks = None if self._asked.abstains else thinks(self._asked)
        self.prompt_tokens = 0 if self._asked.abstains else self._asked.prompt.num_tokens
        self._growing = Growing(self._asked, self._on_news)

    def ready_as(self, other: "Asking", choice: int) -> None:
        """Ready for another answer to the prompt of ``other``; which one joins its seed."""
        assert other._asked is not None
        sampling = other._asked.sampling.of_choice(choice)
        self._asked = dataclasses.replace(other._asked, sampling=sampling)
        self.prompt_tokens, self.moments = other.prompt_tokens, dict(other.moments)
        self.thinks = other.thinks
        self._growing = Growing(self._asked, self._on_news)

    async def begin(self, deadline: float) -> None:
        """Hand it to the engine; it fails at ``deadline``, by ``time.monotonic``."""
        assert self._asked is not None
        question = self._asked
        if self._failed is not None:
            raise self._failed
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(LATE)
        if question.abstains:  # an answer as others, for clients that know no other end
            result = dataclasses.replace(abstained(question), finish_reason="stop")
            self._inbox.put(self._place, Piece(result.text, [], []))
            self._end(result)
            return
        request = dataclasses.replace(question, timeout=left)

        def add() -> None:
            number = self._state.engine.add(request, self._on_progress)
            with self._lock:
                self._number, closed = number, self._closed
            if closed:
                self._state.engine.abort(number)

        await self._loop.run_in_executor(self._state.hand_over, add)

    async def check_current(self) -> None:
        """Problem 503 where a document that it is made from left meanwhile: it is to be sent again.

        Called before its end is sent, so that what was acknowledged as removed is in no answer that
        ends later.
        """
        if self._asked is None or self._asked.settings.kb is None:
            return
        if not await asyncio.to_thread(lambda: self._asked is None or self._asked.is_current):
            raise unavailable(
                "a document that this answer was made from was removed meanwhile; ask again",
                1.0,
                "document_removed",
            )

    def close(self) -> None:
        """Nothing more is wanted of it."""
        with self._lock:
            self._closed, number = True, self._number
        if number is not None and not self._over:
            self._state.engine.abort(number)
        self._over = True
        self._state.asking.discard(self)

    def fail(self, error: BaseException) -> None:
        """It ends with an error, wherever it is."""
        if not self._over:
            self._failed = error
            self.close()
            self._inbox.put(self._place, error)

    @property
    def chunk_ids(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Of what was retrieved for it, and contents that these were encoded behind."""
        return ((), ()) if self._asked is None else (self._asked.chunk_ids, self._asked.content_ids)

    @property
    def sources(self) -> list[Source]:
        """The chunks of its prompt, once it is ready."""
        return [] if self._asked is None else self._asked.sources

    @property
    def _is_plain(self) -> bool:
        return self._asked is not None and self._asked.plain

    @property
    def fingerprint(self) -> str | None:
        """Of what its answer depends on beside the request; None where that is not known."""
        if self._asked is None or not self._asked.plain:
            return None
        settings, server = self._asked.settings, self._state.settings
        sizes = {
            "rows": server.rows,
            "prefill_tokens": server.engine.prefill_tokens,
            "together_flops": server.engine.together_flops,
            "max_new_tokens": server.max_new_tokens,
        }
        return answer_fingerprint(settings.model, settings.ask, settings.method, sizes)

    @property
    def where(self) -> str:
        """What it waits for, or does, in words."""
        if self._number is None:
            return "preparing"
        status = self._state.engine.where(self._number)
        if status is None:
            return "waiting"
        of = f" {status.there}/{status.chunks}" if status.status == "loading" else ""
        return status.status + of

    def account(self, result: Result, return_text: bool, access: Access) -> dict[str, Any]:
        """What a Result says beside the answer; folders of the server are not shown.

        Where KV of a served knowledge base was found tells what others asked: only admins see it.
        """
        shown = result.to_dict()
        for name in ("text", "token_ids", "finish_reason"):
            del shown[name]
        for source in shown["sources"]:
            source["file"] = source["file"] and Path(source["file"]).name
            if not return_text:
                del source["text"]
        if self._is_plain:
            shown["plain"] = [dataclasses.asdict(span) for span in self.spans]
        base = None if self._asked is None else self._asked.settings.kb
        if not access.admin and any(base is kb for kb in self._state.knowledge_bases.values()):
            for row in shown["reuse"]:
                row["where"] = None
        if base is not None:
            parent = f"{base.path.parent}/"
            shown["notes"] = [note.replace(parent, "") for note in shown["notes"]]
        return shown

    def _on_progress(self, progress: Progress) -> None:
        """On the engine's thread."""
        self._loop.call_soon_threadsafe(self._take_progress, progress)

    def _take_progress(self, progress: Progress) -> None:
        """Text of new tokens, here and not on the engine's thread."""
        if self._over:
            return
        assert self._growing is not None
        try:
            if progress.outcome is not None:
                self.moments |= progress.outcome.moments
            before = self._growing.ended
            whole = self._growing.on_progress(progress)
            if whole and not before and not self._over:  # a stop string
                self._state.engine.stop(progress.number)
        except Exception as error:  # whoever waits sees it, and the event loop does not
            self.fail(error)

    def _on_news(self, item: News) -> None:
        if isinstance(item, Piece):
            self.pieces.append(item)
            self._inbox.put(self._place, item)
        else:
            self._end(item)

    def _end(self, item: Result | BaseException) -> None:
        if self._is_plain and isinstance(item, Result):
            self.spans = spans(item.sources, item.reuse)
        self._over = True
        self._state.asking.discard(self)
        self._inbox.put(self._place, item)


def usage(askings: Sequence[Asking], results: Sequence[Result], choices: int) -> dict[str, Any]:
    """Tokens of prompts and answers, as OpenAI counts them: a prompt once, whatever its choices.

    Cached are those whose KV was found and used as it was; written are those that were encoded.
    """
    rows = [row for result in results[::choices] for row in result.reuse]
    hits = [row for row in rows if row.how in ("prefix hit", "chunk hit")]
    prompt = sum(asking.prompt_tokens for asking in askings[::choices])
    completion = sum(len(result.token_ids) for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(row.tokens - row.recomputed for row in hits),
            "cache_write_tokens": sum(row.tokens for row in rows if row.how == "encoded"),
        },
    }
