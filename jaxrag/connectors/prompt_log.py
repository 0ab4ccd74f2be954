"""Prompts that had no plan, or a long rest behind it: an engine notes them for the command.

One file in the manifest's folder, a line of JSON for each. It holds prompts, so only the user of
the engine may read it; `jaxrag kb connector` encodes what it finds in them.
"""

import errno
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


class PromptLog:
    """Notes prompts, each once, until the file is full."""

    def __init__(self, folder: Path, tokenizer: str, limit: int) -> None:
        """Make the file, or its mode what it is to be.

        Args:
          folder: of the manifest.
          tokenizer: digest of the one whose ids are noted.
          limit: bytes that the file may have; 0 makes none and notes nothing.

        Raises ConfigError where it cannot be written.
        """
        self._path, self._tokenizer, self._limit = folder / FILE, tokenizer, limit
        self._noted: set[bytes] = set()
        try:
            if limit:
                self._opened().close()
                self._noted |= set(self._path.read_bytes().splitlines(keepends=True))
        except OSError as error:
            reason = f"cannot be written ({error.strerror}), which wanted_bytes={limit} needs"
            raise ConfigError(f"{self._path}: {reason}; 0 notes nothing") from None

    def note(self, ids: NDArray[np.int32], spans: Sequence[int] | None) -> None:
        """Note token ids int32 [T], and the spans that their client named.

        That there is no room or no disk is said in the log, once.
        """
        fields = {"tokenizer": self._tokenizer, "ids": ids.tolist(), "spans": spans}
        line = json.dumps(fields).encode() + b"\n"
        if not self._limit or line in self._noted:
            return
        try:
            with self._opened() as file:
                if file.tell() + len(line) > self._limit:
                    raise OSError(errno.EDQUOT, f"it is full: wanted_bytes={self._limit}")
                file.write(line)
                self._noted.add(line)
        except OSError as error:
            self._limit = 0
            _LOG.warning("%s: cannot be written (%s)", self._path, error.strerror)

    def _opened(self) -> BinaryIO:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        file = os.fdopen(os.open(self._path, flags, 0o600), "ab")
        os.fchmod(file.fileno(), 0o600)
        return file
