"""`jaxrag serve --replicas N`: engines on a Ray cluster, each a Ray Serve application.

Ray is imported here and in ``ray_engine`` alone, and only where it is used.
"""

import contextlib
import dataclasses
import hashlib
import logging
import math
import os
import threading
import time
import warnings
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrag.base.errors import ConfigError, EngineUnavailable
from jaxrag.base.installed import installs
from jaxrag.base.options import option
from jaxrag.cli.ray_engine import RayEngine
from jaxrag.engine.routing import Routing

if TYPE_CHECKING:
    from jaxrag.engine.jobs import Job, JobNews, ReplicaReport
    from jaxrag.server.http.handover import Predecessor
    from jaxrag.server.settings import ServerSettings
    from jaxrag.server.state.members import ReplicaLink
    from jaxrag.server.state.replicas import Replicas
    from jaxrag.server.state.state import ServerState

_LOG = logging.getLogger("jaxrag")

_OURS = "jaxrag"
_PARTS = "-engine-"
_ONGOING = 100_000  # that an engine is given at once: it has its own queue
_HEALTH_SECONDS = 2.0  # between two looks of Ray Serve at an engine
_DELETE_SECONDS = 60.0  # until an engine that was told to end is no more
_LOOK_SECONDS = 1.0  # between two looks at whether there are engines enough
_VARIABLES = ("JAX_", "XLA_", "AWS_", "JAXRAG_")  # that an engine has from the server
_OF_ENGINE = (
    "model", "knowledge_bases", "secret_file", "method", "methods", "decode", "decode_rules", "k",
    "plain", "plain_ungated", "plain_gate", "template", "max_new_tokens", "rows", "classes",
    "memory_bytes", "tier", "warm_up", "allow_history_dependent", "keys", "engine",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ReplicaOptions:
    """Of engines on a Ray cluster.

    Attributes:
      replicas: how many; 0: the server has its own.
      max_replicas: the most, where there is more work than these do; 0: as many.
      routing: which of them gets a request.
      replica_cpus: that Ray counts for each.
      replica_gpus: likewise.
      replica_processes: of each, that hold one model together.
      ray_address: of the cluster; "local" starts one that ends with the server.
      replica_seconds: that they may take until the first is ready.
    """

    replicas: int = option(0, "engines on a Ray cluster that share the work; 0: none", "N")
    routing: Routing = option(
        "residency", "which of them gets a request",
    )  # fmt: skip
    replica_cpus: float = option(1.0, "that each of them has", "N")
    replica_gpus: float = option(0.0, "likewise", "N")
    replica_processes: int = option(
        1, "of each engine, which hold one model (--mesh 1,1,N of N devices) and have so many "
        "CPUs and GPUs each", "N",
    )  # fmt: skip
    max_replicas: int = option(0, "of them, where work waits; 0: no more than --replicas", "N")
    ray_address: str | None = option(
        None, "of the cluster; local: one of its own", "ADDRESS", unset="that of this machine",
    )  # fmt: skip
    replica_seconds: float = option(600.0, "until the first of them is ready", "S")

    def __post_init__(self) -> None:
        """ConfigError for what no cluster has."""
        if self.replicas < 0:
            raise ConfigError(f"--replicas {self.replicas}: expected 0 or more")
        if self.max_replicas and self.max_replicas < self.replicas:
            raise ConfigError(
                f"--max-replicas {self.max_replicas}: expected at least --replicas {self.replicas}"
            )
        if self.replica_processes < 1:
            raise ConfigError(f"--replica-processes {self.replica_processes}: expected 1 or more")
        for name in ("replica_cpus", "replica_gpus"):
            if getattr(self, name) < 0:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} {getattr(self, name):g}: expected 0 or more")


