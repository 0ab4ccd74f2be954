"""Replicas on Ray: which of them is asked, measured over HTTP; and kills under load.

One server, ``replicas`` engines on a Ray cluster of this machine, random weights, a knowledge base
on disk. The pool of each engine holds ``share`` of the corpus, and host memory none of it, so that
a chunk that is not in the pool is read from the store. Questions name ``k`` documents; the first is
drawn by Zipf's law, the others with probability ``together`` from its topic, else by Zipf's law
too. ``clients`` ask one question after the other, each over a connection of its own process.

Every way to choose an engine gets the same questions, from empty pools: the first ``warm`` fill
them, the others are counted. Ways take turns, round by round, after a round that compiles; what is
said of a way is the median of its rounds. ``pool`` is the share of chunks that were in the pool of
the engine that was chosen.

Then engines are killed at random moments while questions come, but for the last that is up, and
each answer is compared with that of a server that nobody kills: it is right, it is an error of the
API, or it is missing. Who is told to ask again later waits so long before the next question.

example: python benchmarks/replicas.py --out benchmarks/results/replicas.json
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from script import between, in_turn, spread

from jaxrag.base.errors import RequestError
from jaxrag.cli import PROGRAM, run_command
from jaxrag.cli.command import parse
from jaxrag.cli.output import give_out, require_folder
from jaxrag.cli.serve import opened
from jaxrag.engine.routing import Routing
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import SMALL_LLAMA, random_named, write_random
from jaxrag.models.model import load_model
from jaxrag.models.text import byte_level

ROUTINGS: tuple[Routing, ...] = ("residency", "hashing", "round_robin", "random")
_WORDS = 400
_PATIENCE = 120.0  # seconds for one answer


@dataclasses.dataclass(frozen=True)
class Options:
    """The comparison."""

    replicas: int = 4
    documents: int = 400
    chunk_tokens: int = 256
    k: int = 3
    share: float = 0.1
    zipf: float = 1.0
    topics: int = 40
    clients: int = 8
    warm: int = 100
    requests: int = 150
    repeats: int = 3
    answer: int = 8
    kills: int = 20
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Asked:
    """What became of one question.

    Attributes:
      text: of its answer; None where it has none.
      error: code of the API's error; "" where there is none.
      first: seconds to its first token.
      where: the tier of each chunk.
    """

    text: str | None
    error: str = ""
    first: float = 0.0
    where: tuple[str | None, ...] = ()


def run(options: Options) -> dict[str, Any]:
    """Measure; JSON-able."""
    machine = describe()  # which fails, where it does, before ten minutes of work
    rng = np.random.default_rng(options.seed)
    with (
        tempfile.TemporaryDirectory(prefix="jaxrag-replicas-") as folder,
        concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as client,
    ):
        words = _words(rng)
        names = [f"q{it}x{it % _WORDS}" for it in range(options.documents)]
        with _server(Path(folder), options, words, names, rng) as (url, engine, keys):
            workloads = {}
            for together in (0.0, 0.8):
                bodies = _bodies(options, names, words, together)
                arms: dict[str, Callable[[], dict[str, float]]] = {
                    routing: functools.partial(
                        _measured, options, client, url, engine, keys, routing, bodies
                    )
                    for routing in ROUTINGS
                }
                found = in_turn(arms, options.repeats)
                workloads[f"{together:g}"] = {name: _medians(it) for name, it in found.items()}
            engine.routing = "residency"
            killed = _killed(options, client, url, engine, _bodies(options, names, words, 0.8))
    return {
        "benchmark": "replicas",
        "model": random_named(SMALL_LLAMA, shape=True),
        "options": dataclasses.asdict(options),
        "together": workloads,
        "kills": killed,
        "machine": machine,
    }


@contextlib.contextmanager
def _server(
    work: Path,
    options: Options,
    words: Sequence[str],
    names: Sequence[str],
    rng: np.random.Generator,
) -> Iterator[tuple[str, Any, list[str]]]:
    """A server with its replicas: its URL, what chooses among them, and the keys of all chunks."""
    write_random(work / "model", SMALL_LLAMA, "float32", options.seed)
    byte_level.save(byte_level.train([" ".join(words)], SMALL_LLAMA.vocab_size), work / "model")
    model = load_model(str(work / "model"))
    with KnowledgeBase.open(
        work / "kb", model, template="plain", chunk_tokens=options.chunk_tokens, overlap=0,
        chunk_by="tokens", encoders=["isolated"],
    ) as base:  # fmt: skip
        base.add([_document(model.text_tokenizer(), rng, words, it, options) for it in names])
    pool = int(options.share * options.documents) * options.chunk_tokens
    room = 2 * options.clients * 128  # for questions and answers, beside the chunks
    file = work / "serve.toml"
    file.write_text(
        f"port = 0\nwarm_up = false\nk = {options.k}\nrows = {options.clients}\n"
        f'method = "turborag"\nmax_seconds = {_PATIENCE}\ndrain_seconds = 2.0\n'
        f"[model]\npath = {json.dumps(str(work / 'model'))}\ncache_tokens = {pool + room}\n"
        f"[knowledge_bases]\ncorpus = {json.dumps(str(work / 'kb'))}\n[engine]\narena_bytes = 0\n",
        encoding="utf-8",
    )
    args = parse(
        PROGRAM,
        ["serve", "--config", str(file), "--replicas", str(options.replicas), "--ray-address=local",
         "--replica-cpus=0.5"]
    )  # fmt: skip
    with opened(args) as server:
        assert server is not None
        engine, base = server.state.engine, server.state.knowledge_bases["corpus"]
        ready, loops = threading.Event(), list[asyncio.AbstractEventLoop]()

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve(ready.set)

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        try:
            if not ready.wait(60):
                raise RequestError("the server does not start")
            yield server.url, engine, list(base.store.keys())
        finally:
            loops[0].call_soon_threadsafe(server.end)
            thread.join()


def _measured(
    options: Options,
    client: concurrent.futures.Executor,
    url: str,
    engine: Any,
    keys: list[str],
    routing: Routing,
    bodies: Sequence[Mapping[str, Any]],
) -> dict[str, float]:
    """One way to choose, from empty pools."""
    engine.routing = routing
    engine.drop(keys)
    time.sleep(2.0)  # until that is reported
    client.submit(ask_all, url, bodies[: options.warm], options.clients).result()
    start = time.perf_counter()
    asked = client.submit(ask_all, url, bodies[options.warm :], options.clients).result()
    seconds = time.perf_counter() - start
    if failed := [it for it in asked if it.text is None]:
        raise RequestError(f"{len(failed)} of {len(asked)} questions failed: {failed[0].error}")
    where = [tier for it in asked for tier in it.where]
    first = sorted(it.first for it in asked)
    return {
        "pool": where.count("pool") / len(where),
        "first_p50": statistics.median(first),
        "first_p95": first[int(0.95 * len(first))],
        "per_second": len(asked) / seconds,
    }


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {name: spread([it[name] for it in rounds]) for name in rounds[0]}


def _killed(
    options: Options,
    client: concurrent.futures.Executor,
    url: str,
    engine: Any,
    bodies: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Kill engines at random moments while questions come."""
    bodies = [{**it, "max_tokens": 8 * options.answer} for it in bodies[:64]]
    right = [it.text for it in client.submit(ask_all, url, bodies, options.clients).result()]
    drawn, over, killed = random.Random(options.seed), threading.Event(), list[int]()

    def kill() -> None:
        while len(killed) < options.kills:
            time.sleep(drawn.uniform(0.5, 6.0))
            there = [it["pid"] for it in engine.members.values() if it["up"]]
            pids = [it for it in there if it not in killed]  # a death is seen a moment later
            if len(pids) > 1:
                killed.append(drawn.choice(pids))
                os.kill(killed[-1], signal.SIGKILL)
        over.set()

    thread = threading.Thread(target=kill)
    thread.start()
    count: Counter[str] = Counter()
    start = time.perf_counter()
    while not over.is_set():
        for asked, expected in zip(
            client.submit(ask_all, url, bodies, options.clients).result(), right, strict=True
        ):
            if asked.text is None:
                count[asked.error or "missing"] += 1
            else:
                count["right" if asked.text == expected else "wrong"] += 1
    seconds = time.perf_counter() - start
    thread.join()
    for name in ("right", "wrong", "missing", "engine_unavailable"):
        count.setdefault(name, 0)
    return {"kills": len(killed), "seconds": seconds, "questions": count.total(), **count}


