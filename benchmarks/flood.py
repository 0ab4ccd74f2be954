"""A flood: many times more requests than a server can take, and what becomes of those it lets in.

`jaxrag serve` runs in a process of its own, over random weights. First its capacity is measured:
requests that are all there at the start, over the seconds until the last is answered. Then
``factor`` times as many a second come for a while. What is let in is to be served as in quiet
times, the rest is to be refused at once with a time to come back, and memory is not to grow.

``within`` is the share of the requests that were let in whose first token came within ``first``
seconds of when they were due, at a client that shares the machine; ``within_by_server`` is that
share by the server's own metrics, from when it had read the request (``first`` is to be a bound of
their buckets). ``told`` is the share of the refused whose 429 named 1 to 120 seconds.

With ``--hostile 0.1`` one in ten requests besides is made to do harm: numbers that no engine holds,
prompts, messages and documents beyond all limits, headers without end, half a request, a foreign
host. What became of these is counted by status; ``restarts`` is how often the engine began anew.

example: python benchmarks/flood.py --seconds 60 --out benchmarks/results/flood.json
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.cli import run_command
from jaxrag.cli.options import add_json
from jaxrag.cli.output import give_out
from jaxrag.measure.bench.options import Traffic
from jaxrag.measure.bench.serve_client import offer_http
from jaxrag.measure.bench.serve_http import OwnServer, own_server
from jaxrag.measure.bench.serve_records import ServedRequest, percentiles
from jaxrag.measure.bench.serve_workload import AskedRequest, draw
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import SMALL_LLAMA
from jaxrag.models.model import Model, random_model

_BUSY = 429


@dataclasses.dataclass(frozen=True)
class Options:
    """The flood.

    Attributes:
      factor: requests a second, over the capacity.
      seconds: for how long they come.
      rows: that decode together.
      waiting: requests that may wait for their first token; 0: as many as are served in half the
        time that a first token may take.
      first: seconds within which it is to come.
      answer: tokens.
      chunk_tokens: of a document.
      config: of the model.
      patience: seconds after the last was due in which all must be answered.
      hostile: requests that are made to do harm, for each of the others.
    """

    factor: float = 10.0
    seconds: float = 20.0
    rows: int = 8
    waiting: int = 0
    first: float = 1.0
    answer: int = 64
    chunk_tokens: int = 256
    config: ModelConfig = SMALL_LLAMA
    patience: float = 60.0
    hostile: float = 0.0


def run(options: Options) -> dict[str, Any]:
    """Measure the capacity, then flood; JSON-able."""
    few = Traffic(
        requests=8 * options.rows, documents=16, chunk_tokens=options.chunk_tokens, chunks=2,
        answers=(options.answer,), neighbours=0,
    )  # fmt: skip
    model = random_model(options.config)
    asked = draw(few, model.config.vocab_size)
    with _server(model, options, few.requests) as server:
        for _ in range(2):  # the first compiles
            served = _ask(server, asked, math.inf, options)
            if not all(it.complete for it in served):
                raise RequestError(f"the server answers nothing like this: {served[0].error}")
        capacity = len(served) / max(it.last or 0.0 for it in served)
    rate = options.factor * capacity
    many = dataclasses.replace(few, requests=math.ceil(rate * options.seconds))
    waiting = options.waiting or max(int(capacity * options.first / 2), 1)
    with _server(model, options, waiting) as server:
        for it in asked:  # one after the other, as few may wait
            _ask(server, [it], math.inf, options)
        before = server.peak_bytes()
        first = _first_tokens(server, options)
        with _attacked(server, rate * options.hostile) as harm:
            served = _ask(server, draw(many, model.config.vocab_size), rate, options)
        all_of, within = (b - a for a, b in zip(first, _first_tokens(server, options), strict=True))
        grown = server.peak_bytes() - before
        restarts = _counter(server, "jaxrag_engine_restarts_total")
        after = [one for it in asked[:4] for one in _ask(server, [it], math.inf, options)]
    return {
        "benchmark": "flood",
        "options": {k: v for k, v in dataclasses.asdict(options).items() if k != "config"},
        "capacity_per_second": capacity,
        "rate_per_second": rate,
        "may_wait": waiting,
        **_outcome(served, options),
        "within_by_server": within / all_of if all_of else None,
        "grown_bytes": grown,
        "hostile": dict(harm),
        "restarts": restarts,
        "served_afterwards": sum(it.complete for it in after) / len(after),
        "machine": describe(),
    }


@contextlib.contextmanager
def _server(model: Model, options: Options, waiting: int) -> Iterator[OwnServer]:
    with (
        tempfile.TemporaryDirectory(prefix="jaxrag-flood-") as folder,
        own_server(
            model, Path(folder), method="turborag", rows=options.rows,
            cache_tokens=64 * options.chunk_tokens, requests=waiting,
        ) as server,
    ):  # fmt: skip
        yield server


def _ask(
    server: OwnServer, asked: Sequence[AskedRequest], rate: float, options: Options
) -> list[ServedRequest]:
    return offer_http(server.url, asked, rate, lambda it: server.body(it, ""), options.patience)


@contextlib.contextmanager
def _attacked(server: OwnServer, rate: float) -> Iterator[Counter[str]]:
    """While the block runs, hostile requests are sent; counts them by status."""
    count: Counter[str] = Counter()
    over = threading.Event()

    def send() -> None:
        with httpx.Client(base_url=server.url, timeout=60.0) as client:
            for number in itertools.count():
                if over.wait(1 / rate):
                    return
                name, ask = _HARM[number % len(_HARM)]
                try:
                    status = str(client.send(ask(client)).status_code)
                except httpx.HTTPError as error:
                    status = type(error).__name__
                count[f"{name}: {status}"] += 1

    thread = threading.Thread(target=send)
    if rate:
        thread.start()
    try:
        yield count
    finally:
        over.set()
        if rate:
            thread.join()


def _chat(**body: Any) -> Callable[[httpx.Client], httpx.Request]:
    given = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | body
    data = json.dumps(given)

    def make(client: httpx.Client) -> httpx.Request:
        headers = {"content-type": "application/json"}
        return client.build_request("POST", "/v1/chat/completions", content=data, headers=headers)

    return make


def _get(**headers: str) -> Callable[[httpx.Client], httpx.Request]:
    return lambda client: client.build_request("GET", "/v1/models", headers=headers)


_HARM: tuple[tuple[str, Callable[[httpx.Client], httpx.Request]], ...] = (
    ("number", _chat(top_k=1 << 40)),
    ("messages", _chat(messages=[{"role": "user", "content": "a" * 30}] * 20_000)),
    ("question", _chat(messages=[{"role": "user", "content": "a b " * 500_000}])),
    ("documents", _chat(documents=["a"] * 100_000)),
    ("head", _get(x="a" * (1 << 20))),
    ("host", _get(host="evil.example")),
    ("temperature", _chat(temperature=1e308)),
)


def _counter(server: OwnServer, name: str) -> int:
    for line in server.read("/metrics").decode().splitlines():
        if line.startswith(f"{name} "):
            return int(float(line.split()[1]))
    return 0


def _first_tokens(server: OwnServer, options: Options) -> tuple[float, float]:
    """How many first tokens it has given so far, and how many of them in time."""
    name, found = "jaxrag_ttft_seconds", dict[str, float]()
    for line in server.read("/metrics").decode().splitlines():
        key, _, value = line.rpartition(" ")
        if key.startswith(name):
            found[key] = float(value)
    return found[f"{name}_count"], found[f'{name}_bucket{{le="{float(options.first)}"}}']


def _outcome(served: Sequence[ServedRequest], options: Options) -> dict[str, Any]:
    """What became of the requests of a flood."""
    whole = [it for it in served if it.complete]
    refused = [it for it in served if it.status == _BUSY]
    others = [it for it in served if not it.complete and it.status != _BUSY]
    told = sum(it.retry_after is not None and 1 <= it.retry_after <= 120 for it in refused)
    within = sum(it.to_first < options.first for it in whole)
    return {
        "requests": len(served),
        "admitted": len(whole),
        "refused": len(refused),
        "others": dict(Counter(str(it.error)[:200] for it in others)),
        "told": told / len(refused) if refused else None,
        "within": within / len(whole) if whole else None,
        "first_token": percentiles([it.to_first for it in whole]),
    }


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines."""
    first = result["first_token"]
    yield (
        f"{result['rate_per_second']:.0f} requests a second, {result['options']['factor']:g} times "
        f"the capacity of {result['capacity_per_second']:.1f}, for "
        f"{result['options']['seconds']:g} s; {result['may_wait']} may wait"
    )
    yield (
        f"{result['requests']} came: {result['admitted']} answered, {result['refused']} refused "
        f"with 429, {sum(result['others'].values())} otherwise"
    )
    if first:
        yield (
            f"first token of those: p50 {1000 * first['p50']:.0f} ms, p95 "
            f"{1000 * first['p95']:.0f} ms; {100 * result['within']:.1f} % within "
            f"{result['options']['first']:g} s, by the server's metrics "
            f"{100 * (result['within_by_server'] or 0.0):.1f} %"
        )
    if result["told"] is not None:
        yield f"refused with a time to come back: {100 * result['told']:.0f} %"
    if result["hostile"]:
        answered = ", ".join(f"{count} {name}" for name, count in sorted(result["hostile"].items()))
        yield f"hostile: {answered}; the engine began anew {result['restarts']} times"
    yield (
        f"memory of the server: {result['grown_bytes'] / 1e6:+.0f} MB; answered after it: "
        f"{100 * result['served_afterwards']:.0f} %"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print lines or JSON."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Options):
        if isinstance(field.default, int | float):
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=type(field.default),
                default=field.default,
                metavar="N",
                help=f"({field.default:g})",
            )
    parser.add_argument("--out", metavar="FILE", help="write the result here, as JSON")
    add_json(parser)
    return run_command(_main, parser.parse_args(argv))


def _main(args: argparse.Namespace) -> int:
    names = [it.name for it in dataclasses.fields(Options) if isinstance(it.default, int | float)]
    result = run(Options(**{name: getattr(args, name) for name in names}))
    give_out(args, result, report(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
