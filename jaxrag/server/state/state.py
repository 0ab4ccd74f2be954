"""What every handler of a server needs, found at ``request.app.state.server``."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from starlette.requests import Request

from jaxrag.base.errors import ConfigError
from jaxrag.base.sharding import processes_of
from jaxrag.engine.engine import Engine
from jaxrag.engine.state import EngineSettings
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import PromptTemplate, template_named
from jaxrag.reuse.decode import DECODE_RULES
from jaxrag.reuse.methods import METHODS, Method, method_named
from jaxrag.serve.answers import Result
from jaxrag.serve.compatibility import default_method
from jaxrag.serve.plain import PlainSpan
from jaxrag.serve.token_cache import TokenCache
from jaxrag.server.errors import unauthorized
from jaxrag.server.proxies import limited_by_proxy
from jaxrag.server.settings import ServerSettings
from jaxrag.server.state.bodies import Bodies
from jaxrag.server.state.library import Library
from jaxrag.server.state.limits import Limits
from jaxrag.server.state.memory import PLAIN, TenantMemory
from jaxrag.server.state.plain import plain_methods
from jaxrag.server.state.recipe import recipe_for, recipe_like
from jaxrag.server.state.threads import FairThreads
from jaxrag.server.tenants import Access, Tenants, bearer

_HANDS = 2  # threads that give prompts to the engine

Phase = Literal["starting", "ready", "draining"]
Ended = Literal["finished", "cancelled", "expired", "refused", "failed"]


@dataclasses.dataclass(frozen=True)
class Served:
    """What became of one request, for those who count and log.

    Attributes:
      endpoint: its path.
      request_id: names it.
      tenant: whose it was.
      stream: whether its answer came piece by piece.
      ended: how it ended.
      status: of HTTP; of one that failed within its stream as if it had failed before.
      code: of its error; None where it has none.
      seconds: from its arrival to its end.
      first_seconds: from its arrival to its first token; None where there was none.
      between: seconds between every two deliveries of tokens.
      prompt_tokens: length of its prompt; 0 where it was not known yet.
      results: of its prompts that have an answer.
      passages: that were found in its messages, of prompts that have an answer.
      moments: when what happened of its last prompt, by ``time.monotonic``: to the first token on
        its way to the client.
    """

    endpoint: str
    request_id: str
    tenant: str
    stream: bool
    ended: Ended
    status: int
    code: str | None
    seconds: float
    first_seconds: float | None = None
    between: tuple[float, ...] = ()
    prompt_tokens: int = 0
    results: tuple[Result, ...] = ()
    passages: tuple[PlainSpan, ...] = ()
    moments: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class ServerState:
    """A server's parts. Make one with ``make_state``.

    Attributes:
      settings: how it serves.
      model: what it serves.
      engine: of the model.
      knowledge_bases: those of the settings, by name.
      methods: that requests may name, by name.
      decode_rules: that requests may name.
      template: of requests about no knowledge base; None: the model's own.
      tenants: who is let in.
      memory: KV of documents that come with requests, a store for each tenant.
      token_cache: token ids of what messages hold, of all tenants, each for itself.
      library: files and vector stores of the tenants.
      limits: how much is let in.
      bodies: how much of what is sent is held.
      prepare: threads that retrieve and tokenise, shared fairly by the tenants.
      hand_over: threads that give prompts to the engine, which is not to wait for retrieval.
      phase: whether it takes requests.
      compiling: how many shapes of requests programs are compiled for, and of how many; None where
        none is being compiled ahead.
      created: when it began, in seconds since 1970.
      observers: called with every request to the model that ended, on the event loop's thread;
        they must not wait.
      asking: prompts on their way (``answers.asking.Asking``).
      requests: of HTTP that are being answered.
      max_requests: most of these, as there are connections; None: any number.
      scoring: is held by who has texts scored, one at a time.
      metrics: what is counted.
    """

    settings: ServerSettings
    model: Model
    engine: Engine
    knowledge_bases: dict[str, KnowledgeBase]
    methods: Mapping[str, Method]
    decode_rules: tuple[str, ...]
    template: PromptTemplate | None
    tenants: Tenants
    memory: TenantMemory
    token_cache: TokenCache
    library: Library
    limits: Limits
    bodies: Bodies
    prepare: FairThreads
    hand_over: ThreadPoolExecutor
    phase: Phase = "starting"
    compiling: tuple[int, int] | None = None
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    observers: list[Callable[[Served], None]] = dataclasses.field(default_factory=list)
    asking: set[Any] = dataclasses.field(default_factory=set)
    requests: int = 0
    max_requests: int | None = None
    scoring: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    metrics: Any = None

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.settings.model.name or Path(self.model.path or "model").name

    def access(self, request: Request) -> Access:
        """What the sender of a request may do, and whom a proxy says it asks for.

        Raises Problem 401 for one without a known key, and what ``limited_by_proxy`` does.
        """
        access = self.tenants.access(bearer(request.headers.get("authorization")))
        if access is None:
            raise unauthorized("no key that this server knows; send Authorization: Bearer KEY")
        return limited_by_proxy(access, request, self.settings)

    def readable(self, access: Access) -> list[str]:
        """Names of the knowledge bases that the sender may read, the default first.

        Behind those that are served stand the ids of its tenant's vector stores.
        """
        return [shelf.name for shelf in self.library.shelves(access) if not shelf.expired]

    def default_base(self, access: Access) -> str | None:
        """The one that a chat is about that names none: the first that is served."""
        return next((name for name in self.knowledge_bases if access.may_read(name)), None)

    def chooses(self, base: KnowledgeBase | None) -> bool:
        """Whether model and prompt choose the method of a request, and neither setting nor gate."""
        gated = base is None and self.settings.plain_gate is not None
        return self.settings.method is None and not gated

    def default_method(self, base: KnowledgeBase | None) -> Method:
        """Of a request about a knowledge base, or about none, that names no method."""
        if self.chooses(base):
            method = default_method(self.model, base)
            if method.name in self.methods:
                return method
        return next(iter(self.methods.values()))

    @property
    def prompt_format(self) -> PromptTemplate:
        """Of a request about no knowledge base that names no method."""
        return self.template or self.model.prompt_format(self.default_method(None).template)

    def close(self) -> None:
        """Let go of everything but the model and the knowledge bases that it was given."""
        self.prepare.shutdown()
        self.hand_over.shutdown(wait=False, cancel_futures=True)
        self.memory.close()
        self.library.close()


def make_state(
    settings: ServerSettings,
    model: Model,
    knowledge_bases: Mapping[str, KnowledgeBase] | None = None,
    engine: Callable[[Model, EngineSettings], Engine] = Engine,
) -> ServerState:
    """The state of a server over a model, which gets an engine of the settings.

    ``engine`` makes it.

    Raises ConfigError or RequestError for a method or rule that is unknown or does not serve.
    """
    if len(processes_of(model.mesh)) > 1 and settings.data is not None:
        raise ConfigError(
            f"data={settings.data!r}: several processes hold the model, and uploads are encoded by "
            "a server of one; leave data out, or run jaxrag ingest"
        )
    data = None if settings.data is None else Path(settings.data)
    tenants = Tenants.open(settings.keys, data)
    given = settings.engine.scheduler
    scheduler = dataclasses.replace(
        given, classes=settings.classes, weights={**tenants.weights, **given.weights}
    )
    model.engine = engine(model, dataclasses.replace(settings.engine, scheduler=scheduler))
    rules = tuple(DECODE_RULES) if settings.decode_rules is None else settings.decode_rules
    bases = dict(knowledge_bases or {})
    methods = offered_methods(settings, model, next(iter(bases.values()), None))
    methods = plain_methods(settings, model, methods)
    recipe = recipe_like(next(iter(bases.values()))) if bases else recipe_for(methods)
    return ServerState(
        settings=settings,
        model=model,
        engine=model.engine,
        knowledge_bases=bases,
        methods=methods,
        decode_rules=rules,
        template=_template(settings, model),
        tenants=tenants,
        memory=TenantMemory(
            model,
            tenants,
            settings.memory_bytes,
            data / PLAIN if data is not None and settings.plain_store_bytes else None,
            settings.plain_store_bytes,
        ),
        token_cache=TokenCache(),
        library=Library(settings, model, bases, recipe, tenants),
        limits=Limits(settings),
        bodies=Bodies(settings.max_bodies_bytes, len(tenants.names)),
        prepare=_prepare_threads(settings),
        hand_over=ThreadPoolExecutor(_HANDS, "jaxrag-hand-over"),
    )


def _template(settings: ServerSettings, model: Model) -> PromptTemplate | None:
    """That of the settings. Raises ConfigError, and TokenizerError where its markers are cut."""
    if settings.template is None:
        return None
    template = template_named(settings.template)
    if model.tokenizer is not None:
        template.check_markers(model.tokenizer)
    return template


def _prepare_threads(settings: ServerSettings) -> FairThreads:
    """Of which one tenant leaves a thread to the others, where there may be others."""
    count = settings.prepare_threads
    return FairThreads(count, "jaxrag-prepare", count - 1 if settings.keys else count)


def offered_methods(
    settings: ServerSettings, model: Model, base: KnowledgeBase | None
) -> dict[str, Method]:
    """Methods by the names that requests may give, the default first."""
    names = tuple(METHODS) if settings.methods is None else settings.methods
    if unknown := [name for name in names if name not in METHODS]:
        raise ConfigError(f"methods: {unknown[0]!r}: expected some of {', '.join(METHODS)}")
    named = settings.method
    default = default_method(model, base) if named is None else method_named(named)
    if not settings.allow_history_dependent and (
        default.prefix_cache or default.misses == "in_place"
    ):
        raise ConfigError(
            f"method {default.name!r}: prefix_cache and misses='in_place' make answers depend on "
            "what was asked before; pass --allow-history-dependent to have it so"
        )
    if default.wraps:
        raise ConfigError(f"method {default.name!r}: a server reads no packets; name another")
    return {default.name: default} | {name: METHODS[name] for name in names}


def state_of(request: Request) -> ServerState:
    """The state of the server that a request came to."""
    state: ServerState = request.app.state.server
    return state