def ask_all(url: str, bodies: Sequence[Mapping[str, Any]], clients: int) -> list[Asked]:
    """Ask every question once, so many at a time; in a process of its own."""
    return asyncio.run(_ask_all(url, bodies, clients))


async def _ask_all(url: str, bodies: Sequence[Mapping[str, Any]], clients: int) -> list[Asked]:
    import httpx

    found: list[Asked | None] = [None] * len(bodies)
    left = iter(range(len(bodies)))

    async def work(http: httpx.AsyncClient) -> None:
        for at in left:
            found[at] = await _ask(http, bodies[at])

    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE) as http:
        await asyncio.gather(*(work(http) for _ in range(clients)))
    return [it for it in found if it is not None]


async def _ask(http: Any, body: Mapping[str, Any]) -> Asked:
    """One question, to the last event of its stream."""
    import httpx

    start, first, text, where, done = time.perf_counter(), 0.0, "", (), False
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                error = json.loads(await answer.aread())["error"]
                await asyncio.sleep(float(answer.headers.get("retry-after", 0)))
                return Asked(None, error["code"] or "refused")
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return Asked(None, event["error"]["code"])
                new = "".join(it["delta"].get("content") or "" for it in event["choices"])
                if new and not first:
                    first = time.perf_counter() - start
                text += new
                rows = event.get("jaxrag", {}).get("reuse", ())
                where = where or tuple(it["where"] for it in rows if it["part"] != "prefix")
    except httpx.HTTPError:
        return Asked(None)
    first = first or time.perf_counter() - start
    return Asked(text, "", first, where) if done else Asked(None)


