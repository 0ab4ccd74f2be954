"""One client that sends at given times and never waits for answers, to an engine or over HTTP.

Over HTTP it speaks OpenAI's ``/v1/completions`` with token ids as the prompt, and reads the stream
of events by hand: one connection a request, nothing between the bytes and the clock.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from jaxrag.base.errors import RequestError
from jaxrag.engine.engine import Engine
from jaxrag.engine.progress import Progress
from jaxrag.engine.request import Request
from jaxrag.measure.bench.serve_records import ServedRequest
from jaxrag.measure.bench.serve_workload import AskedRequest

_LINE = 1 << 22  # bytes of one event at most


class RefusedByServer(RequestError):
    """A status that is not 200.

    Attributes:
      retry_after: seconds that its header says; None where it has none.
    """

    def __init__(self, status: int, headers: Mapping[str, str], text: str) -> None:
        super().__init__(f"the peer answered {status}: {text}")
        self.status = status
        after = headers.get("retry-after", "")
        self.retry_after = float(after) if after.replace(".", "", 1).isdigit() else None


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
    served = [ServedRequest(it.at(rate), it.tokens, it.tenant) for it in asked]
    requests = [request_of(it) for it in asked]
    left = threading.Semaphore(0)
    start = time.perf_counter()

    def sink(one: ServedRequest) -> Callable[[Progress], None]:
        def told(progress: Progress) -> None:
            one.came(time.perf_counter() - start, len(progress.new), progress.new)
            if progress.error is not None:
                one.error = f"{type(progress.error).__name__}: {progress.error}"
            if progress.outcome is not None:
                one.done = True
                parts = [it for it in progress.outcome.reuse if it.part != "prefix"]
                one.found.update(it.where or it.how for it in parts)
            if progress.last:
                left.release()

        return told

    numbers = []
    for one, request in zip(served, requests, strict=True):
        time.sleep(max(0.0, one.due - (time.perf_counter() - start)))
        numbers.append(engine.add(request, sink(one)))
    until = time.perf_counter() + patience
    for _ in served:
        if not left.acquire(timeout=max(0.0, until - time.perf_counter())):
            break
    else:
        return served
    for number, one in zip(numbers, served, strict=True):
        if not one.done and one.error is None:
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
    return asyncio.run(_offer_http(url, asked, rate, body_of, patience))


async def _offer_http(
    url: str,
    asked: Sequence[AskedRequest],
    rate: float,
    body_of: Callable[[AskedRequest], Mapping[str, Any]],
    patience: float,
) -> list[ServedRequest]:
    served = [ServedRequest(it.at(rate), it.tokens, it.tenant) for it in asked]
    bodies = [json.dumps(body_of(it)).encode() for it in asked]
    start = time.perf_counter()

    async def ask(one: ServedRequest, body: bytes) -> None:
        await asyncio.sleep(max(0.0, one.due - (time.perf_counter() - start)))
        try:
            async with asyncio.timeout(patience + one.due):
                async for event in _events(url, body):
                    _take(one, event, time.perf_counter() - start)
        except RefusedByServer as error:
            one.error = f"RequestError: {error}"
            one.status, one.retry_after = error.status, error.retry_after
        except TimeoutError:
            one.error = f"no complete answer within {patience} s"
        except (OSError, EOFError, ValueError, RequestError) as error:
            one.error = f"{type(error).__name__}: {error}"

    await asyncio.gather(*(ask(*it) for it in zip(served, bodies, strict=True)))
    return served


def _take(one: ServedRequest, event: Mapping[str, Any], now: float) -> None:
    """Count what an event brings."""
    if "error" in event:
        raise RequestError(f"the peer says {json.dumps(event['error'])[:300]}")
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or []
        one.came(now, len(ids) or bool(choice.get("text")), ids)
        one.text += choice.get("text") or ""
        one.done = one.done or choice.get("finish_reason") is not None
    usage = event.get("usage")
    if usage:  # exact, where one event brought several tokens and no ids
        one.tokens = int(usage["completion_tokens"])


async def _events(url: str, body: bytes) -> AsyncIterator[dict[str, Any]]:
    """The events of one streamed completion. RequestError for any status but 200."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    reader, writer = await asyncio.open_connection(host, port, limit=_LINE)
    try:
        writer.write(
            f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1\r\n"
            f"Host: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        status, headers = await _head(reader)
        lines = _lines(_chunks(reader) if headers.get("transfer-encoding") else _rest(reader))
        if status != 200:
            text = b" ".join([line async for line in lines]).decode(errors="replace")
            raise RefusedByServer(status, headers, " ".join(text.split())[:300])
        async for line in lines:
            name, _, data = line.partition(b":")
            if name == b"data" and data.strip() != b"[DONE]":
                yield json.loads(data)
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(lines[0].split()[1])
    pairs = (line.partition(":") for line in lines[1:] if line)
    return status, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body of a response in HTTP's chunks."""
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body of a response that ends with its connection."""
    while data := await reader.read(1 << 16):
        yield data


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines, wherever they were cut."""
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
    if rest:
        yield rest
