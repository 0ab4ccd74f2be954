"""Serving under load: the same arrivals for an engine under several settings, and for a peer.

The arms differ in the engine's settings and in the method; they have the same weights, requests
and moments, and read chunk KV from one store, over one link. Every arm starts with an empty pool
and compiled programs. Times count from when a request was due.

The peer serves the same weights over HTTP, with its prefix cache on: the prompts as they come
(``peer``), and all of them once more (``peer_repeated``), its best case.
"""

import contextlib
import dataclasses
import functools
import gc
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.engine.engine import Engine
from jaxrag.engine.request import Request, check_length
from jaxrag.engine.state import EngineSettings
from jaxrag.kv.store import ChunkStore, KVStore
from jaxrag.measure.bench.options import ServeOptions, Traffic
from jaxrag.measure.bench.serve_arms import FULL, Arm
from jaxrag.measure.bench.serve_client import offer, offer_http
from jaxrag.measure.bench.serve_peer import HttpPeer, vllm
from jaxrag.measure.bench.serve_records import ServedRequest, summary
from jaxrag.measure.bench.serve_workload import AskedRequest, draw, like
from jaxrag.measure.bench.throttle import SlowLink, Throttled
from jaxrag.measure.machine import describe, settle
from jaxrag.measure.zoo import SMALL_LLAMA
from jaxrag.models.model import Model, load_model, random_model
from jaxrag.models.spec import num_params
from jaxrag.models.text.progress import progress_bar
from jaxrag.reuse.methods import METHODS, Method

PEER, REPEATED = "peer", "peer_repeated"
_WARM = 3  # requests of every length of an answer


def run(options: ServeOptions) -> dict[str, Any]:
    """All arms at all rates, then the peer; JSON-able."""
    model = random_model(SMALL_LLAMA) if options.model is None else load_model(options.model)
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="jaxrag-bench-", dir=options.folder)
        )
        bench = Bench(model, options, Path(name) / "store")
        rows: list[dict[str, Any]] = []
        steps = len(options.compared) * len(options.rates)
        bar = stack.enter_context(progress_bar(steps, "serve", "arm"))
        for rate in options.rates:
            for arm in options.compared:
                bar.set_postfix_str(f"{arm.name} at {rate:g}/s", refresh=False)
                rows.append(bench.measure(arm, rate))
                bar.update()
        peer = None
        if options.peer_python is not None or options.peer is not None:
            bar.set_postfix_str("peer", refresh=False)
            with _peer(model, options, Path(name)) as server:
                peer = server.about
                for rate in options.rates:
                    rows += bench.measure_peer(server, rate)
        equal = bench.equal()
    config = model.config
    return {
        "benchmark": "serve",
        "model": {
            "directory": options.model,
            "parameters": num_params(config),
            "layers": config.num_layers,
            "model_dim": config.model_dim,
            "dtype": config.dtype,
            "chunk_bytes": model.kv_layout.nbytes(options.traffic.chunk_tokens),
        },
        "traffic": dataclasses.asdict(options.traffic),
        "arms": {arm.name: dataclasses.asdict(arm) for arm in options.compared},
        "rows_that_decode": options.rows,
        "watched": options.watched,
        "pool_chunks": options.pool_chunks,
        "link_bytes_per_second": options.link,
        "slo": dataclasses.asdict(options.slo),
        "rows": rows,
        "equal": equal,
        "peer": peer,
        "machine": describe(),
    }


