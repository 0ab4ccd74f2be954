"""Prompts that had no plan, or a long rest behind it: an engine notes them for the command.

One file in the manifest's folder, a line of JSON for each. It holds prompts, so only the user of
the engine may read it; `jaxrag kb connector` encodes what it finds in them.
"""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from jaxrag.base.errors import ConfigError

FILE = "wanted.jsonl"
_LOG = logging.getLogger("vllm.jaxrag")


class Wanted:
    """Notes prompts, each once, until the file is full."""

    def __init__(self, folder: Path, tokenizer: str, limit: int) -> None:
        """Make the file, or its mode what it is to be.

        Args:
          folder: of the manifest.
          tokenizer: digest of the one whose ids are noted.
          limit: bytes that the file may have.

        Raises ConfigError where it cannot be written.
        """
        self._path, self._tokenizer, self._limit = folder / FILE, tokenizer, limit
        self._open = True
        try:
            self._opened().close()
            self._noted = set(self._path.read_bytes().splitlines(keepends=True))
        except OSError as error:
            raise ConfigError(
                f"{self._path}: cannot be written ({error.strerror}), which wanted_bytes={limit} "
                "needs; 0 notes nothing"
            ) from None

    def note(self, ids: NDArray[np.int32], spans: Sequence[int] | None) -> None:
        """Note token ids int32 [T], and the spans that their client named.

        That there is no room or no disk is said in the log, once.
        """
        fields = {"tokenizer": self._tokenizer, "ids": ids.tolist(), "spans": spans}
        line = json.dumps(fields).encode() + b"\n"
        if not self._open or line in self._noted:
            return
        try:
            with self._opened() as file:
                self._open = file.tell() + len(line) <= self._limit
                if self._open:
                    file.write(line)
                    self._noted.add(line)
                else:
                    _LOG.warning("%s is full: wanted_bytes=%d", self._path, self._limit)
        except OSError as error:
            self._open = False
            _LOG.warning("%s: cannot be written (%s)", self._path, error.strerror)

    def _opened(self) -> BinaryIO:
        def private(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NOFOLLOW, 0o600)

        file = open(self._path, "ab", opener=private)  # noqa: SIM115, its callers close it
        os.fchmod(file.fileno(), 0o600)
        return file
