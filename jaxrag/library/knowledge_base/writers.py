"""Writers at work on a knowledge base, and the store keys that they are about to make live.

Between the put of a chunk and the commit of the catalog nothing but its writer knows that the chunk
is needed. So a writer names its keys beforehand in a file of its own, ``writers/<name>`` in the
folder of the knowledge base, and holds a lock on it: 20 bytes a key, read by whoever collects
garbage, in this process or another. A writer that dies loses the lock, and its file counts no more.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from jaxrag.base.errors import disk_errors
from jaxrag.kv.store.keys import is_hex
from jaxrag.kv.store.record import ATTEMPT_DIGITS, attempt_begun, new_attempt

FOLDER = "writers"
_KEY_BYTES = 20


class KeyWriter:
    """A writer at work; safe to share between threads."""

    def __init__(self, descriptor: int, path: Path) -> None:
        """Use ``KeyWriter.at_work``."""
        self._descriptor = descriptor
        self._path = path

    @classmethod
    @contextlib.contextmanager
    def at_work(cls, folder: Path) -> Iterator[Self]:
        """A writer on the knowledge base in a folder, until the context is left.

        Raises StoreError when its file cannot be made.
        """
        with disk_errors(folder):
            (folder / FOLDER).mkdir(exist_ok=True)
            writer = cls(*_locked_file(folder / FOLDER))
        try:
            yield writer
        finally:
            with contextlib.suppress(OSError):
                writer._path.unlink()  # before the lock goes, so that no other process removes it
            os.close(writer._descriptor)

    def needs(self, keys: Iterable[str]) -> None:
        """No collection that begins after this removes chunks of these keys, or what is put there.

        To be called before the store is asked for them. Raises StoreError when they cannot be
        written down.
        """
        data = memoryview(bytes.fromhex("".join(keys)))
        with disk_errors(self._path):
            while data:
                data = data[os.write(self._descriptor, data) :]


class Writers:
    """The writers at work on a knowledge base, as others see them."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is that of the knowledge base."""
        self._folder = folder / FOLDER
        self._keys: dict[str, tuple[int, set[bytes]]] = {}  # by file: bytes read, keys in them

    def need(self, key: str) -> bool:
        """Whether a writer at work has named the key. Raises StoreError when that is not known."""
        digest = bytes.fromhex(key)
        return any(digest in keys for keys in self._at_work().values())

    def since(self) -> float | None:
        """When the one that has been at work for longest began, in seconds since 1970."""
        return min(map(attempt_begun, self._at_work()), default=None)

    def _at_work(self) -> dict[str, set[bytes]]:
        """The keys that each writer at work has named so far, by its file."""
        keys_of = {}
        with disk_errors(self._folder):
            try:
                names = os.listdir(self._folder)
            except FileNotFoundError:
                names = []
            for name in names:
                if is_hex(name, ATTEMPT_DIGITS) and (keys := self._read(name)) is not None:
                    keys_of[name] = keys
        self._keys = {name: self._keys[name] for name in keys_of}
        return keys_of

    def _read(self, name: str) -> set[bytes] | None:
        """The keys of one file; None when its writer is not at work any more."""
        path = self._folder / name
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                done, keys = self._keys.get(name, (0, set()))
                file.seek(done)
                data = file.read()
                whole = len(data) // _KEY_BYTES * _KEY_BYTES
                keys.update(data[i : i + _KEY_BYTES] for i in range(0, whole, _KEY_BYTES))
                self._keys[name] = (done + whole, keys)
                return keys
            with contextlib.suppress(OSError):  # not ours to remove: it stays, and means nothing
                path.unlink(missing_ok=True)
        return None


def _locked_file(folder: Path) -> tuple[int, Path]:
    """A new file that is locked, and where it is."""
    while True:
        path = folder / new_attempt()
        descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Whoever looked before it was locked took it for a dead writer's and removed it.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor, path
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
