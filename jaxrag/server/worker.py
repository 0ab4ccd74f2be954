"""A process that parses and cuts files, so that no file stops or takes down the server.

Parsers are Python that runs for seconds, and files come from strangers: a file that crashes the
process, takes its memory or never ends costs nobody but itself. Both sides send frames of JSON with
their length in front; nothing that comes back is run.
"""

import base64
import contextlib
import dataclasses
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxrag.documents import BadDocument, Document
from jaxrag.documents.chunking import Chunk, Chunking, split
from jaxrag.documents.paths import read_open
from jaxrag.errors import DocumentError
from jaxrag.text.tokenizer import Tokenizer

MOST_BYTES = 16 << 30  # of address space that the process may have, most of it never touched

_LENGTH = struct.Struct(">Q")
_START_SECONDS = 120.0  # for the interpreter and its imports, on a machine that is busy
_LOOK_SECONDS = 0.2  # between two looks at whether the file is wanted still
_GRACE_SECONDS = 10  # after which the process ends itself, where nobody did it before


class WorkerFailed(DocumentError):
    """A file whose parser crashed, or took too long."""


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A document and its chunks."""

    document: Document
    chunks: tuple[Chunk, ...]


class Worker:
    """The process, seen from the server; started when it is needed. For one thread."""

    def __init__(self, tokenizer: Tokenizer, seconds: float) -> None:
        """Bind what all files have in common.

        Args:
          tokenizer: what chunks are counted in.
          seconds: that one document may take.
        """
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._received = bytearray()  # of frames that are not taken yet

    @property
    def pid(self) -> int | None:
        """Of the process, where it runs."""
        return None if self._process is None else self._process.pid

    def parse(
        self,
        path: Path,
        filename: str,
        name: str,
        chunking: Chunking,
        wanted: Callable[[], bool],
    ) -> Iterator[Parsed | BadDocument]:
        """The documents of a file, one after another.

        Args:
          path: where its bytes are.
          filename: says what kind of file it is, and is what sources show.
          name: begins the ids of its documents.
          chunking: of the knowledge base.
          wanted: asked now and then; once it is not, InterruptedError is raised.

        Raises WorkerFailed where the process died or took too long; the next file gets another.
        """
        done = False
        try:
            process = self._running(wanted)
            self._send(process, {
                "path": str(path), "filename": filename, "name": name,
                "chunking": dataclasses.asdict(chunking),
            })  # fmt: skip
            while not done:
                told = self._receive(process, self._seconds, wanted)
                if "document" in told:
                    yield _parsed(told["document"])
                elif "bad" in told:
                    yield BadDocument(**told["bad"])
                else:
                    done = True
        finally:
            if not done:
                self.close()

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        self._received.clear()
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def _running(self, wanted: Callable[[], bool]) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxrag.server.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            bufsize=0,
        )
        self._send(process, {"tokenizer": self._tokenizer.to_json(), "seconds": self._seconds})
        self._receive(process, _START_SECONDS, wanted)
        return process

    def _send(self, process: "subprocess.Popen[bytes]", message: dict[str, Any]) -> None:
        assert process.stdin is not None
        try:
            write_frame(process.stdin, message)
        except OSError:
            raise WorkerFailed(self._ended(process)) from None

    def _receive(
        self, process: "subprocess.Popen[bytes]", seconds: float, wanted: Callable[[], bool]
    ) -> dict[str, Any]:
        """The next frame, in so many seconds."""
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        data, start = self._received, _LENGTH.size
        while len(data) < start or len(data) < start + _LENGTH.unpack_from(data)[0]:
            if not wanted():
                raise InterruptedError
            left = deadline - time.monotonic()
            if left <= 0:
                raise WorkerFailed(
                    f"took longer than {seconds:g} s to parse; split the file or save it anew"
                )
            if not select.select([process.stdout], [], [], min(left, _LOOK_SECONDS))[0]:
                continue
            piece = os.read(process.stdout.fileno(), 1 << 20)
            if not piece:
                raise WorkerFailed(self._ended(process))
            data += piece
        end = start + _LENGTH.unpack_from(data)[0]
        told: dict[str, Any] = json.loads(data[start:end])
        del data[:end]
        return told

    def _ended(self, process: "subprocess.Popen[bytes]") -> str:
        code = process.wait()
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"its parser ended with {why}; save the file anew, or in another format"


def _parsed(told: dict[str, Any]) -> Parsed:
    rows, pages = told.pop("chunks"), tuple(told.pop("pages"))
    document = Document(**told, pages=pages)
    chunks = []
    for index, (start, end, page, section, ids) in enumerate(rows):
        tokens = np.frombuffer(base64.b64decode(ids), "<i4").astype(np.int32)
        text = document.text[start:end]
        chunks.append(Chunk(index, start, end, tokens, text, page, section))
    return Parsed(document, tuple(chunks))


def write_frame(stream: IO[bytes], message: dict[str, Any]) -> None:
    """Send one message."""
    data = json.dumps(message, ensure_ascii=False).encode()
    left = memoryview(_LENGTH.pack(len(data)) + data)
    while left:
        left = left[stream.write(left) :]


def read_frame(stream: IO[bytes]) -> dict[str, Any] | None:
    """Wait for one message; None where the other side is gone."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    message: dict[str, Any] = json.loads(stream.read(_LENGTH.unpack(head)[0]))
    return message


# In the process.


def main() -> None:
    """Serve one parent, until it is gone."""
    _bound_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair
    answers = open(os.dup(1), "wb", buffering=0)  # noqa: SIM115 (as long as the process)
    os.dup2(2, 1)  # what a parser prints is no answer
    asked = sys.stdin.buffer
    first = read_frame(asked)
    if first is None:
        return
    tokenizer = Tokenizer(first["tokenizer"].encode(), {}, {})
    seconds = round(first["seconds"]) + _GRACE_SECONDS
    write_frame(answers, {"ready": True})
    while (job := read_frame(asked)) is not None:
        signal.alarm(seconds)  # ends the process even inside of a library, and without a parent
        for message in _messages(job, tokenizer):
            signal.alarm(0)  # the parent reads when it has room for more
            write_frame(answers, message)
            signal.alarm(seconds)
        signal.alarm(0)
        write_frame(answers, {"end": True})


def _messages(job: dict[str, Any], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """What is to be said of a file, document by document."""
    chunking = Chunking(**job["chunking"])
    name, filename = job["name"], job["filename"]
    try:
        with open(job["path"], "rb") as stream:
            for found in read_open(stream, filename, name):
                if isinstance(found, BadDocument):
                    yield {"bad": dataclasses.asdict(found)}
                    continue
                try:
                    yield {"document": _cut(found, name, filename, tokenizer, chunking)}
                except DocumentError as error:
                    yield {"bad": {"source": filename, "reason": str(error)}}
    except DocumentError as error:
        yield {"bad": {"source": filename, "reason": str(error)}}
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error}); upload it again"
        yield {"bad": {"source": filename, "reason": reason}}


def _cut(
    document: Document, name: str, filename: str, tokenizer: Tokenizer, chunking: Chunking
) -> dict[str, Any]:
    chunks = split(document.text, tokenizer, chunking, document.pages)
    own = document.id if document.id.startswith(name) else f"{name}/{document.id}"
    return {
        "id": own,
        "text": document.text,
        "title": document.title,
        "file": filename,
        "metadata": dict(document.metadata),
        "pages": list(document.pages),
        "chunks": [
            (it.start, it.end, it.page, it.section, base64.b64encode(it.ids.astype("<i4")).decode())
            for it in chunks
        ],
    }


def _bound_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
