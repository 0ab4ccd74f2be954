"""What runs in the process that parses files (``jaxrag.library.documents.parser`` starts it).

It imports neither JAX nor, unless it is to cut what it reads, a tokenizer. Both sides send frames
of JSON with their length in front; nothing that is sent is run.
"""

import base64
import dataclasses
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import ReadOptions
from jaxrag.library.documents.readers import read_open

LENGTH = struct.Struct(">Q")  # of a frame, before it

_GRACE_SECONDS = 10  # after which the process ends itself, where the parent did not

Cutter = Callable[[Document, dict[str, Any]], list[tuple[Any, ...]]]


def write_frame(stream: IO[bytes], message: dict[str, Any]) -> None:
    """Send one message; file names may hold what is no Unicode."""
    data = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    left = memoryview(LENGTH.pack(len(data)) + data)
    while left:
        left = left[stream.write(left) :]


def read_frame(stream: IO[bytes]) -> dict[str, Any] | None:
    """Wait for one message; None where the other side is gone."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return parse_frame(stream.read(LENGTH.unpack(head)[0]))


def parse_frame(data: bytes | memoryview) -> dict[str, Any]:
    """The message of a frame, without its length."""
    message: dict[str, Any] = json.loads(str(data, "utf-8", "surrogatepass"))
    return message


def main() -> None:
    """Serve one parent, until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair
    answers = open(os.dup(1), "wb", buffering=0)  # noqa: SIM115 (as long as the process)
    os.dup2(2, 1)  # what a parser prints is no answer
    asked = sys.stdin.buffer
    first = read_frame(asked)
    if first is None:
        return
    _limit(resource.RLIMIT_AS, first["nbytes"])
    _limit(resource.RLIMIT_CORE, 0)
    cut = None if first["tokenizer"] is None else _cutter(first["tokenizer"])
    seconds = round(first["seconds"]) + _GRACE_SECONDS
    write_frame(answers, {"ready": True})
    while (job := read_frame(asked)) is not None:
        signal.alarm(seconds)  # ends the process even inside of a library, and without a parent
        try:
            for message in _messages(job, cut):
                signal.alarm(0)  # the parent reads when it has room for more
                write_frame(answers, message)
                signal.alarm(seconds)
        except MemoryError:
            write_frame(answers, {"memory": True})
            return
        signal.alarm(0)
        write_frame(answers, {"end": True})


def _messages(job: dict[str, Any], cut: Cutter | None) -> Iterator[dict[str, Any]]:
    """What is to be said of a file, document by document."""
    filename, options = job["filename"], ReadOptions(**job["options"])
    try:
        with open(job["path"], "rb") as stream:
            for found in read_open(stream, filename, job["name"], options, job["reported"]):
                if isinstance(found, BadDocument):
                    yield {"bad": dataclasses.asdict(found)}
                    continue
                try:
                    yield {"document": _described(found, cut, job["chunking"])}
                except DocumentError as error:
                    yield {"bad": {"source": filename, "reason": str(error)}}
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error})"
        yield {"bad": {"source": filename, "reason": reason}}


def _described(document: Document, cut: Cutter | None, chunking: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": document.id,
        "text": document.text,
        "title": document.title,
        "file": document.file,
        "metadata": dict(document.metadata),
        "pages": list(document.pages),
        "chunks": [] if cut is None else cut(document, chunking),
    }


def _cutter(tokenizer_json: str) -> Cutter:
    from jaxrag.library.documents.chunking import Chunking, split  # only who cuts waits for JAX
    from jaxrag.models.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(tokenizer_json.encode(), {}, {})

    def cut(document: Document, chunking: dict[str, Any]) -> list[tuple[Any, ...]]:
        chunks = split(document.text, tokenizer, Chunking(**chunking), document.pages)
        return [
            (it.start, it.end, it.page, it.section, base64.b64encode(it.ids.astype("<i4")).decode())
            for it in chunks
        ]

    return cut


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (bound, bound))
