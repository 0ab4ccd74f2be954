"""One engine of several that answer for one server."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterable, Mapping

import numpy as np

from jaxrag.base.errors import EngineUnavailable
from jaxrag.base.types import HostArray
from jaxrag.engine.engine import Engine
from jaxrag.engine.jobs import SILENT_SECONDS, Job, JobNews, ReplicaReport, name_of
from jaxrag.engine.progress import Progress
from jaxrag.engine.ranks import RankLost
from jaxrag.engine.staging import key_in_part
from jaxrag.engine.wire import request_of
from jaxrag.server.state.replica_stores import ReplicaStores


class Replica:
    """Serves jobs of servers with an engine of this process. For one event loop."""

    def __init__(
        self,
        engine: Engine,
        stores: ReplicaStores,
        about: Mapping[str, str],
    ) -> None:
        """Serve with an engine.

        Args:
          engine: of this process.
          stores: what jobs read.
          about: what must be the same in all engines of a server, by name.
        """
        self._engine, self._stores = engine, stores
        self._about = dict(about)
        self._running: dict[tuple[str, int], int] = {}  # the engine's number of each job
        self._heard: dict[str, float] = {}

    async def serve(self, job: Job) -> AsyncGenerator[JobNews, None]:
        """What the engine makes of a job, as it comes. Leaving the iteration aborts it."""
        loop, engine = asyncio.get_running_loop(), self._engine
        news: asyncio.Queue[Progress] = asyncio.Queue()
        key = job.server, job.number
        self._heard[job.server] = time.monotonic()

        def begin() -> int:
            request = request_of(job.request, self._stores(job.store))

            def sink(progress: Progress) -> None:
                loop.call_soon_threadsafe(news.put_nowait, progress)

            return engine.add(request, sink)

        try:
            number = await asyncio.to_thread(begin)
        except Exception as error:  # of this request: who asked is told
            _check_there(error)
            yield JobNews(time.monotonic(), (Progress(job.number, error=error),))
            return
        self._running[key] = number
        ended = False
        try:
            while not ended:
                batch = [await news.get()]
                while not news.empty():
                    batch.append(news.get_nowait())
                ended = batch[-1].last
                _check_there(batch[-1].error)
                numbered = tuple(dataclasses.replace(it, number=job.number) for it in batch)
                yield JobNews(time.monotonic(), numbered)
        finally:
            del self._running[key]
            if not ended:
                engine.abort(number)

    def stop(self, server: str, number: int) -> None:
        """No more tokens of a job are wanted; its outcome comes."""
        found = self._running.get((server, number))
        if found is not None:
            self._engine.stop(found)

    def drop(self, keys: list[str]) -> None:
        """Let the KV of chunks leave the pool and the arena."""
        self._engine.drop(keys)

    def forget(self, tenant: str) -> int:
        """Drop what a tenant brought with its requests; of how many chunks."""
        keys = self._stores.forget(tenant)
        self._engine.drop(keys)
        return len(keys)

    def report(self, server: str) -> ReplicaReport:
        """What it holds and does; jobs of servers that have not asked for long are aborted."""
        now = time.monotonic()
        self._heard[server] = now
        for name in [name for name, at in self._heard.items() if now - at > SILENT_SECONDS]:
            del self._heard[name]
            for key, number in self._running.items():
                if key[0] == name:
                    self._engine.abort(number)
        engine, places = self._engine, {}
        for (of, number), own in self._running.items():
            place = engine.where(own) if of == server else None
            if place is not None:
                places[number] = place
        pool, host = engine.held()
        config = engine.runner.model.config
        parts = len(config.global_layers) < config.num_kv_layers
        return ReplicaReport(
            phase="ready",
            about=self._about,
            num_pages=engine.runner.num_pages,
            pool=_names(pool, parts),
            host=_names([*host, *self._stores.memory_keys()], parts),
            status=engine.status(),
            tiers=engine.tiers(),
            compiled=engine.compiled.copy(),
            iterations=engine.iterations,
            silence=engine.silence,
            where=places,
        )


def _check_there(error: BaseException | None) -> None:
    """Raise EngineUnavailable for an error that is not of the request: the engine has ended."""
    if isinstance(error, RankLost):
        raise EngineUnavailable(f"a replica is gone ({error})") from None


def _names(keys: Iterable[str], parts: bool) -> HostArray:
    """Of what it has; where chunks are asked for in ``parts``, what it has whole serves as one."""
    every = ((key, key_in_part(key)) if parts else (key,) for key in keys)
    return np.fromiter((name_of(key) for pair in every for key in pair), np.uint64)
