"""`jaxrag serve` in a process of its own, asked over HTTP for what an engine is asked in this one.

Both have the same weights, rows and pool, and the KV of all documents in memory, encoded before
anything is timed; what is left between them is what the server costs, and what it costs that the
client is another process on the same cores.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrag.measure.bench.serve_peer import HttpPeer, end, until_ready, write_model
from jaxrag.measure.bench.serve_workload import AskedRequest
from jaxrag.models.model import Model

IN_PROCESS, HTTP = "in_process", "http"
_NAME = "model"


class OwnServer(HttpPeer):
    """A server of this package."""

    def body(self, asked: AskedRequest, salt: str) -> dict[str, Any]:
        """The request for exactly so many greedy tokens, streamed; chunks as documents."""
        return {
            "model": self.model,
            "prompt": asked.prompt.final.tolist(),
            "documents": [chunk.tolist() for chunk in asked.prompt.chunks],
            "max_tokens": asked.tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def ids_of(self, text: str) -> list[int]:
        """Token ids of an answer, by the words of ``serve_peer.write_model``."""
        return [int(word.removeprefix("t")) for word in text.split()]

    def programs(self) -> dict[str, int]:
        """What it has compiled so far, by function."""
        found: dict[str, int] = self._get("/v1/engine")["programs"]
        return found


@contextlib.contextmanager
def own_server(
    model: Model, folder: Path, *, method: str, rows: int, cache_tokens: int, requests: int
) -> Iterator[OwnServer]:
    """`jaxrag serve` on a copy of a model, until the block ends.

    Args:
      folder: an empty one, for the copy, the settings and the server's messages.
      requests: that may wait.

    Raises:
      RequestError: it ended before it answered.
    """
    write_model(model, folder / _NAME)
    settings = (
        f"method = {json.dumps(method)}\nrows = {rows}\nwarm_up = false\n"
        f"max_waiting = {requests}\nmax_waiting_tokens = {1 << 40}\n"
        f"[model]\npath = {json.dumps(str(folder / _NAME))}\ncache_tokens = {cache_tokens}\n"
        f"dtype = {json.dumps(model.config.dtype)}\n"
    )
    with serving(settings, folder) as (url, _):
        yield OwnServer(url, {"name": "jaxrag serve, in a process of its own"})


@contextlib.contextmanager
def serving(settings: str, folder: Path) -> Iterator[tuple[str, int]]:
    """`jaxrag serve` with the text of a settings file, until the block ends: its URL and process.

    Args:
      settings: TOML without a port.
      folder: an empty one, for the settings and the server's messages.

    Raises:
      RequestError: it ended before it answered.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file, log = folder / "serve.toml", folder / "messages.txt"
    file.write_text(f'port = {port}\nlog_format = "json"\n{settings}', encoding="utf-8")
    command = [sys.executable, "-m", "jaxrag", "serve", "--config", str(file)]
    with open(log, "wb") as messages:
        process = subprocess.Popen(
            command, stdout=messages, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        until_ready(process, url, log, "/ready")
        yield url, process.pid
    finally:
        end(process)
