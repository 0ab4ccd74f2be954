"""One client that sends at given times and never waits for answers, to an engine or over HTTP.

Over HTTP it speaks OpenAI's ``/v1/completions`` with token ids as the prompt, and reads the stream
of events: one connection and one thread a request, nothing between the bytes and the clock.
"""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from jaxrag.base.errors import RequestError
from jaxrag.engine.engine import Engine
from jaxrag.engine.progress import Progress
from jaxrag.engine.request import Request
from jaxrag.measure.bench.serve_records import ServedRequest
from jaxrag.measure.bench.serve_workload import AskedRequest


def offer(
    engine: Engine,
    asked: Sequence[AskedRequest],
    rate: float,
    request_of: Callable[[AskedRequest], Request],
    patience: float,
) -> list[ServedRequest]:
    """Send requests to an engine of this process when they are due; what became of each.

    What has no complete answer so many seconds after the last was sent is aborted, and lost.
    """
    served = [ServedRequest(arrival.at(rate), arrival.tokens) for arrival in asked]
    requests = [request_of(arrival) for arrival in asked]
    left = threading.Semaphore(0)
    start = time.perf_counter()

    def sink(record: ServedRequest) -> Callable[[Progress], None]:
        def on_progress(progress: Progress) -> None:
            record.came(time.perf_counter() - start, len(progress.new), progress.new)
            if progress.error is not None:
                record.error = f"{type(progress.error).__name__}: {progress.error}"
            if progress.outcome is not None:
                record.done = True
                parts = [part for part in progress.outcome.reuse if part.part != "prefix"]
                record.found.update(part.where or part.how for part in parts)
            if progress.last:
                left.release()

        return on_progress

    numbers = []
    for record, request in zip(served, requests, strict=True):
        time.sleep(max(0.0, record.due - (time.perf_counter() - start)))
        numbers.append(engine.add(request, sink(record)))
    until = time.perf_counter() + patience
    for _ in served:
        if not left.acquire(timeout=max(0.0, until - time.perf_counter())):
            break
    else:
        return served
    for number, record in zip(numbers, served, strict=True):
        if not record.done and record.error is None:
            engine.abort(number)
    return served


def offer_http(
    url: str,
    asked: Sequence[AskedRequest],
    rate: float,
    body_of: Callable[[AskedRequest], Mapping[str, Any]],
    patience: float,
) -> list[ServedRequest]:
    """As ``offer``, to a server that speaks OpenAI's completions; ``url`` as http://HOST:PORT."""
    served = [ServedRequest(arrival.at(rate), arrival.tokens) for arrival in asked]
    bodies = [json.dumps(body_of(arrival)) for arrival in asked]
    start = time.perf_counter()

    def ask(record: ServedRequest, body: str) -> None:
        time.sleep(max(0.0, record.due - (time.perf_counter() - start)))
        until = time.perf_counter() + patience
        try:
            for event in _events(url, body, patience):
                if time.perf_counter() > until:
                    raise TimeoutError
                _take(record, event, time.perf_counter() - start)
        except TimeoutError:
            record.error = f"no complete answer within {patience} s"
        except (OSError, http.client.HTTPException, ValueError, RequestError) as error:
            record.error = f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(asked)) as threads:
        list(threads.map(ask, served, bodies))
    return served


def _take(record: ServedRequest, event: Mapping[str, Any], now: float) -> None:
    """Count what an event brings."""
    if "error" in event:
        raise RequestError(f"the peer says {json.dumps(event['error'])[:300]}")
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or []
        record.came(now, len(ids) or bool(choice.get("text")), ids)
        record.done = record.done or choice.get("finish_reason") is not None
    usage = event.get("usage")
    if usage:  # exact, where one event brought several tokens and no ids
        record.tokens = int(usage["completion_tokens"])


def _events(url: str, body: str, patience: float) -> Iterator[dict[str, Any]]:
    """The events of one streamed completion. RequestError for any status but 200."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port or 80, timeout=patience
    )
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"{parts.path.rstrip('/')}/v1/completions", body, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            text = " ".join(answer.read().decode(errors="replace").split())
            raise RequestError(f"the peer answered {answer.status}: {text[:300]}")
        for line in answer:
            name, _, data = line.partition(b":")
            if name == b"data" and data.strip() != b"[DONE]":
                yield json.loads(data)
