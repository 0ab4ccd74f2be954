"""Uploaded files on disk: whole and durable, or not there.

Bytes go to a file of a temporary name, which is made durable and renamed before the registry learns
of it. What a killed server leaves behind is one of a temporary name, or one that the registry does
not know: both are swept when the next one starts. A file that is removed leaves the registry first.
"""

import dataclasses
import os
import threading
from pathlib import Path

from jaxrag.base.disk import sync_folder
from jaxrag.base.errors import disk_errors
from jaxrag.server.durable import UNFINISHED, make_folder
from jaxrag.server.state.quota import Quota
from jaxrag.server.state.registry import FileRow, Registry, new_id
from jaxrag.server.tenants import folder_name

FILES = "files"  # folder of a tenant
TENANTS = "tenants"  # folder of the data folder
_NAME_CHARACTERS = 255
_JOINERS = "\u200c\u200d"  # of Persian words and of emoji


class Uploads:
    """The files of all tenants."""

    def __init__(self, data: Path, registry: Registry, quota: Quota) -> None:
        """Of a data folder, its registry, and what tenants may store."""
        self._data = data
        self._registry, self._quota = registry, quota

    def folder(self, tenant: str) -> Path:
        """Where a tenant's files lie."""
        return self._data / TENANTS / folder_name(tenant) / FILES

    def path(self, file: FileRow) -> Path:
        """Where the bytes of a file lie."""
        return self.folder(file.tenant) / file.id

    def without_folder(self, text: str) -> str:
        """A message without the data folder, which clients do not see."""
        return text.replace(f"{self._data}/", "")

    def begin(self, tenant: str) -> "Upload":
        """A new file, to be written. Raises StoreError, and Problem 413 where no more may be."""
        self._quota.check(tenant)
        folder = self.folder(tenant)
        with disk_errors(folder):
            make_folder(folder)
            return Upload(self._registry, self._quota, tenant, folder, new_id("file-"))

    def remove(self, file: FileRow) -> None:
        """Forget a file and remove its bytes."""
        self._registry.remove_file(file.id)
        with disk_errors(self.path(file)):
            self.path(file).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove what no acknowledged upload is; how many. Before anybody uploads."""
        known = {file.id for file in self._registry.files()}
        swept = 0
        with disk_errors(self._data):
            for folder in (self._data / TENANTS).glob(f"*/{FILES}"):
                for path in folder.iterdir():
                    if path.name not in known:
                        path.unlink()
                        swept += 1
        return swept


@dataclasses.dataclass
class Upload:
    """A file that is being written. ``abort`` it where ``finish`` is not reached."""

    registry: Registry
    quota: Quota
    tenant: str
    folder: Path
    id: str
    size: int = 0

    def __post_init__(self) -> None:
        """Open the file of a temporary name."""
        self._new = self.folder / f"{UNFINISHED}{self.id}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = open(os.open(self._new, flags, 0o600), "wb")  # noqa: SIM115 (closed by finish)
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Append bytes. Raises StoreError, and Problem 413 beyond what the tenant may store."""
        self.quota.write(self.tenant, len(data))
        self.size += len(data)
        with self._lock, disk_errors(self._new):
            self._file.write(data)

    def finish(self, filename: str, purpose: str) -> FileRow:
        """Make it durable and known; it is there for good when this returns."""
        with self._lock, disk_errors(self._new):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._new, self.folder / self.id)
            sync_folder(self.folder)
        made = self.registry.add_file(self.id, self.tenant, filename, self.size, purpose)
        self.quota.written(self.tenant, self.size)
        self.size = 0
        return made

    def abort(self) -> None:
        """Leave nothing behind."""
        with self._lock:
            self._file.close()
            self._new.unlink(missing_ok=True)
            self.quota.written(self.tenant, self.size)
            self.size = 0


def upload_of(base: Path, document_id: str) -> Path | None:
    """The upload from which a document of a tenant's vector store was made; None: there is none.

    ``base`` is the folder of the store in the data folder. Works without a server.
    """
    files = uploads_of(base)
    if files is None or not files.is_dir():
        return None
    found = [it for it in files.iterdir() if it.name == document_id[: len(it.name)]]
    return next(iter(found), None)


def uploads_of(base: Path) -> Path | None:
    """The folder of the uploads of whose vector store this is; None: it is no tenant's."""
    tenant = base.parent.parent
    return tenant / FILES if tenant.parent.name == TENANTS else None


def plain_name(filename: str) -> str:
    """A name without folders and control characters; "" where nothing is left of it.

    "TCP/IP.md" is TCP_IP.md. What can only be a path, as "C:/docs/a.md" or "../a.md", is a.md.
    """
    parts = filename.replace("\\", "/").split("/")
    path = any(part in ("", ".", "..") or part.endswith(":") for part in parts)
    name = parts[-1] if path else "_".join(parts)
    kept = "".join(it for it in name if it.isprintable() or it in _JOINERS).strip(f" {_JOINERS}")
    stem, dot, suffix = kept.rpartition(".")
    if len(kept) > _NAME_CHARACTERS and dot and len(suffix) < _NAME_CHARACTERS // 2:
        kept = f"{stem[: _NAME_CHARACTERS - len(suffix) - 1]}.{suffix}"
    return kept[:_NAME_CHARACTERS] if kept.strip(".") else ""