def _bodies(
    options: Options, names: Sequence[str], words: Sequence[str], together: float
) -> list[dict[str, Any]]:
    """The questions, in the order in which they are asked."""
    rng = np.random.default_rng((options.seed, int(10 * together)))
    popular = np.arange(1, options.documents + 1) ** -options.zipf
    places = rng.permutation(options.documents)  # so that topics are no order of popularity
    bodies = []
    for _ in range(options.warm + options.requests):
        chosen = [int(rng.choice(options.documents, p=popular / popular.sum()))]
        while len(chosen) < options.k:
            near = places % options.topics == places[chosen[0]] % options.topics
            weights = popular * near if rng.random() < together else popular.copy()
            weights[chosen] = 0
            chosen.append(int(rng.choice(options.documents, p=weights / weights.sum())))
        text = " ".join([*(names[it] for it in chosen), *rng.choice(words, 4)])
        bodies.append(
            {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": options.answer,
                "ignore_eos": True,
                "stream": True,
            }
        )
    return bodies


def _words(rng: np.random.Generator) -> list[str]:
    """Words of three syllables."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    found: dict[str, None] = {}
    while len(found) < _WORDS:
        found["".join(rng.choice(syllables, 3))] = None
    return list(found)


def _document(
    tokenizer: Any, rng: np.random.Generator, words: Sequence[str], name: str, options: Options
) -> Document:
    """A document of one chunk that is nearly full; its name is in it and in no other."""
    parts, used = [name], len(tokenizer.encode(name))
    while True:
        word = f" {rng.choice(words)}s"  # a question's words are in none
        used += len(tokenizer.encode(word))
        if used > options.chunk_tokens - 4:
            return Document(name, "".join(parts))
        parts.append(word)


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The result as lines."""
    for together, arms in result["together"].items():
        yield f"documents of one topic with probability {together}"
        for name, it in arms.items():
            first, last = it["first_p50"]["median"], it["first_p95"]["median"]
            yield (
                f"  {name:12} pool {between(it['pool'], '.3f')}  first token {1e3 * first:.0f} ms, "
                f"p95 {1e3 * last:.0f} ms  {between(it['per_second'], '.1f')} a second"
            )
    kills = result["kills"]
    yield (
        f"{kills['kills']} kills in {kills['seconds']:.0f} s: {kills['questions']} questions, "
        f"{kills['right']} right, {kills['engine_unavailable']} told, {kills['wrong']} wrong, "
        f"{kills['missing']} missing"
    )


def main() -> int:
    """Measure, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Options):
        kind = type(field.default)
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, default=field.default, metavar="N"
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", metavar="FILE", help="write the result as JSON")
    return run_command(_run, parser.parse_args())


def _run(args: argparse.Namespace) -> int:
    options = Options(**{it.name: getattr(args, it.name) for it in dataclasses.fields(Options)})
    require_folder(args.out)
    result = run(options)
    give_out(args, result, report(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
