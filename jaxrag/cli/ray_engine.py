"""What runs in the processes of a replica: an engine that Ray Serve starts, or several as one.

Of several processes, Ray actors in one placement group, the first is the engine; it starts the
others, and they end with it.
"""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from jaxrag.base.errors import EngineUnavailable, JaxragError
from jaxrag.cli.command import Args

if TYPE_CHECKING:
    from jaxrag.engine.jobs import Job, JobNews, ReplicaReport
    from jaxrag.server.settings import ServerSettings
    from jaxrag.server.state.replica import Replica
    from jaxrag.server.state.state import ServerState

_LOG = logging.getLogger("jaxrag")

_TOLD_SECONDS = 5.0  # for which an engine of several processes says why it cannot start
_SLOWEST = 60.0  # seconds between two tries of an engine that cannot start


class RayEngine:
    """What Ray Serve runs: one engine, with its model and knowledge bases.

    It loads in the background, and again where that fails: what is missing may come.
    """

    def __init__(
        self, settings: "ServerSettings", processes: int = 1, each: tuple[float, float] = (0, 0)
    ) -> None:
        """``each``: CPUs and GPUs of each process."""
        self._settings, self._processes, self._each = settings, processes, each
        self._spent = False  # of several processes: only all of them anew can serve
        self._leading = contextlib.ExitStack()
        self._followers: list[Any] = []
        self._replica: Replica | None = None
        self._state: ServerState | None = None
        self._why = ""
        threading.Thread(target=self._load, name="jaxrag-load", daemon=True).start()

    async def serve(self, job: "Job") -> "AsyncGenerator[JobNews, None]":
        """As ``Replica.serve``."""
        if self._replica is None:
            raise EngineUnavailable(self._why or "the engine is starting")
        news = self._replica.serve(job)
        try:
            async for it in news:
                yield it
        finally:
            await news.aclose()

    async def report(self, server: str) -> "ReplicaReport":
        """As ``Replica.report``; also of an engine that is not ready."""
        from jaxrag.engine.jobs import ReplicaReport

        if self._replica is None:
            return ReplicaReport("failed" if self._why else "starting", self._why)
        lost = None if self._state is None else self._state.engine.lost
        if lost is not None:
            return ReplicaReport("failed", str(lost))
        return self._replica.report(server)

    async def stop(self, server: str, number: int) -> None:
        """As ``Replica.stop``."""
        if self._replica is not None:
            self._replica.stop(server, number)

    async def drop(self, keys: list[str]) -> None:
        """As ``Replica.drop``."""
        if self._replica is not None:
            await asyncio.to_thread(self._replica.drop, keys)

    async def forget(self, tenant: str) -> int:
        """As ``Replica.forget``."""
        if self._replica is None:
            return 0
        return await asyncio.to_thread(self._replica.forget, tenant)

    def check_health(self) -> None:
        """What Ray Serve asks: it starts an engine anew that raises."""
        state = self._state
        if self._spent:
            raise RuntimeError(self._why)
        if state is not None and state.engine.lost is not None:
            raise RuntimeError(str(state.engine.lost))
        if state is not None and state.engine.silence > state.settings.stall_seconds:
            raise RuntimeError(f"the engine has done nothing for {state.engine.silence:.0f} s")

    def _load(self) -> None:
        pause = 1.0
        while self._replica is None:
            try:
                self._replica = self._made()
            except Exception as error:
                is_ours = isinstance(error, JaxragError)
                self._why = str(error) if is_ours else f"{type(error).__name__}: {error}"
                _LOG.error("the engine cannot start: %s", self._why, exc_info=not is_ours)
                if self._processes > 1:
                    self._give_up(self._why)
                    return
                time.sleep(pause)
                pause = min(2 * pause, _SLOWEST)

    def _give_up(self, why: str) -> None:
        """Of several processes: say why for a while, then have Ray Serve start all anew."""
        self._why = why
        time.sleep(_TOLD_SECONDS)
        self._spent = True

    def _made(self) -> "Replica":
        from jaxrag.cli.opening import model_of, open_bases
        from jaxrag.cli.processes import led
        from jaxrag.server.state.replica import Replica
        from jaxrag.server.state.replica_stores import ReplicaStores, about
        from jaxrag.server.state.state import make_state
        from jaxrag.server.state.warm import WarmUp

        settings, host = self._settings, ""
        if self._processes > 1:
            led_by_it = _lead(settings, self._processes, self._each, self._give_up)
            settings, host, self._followers = led_by_it
        model = model_of(settings)
        bases = open_bases(settings, model)
        try:
            state = make_state(settings, model, bases)
            if host:
                self._leading.enter_context(led(state, (host, 0)))
            if settings.warm_up:
                warm_up = WarmUp(state)
                warm_up.ready()
                threading.Thread(target=warm_up.rest, name="jaxrag-warm-up", daemon=True).start()
        except BaseException:
            for base in bases.values():
                base.close()
            raise
        stores = ReplicaStores(model, bases, len(state.tenants.names), settings.memory_bytes)
        self._state = state
        return Replica(state.engine, stores, about(model, bases))


class RayRank:
    """Any process of a replica but the first: makes its iterations, until its engine ends."""

    def follow(self, settings: "ServerSettings", coordinator: str, count: int, rank: int) -> None:
        """Follow as process ``rank`` of ``count``.

        Raises what cannot be opened; a process whose leader is lost ends at once.
        """
        from jaxrag.cli.opening import model_of, open_bases
        from jaxrag.cli.processes import led
        from jaxrag.server.state.state import make_state

        settings = _joined(settings, coordinator, count, rank)
        model = model_of(settings)
        state = make_state(settings, model, open_bases(settings, model))
        with led(state, ("", 0)):
            pass


def _lead(
    settings: "ServerSettings",
    count: int,
    each: tuple[float, float],
    ended: Callable[[str], None],
) -> tuple["ServerSettings", str, list[Any]]:
    """Start the other processes of a replica, ``count`` with this one, and join them.

    ``ended`` is called on a thread with the reason, once one of them has ended.

    Returns the settings with the mesh of all, the host that they reach this one by, and the others,
    which end when nobody holds them any more. Raises RequestError where they do not come.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group, host = ray.util.get_current_placement_group(), ray.util.get_node_ip_address()
    with socket.create_server((host, 0)) as free:
        coordinator = f"{host}:{free.getsockname()[1]}"
    followers = [
        ray.remote(RayRank)
        .options(
            num_cpus=each[0],
            num_gpus=each[1],
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank
            ),
        )
        .remote()
        for rank in range(1, count)
    ]
    runs = [
        follower.follow.remote(settings, coordinator, count, rank)
        for rank, follower in enumerate(followers, 1)
    ]

    def watch() -> None:
        [first], _ = ray.wait(runs, num_returns=1)
        try:
            ray.get(first)
            why = "it ended"
        except Exception as error:
            why = str(getattr(error, "cause", None) or type(error).__name__)
        ended(f"rank {1 + runs.index(first)}: {' '.join(why.split())}")

    threading.Thread(target=watch, name="jaxrag-ranks", daemon=True).start()
    return _joined(settings, coordinator, count, 0), host, followers


def _joined(
    settings: "ServerSettings", coordinator: str, count: int, rank: int
) -> "ServerSettings":
    from jaxrag.cli.options import join

    join(Args(distributed=True, coordinator=coordinator, processes=count, process_id=rank))
    import jax

    mesh = settings.model.mesh or f"1,1,{jax.device_count()}"
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, mesh=mesh))
