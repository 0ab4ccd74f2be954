"""What runs in the process that parses files (``jaxrag.library.documents.parser`` starts it).

It imports neither JAX nor, unless it is to cut what it reads, a tokenizer. Both sides send JSON;
nothing that is sent is run.
"""

import base64
import dataclasses
import json
import resource
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import ReadOptions
from jaxrag.library.documents.readers import read_open

_GRACE_SECONDS = 10  # after which the process ends itself, where the parent did not

Cutter = Callable[[Document, dict[str, Any]], list[tuple[Any, ...]]]


def send(pipe: Connection, message: dict[str, Any]) -> None:
    """Send one message; file names may hold what is no Unicode."""
    pipe.send_bytes(json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def receive(pipe: Connection) -> dict[str, Any]:
    """Wait for one message. Raises EOFError or OSError where the other side is gone."""
    message: dict[str, Any] = json.loads(pipe.recv_bytes().decode("utf-8", "surrogatepass"))
    return message


def main(fd: int) -> None:
    """Serve the parent behind a socket, until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair
    pipe = Connection(fd)
    try:
        first = receive(pipe)
        _limit(resource.RLIMIT_AS, first["nbytes"])
        _limit(resource.RLIMIT_CORE, 0)
        cut = None if first["tokenizer"] is None else _cutter(first["tokenizer"])
        seconds = round(first["seconds"]) + _GRACE_SECONDS
        send(pipe, {"ready": True})
        while True:
            job = receive(pipe)
            signal.alarm(seconds)  # ends the process even inside of a library, without a parent too
            for message in _messages(job, cut):
                signal.alarm(0)  # the parent reads when it has room for more
                send(pipe, message)
                signal.alarm(seconds)
            signal.alarm(0)
            send(pipe, {"end": True})
    except MemoryError:
        send(pipe, {"memory": True})
    except (EOFError, OSError):
        return


def _messages(job: dict[str, Any], cut: Cutter | None) -> Iterator[dict[str, Any]]:
    """What is to be said of a file, document by document."""
    filename, options = job["filename"], ReadOptions(**job["options"])
    try:
        with open(job["path"], "rb") as stream:
            for document in read_open(stream, filename, job["name"], options, job["reported"]):
                if isinstance(document, BadDocument):
                    yield {"bad": dataclasses.asdict(document)}
                    continue
                try:
                    yield {"document": _described(document, cut, job["chunking"])}
                except DocumentError as error:
                    yield {"bad": {"source": filename, "reason": str(error)}}
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error})"
        yield {"bad": {"source": filename, "reason": reason}}


def _described(document: Document, cut: Cutter | None, chunking: dict[str, Any]) -> dict[str, Any]:
    return vars(document) | {"chunks": [] if cut is None else cut(document, chunking)}


def _cutter(tokenizer_json: str) -> Cutter:
    from jaxrag.library.documents.chunking import Chunking, split  # only who cuts waits for JAX
    from jaxrag.models.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(tokenizer_json.encode(), {}, {})

    def cut(document: Document, chunking: dict[str, Any]) -> list[tuple[Any, ...]]:
        chunks = split(document.text, tokenizer, Chunking(**chunking), document.pages)
        return [
            (c.start, c.end, c.page, c.section, base64.b64encode(c.ids.astype("<i4")).decode())
            for c in chunks
        ]

    return cut


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (bound, bound))
