"""What hostile requests cost everybody else: each kind alone, against a server of its own.

`jaxrag serve` runs in a process of its own, with the keys of two tenants, at most ``descriptors``
open files and the shipped model. While one kind of hostile request is sent, another process asks
``/health`` every 20 ms, and another tenant chats where the kind is about prompts. Said of each:

- status: of the hostile requests, by number;
- health: seconds that the slowest ``/health`` waited;
- chat: seconds of the other tenant's chat (``None``: not asked);
- memory_mb: the most resident memory of the server beyond what it had before, in 10^6 bytes;
- restarts: how often its engine began anew;
- log_kb: what it wrote to its log meanwhile.

A foreign ``Host`` is tried on a server without keys.

example: python benchmarks/edge.py --out benchmarks/results/edge.json
"""

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
from script import Result, run_script

from jaxrag.base.errors import RequestError
from jaxrag.base.options import option
from jaxrag.measure.bench.serve_peer import end, until_ready
from jaxrag.measure.machine import describe

_HOSTILE, _HONEST = "hostile", "honest"
_CHAT = "/v1/chat/completions"
_MB = 1_000_000
_WORD = "the "  # which the model knows


@dataclasses.dataclass(frozen=True)
class Options:
    """The server."""

    model: str = option("checkpoints/synthetic-0.8m/dual", "its directory", "DIR")
    descriptors: int = option(256, "open files that the server may have", "N")
    only: str = option("", "kinds by pattern (all)", "PATTERN")


@dataclasses.dataclass(frozen=True)
class _Server:
    """One that runs."""

    url: str
    pid: int
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        parts = httpx.URL(self.url)
        return parts.host, parts.port or 80


@dataclasses.dataclass(frozen=True)
class _Kind:
    """One kind of hostile request.

    Attributes:
      name: what it is.
      send: sends them all, and says what status each had.
      chat: whether another tenant chats meanwhile.
      keys: whether the server has keys.
    """

    name: str
    send: Callable[[_Server], list[str]]
    chat: bool = False
    keys: bool = True


def run(options: Options) -> Result:
    """Each kind against a server of its own."""
    rows = []
    for kind in _KINDS:
        if not re.search(options.only, kind.name):
            continue
        with (
            tempfile.TemporaryDirectory(prefix="jaxrag-edge-") as folder,
            _serve(options, Path(folder), keys=kind.keys) as server,
        ):
            rows.append({"kind": kind.name} | _attacked(server, kind))
        print(_line(rows[-1]), file=sys.stderr)
    return {"options": dataclasses.asdict(options), "rows": rows} | describe()


def report(result: Result) -> Iterator[str]:
    """A table."""
    head = f"{'kind':44} {'health s':>9} {'chat s':>7} {'MB':>6} {'restarts':>8} {'log kB':>7}"
    yield f"{head}  status"
    yield from map(_line, result["rows"])


def _line(row: dict[str, Any]) -> str:
    chat = "-" if row["chat"] is None else f"{row['chat']:.2f}"
    status = ", ".join(f"{count} x {name}" for name, count in row["status"].items())
    return (
        f"{row['kind']:44} {row['health']:9.3f} {chat:>7} {row['memory_mb']:6.0f} "
        f"{row['restarts']:8} {row['log_kb']:7.1f}  {status}"
    )