class _Link:
    """The way to an engine over Ray Serve."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name, self._handle = name, handle

    async def serve(self, job: "Job") -> "AsyncGenerator[JobNews, None]":
        stream, ended = self._handle.options(stream=True).serve.remote(job), False
        try:
            with self._errors():
                async for news in stream:
                    yield news
                ended = True
        finally:
            if not ended:
                stream.cancel()

    async def report(self, server: str) -> "ReplicaReport":
        return await self._ask("report", server)  # type: ignore[no-any-return]

    async def stop(self, server: str, number: int) -> None:
        await self._ask("stop", server, number)

    async def drop(self, keys: list[str]) -> None:
        await self._ask("drop", keys)

    async def forget(self, tenant: str) -> int:
        return await self._ask("forget", tenant)  # type: ignore[no-any-return]

    async def _ask(self, method: str, *args: Any) -> Any:
        with self._errors():
            return await getattr(self._handle, method).remote(*args)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """What Ray raises where an engine is gone, as EngineUnavailable."""
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        try:
            yield
        except RayTaskError:  # raised by the engine's own code
            raise
        except (RayError, RayServeException) as error:
            why = type(error).__name__
            raise EngineUnavailable(f"replica {self.name} is gone ({why})") from None


def check_options(options: ReplicaOptions, distributed: bool) -> None:
    """ConfigError where there can be no replicas."""
    if distributed:
        raise ConfigError(
            f"--replicas {options.replicas} with --distributed: the processes of a replica are "
            "--replica-processes; leave --distributed out"
        )
    if importable("ray.serve"):
        return
    raise ConfigError(f"--replicas: ray[serve] is not installed; {installs('ray')} does it")


def importable(name: str) -> bool:
    """Can a module be imported?"""
    import importlib.util

    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@dataclasses.dataclass
class Engines:
    """The engines of a server.

    Attributes:
      prefix: of the names of their applications; "" without any.
      links: the ways to them.
      fits: of those that were started now, how many the cluster had room for at once.
      ready: whether one of them has been.
    """

    prefix: str = ""
    links: "list[ReplicaLink]" = dataclasses.field(default_factory=list)
    fits: int = 0
    ready: bool = False


@contextlib.contextmanager
def engines(
    settings: "ServerSettings", options: ReplicaOptions, theirs: str = ""
) -> Iterator[Engines]:
    """The engines of a server, which may not be ready yet; for as long as it serves.

    Those that run in the cluster already are used. A cluster that was there keeps them, but for
    those of a server that did not get so far as to serve. Without replicas there are none.
    ``theirs``: prefix of the engines of a server that this one takes over from; they may be there.

    Raises ConfigError where no cluster is reached, or it has engines of other settings.
    """
    if not options.replicas:
        yield Engines()
        return
    if settings.plain_store_bytes:
        raise ConfigError(
            f"--plain-store-bytes {settings.plain_store_bytes} with --replicas: what engines keep "
            "of passages is in memory only; leave it out"
        )
    import ray
    from ray import serve

    _join(options)
    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        there, fits = set(serve.status().applications), _fits(options)
        names = _deploy(settings, options, theirs)
        links = [_Link(str(at), serve.get_app_handle(name)) for at, name in enumerate(names)]
        fits = fits if set(names) - there else len(names)
        found = Engines(_prefix(settings, options), list(links), fits)
        try:
            yield found
        except BaseException:
            if not found.ready:
                for name in set(names) - there:
                    serve.delete(name, _blocking=False)
            raise
    finally:
        ray.shutdown()  # with it all that runs in a cluster of this process's own


@contextlib.contextmanager
def replicated(
    state: "ServerState",
    found: Engines,
    options: ReplicaOptions,
    before: "Predecessor | None" = None,
) -> Iterator[None]:
    """Have these engines serve what the state's engine is asked, within; more, if more may be.

    ``before``: the server that this one takes over from; where both have no room beside each other,
    it ends one of its engines, and the others of these start when all of its have ended.

    Raises ConfigError where none of them gets ready.
    """
    from jaxrag.server.state.replica_stores import about, store_ref
    from jaxrag.server.state.replicas import Replicas

    engine = state.engine
    assert isinstance(engine, Replicas)
    named = about(state.model, state.knowledge_bases)
    engine.open(found.links, lambda request: store_ref(state, request), named)
    try:
        if before is not None and not found.fits:
            before.make_room(state.settings.drain_seconds + _DELETE_SECONDS)
        least = None if before is None else max(found.fits, 1)
        engine.wait(options.replica_seconds, least)
        found.ready = True
        with _scaled(state, engine, options):
            yield
    finally:
        engine.close()


@contextlib.contextmanager
def _scaled(state: "ServerState", engine: "Replicas", options: ReplicaOptions) -> Iterator[None]:
    """Within, engines come and go by the work that waits."""
    from ray import serve

    from jaxrag.server.state.scaling import Scaling

    if options.max_replicas <= options.replicas:
        yield
        return
    scaling, over = Scaling(options.replicas, options.max_replicas), threading.Event()
    mine = _prefix(state.settings, options)

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            count = len(engine.members)
            target = scaling.wanted(time.monotonic(), engine.queued_seconds, count)
            try:
                for at in range(count, target):
                    _LOG.info("work waits: replica %d is started", at)
                    _run([f"{mine}{at}"], state.settings, options)
                    engine.join(_Link(str(at), serve.get_app_handle(f"{mine}{at}")))
                for at in range(target, count):
                    _LOG.info("little work: replica %d ends", at)
                    engine.leave(str(at), state.settings.drain_seconds)
                    serve.delete(f"{mine}{at}")
            except Exception:
                _LOG.exception("replicas cannot be made or ended now")

    thread = threading.Thread(target=look, name="jaxrag-scaling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LOOK_SECONDS)


def _join(options: ReplicaOptions) -> None:
    """Reach the cluster, or start one."""
    import ray

    # That of JAX on forks: what Ray starts runs another program at once.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    how: dict[str, Any] = {"log_to_driver": False, "namespace": _OURS, "logging_level": "ERROR"}
    target = options.ray_address
    if target != "local":
        try:
            ray.init(address=target or "auto", **how)
            return
        except (ConnectionError, RuntimeError, ValueError) as error:
            if target is not None:
                said = " ".join(str(error).split())[:200]
                raise ConfigError(
                    f"--ray-address {target}: no Ray cluster is reached there ({said}); start one "
                    "with `ray start --head`, or set RAY_AUTH_MODE=token where it wants a token"
                ) from None
    most = max(options.replicas, options.max_replicas)
    each = options.replica_processes * options.replica_cpus
    cpus = max(os.cpu_count() or 1, math.ceil(most * each))
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, **how)


def _prefix(settings: "ServerSettings", options: ReplicaOptions) -> str:
    """What the names of a server's applications begin with: its own, and of its settings."""
    folders = (settings.model.path, *settings.knowledge_bases.values())
    name = settings.model.name or next((Path(it).name for it in folders if it is not None), "model")
    settled = repr((engine_settings(settings), options.replica_gpus, options.replica_processes))
    return f"{_OURS}-{name}-{hashlib.sha256(settled.encode()).hexdigest()[:8]}{_PARTS}"


