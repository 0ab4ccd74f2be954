"""llama.cpp as another process has it: chunks in, their KV out, and steps of sequences."""

import contextlib
import dataclasses
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.errors import EngineError, ModelError
from jaxrag.base.types import HostArray, TokenRun


@dataclasses.dataclass(frozen=True)
class LlamaCppOptions:
    """What a context of llama.cpp is made with: a file, the type of KV, and its sizes."""

    path: str
    kv: str
    cells: int
    rows: int
    threads: int


class LlamaCpp:
    """A process with llama.cpp, started at the first call and again after it ended.

    Calls are made one after the other, from any thread. Each raises EngineError where llama.cpp
    failed; where its process ended with it, all rows are empty from then on, and ``lives`` is
    another number.

    Attributes:
      lives: how often a process was started.
    """

    def __init__(self, asked: LlamaCppOptions, layers: int, row: int, vocab_size: int) -> None:
        """``row``: bytes of K, or V, of a token in a layer."""
        self.asked, self.lives = asked, 0
        self._vocab_size = vocab_size
        self._expected = {"vocab_size": vocab_size, "layers": layers, "row": row}
        size = max(asked.cells * 2 * layers * row, asked.rows * vocab_size * 4)
        self._file = os.memfd_create("jaxrag") if hasattr(os, "memfd_create") else _file()
        os.truncate(self._file, size)  # takes memory where it is written
        self._shared = mmap.mmap(self._file, size)
        self._area = np.frombuffer(self._shared, np.uint8)
        self._lock = threading.RLock()
        self._started = list[tuple[subprocess.Popen[bytes], Connection]]()  # at most one
        weakref.finalize(self, os.close, self._file)
        weakref.finalize(self, _end, self._started)

    def live(self) -> int:
        """Start it where it does not run; ``lives``."""
        with self._lock:
            if not self._started:
                self._start()
            return self.lives

    def encode(self, before: HostArray, ids: HostArray) -> HostArray:
        """KV uint8 [L, 2, T, row] of a chunk [T] int32 that is read behind some tokens."""
        with self._lock:
            shape = self._call("encode", before, ids)
            return self._area[: int(np.prod(shape))].reshape(shape).copy()

    def restore(self, row: int, kv: HostArray, first: int, place: int, life: int) -> None:
        """Put KV that was read from position ``first`` on to ``place`` of a row.

        EngineError where ``lives`` is another than ``life``.
        """
        with self._lock:
            self._require(life)
            self._area[: kv.size] = kv.reshape(-1)
            self._call("restore", row, kv.shape, 0, first, place)

    def step(self, runs: Sequence[TokenRun], life: int) -> HostArray:
        """Run tokens; the logits [n, V] float32 behind those where they are wanted, in order.

        EngineError where ``lives`` is another than ``life``.
        """
        with self._lock:
            self._require(life)
            self._call("step", list(runs))
            count = sum(ends for *_, ends in runs)
            found = self._area[: count * self._vocab_size * 4].view(np.float32)
            return found.reshape(count, self._vocab_size).copy()

    def leave(self, row: int) -> None:
        """Nobody has the row any more."""
        with self._lock:
            if self._started:
                self._call("leave", row)

    def _require(self, life: int) -> None:
        if not self._started or life != self.lives:
            raise EngineError("llama.cpp ended, and with it the rows of this request; ask again")

    def close(self) -> None:
        """End the process; the next call starts another."""
        with self._lock:
            _end(self._started)

    def _call(self, *command: Any) -> Any:
        self.live()
        return self._answer(*command)

    def _answer(self, *command: Any) -> Any:
        [(process, link)] = self._started
        try:
            link.send(command)
            answer = link.recv()
        except (EOFError, OSError):
            code = process.wait()
            self.close()
            how = f"status {code}" if code >= 0 else signal.Signals(-code).name
            raise EngineError(
                f"llama.cpp ended with {how} in {command[0]!r}; it is started anew, ask again"
            ) from None
        except BaseException:  # what is on the link answers nobody
            self.close()
            raise
        if isinstance(answer, Exception):
            raise EngineError(str(answer))
        return answer

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with contextlib.closing(theirs):
            passed = theirs.fileno(), self._file
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("worker.py")), *map(str, passed)],
                pass_fds=passed,
                start_new_session=True,  # an interrupt is ours to hear
                stdin=subprocess.DEVNULL,
            )
        self._started.append((process, Connection(ours.detach())))
        self.lives += 1
        try:
            answer = self._answer("open", *dataclasses.astuple(self.asked))
            if answer != self._expected:
                raise EngineError(f"it keeps KV otherwise than its file says ({answer})")
        except EngineError as error:
            self.close()
            raise ModelError(f"{self.asked.path}: {error}") from None


def _end(started: list[tuple[subprocess.Popen[bytes], Connection]]) -> None:
    while started:
        process, link = started.pop()
        link.close()
        process.kill()
        process.wait()


def _file() -> int:
    """The descriptor of a file without a name, where memory has none."""
    with tempfile.TemporaryFile(prefix="jaxrag-") as file:
        return os.dup(file.fileno())