def _attacked(server: _Server, kind: _Kind) -> dict[str, Any]:
    """What the hostile requests cost."""
    honest = _key(_HONEST) if kind.keys else None
    _chat(server, honest)  # compiles
    before, restarts, log = _memory(server), _restarts(server), server.log.stat().st_size
    peak, over = [before], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            peak.append(max(peak[-1], _memory(server)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    status: list[str] = []
    sender = threading.Thread(target=lambda: status.extend(kind.send(server)))
    chat = None
    with _probed(server.url) as slowest:
        sender.start()
        if kind.chat:
            time.sleep(0.5)
            chat = _chat(server, honest)
        sender.join()
    over.set()
    watcher.join()
    _chat(server, honest)  # it serves on
    return {
        "status": dict(sorted(Counter(status).items())), "health": round(slowest[0], 4),
        "chat": None if chat is None else round(chat, 3),
        "memory_mb": round((max(peak) - before) / _MB, 1),
        "restarts": _restarts(server) - restarts,
        "log_kb": round((server.log.stat().st_size - log) / 1000, 1),
    }  # fmt: skip


@contextlib.contextmanager
def _probed(url: str) -> Iterator[list[float]]:
    """The seconds of the slowest ``/health`` while the block ran, in a list that is filled then."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_probe, args=(url, theirs))
    process.start()
    ours.recv()  # it has asked once
    slowest: list[float] = []
    try:
        yield slowest
    finally:
        ours.send(None)
        slowest.append(ours.recv())
        process.join()


def _probe(url: str, report_to: Connection) -> None:
    slowest = 0.0
    with httpx.Client(base_url=url, timeout=600) as client:
        client.get("/health")
        report_to.send(None)
        while not report_to.poll(0.02):
            start = time.perf_counter()
            with contextlib.suppress(httpx.HTTPError):
                client.get("/health")
            slowest = max(slowest, time.perf_counter() - start)
    report_to.send(slowest)


def _chat(server: _Server, key: str | None) -> float:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"messages": [_said("What is the home of the")], "max_tokens": 4}
    start = time.perf_counter()
    answer = httpx.post(server.url + _CHAT, json=body, headers=headers, timeout=600)
    if answer.is_error:
        raise RequestError(f"the honest chat was refused: {answer.text}")
    return time.perf_counter() - start


def _posted(path: str, *bodies: dict[str, Any], at_once: int = 1) -> Callable[[_Server], list[str]]:
    """Sends each body ``at_once`` times together."""

    def send(server: _Server) -> list[str]:
        status: list[str] = []
        for body in bodies:
            data = json.dumps(body).encode()
            threads = [
                threading.Thread(target=lambda data=data: status.append(_post(server, path, data)))
                for _ in range(at_once)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return status

    return send


def _post(server: _Server, path: str, data: bytes) -> str:
    headers = {"authorization": f"Bearer {_key(_HOSTILE)}", "content-type": "application/json"}
    try:
        answer = httpx.post(server.url + path, content=data, headers=headers, timeout=600)
    except httpx.HTTPError as error:
        return type(error).__name__
    return str(answer.status_code)


def _asked(**body: Any) -> dict[str, Any]:
    return {"messages": [_said(_WORD)], "max_tokens": 1} | body


def _said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _held(count: int, head: bytes, body: int, seconds: float) -> Callable[[_Server], list[str]]:
    """Opens connections that never finish, and says how many the server still held at the end."""

    def send(server: _Server) -> list[str]:
        held = []
        for _ in range(count):
            one = socket.create_connection(server.address, timeout=30)
            held.append(one)
            with contextlib.suppress(OSError):
                one.sendall(head + b"a" * body)
        time.sleep(seconds)
        status = [_ending(one) for one in held]
        return status

    return send


def _ending(one: socket.socket) -> str:
    one.settimeout(0.01)
    with one:
        try:
            answer = one.recv(64)
        except TimeoutError:
            return "held"
        except OSError:
            return "closed"
    return answer.split()[1].decode() if answer.startswith(b"HTTP/") else "closed"


def _header(size: int) -> Callable[[_Server], list[str]]:
    def send(server: _Server) -> list[str]:
        with socket.create_connection(server.address, timeout=60) as one:
            with contextlib.suppress(OSError):
                one.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX-A: ")
                for _ in range(size // _MB):
                    one.sendall(b"a" * _MB)
                one.sendall(b"\r\n\r\n")
            with contextlib.suppress(OSError):
                answer = one.recv(64)
                return [answer.split()[1].decode() if answer else "closed"]
        return ["closed"]

    return send


def _foreign(server: _Server) -> list[str]:
    host = f"evil.example:{server.address[1]}"
    headers = {"host": host, "origin": f"http://{host}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        answers = [client.post(_CHAT, json=_asked()), client.delete("/v1/files/file-1")]
        answers += [client.get(path) for path in ("/v1/files", "/v1/engine", "/health")]
    return [str(answer.status_code) for answer in answers]


def _limits(server: _Server) -> list[str]:
    headers = {"authorization": f"Bearer {_key(_HOSTILE)}"}
    return [
        str(httpx.get(f"{server.url}/v1/files?limit={limit}", headers=headers).status_code)
        for limit in ("0" * 8 + "1" + "0" * 4000, "00000000199999")
    ]


_BODY = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\n"
    % (b"sk-hostile-0123456789")
    + b"Content-Type: application/json\r\nContent-Length: 16000000\r\n\r\n"
)
_KINDS = (
    _Kind(
        "numbers: top_k of 2^40, 1e308, 2^63",
        _posted(_CHAT, *(
            _asked(**{name: value}) for name in ("top_k", "seed", "max_tokens", "temperature", "n")
            for value in (1 << 40, 1 << 63, 1e308, -(1 << 63))
        )),
        chat=True,
    ),
    *(
        _Kind(
            f"{count:,} messages",
            _posted(_CHAT, _asked(messages=[_said(_WORD * 8)] * count)),
        )
        for count in (20_000, 60_000, 130_000)
    ),
    _Kind(
        "4 questions of 15 MB at once",
        _posted(_CHAT, _asked(messages=[_said(_WORD * 3_750_000)]), at_once=4),
        chat=True,
    ),
    _Kind("200,000 documents", _posted(_CHAT, _asked(documents=[_WORD] * 200_000)), chat=True),
    _Kind("200,000 blocks", _posted(_CHAT, _asked(blocks=[_WORD] * 200_000)), chat=True),
    _Kind(
        "400 half-sent heads",
        _held(400, b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-A: ", 0, 20),
        chat=True,
    ),
    _Kind("a header of 300 MB", _header(300 * _MB)),
    _Kind("40 bodies, 15 of 16 MB sent", _held(40, _BODY, 15_000_000, 5), chat=True),
    _Kind("/detokenize of 5,000,000 ids", _posted("/detokenize", {"tokens": [1] * 5_000_000})),
    _Kind("/tokenize of 14 MB", _posted("/tokenize", {
        "prompt": _WORD * 3_500_000, "return_token_strs": True})),
    _Kind("limit= of 5,000 digits and of zeros", _limits),
    _Kind("Host: evil.example, without keys", _foreign, keys=False),
)  # fmt: skip


def _memory(server: _Server) -> int:
    text = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
    return int(text.split("VmRSS:")[1].split()[0]) * 1024


def _restarts(server: _Server) -> int:
    headers = {"authorization": f"Bearer {_key(_HONEST)}"}
    text = httpx.get(server.url + "/metrics", headers=headers, timeout=600).text
    found = re.search(r"^jaxrag_engine_restarts_total ([0-9.e+]+)", text, re.MULTILINE)
    return int(float(found[1])) if found else 0


def _key(tenant: str) -> str:
    return f"sk-{tenant}-0123456789"


@contextlib.contextmanager
def _serve(options: Options, folder: Path, *, keys: bool) -> Iterator[_Server]:
    """A server until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "jaxrag", "serve", "--model", options.model, "--port", str(port),
    ]  # fmt: skip
    if keys:
        path = folder / "keys.toml"
        path.write_text(
            "".join(
                f'[[keys]]\nsha256 = "{hashlib.sha256(_key(tenant).encode()).hexdigest()}"\n'
                f'tenant = "{tenant}"\nread = ["*"]\n'
                for tenant in (_HOSTILE, _HONEST)
            ),
            encoding="utf-8",
        )
        command += ["--keys", str(path)]
    log = folder / "messages.txt"
    most = (options.descriptors, options.descriptors)
    with open(log, "wb") as messages:
        process = subprocess.Popen(
            command, stdout=messages, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, most),
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        until_ready(process, url, log, "/ready")
        yield _Server(url, process.pid, log)
    finally:
        end(process)


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, Options, run, report))