def _deploy(settings: "ServerSettings", options: ReplicaOptions, theirs: str) -> list[str]:
    """Have the engines of a server run; the names of their applications."""
    from ray import serve

    mine = _prefix(settings, options)
    family = mine.removesuffix(_PARTS).rpartition("-")[0]
    names = [f"{mine}{at}" for at in range(options.replicas)]
    there = serve.status().applications
    for other in sorted(there):
        taken_over = bool(theirs) and other.startswith(theirs)
        if other.startswith(f"{family}-") and not (other.startswith(mine) or taken_over):
            raise ConfigError(
                f"engines of {family.removeprefix(f'{_OURS}-')} with other settings run in this "
                f"Ray cluster ({other}); end them with `serve shutdown`, or serve under another "
                "--name"
            )
    for gone in [it for it in there if it.startswith(mine) and it not in names]:
        if mine != theirs:
            serve.delete(gone)
    _run([name for name in names if name not in there], settings, options)
    return names


def _fits(options: ReplicaOptions) -> int:
    """How many more engines the cluster has room for now."""
    import ray

    free = ray.available_resources()
    each = {"CPU": options.replica_cpus, "GPU": options.replica_gpus}
    needed = {name: options.replica_processes * count for name, count in each.items() if count}
    fitting = (int(free.get(name, 0.0) // count) for name, count in needed.items())
    return min(fitting, default=options.replicas)


def one_less(state: "ServerState", prefix: str) -> bool:
    """End one of a server's engines, once it has answered what it has; False where it has one."""
    from jaxrag.server.state.replicas import Replicas

    engine = state.engine
    if not isinstance(engine, Replicas):
        return False
    up = [name for name, member in engine.members.items() if member["up"] and not member["leaving"]]
    if len(up) < 2:
        return False
    from ray import serve

    _LOG.info("replica %s ends: another server needs its place", up[-1])
    engine.leave(up[-1], state.settings.drain_seconds)
    serve.delete(f"{prefix}{up[-1]}")
    return True


def end_engines(theirs: str, mine: str) -> None:
    """End the engines of a server that is no more, unless they are this one's."""
    from ray import serve

    if not theirs or theirs == mine:
        return
    for name in [it for it in serve.status().applications if it.startswith(theirs)]:
        _LOG.info("%s ends: its server was taken over from", name)
        serve.delete(name)


def _run(names: Sequence[str], settings: "ServerSettings", options: ReplicaOptions) -> None:
    """Start applications, without waiting for what they load."""
    from ray import serve

    if names:
        made = application(engine_settings(settings), options)
        serve.run_many(
            [serve.RunTarget(made, name=name, route_prefix=None) for name in names],
            wait_for_applications_running=False,
        )


def application(settings: "ServerSettings", options: ReplicaOptions) -> Any:
    """One engine as a Ray Serve application."""
    from ray import serve

    passed = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and name != "JAX_PLATFORMS"
    }
    platforms = passed.pop(f"{_OURS.upper()}_PLATFORMS", "")
    counts = {"CPU": options.replica_cpus, "GPU": options.replica_gpus}
    bundle = {name: count for name, count in counts.items() if count}
    several: dict[str, Any] = {}
    if options.replica_processes > 1:
        several["placement_group_bundles"] = [bundle] * options.replica_processes
    deployed = serve.deployment(
        name="engine",
        num_replicas=1,
        max_ongoing_requests=_ONGOING,
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        **several,
        ray_actor_options={
            "num_cpus": options.replica_cpus,
            "num_gpus": options.replica_gpus,
            "runtime_env": {"env_vars": {**passed, "JAX_PLATFORMS": platforms}},
        },
    )(RayEngine)
    each = options.replica_cpus, options.replica_gpus
    return deployed.bind(settings, options.replica_processes, each)


def engine_settings(settings: "ServerSettings") -> "ServerSettings":
    """Of an engine: those of its server that concern it, with paths that hold on other machines."""
    from jaxrag.server.settings import ServerSettings

    own = {name: getattr(settings, name) for name in _OF_ENGINE}
    own["knowledge_bases"] = {
        name: _absolute(folder) for name, folder in settings.knowledge_bases.items()
    }
    own["model"] = dataclasses.replace(settings.model, path=_absolute(settings.model.path))
    for name in ("keys", "secret_file", "plain_gate", "method", "template"):
        own[name] = _absolute(own[name])
    if settings.tier is not None:
        own["tier"] = os.path.abspath(settings.tier)
    return ServerSettings(**own, drain_seconds=settings.drain_seconds)


def one_device(settings: "ServerSettings") -> "ServerSettings":
    """Of the server itself, which only makes prompts ready: the mesh is that of its engines."""
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, mesh=None))


def _absolute(path: Any) -> Any:
    """A path that is there, from the root; anything else as it is."""
    return str(Path(path).resolve()) if isinstance(path, str) and Path(path).exists() else path


def build(args: Mapping[str, Any]) -> Any:
    """One engine for a Ray Serve configuration file, whose ``args`` are settings of the server.

    Those beside them are of ``ReplicaOptions``.
    """
    from jaxrag.base.tables import build as build_table
    from jaxrag.server.settings import ServerSettings

    own = {field.name for field in dataclasses.fields(ReplicaOptions)}
    options = ReplicaOptions(**{name: args[name] for name in own & args.keys()})
    values = {name: value for name, value in args.items() if name not in own}
    settings = build_table(ServerSettings, values, "args of jaxrag.cli.replicas:build")
    return application(engine_settings(settings), options)
