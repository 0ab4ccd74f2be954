"""`jaxrag serve` in a process of its own."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxrag.measure.bench.serve_peer import end, until_ready


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
