"""Send hostile requests to a server of its own, alone and amid a flood of ordinary ones.

The server runs in a process of its own, over a small random model with a chat template and tools.
First each hostile request is sent alone, again and again, while GET /health is asked without a
pause: the longest answer of /health is what one client may cost all others. Then clients ask
ordinary questions for --seconds, and every other thread sends hostile requests meanwhile.

Bad is: a hostile request that is not answered with 4xx; an ordinary one that is answered with
another status than 200, 429 or 503; an engine that was made anew; a server that ended.

example: python tests/faults/hostile_requests.py --seconds 60 --out faults-requests.json
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxrag.cli import run_command
from jaxrag.cli.output import give_out, require_folder
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import SMALL_LLAMA, write_random
from jaxrag.models.text import byte_level

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ALIKE = 3  # times that each is sent alone
PAUSE = 0.002  # seconds between two looks at /health
PATIENCE = 600.0  # seconds for one answer
ORDINARY = {200, 429, 503}
_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def asked(text: str, **more: Any) -> dict[str, Any]:
    """A chat of one question."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


def levels(count: int) -> dict[str, Any]:
    """A schema of objects within objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(count):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def properties(count: int, name: str = "p") -> dict[str, Any]:
    """A schema whose properties may all be left out."""
    return {"properties": {f"{name}{it}": {} for it in range(count)}}


def hostile() -> dict[str, tuple[str, bytes]]:
    """By name: where they are sent, and their bodies."""
    tools = [{"type": "function", "function": {"name": "f", "description": "a" * 1_000_000}}]
    branches = [{"type": "object", "properties": {"a": {"const": it}}} for it in range(900)]
    several = [properties(480, name) for name in "abcdefghijk"]
    bodies = {
        "1 MB of one word, chat": (CHAT, asked("a" * 1_000_000)),
        "1 MB of one word, completion": (COMPLETIONS, {"prompt": "a" * 1_000_000}),
        "1 MB of one word, tool": (CHAT, asked("Hi", tools=tools)),
        "1.9 MB without spaces, document": (CHAT, asked("Hi", documents=["a" * 1_900_000])),
        "510 kB of one word, chat": (CHAT, asked("a" * 510_000)),
        "schema of 900 branches": (CHAT, asked("Hi", guided_json={"anyOf": branches})),
        "schema of 64 levels": (CHAT, asked("Hi", guided_json=levels(64))),
        "schema of 1,500 properties": (CHAT, asked("Hi", guided_json=properties(1500))),
        "schema of 11 x 480 properties": (CHAT, asked("Hi", guided_json={"anyOf": several})),
    }  # fmt: skip
    found = {name: (path, json.dumps(body).encode()) for name, (path, body) in bodies.items()}
    found["half a surrogate pair"] = CHAT, b'{"messages": "\xed\xa0\xbd"}'
    found["JSON 100,000 deep"] = CHAT, b'{"messages": ' + b"[" * 100_000 + b"}"
    return found


class Served:
    """A server in a process of its own."""

    def __init__(self, folder: Path) -> None:
        model = write_random(folder / "model", SMALL_LLAMA, "float32", 0)
        words = byte_level.train(["a question of words"], 2000, ["<|im_start|>", "<|im_end|>"])
        byte_level.save(words, model, {"chat_template": _TEMPLATE, "eos_token": "<|im_end|>"})
        ends = {"eos_token_id": words.token_to_id("<|im_end|>")}
        (model / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
        command = ["serve", "--model", str(model), "--port", "0", "--data", str(folder / "data")]
        self.log = folder / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jaxrag", *command], stderr=log, stdout=log
            )
        self.port = int(self._told(r"http://[^:\s]+:(\d+)"))
        while self.ask("GET", "/ready")[0] != 200:
            time.sleep(0.2)

    def _told(self, pattern: str) -> str:
        while True:
            if found := re.search(pattern, self.log.read_text(encoding="utf-8")):
                return found[1]
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended: {self.log.read_text(encoding='utf-8')[-500:]}")
            time.sleep(0.1)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        """Status and text of an answer."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(link):
            link.request(method, path, body, {"content-type": "application/json"})
            answer = link.getresponse()
            return answer.status, answer.read().decode()

    def restarts(self) -> float:
        """How often its engine's pool was made anew."""
        text = self.ask("GET", "/metrics")[1]
        found = re.search(r"^jaxrag_engine_restarts_total (.+)$", text, re.M)
        assert found is not None
        return float(found[1])


