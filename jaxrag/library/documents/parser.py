"""A process that parses files, so that no file stops or takes down who reads it.

Parsers build trees of what strangers wrote: a file that crashes its parser, takes its memory or
never ends costs only itself. ``parser_process`` is what runs there. It is a plain process, not one
of ``multiprocessing`` or an executor's: those run the caller's script once more, and give what a
file holds only when all of it is parsed.
"""

import base64
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.document import BadDocument, Document
from jaxrag.library.documents.files import ReadOptions
from jaxrag.library.documents.parser_process import receive, send
from jaxrag.library.documents.readers import is_of_records

if TYPE_CHECKING:
    from jaxrag.library.documents.chunking import Chunk, Chunking
    from jaxrag.models.text.tokenizer import Tokenizer

_START_SECONDS = 120.0  # for the interpreter and its imports, on a machine that is busy
_LOOK_SECONDS = 0.2  # between two looks at whether the file is wanted still
_LEAST_BYTES = 256 << 20  # of address space
# Without site, which would cost as much as all else; modules are found where they are found here.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from jaxrag.library.documents.parser_process import main; main(int(sys.argv[2]))"
)


@dataclasses.dataclass(frozen=True)
class ParseLimits:
    """What one document may take of the process that parses it.

    Attributes:
      seconds: of time, most of which is the parser's.
      nbytes: of address space of the process.

    Raises DocumentError for what is not above 0.
    """

    seconds: float = 60.0
    nbytes: int = 4 << 30

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, int | float) or not 0 < self.seconds < float("inf"):
            raise DocumentError(f"parse_seconds={self.seconds!r}: expected a finite number above 0")
        if not isinstance(self.nbytes, int) or self.nbytes < _LEAST_BYTES:
            raise DocumentError(
                f"parse_bytes={self.nbytes!r}: expected at least {_LEAST_BYTES}, which the parsers "
                "take without a file"
            )


class ParserFailed(DocumentError):
    """A file whose parser crashed, took too long or too much memory.

    ``limit`` names what of ParseLimits it came to, and is '' where it came to none.
    """

    def __init__(self, reason: str, limit: str = "") -> None:
        super().__init__(reason)
        self.limit = limit


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A document, and its chunks where the parser was to cut it."""

    document: Document
    chunks: "tuple[Chunk, ...]"


class Parser:
    """The process, seen from outside; started when it is needed, and used again. For one thread."""

    def __init__(self, limits: ParseLimits, tokenizer: "Tokenizer | None" = None) -> None:
        """Bind what all files have in common.

        Args:
          tokenizer: what chunks are counted in, where documents are to be cut.
        """
        self._limits = limits
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> "Parser":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the process, where it runs."""
        return None if self._process is None else self._process.pid

    def parse(
        self,
        path: Path,
        filename: str,
        name: str,
        options: ReadOptions,
        reported: str | None = None,
        *,
        chunking: "Chunking | None" = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Iterator[Parsed | BadDocument]:
        """The documents of a file, one after another.

        Args:
          path: where its bytes are.
          filename: says what kind of file it is, and is what a BadDocument shows.
          name: is the id of its document, or begins the ids of its documents.
          reported: the ``file`` of its documents.
          chunking: how it is cut, where there is a tokenizer.
          wanted: asked now and then; once it is not, InterruptedError is raised.

        Raises ParserFailed where the process died or came to a limit; the next file gets another.
        """
        done = False
        left = self._limits.seconds
        try:
            pipe = self._running(wanted)
            self._send(pipe, {
                "path": os.path.abspath(path), "filename": filename, "name": name,
                "options": dataclasses.asdict(options), "reported": reported,
                "chunking": None if chunking is None else dataclasses.asdict(chunking),
            })  # fmt: skip
            while not done:
                message, waited = self._receive(pipe, left, wanted)
                # Each record is a document; pages that cannot be read are parts of one.
                left = self._limits.seconds if is_of_records(filename) else left - waited
                if "document" in message:
                    yield _parsed(message["document"])
                elif "bad" in message:
                    yield BadDocument(**message["bad"])
                elif "memory" in message:
                    raise ParserFailed(
                        f"takes more than {self._limits.nbytes / 2**30:.3g} GiB of memory to "
                        "parse; split the file",
                        "parse_bytes",
                    )
                else:
                    done = True
        finally:
            if not done:
                self.close()

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        if self._pipe is not None:
            self._pipe.close()

    def _running(self, wanted: Callable[[], bool]) -> Connection:
        if self._pipe is not None and self._process is not None and self._process.poll() is None:
            return self._pipe
        self.close()
        places = json.dumps([str(Path(__file__).parents[3]), *sys.path])
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, places, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                start_new_session=True,  # an interrupt of the terminal is the parent's affair
            )
        tokenizer = None if self._tokenizer is None else self._tokenizer.to_json()
        self._send(self._pipe, {"tokenizer": tokenizer, **dataclasses.asdict(self._limits)})
        self._receive(self._pipe, _START_SECONDS, wanted)
        return self._pipe

    def _send(self, pipe: Connection, message: dict[str, Any]) -> None:
        try:
            send(pipe, message)
        except OSError:
            raise self._ended() from None

    def _receive(
        self, pipe: Connection, seconds: float, wanted: Callable[[], bool]
    ) -> tuple[dict[str, Any], float]:
        """The next message, in so many seconds, and how many it took."""
        begun = time.monotonic()
        try:
            while wanted():
                left = begun + seconds - time.monotonic()
                if left <= 0:
                    raise ParserFailed(
                        f"took more than {self._limits.seconds:g} s to parse; split the file or "
                        "save it anew",
                        "parse_seconds",
                    )
                if pipe.poll(min(left, _LOOK_SECONDS)):
                    return receive(pipe), time.monotonic() - begun
        except (EOFError, OSError):
            raise self._ended() from None
        raise InterruptedError

    def _ended(self) -> ParserFailed:
        assert self._process is not None
        code = self._process.wait()
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
        return ParserFailed(
            f"its parser ended with {why}; save the file anew, or in another format"
        )


def _parsed(message: dict[str, Any]) -> Parsed:
    rows, pages = message.pop("chunks"), tuple(message.pop("pages"))
    document = Document(**message, pages=pages)
    return Parsed(document, _chunks(document.text, rows) if rows else ())


def _chunks(text: str, rows: list[list[Any]]) -> "tuple[Chunk, ...]":
    import numpy as np

    from jaxrag.library.documents.chunking import Chunk  # the process itself must not wait for JAX

    chunks = []
    for index, (start, end, page, section, ids) in enumerate(rows):
        tokens = np.frombuffer(base64.b64decode(ids), "<i4").astype(np.int32)
        chunks.append(Chunk(index, start, end, tokens, text[start:end], page, section))
    return tuple(chunks)
