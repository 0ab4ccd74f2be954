"""Files and folders that are there, whole, after a crash."""

import os
import secrets
from pathlib import Path

from jaxrag.base.errors import disk_errors

PRIVATE = 0o700  # of the data folder: no other user reads what was uploaded
REGISTRY = "server.sqlite"  # file in the data folder: state.registry
UNFINISHED = ".new-"  # begins the name of a file that is being written


def write_durably(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Make a file of these bytes, durable when this returns; one that is there is replaced.

    Raises StoreError.
    """
    with disk_errors(path):
        make_folder(path.parent)
        new = path.parent / f"{UNFINISHED}{secrets.token_hex(8)}"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        sync_folder(path.parent)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder, with this mode, and those above it; durable when this returns."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode, exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
