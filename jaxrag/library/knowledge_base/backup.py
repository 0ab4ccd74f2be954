"""A knowledge base put aside while it is in use, and brought back.

A backup is a folder: ``catalog.backup``, a copy of the catalog with all documents, settings and
names of KV, ``uploads/``, the files that its documents were made of on a server, and
``backup.json``, written last, with the digest of each. KV and vectors are made of these: KV that is
still stored is found by its key.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

from jaxrag.base.disk import held, sync_folder
from jaxrag.base.errors import DamagedCatalogError, KnowledgeBaseError, StoreError, disk_errors
from jaxrag.kv.store.owners import Owners
from jaxrag.library.catalog import Catalog
from jaxrag.library.catalog.database import is_open, remove_files
from jaxrag.library.catalog.salvage import lock_out, replace
from jaxrag.library.knowledge_base.location import CATALOG, open_repository, owners_of
from jaxrag.library.knowledge_base.settings import CHANGES
from jaxrag.models.text.progress import progress_bar

MANIFEST = "backup.json"
_CATALOG = "catalog.backup"  # a name that nobody opens as a knowledge base
_UPLOADS = "uploads"
_FORMAT = 1
_PART = 1 << 20  # bytes
_PRIVATE = 0o600
_GAP = 1 << 24  # chunk ids that are never given, where it is not known which were


@dataclasses.dataclass(frozen=True)
class BackupReport:
    """What a backup holds.

    Attributes:
      changes: that the knowledge base had acknowledged.
      uploads: files that documents were made of.
      nbytes: of all files.
    """

    folder: str
    documents: int
    chunks: int
    changes: int
    uploads: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """What a knowledge base holds that was brought back.

    Attributes:
      changes: that it counts as acknowledged now.
      removed: ids of documents that were removed since the backup, and stay removed.
      returned: ids of those that are back.
      undone: how many documents that were added or changed since are as in the backup now.
      uploads: files that were put back.
      left: how many of the backup were not, as the folder is of no server.
      kept: where the catalog is that was here, None where there was none.
    """

    folder: str
    documents: int
    chunks: int
    changes: int
    removed: tuple[str, ...]
    returned: tuple[str, ...]
    undone: int
    uploads: int
    left: int
    kept: str | None


def back_up(
    folder: Path, into: Path, uploads: Path | None = None, progress: bool = False
) -> BackupReport:
    """Write a backup of a knowledge base; others may read and write it meanwhile.

    It holds what was acknowledged when this began, and perhaps more.

    Args:
      into: a folder that is empty or not there yet.
      uploads: the folder of files that its documents may have been made of.

    Raises KnowledgeBaseError for a folder that holds something, StoreError where files cannot be
    read or written, DamagedCatalogError for a catalog that cannot be believed.
    """
    with contextlib.closing(Catalog.open(folder / CATALOG)) as catalog, disk_errors(into):
        if into.exists() and any(into.iterdir()):
            raise KnowledgeBaseError(f"{into} is not empty; name a new folder for the backup")
        into.mkdir(parents=True, exist_ok=True)
        copy = into / _CATALOG
        copy.touch(_PRIVATE, exist_ok=False)  # another's may have begun in this moment
        with progress_bar(None, "backup", "B", shown=progress, scale=True) as bar:
            catalog.copy_to(copy, bar.update)
    with contextlib.closing(Catalog.open(copy)) as copied, disk_errors(into):
        ids = [document.id for document in copied.documents()]
        counts, settings = copied.counts(), copied.settings()
        copied.check_whole()
    with disk_errors(into):
        files = {_CATALOG: _digest(copy)}
        for file in _made_of(ids, uploads):
            (into / _UPLOADS).mkdir(0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                files[f"{_UPLOADS}/{file.name}"] = _copy(file, into / _UPLOADS / file.name)
        content = {
            "format": _FORMAT, "id": settings["id"], "changes": settings.get(CHANGES, 0),
            "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "documents": counts["documents"], "chunks": counts["chunks"], "sha256": files,
        }  # fmt: skip
        if (into / _UPLOADS).is_dir():
            sync_folder(into / _UPLOADS)
        sync_folder(into)
        with open(into / MANIFEST, "x") as manifest:
            manifest.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
            manifest.flush()
            os.fsync(manifest.fileno())
        sync_folder(into)
        nbytes = sum((into / name).stat().st_size for name in files)
    return BackupReport(str(into), content["documents"], content["chunks"], content["changes"],
                        len(files) - 1, nbytes)  # fmt: skip


def restore(
    folder: Path,
    backup: Path,
    *,
    accept_older: bool = False,
    with_removed: bool = False,
    uploads: Path | None = None,
    progress: bool = False,
) -> RestoreReport:
    """Bring a knowledge base back from a backup, into its folder or another one.

    The catalog that is there is kept as ``catalog.sqlite.replaced``, or with a number behind that
    where there is one. Who is killed meanwhile leaves one of them in place.

    Args:
      accept_older: go back though documents were added, changed or removed since. What was removed
        stays removed.
      with_removed: the same, and what was removed since is back, too.
      uploads: the folder of the files that its documents were made of; those that lack are put
        there.

    Raises:
      KnowledgeBaseError: the folder holds another knowledge base or one that is newer, or is open;
        or ``backup`` is none.
      StoreError: the backup is not as it was written, or files cannot be written.
    """
    path = folder / CATALOG
    new = path.with_name(f"{path.name}-restored")
    files = _manifest(backup)
    if is_open(path):
        raise KnowledgeBaseError(f"{folder} is open in this process; close it to restore it")
    with disk_errors(backup):
        for name, digest in files.items():  # the catalog is checked as it is copied
            file = backup / name
            if not file.is_file() or (name != _CATALOG and _digest(file) != digest):
                raise _unlike(file)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with held(folder, "restore"):
        try:
            with disk_errors(folder):
                remove_files(new)
                with progress_bar(None, "restore", "B", shown=progress, scale=True) as bar:
                    if _copy(backup / _CATALOG, new, bar.update) != files.pop(_CATALOG):
                        raise _unlike(backup / _CATALOG)
            there = _There.find(path)
            with contextlib.closing(Catalog.open(new)) as catalog:
                report, owners, owner = _merged(folder, catalog, there, accept_older, with_removed)
                ids = {document.id for document in catalog.documents()}
            with disk_errors(folder):
                there.give_way(new)
            owners.acknowledge(owner, report.changes)
            with disk_errors(folder):
                put = _put_back(backup, files, _made_of(ids, backup / _UPLOADS), uploads)
            return dataclasses.replace(report, uploads=put, left=len(files) * (uploads is None))
        finally:
            remove_files(new)


@dataclasses.dataclass(frozen=True)
class _There:
    """The catalog in whose place a restored one is put.

    Attributes:
      state: what changes with the file, None where there is none.
      whole: whether it can be read.
      changes: that it counts as acknowledged.
      documents: digests by id.
    """

    path: Path
    state: tuple[int, ...] | None
    whole: bool
    id: str | None = None
    changes: int = 0
    documents: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def find(cls, path: Path) -> Self:
        """Look at it. Raises KnowledgeBaseError for a file that is something else."""
        if not path.exists():
            return cls(path, None, False)
        if not path.stat().st_size:
            return cls(path, _state(path), False)
        try:
            with contextlib.closing(Catalog.open(path)) as catalog:
                catalog.checkpoint()
            state = _state(path)
            with contextlib.closing(Catalog.open(path)) as catalog:
                settings = catalog.settings()
                documents = {document.id: document.digest for document in catalog.documents()}
                return cls(path, state, True, settings["id"], settings.get(CHANGES, 0), documents)
        except DamagedCatalogError:
            return cls(path, _state(path), False)

    def give_way(self, new: Path) -> None:
        """Put the new file in its place. Raises KnowledgeBaseError where others use it."""
        if self.state is None and not self.path.exists():  # it may be since it was looked for
            remove_files(self.path)  # a log without its file
            os.link(new, self.path)
            sync_folder(self.path.parent)
            return
        with open(self.path, "r+b") as file:
            if not lock_out(file.fileno()) or _state(self.path) != self.state:
                raise KnowledgeBaseError(
                    f"{self.path.parent} is in use; restore it when no process has it open"
                )
            shutil.copymode(self.path, new)
            replace(self.path, new, self.kept)

    @property
    def kept(self) -> Path:
        """Where it is afterwards; what an earlier restore kept stays."""
        ends = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        places = (self.path.with_name(f"{self.path.name}.replaced{end}") for end in ends)
        return next(place for place in places if not place.exists())


def _merged(
    folder: Path, catalog: Catalog, there: _There, accept_older: bool, with_removed: bool
) -> tuple[RestoreReport, Owners, str]:
    """Make a copy of the backup's catalog what is to be in the folder."""
    settings = catalog.settings()
    owner, own = settings["id"], settings.get(CHANGES, 0)
    if there.id not in (None, owner):
        raise KnowledgeBaseError(
            f"{folder} holds the knowledge base {there.id}, the backup is of {owner}; name another "
            "folder"
        )
    owners = owners_of(folder, settings)
    stored = owners.changes(owner)
    known = max(stored, there.changes)
    current = there.whole and there.changes >= max(stored, own)  # else it tells of no removal
    held = {document.id: document.digest for document in catalog.documents()}
    gone = sorted(held.keys() - there.documents.keys()) if current else []
    undone = sum(held.get(name) != digest for name, digest in there.documents.items()) * current
    newer = known > own or bool(gone or undone)
    if newer and not current and not with_removed:
        state = "is not there" if there.state is None else "is older still or damaged"
        raise KnowledgeBaseError(
            f"the backup is of change {own} where {known} were acknowledged, and {there.path} "
            f"{state}, so that nothing tells what was removed since; take a newer backup"
            f"{', or repair the catalog first' if there.state else ''}, or pass --with-removed and "
            "remove again what was removed"
        )
    if newer and not (accept_older or with_removed):
        raise KnowledgeBaseError(
            f"{folder} is newer than the backup, of change {known} where that is of {own}: "
            f"{undone} documents were added or changed since and {len(gone)} removed; pass "
            "--accept-older to lose the first and keep the others removed, or --with-removed to "
            "bring these back, too"
        )
    if current:
        with contextlib.closing(Catalog.open(there.path)) as other:
            catalog.follow(other)
            catalog.set("sealed", other.settings().get("sealed"))  # as the KV that is there
    elif newer:
        catalog.reserve(_GAP)
    if not with_removed:
        catalog.remove(gone)
    if newer:
        catalog.set(CHANGES, known + 1)
    catalog.checkpoint()
    if settings["store"] is None:  # readers expect one
        open_repository(folder, settings, "rw", None).close()
    counts = catalog.counts()
    report = RestoreReport(
        str(folder), counts["documents"], counts["chunks"], known + 1 if newer else own,
        removed=() if with_removed else tuple(gone), returned=tuple(gone) if with_removed else (),
        undone=undone, uploads=0, left=0, kept=str(there.kept) if there.state else None,
    )  # fmt: skip
    return report, owners, owner