class Bench:
    """A model, a store and a workload, and arms that are measured over them."""

    def __init__(self, model: Model, options: ServeOptions, folder: Path) -> None:
        self.options = options
        self._model = dataclasses.replace(
            model, cache_tokens=options.pool_chunks * options.traffic.chunk_tokens
        )
        self._store = ChunkStore.open(
            folder,
            model.fingerprint,
            model.kv_layout,
            mode="rw",
            max_tokens=options.traffic.chunk_tokens,
            durable=False,
        )
        self._prepared: set[tuple[str, bytes]] = set()  # encoder and ids of what is stored
        self._answers: dict[tuple[str, float], dict[int, list[int]]] = {}
        self._methods: dict[str, Method] = {}  # of the arms that answered
        for it in self._draw(options.traffic):
            check_length(model, it.prompt, it.tokens)

    def measure(self, arm: Arm, rate: float) -> dict[str, Any]:
        """One arm at one rate, from an empty pool; a row of the result."""
        asked = self._draw(self.options.traffic)
        self._prepare(arm.resolved, self.options.traffic)
        engine = self._warm(arm)
        speed = self.options.link if arm.link is None else arm.link
        link = SlowLink(speed) if speed else None
        store = self._store if link is None else Throttled(self._store, link)
        before = engine.compiled.copy()
        request_of = functools.partial(self._request, store, arm.resolved)
        served = offer(engine, asked, rate, request_of, self.options.patience)
        row = self._row(arm.name, rate, served)
        row["compiled"] = sorted((engine.compiled - before).elements())
        row["read_bytes"] = None if link is None else link.carried
        self._keep(arm.name, rate, arm.resolved, served)
        return row

    def measure_peer(self, peer: HttpPeer, rate: float) -> list[dict[str, Any]]:
        """The peer at one rate: on documents as they come, then the same prompts once more."""
        options = self.options
        vocabulary = self._model.config.vocab_size
        warm = like(options.traffic, vocabulary, _WARM)
        salt = f"run {time.time_ns()}"
        rows = []
        for name in (None, PEER, REPEATED):
            asked = warm if name is None else self._draw(options.traffic)
            body_of = functools.partial(peer.body, salt=f"warm {salt}" if name is None else salt)
            at = math.inf if name is None else rate
            settle()
            served = offer_http(peer.url, asked, at, body_of, options.patience)
            if name is None:
                if lost := [it.error for it in served if not it.complete]:
                    raise RequestError(
                        f"the peer answered {len(lost)} of {len(warm)} requests not at all or "
                        f"not in full: {lost[0] or 'fewer tokens than were asked for'}"
                    )
                continue
            self._keep(name, rate, None, served)
            rows.append(self._row(name, rate, served) | {"compiled": None, "read_bytes": None})
        return rows

    def equal(self) -> dict[str, Any]:
        """Requests whose tokens are equal under all arms of one method, and the peer's as full's.

        ``None`` where fewer than two arms can be compared. A peer rounds differently.
        """
        groups: dict[Method, list[dict[int, list[int]]]] = {}
        for (name, _), answers in self._answers.items():
            if name in self._methods:
                groups.setdefault(self._methods[name], []).append(answers)
        ours = [_same(group) for group in groups.values() if len(group) > 1]
        full = groups.get(METHODS[FULL], [])
        peers = [answer for (name, _), answer in self._answers.items() if name not in self._methods]
        theirs = _same([full[0], *peers]) if full and any(map(_has_tokens, peers)) else None
        return {"arms": min(ours, default=None), "peer_as_full": theirs}

    def _row(self, name: str, rate: float, served: list[ServedRequest]) -> dict[str, Any]:
        """A row of the result; its rate is None where all came at once."""
        known = None if math.isinf(rate) else rate
        return {"arm": name, "rate": known, **summary(served, self.options.slo)}

    def _keep(
        self, name: str, rate: float, method: Method | None, served: list[ServedRequest]
    ) -> None:
        """Remember the answers, to compare them."""
        if method is not None:
            self._methods[name] = method
        self._answers[name, rate] = {at: it.ids for at, it in enumerate(served) if it.complete}

    def _draw(self, traffic: Traffic) -> list[AskedRequest]:
        return draw(traffic, self._model.config.vocab_size)

    def _request(self, store: KVStore, method: Method, asked: AskedRequest) -> Request:
        return Request(
            asked.prompt, store, method, asked.tokens,
            rows=self.options.rows, watched=self.options.watched, primer=asked.prompt.prefix[:0],
        )  # fmt: skip

    def _engine(self, settings: EngineSettings) -> Engine:
        model = dataclasses.replace(self._model)
        model.engine = Engine(model, settings)
        return model.engine

    def _prepare(self, method: Method, traffic: Traffic) -> None:
        """Have every chunk in the store that requests ask for, as the method wants it."""
        if method.encoder is None:
            return
        engine = self._engine(EngineSettings())
        requests = []
        for it in self._draw(traffic):
            chunks = enumerate(it.prompt.chunks)
            needed = {(method.encoder_of(at), chunk.tobytes()) for at, chunk in chunks}
            if not needed <= self._prepared:
                request = self._request(self._store, method, it)
                requests.append(dataclasses.replace(request, max_new_tokens=1))
                self._prepared |= needed
        for progress in engine.iterate(requests):
            if progress.error is not None:
                raise progress.error

    def _warm(self, arm: Arm) -> Engine:
        """An engine that has served requests of all shapes, with an empty pool."""
        gc.collect()  # the pools of engines that are done
        engine = self._engine(arm.engine)
        traffic, vocabulary = self.options.traffic, self._model.config.vocab_size
        engine.warm_up([
            self._request(engine.memory, arm.resolved, it)
            for it in like(traffic, vocabulary, _WARM)
        ])  # fmt: skip
        engine.forget()
        settle()
        return engine


def _same(answers: Sequence[dict[int, list[int]]]) -> float:
    """Share of the requests whose tokens are equal wherever they were answered."""
    numbers = set.intersection(*map(set, answers))
    same = [all(it[n] == answers[0][n] for it in answers) for n in numbers]
    return float(np.mean(same)) if same else 0.0


def _has_tokens(answers: dict[int, list[int]]) -> bool:
    return any(answers.values())


@contextlib.contextmanager
def _peer(model: Model, options: ServeOptions, folder: Path) -> Iterator[HttpPeer]:
    if options.peer is not None:
        yield HttpPeer(options.peer, {"name": "given by its URL"})
        return
    assert options.peer_python is not None
    traffic, work = options.traffic, folder / "peer"
    work.mkdir()
    longest = traffic.chunks * traffic.chunk_tokens + traffic.question + max(traffic.answers)
    with vllm(options.peer_python, model, work, longest) as server:
        yield server