@contextlib.contextmanager
def serving() -> Iterator[Served]:
    """A server, until the block is left."""
    with tempfile.TemporaryDirectory(prefix="jaxrag-requests-") as folder:
        server = Served(Path(folder))
        try:
            yield server
        finally:
            server.process.terminate()
            server.process.wait(60)


def looked(server: Served, over: Callable[[], bool]) -> list[float]:
    """Seconds of each /health until something is over."""
    found = list[float]()
    while True:
        start = time.perf_counter()
        status, _ = server.ask("GET", "/health")
        found.append(time.perf_counter() - start if status == 200 else PATIENCE)
        if over():
            return found
        time.sleep(PAUSE)


def alone(server: Served, path: str, body: bytes) -> dict[str, Any]:
    """What one hostile request gets, and what /health takes beside it."""
    found = list[float]()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        start = time.perf_counter()
        for _ in range(ALIKE):
            answer = threads.submit(server.ask, "POST", path, body)
            found += looked(server, answer.done)
        taken = time.perf_counter() - start
    status, text = answer.result()
    return {
        "status": status, "error": json.loads(text)["error"]["message"][:120],
        "seconds": round(taken / ALIKE, 3), "health_longest": round(max(found), 4),
        "health_median": round(statistics.median(found), 4),
    }  # fmt: skip


def flooded(server: Served, seconds: float, clients: int) -> dict[str, Any]:
    """Statuses of ordinary and hostile requests that come together, and /health beside them."""
    ends = time.monotonic() + seconds
    statuses = {"ordinary": Counter[str](), "hostile": Counter[str]()}
    lock = threading.Lock()
    before = server.restarts()

    def send(number: int) -> None:
        kind = ("ordinary", "hostile")[number % 2]
        own = list(hostile().values())
        if kind == "ordinary":
            own = [
                (CHAT, json.dumps(asked(f"Question {number}, {it}?")).encode()) for it in range(9)
            ]
        for path, body in itertools.cycle(own):
            if time.monotonic() > ends:
                return
            status, _ = server.ask("POST", path, body)
            with lock:
                statuses[kind][str(status)] += 1

    with concurrent.futures.ThreadPoolExecutor(clients) as threads:
        asking = [threads.submit(send, number) for number in range(clients)]
        health = looked(server, lambda: all(it.done() for it in asking))
    for one in asking:
        one.result()
    return {
        **{kind: dict(sorted(it.items())) for kind, it in statuses.items()},
        "restarts": server.restarts() - before, "ended": server.process.poll() is not None,
        "health_longest": round(max(health), 4),
        "health_median": round(statistics.median(health), 4),
    }  # fmt: skip


def run(seconds: float, clients: int) -> dict[str, Any]:
    """Measure; JSON-able."""
    with serving() as server:
        server.ask("POST", CHAT, json.dumps(asked("Hi")).encode())
        quiet = time.monotonic() + 2
        idle = looked(server, lambda: time.monotonic() > quiet)
        found = {name: alone(server, *it) for name, it in hostile().items()}
        flood = flooded(server, seconds, clients)
    bad = [name for name, it in found.items() if not 400 <= it["status"] < 500]
    bad += [f"hostile {it}" for it in flood["hostile"] if not it.startswith("4")]
    bad += [f"ordinary {it}" for it in flood["ordinary"] if int(it) not in ORDINARY]
    bad += ["restarts"] * bool(flood["restarts"]) + ["ended"] * flood["ended"]
    return {
        "benchmark": "hostile_requests",
        "seconds": seconds,
        "clients": clients,
        "health_idle_longest": round(max(idle), 4),
        "alone": found,
        "flood": flood,
        "bad": bad,
        "load": os.getloadavg()[0],
        "machine": describe(),
    }


def measure(args: argparse.Namespace) -> int:
    """Send them; 1 where one was bad."""
    require_folder(args.out)
    result = run(args.seconds, args.clients)
    give_out(args, result, [json.dumps(result, indent=1)])
    return 1 if result["bad"] else 0


def main() -> int:
    """Send what is hostile; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of the flood")
    parser.add_argument("--clients", type=int, default=16, metavar="N", help="half of them hostile")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return run_command(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
