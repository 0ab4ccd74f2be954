"""Parts that prompts had and the store lacked: an engine notes them, the command encodes them.

One file in the manifest's folder, a line of JSON for each. It holds pieces of prompts, so only the
user of the engine may read it.
"""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxrag.base.errors import ConfigError, StoreError

FILE = "wanted.jsonl"
_LOG = logging.getLogger("vllm.jaxrag")


class Wanted:
    """Notes parts, each once, until the file is full."""

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
            os.close(self._opened())
            self._noted = {ids.tobytes() for ids in read(folder, tokenizer)}
        except OSError as error:
            raise ConfigError(
                f"{self._path}: cannot be written ({error.strerror}), which wanted_bytes={limit} "
                "needs; 0 notes nothing"
            ) from None

    def note(self, ids: NDArray[np.int32]) -> None:
        """Note token ids int32 [T]; that there is no room or no disk is said in the log, once."""
        if not self._open or ids.tobytes() in self._noted:
            return
        line = json.dumps({"tokenizer": self._tokenizer, "ids": ids.tolist()}).encode() + b"\n"
        try:
            file = self._opened()
            try:
                if os.fstat(file).st_size + len(line) > self._limit:
                    self._open = False
                    _LOG.warning("%s is full: wanted_bytes=%d", self._path, self._limit)
                    return
                os.write(file, line)
            finally:
                os.close(file)
        except OSError as error:
            self._open = False
            _LOG.warning("%s: cannot be written (%s)", self._path, error.strerror)
            return
        self._noted.add(ids.tobytes())

    def _opened(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        file = os.open(self._path, flags, 0o600)
        try:
            os.fchmod(file, 0o600)
        except OSError:
            os.close(file)
            raise
        return file


def read(folder: Path, tokenizer: str) -> Iterator[NDArray[np.int32]]:
    """Token ids int32 [T] of the parts that were noted with this tokenizer, in their order.

    Raises StoreError for a file that cannot be read or is not as it was written.
    """
    path = folder / FILE
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be read ({error.strerror}); run this as the user that vLLM runs as"
        ) from None
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            ids = np.array(fields["ids"], np.int32)
            if ids.ndim != 1 or not len(ids) or ids.min() < 0:
                raise ValueError("expected token ids")
            if fields["tokenizer"] == tokenizer:
                yield ids
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise StoreError(
                f"{path}, line {number}: is damaged ({error}); take the line out or delete the file"
            ) from None
