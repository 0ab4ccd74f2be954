"""Which ids the rows of a table have, held in memory.

A search of an index finds rows by number. Reading the ids of 50 of a million rows takes longer than
comparing the question with 100,000. A row's number never names another row of the same table, so
what was read stays right, and those that left are not found any more. Rows that came since have
larger numbers, but for those that a compaction moved while another process added some: it reserves
its numbers beforehand.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxrag.library.retrieve.base import NOTHING, Ids

_LEFT = 2  # times as many rows held as there are, from which all are read again
_FEW = 10_000  # rows that are held in any case


class RowIds:
    """The ids of a table's rows by number, 16 bytes for each."""

    def __init__(self, folder: Path, read: Callable[[int], tuple[Ids, Ids]]) -> None:
        """``read(first)`` gives the numbers from ``first`` on and their ids, in any order.

        ``folder`` is the table's: where another one stands in its place all is read again.
        """
        self._folder = folder
        self._read = read
        self._lock = threading.Lock()
        self._descriptor: int | None = None  # of the folder, as nothing else tells it from another
        self._forget()

    def _forget(self) -> None:
        self._held: tuple[Ids, Ids] = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def of(self, numbers: Ids, count: Callable[[], int]) -> Ids:
        """The ids of rows [N] that were just found, int64 [N]; ``count`` tells how many there are.

        NOTHING stands for a row that is gone by now.
        """
        if not len(numbers):
            return numbers
        with self._lock:
            if self._is_another():
                self._forget()
            row_ids = self._among_held(numbers)
            if (row_ids == NOTHING).any():
                if len(self._held[0]) > max(_LEFT * count(), _FEW):
                    self._forget()
                self._add()
                row_ids = self._among_held(numbers)
            if (row_ids == NOTHING).any():  # of a compaction, or gone
                self._forget()
                self._add()
                row_ids = self._among_held(numbers)
            return row_ids

    def _among_held(self, numbers: Ids) -> Ids:
        held, ids = self._held
        if not len(held):
            return np.full(len(numbers), NOTHING, np.int64)
        places = np.minimum(np.searchsorted(held, numbers), len(held) - 1)
        return np.where(held[places] == numbers, ids[places], NOTHING)

    def _add(self) -> None:
        """Read what is not held."""
        held, ids = self._held
        numbers, more = self._read(int(held[-1]) + 1 if len(held) else 0)
        order = np.argsort(numbers)
        self._held = np.concatenate([held, numbers[order]]), np.concatenate([ids, more[order]])

    def _is_another(self) -> bool:
        """Whether the folder is not the one of before. One that is open keeps its inode."""
        if self._descriptor is not None:
            known = os.fstat(self._descriptor)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(known, os.stat(self._folder)):
                    return False
            os.close(self._descriptor)
        self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        return True

    def close(self) -> None:
        """Let go of the folder."""
        with self._lock:
            self._forget()
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