def _manifest(backup: Path) -> dict[str, str]:
    """The digests of a backup's files, by their names in it."""
    try:
        content: dict[str, Any] = json.loads((backup / MANIFEST).read_bytes())
        files = {str(name): str(digest) for name, digest in content["sha256"].items()}
        known = content["format"] == _FORMAT and _CATALOG in files
    except FileNotFoundError:
        raise KnowledgeBaseError(
            f"{backup} holds no {MANIFEST}: it is no backup, or one that was cut short; name a "
            "folder that `jaxrag kb backup` wrote"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise _unlike(backup / MANIFEST) from None
    if not known:
        raise _unlike(backup / MANIFEST)
    return files


def _put_back(
    backup: Path, files: dict[str, str], needed: Iterable[Path], uploads: Path | None
) -> int:
    """Put uploads where they lack; how many."""
    put = 0
    for file in needed if uploads is not None else ():
        assert uploads is not None
        name, place = f"{_UPLOADS}/{file.name}", uploads / file.name
        if name not in files or place.exists():
            continue
        uploads.mkdir(0o700, parents=True, exist_ok=True)
        new = place.with_name(f".new-{place.name}")
        new.unlink(missing_ok=True)
        if _copy(file, new) != files[name]:
            new.unlink()
            raise _unlike(file)
        os.replace(new, place)
        sync_folder(uploads)
        put += 1
    return put


def _made_of(ids: Iterable[str], uploads: Path | None) -> list[Path]:
    """The files whose names begin the ids of documents."""
    files = sorted(uploads.iterdir()) if uploads is not None and uploads.is_dir() else []
    lengths = {len(file.name) for file in files}
    begun = {name[:length] for name in ids for length in lengths}
    return [file for file in files if file.name in begun]


def _copy(source: Path, target: Path, advance: Callable[[int], object] = lambda count: None) -> str:
    """Copy a file to a new private one, durably; returns the digest of its bytes."""
    digest = hashlib.sha256()
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE)
    with open(descriptor, "wb") as out, open(source, "rb") as file:
        while part := file.read(_PART):
            digest.update(part)
            out.write(part)
            advance(len(part))
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _state(path: Path) -> tuple[int, ...]:
    """What changes with a file."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _unlike(path: Path) -> StoreError:
    return StoreError(f"{path} is not as it was written; take another backup")
