"""What a server says while its model is loaded: it is alive, and requests are to come again."""

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

_MOST = 1 << 20  # bytes of a body that are read; a client that sends more may miss its answer
_AGAIN = 2  # seconds until a request is worth sending again
_LOADING = {"status": "ok", "phase": "loading"}  # as ``health`` says it once the model is there
_REFUSED = {
    "error": {
        "message": f"the model is being loaded; ask again in {_AGAIN} s",
        "type": "server_error",
        "param": None,
        "code": "unavailable",
    }
}


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = 5.0  # seconds for a request to arrive, and for the end not to wait for one

    def answer(self) -> None:
        """200 for /health; else 503, as of a server that starts."""
        sent = self.headers["content-length"] or ""
        self.rfile.read(min(int(sent), _MOST) if sent.isdigit() else 0)
        alive = self.path.partition("?")[0] == "/health"
        body = json.dumps(_LOADING if alive else _REFUSED).encode()
        self.send_response(200 if alive else 503)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("connection", "close")
        if not alive:
            self.send_header("retry-after", str(_AGAIN))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = answer

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def while_loading(bound: socket.socket) -> Iterator[None]:
    """Answer on a socket that is bound, until the model is there; then it is free for others.

    Connections that come between are kept by the system.
    """
    server = http.server.ThreadingHTTPServer(
        bound.getsockname()[:2], _Handler, bind_and_activate=False
    )
    server.daemon_threads = True
    server.socket.close()
    server.socket = bound.dup()
    server.server_activate()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
