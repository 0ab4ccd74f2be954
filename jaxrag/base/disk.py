"""What a disk is asked for: that a name outlives a power cut, and that others keep out."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from jaxrag.base.errors import StoreError


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held(folder: Path, work: str) -> Iterator[None]:
    """Keep others of such work out of a folder; the system lets go of it when the process dies.

    Raises StoreError when another one is at work there.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"{folder}: another {work} is writing there; wait for it, or name another folder"
            ) from None
        yield
    finally:
        os.close(descriptor)
