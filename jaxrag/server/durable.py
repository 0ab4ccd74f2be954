"""Files and folders that are there, whole, after a crash."""

import logging
import os
import secrets
import stat
from pathlib import Path

from jaxrag.base.disk import sync_folder
from jaxrag.base.errors import disk_errors

_LOG = logging.getLogger("jaxrag.server")

REGISTRY = "server.sqlite"  # file in the data folder: state.registry
UNFINISHED = ".new-"  # begins the name of a file that is being written
PRIVATE_FILE = 0o600  # no other user reads what was uploaded
_PRIVATE_FOLDER = 0o700
_OTHERS = 0o077


def write_durably(path: Path, data: bytes) -> None:
    """Make a private file of these bytes, durable when this returns; one that is there is replaced.

    Raises StoreError.
    """
    with disk_errors(path):
        make_folder(path.parent)
        new = path.parent / f"{UNFINISHED}{secrets.token_hex(8)}"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make a private folder, and those above it; durable when this returns."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(_PRIVATE_FOLDER, exist_ok=True)
    sync_folder(path.parent)


def make_private(path: Path) -> None:
    """Take from other users what an earlier server let them do with a file or folder of its own.

    Logs where that is not allowed, as with a file of another user; nothing where none is there.
    """
    try:
        mode = path.stat().st_mode
        if mode & _OTHERS:
            path.chmod(stat.S_IMODE(mode) & ~_OTHERS)
    except FileNotFoundError:
        pass
    except OSError as error:
        _LOG.warning("%s can be read by other users (%s); make it private", path, error.strerror)
