"""TensorStore behind the chunk store: where bytes go, and how arrays are written and read."""

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import tensorstore as ts
from numpy.typing import NDArray

from jaxrag.base.errors import ChunkCorrupt, ChunkMissing, StoreError
from jaxrag.kv.store.address import kvstore_spec
from jaxrag.kv.store.grid import HEAD_AXIS, HEADER, Grid

IOMode = Literal["memmap", "default"]

ReadFuture = ts.WriteFutures  # of a write into memory
WriteFuture: TypeAlias = "ts.Future[Any]"  # of a path that becomes durable

LOCK_SUFFIX = ".__lock"  # of the files that TensorStore locks while it writes to a directory

_IO_CONCURRENCY = 16  # requests in flight; TensorStore's default of 4 halves cold reads
_RETRIES = 5  # of a request to an object store, after 1, 2, 4... seconds
_ERRORS = (ValueError, IndexError, NotImplementedError, OSError)  # all that TensorStore raises
_DAMAGE = ("DATA_LOSS", "FAILED_PRECONDITION", "OUT_OF_RANGE", "INVALID_ARGUMENT")
_DIRECTORY_TRIES = 100  # against others who remove the same folders while they are empty


class Backend:
    """A key-value store under one location, with the few operations that chunks need.

    Paths are relative to the location. A failed operation raises StoreError in one line.
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
        io_mode: IOMode = "memmap",
        durable: bool = True,
    ) -> None:
        """Bind a location (``address.kvstore_spec``); creates nothing.

        ``durable`` says whether a write to a file waits for the disk.
        """
        self.location = os.fspath(location)
        if io_mode not in get_args(IOMode):
            raise StoreError(f"io_mode={io_mode!r}: expected one of {', '.join(get_args(IOMode))}")
        self.io_mode = io_mode
        self.durable = durable
        self._context = ts.Context(
            {
                "file_io_mode": {"mode": io_mode},
                "file_io_sync": durable,
                "file_io_concurrency": {"limit": _IO_CONCURRENCY},
                "cache_pool": {"total_bytes_limit": 0},
                "s3_request_retries": {"max_retries": _RETRIES},
                "gcs_request_retries": {"max_retries": _RETRIES},
            }
        )
        with self._errors("open"):
            store = ts.KvStore.open(kvstore_spec(self.location), context=self._context).result()
            self._kv = store + "/" if store.path and not store.path.endswith("/") else store
            self._spec: dict[str, Any] = self._kv.spec().to_json()
        self._folder = self._spec["path"] if self._spec["driver"] == "file" else None

    @property
    def directory(self) -> Path | None:
        """The local directory of a file store, None for any other kind."""
        return Path(self._spec["path"]) if self._spec["driver"] == "file" else None

    # Small values

    def generation(self, path: str) -> bytes:
        """Which value ``path`` holds at this moment, or that it holds none, for ``write_if``."""
        return self.looked_up(path)[0]

    def looked_up(self, path: str) -> tuple[bytes, bool]:
        """``generation``, and whether there is a value."""
        with self._errors(f"read {path}"):
            found = self._kv.read(path).result()
            return bytes(found.stamp.generation), found.state == "value"

    def read_many(self, paths: Sequence[str], limit: int) -> list[bytes | None]:
        """The values at ``paths``: None when absent, cut to ``limit + 1`` bytes when longer.

        A pipe or device in place of a file, which would keep its reader waiting, is empty.
        """
        # A range that ends behind the value is an error, so only a longer value answers a probe.
        probes = [
            None if self._is_special(path) else self._kv.read(path, byte_range=slice(0, limit + 1))
            for path in paths
        ]
        values: list[bytes | None] = [None] * len(paths)
        whole = {}
        for index, probe in enumerate(probes):
            if probe is None:
                values[index] = b""
                continue
            try:
                if probe.result().state == "value":
                    values[index] = probe.result().value
            except _ERRORS as error:
                if not str(error).startswith("OUT_OF_RANGE"):
                    raise self._failure(f"read {paths[index]}", error) from error
                whole[index] = self._kv.read(paths[index])
        for index, read in whole.items():
            with self._errors(f"read {paths[index]}"):
                if read.result().state == "value":
                    values[index] = read.result().value
        return values

    def _is_special(self, path: str) -> bool:
        if self._folder is None:
            return False
        try:
            mode = os.stat(self._folder + path).st_mode
        except OSError:
            return False  # who reads it says what is wrong
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))

    def contents(self, paths: Sequence[str]) -> list[bytes | None]:
        """The whole values at ``paths``, however long; None when absent."""
        reads = [self._kv.read(path) for path in paths]
        values: list[bytes | None] = []
        for path, read in zip(paths, reads, strict=True):
            with self._errors(f"read {path}"):
                found = read.result()
                values.append(found.value if found.state == "value" else None)
        return values

    def write_if(self, path: str, value: bytes, generation: bytes) -> bytes | None:
        """Write durably if ``path`` is still at ``generation``; the new generation if it was."""
        return self._change_if(path, value, generation, "commit")

    def delete_if(self, path: str, generation: bytes) -> bool:
        """Remove the value of ``path`` if it is still at ``generation``; whether it was."""
        return self._change_if(path, None, generation, "remove") is not None

    def write(self, path: str, value: bytes) -> None:
        """Write durably, whatever ``path`` holds."""
        with self._errors(f"write {path}"):
            self._kv.write(path, value).result()

    def delete(self, path: str) -> None:
        """Remove the value of ``path``, if there is one."""
        try:
            self._kv.write(path, None).result()
        except _ERRORS as error:
            if not str(error).startswith("NOT_FOUND"):  # else its folder was removed meanwhile
                raise self._failure(f"remove {path}", error) from error

    # Prefixes and, where there are any, folders

    def paths(self, prefix: str) -> list[str]:
        """Every path that starts with ``prefix``, relative to it, sorted; no lock files."""
        with self._errors(f"list {prefix}"):
            found = self._kv.list(_range(prefix), strip_prefix_length=len(prefix)).result()
            return sorted(path.decode() for path in found)

    def names(self, prefix: str) -> list[str]:
        """The first parts of ``paths``."""
        if self.directory is None:
            return sorted({path.partition("/")[0] for path in self.paths(prefix)})
        with self._errors(f"list {prefix}"), contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self.directory / prefix))
        return []

    def holds(self, prefix: str, paths: Iterable[str]) -> bool:
        """Whether there is a value at every one of these paths, which start with ``prefix``."""
        if self.directory is None:
            return {prefix + path for path in self.paths(prefix)}.issuperset(paths)
        return all(os.path.isfile(self.directory / path) for path in paths)

    def delete_prefix(self, prefix: str) -> None:
        """Remove every path that starts with ``prefix``, and the folders that are empty then."""
        with self._errors(f"remove {prefix}"):
            self._kv.delete_range(_range(prefix)).result()
        self.prune(prefix)

    def prune(self, prefix: str) -> None:
        """Remove the folders under and above ``prefix`` that are empty."""
        if self.directory is None:
            return
        for inner, _, _ in os.walk(self.directory / prefix, topdown=False):
            _remove_empty(inner)
        for outer in (self.directory / prefix).parents:
            if outer == self.directory or not _remove_empty(outer):
                return

    def make_directory(self, prefix: str) -> None:
        """Create the folder of ``prefix``, where there are folders, for good.

        Who writes under a prefix of his own calls this first: from then on no other finds the
        folders above empty and removes them.
        """
        if self.directory is None:
            return
        for _ in range(_DIRECTORY_TRIES):
            try:
                os.makedirs(self.directory / prefix, exist_ok=True)
                return
            except FileNotFoundError:  # a folder above was removed in between
                continue
            except OSError as error:
                raise self._failure(f"write {prefix}", error) from error
        raise StoreError(f"{self.location}: cannot write {prefix}: its folder keeps disappearing")

    def sizes(self, prefix: str) -> int | None:
        """Bytes of all files under ``prefix``, None where the store does not tell."""
        if self.directory is None:
            return None
        total = 0
        for folder, _, names in os.walk(self.directory / prefix):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(os.path.join(folder, name)).st_size
        return total

    def remove_stale(
        self,
        prefix: str,
        seconds: float,
        dry_run: bool,
        busy: Callable[[str], bool],
        passed: Set[str] = frozenset(),
    ) -> tuple[int, int]:
        """Remove lock files and empty folders under ``prefix`` that are older; how many of each.

        Only directories have them: writers that died leave them behind. A folder that is empty but
        for such lock files and folders is empty. Folders in ``prefix`` that are ``busy`` by their
        names, or ``passed`` over, stay as they are.
        """
        if self.directory is None:
            return 0, 0
        root, before = self.directory / prefix, time.time() - seconds
        found = []  # parents first, and before anything goes: a removal makes its parent young
        for folder, folders, names in os.walk(root):
            with contextlib.suppress(OSError):  # others remove and write here too
                found.append((folder, os.stat(folder).st_mtime <= before, list(folders), names))
            if passed and os.path.samefile(folder, root):
                folders[:] = [name for name in folders if name not in passed]
        locks = 0
        empty: set[str] = set()
        for folder, old, folders, names in reversed(found):
            held = [os.path.join(folder, name) for name in names if name.endswith(LOCK_SUFFIX)]
            others = len(names) - len(held)
            others += sum(os.path.join(folder, name) not in empty for name in folders)
            if others and not held:
                continue
            top = os.path.relpath(folder, root).partition(os.sep)[0]
            if top != os.curdir and busy(top):
                continue
            gone = sum(_remove_lock(path, before, dry_run) for path in held)
            locks += gone
            if old and others + len(held) == gone and (dry_run or _remove_empty(folder)):
                empty.add(folder)
        return locks, len(empty)

    def remove_stale_locks(self, seconds: float, dry_run: bool) -> int:
        """Remove old lock files of the few values beside the chunks; how many."""
        if self.directory is None:
            return 0
        before = time.time() - seconds
        patterns = (f"*{LOCK_SUFFIX}", f"*/*{LOCK_SUFFIX}")
        paths = [path for pattern in patterns for path in self.directory.glob(pattern)]
        return sum(_remove_lock(path, before, dry_run) for path in paths)

    # Arrays

    def start_part(self, path: str, grid: Grid, rank: int, part: NDArray[Any]) -> WriteFuture:
        """Begin to write one file of the array under ``path``; ``part`` is held until it is done.

        Pass what is begun to ``finish_writes``.
        """
        with self._errors(f"write {path}"):
            target = self._open_array(path, grid)[grid.slices(rank)]
            return target.write(
                part.view(grid.bits), can_reference_source_data_indefinitely=True
            ).commit

    def start_header(
        self,
        path: str,
        grid: Grid,
        axes: tuple[str, ...] | None,
        attributes: Mapping[str, Any],
    ) -> WriteFuture:
        """Begin to write the ``zarr.json`` of the array under ``path``."""
        text = json.dumps(grid.header(axes, attributes)).encode()
        with self._errors(f"write {path}"):
            return self._kv.write(path + HEADER, text)

    def finish_writes(self, path: str, writes: Sequence[WriteFuture]) -> None:
        """Wait until every write is durable or has failed; raise the first failure."""
        failures = [write.exception() for write in writes]  # all: their sources may be reused then
        for failure in failures:
            if isinstance(failure, Exception):
                raise self._failure(f"write {path}", failure) from failure

    def write_array(
        self,
        path: str,
        grid: Grid,
        array: NDArray[Any],
        axes: tuple[str, ...] | None,
        attributes: Mapping[str, Any],
    ) -> None:
        """Write a contiguous array as one file under ``path``; durable when this returns."""
        writes = [self.start_part(path, grid, 0, array)]
        writes.append(self.start_header(path, grid, axes, attributes))
        self.finish_writes(path, writes)

    def start_read(
        self,
        path: str,
        grid: Grid,
        out: NDArray[Any],
        layers: Sequence[int] | None = None,
        heads: slice | None = None,
    ) -> ReadFuture:
        """Begin to read the array under ``path``, or some of its layers and heads, into ``out``.

        ``out`` may be strided and belongs to the read until ``finish_read`` has returned or
        raised. It then holds what is stored, unverified.
        """
        target = ts.array(out.view(grid.bits), copy=False, write=True, context=self._context)
        source = self._open_array(path, grid)
        if layers is not None:
            first, end = (layers[0], layers[-1] + 1) if layers else (0, 0)
            one_range = end - first == len(layers)
            source = source[ts.d[0][slice(first, end) if one_range else list(layers)]]
            source = source[ts.d[0].translate_to[0]]
        if heads is not None:
            source = source[ts.d[HEAD_AXIS][heads]][ts.d[HEAD_AXIS].translate_to[0]]
        return target.write(source)

    def finish_read(self, read: ReadFuture, key: str) -> ChunkMissing | ChunkCorrupt | None:
        """Wait for a read; the reason when the bytes of the chunk are gone or damaged."""
        try:
            read.result()
        except _ERRORS as error:
            text = _one_line(error)
            if text.startswith("NOT_FOUND"):
                return ChunkMissing(f"chunk {key}: committed, but its bytes are gone ({text})")
            if text.startswith(_DAMAGE):
                return ChunkCorrupt(f"chunk {key}: bytes refused: {text}")
            raise self._failure(f"read chunk {key}", error) from error
        return None

    def _open_array(self, path: str, grid: Grid) -> ts.TensorStore:
        # assume_metadata: nothing that lies on disk decides a shape or an allocation. Without
        # fill_missing_data_reads=False, TensorStore serves zeros for a half-written array.
        return ts.open(
            {
                "driver": "zarr3",
                "kvstore": {**self._spec, "path": self._spec.get("path", "") + path},
                "metadata": grid.metadata(),
                "open": True,
                "assume_metadata": True,
                "fill_missing_data_reads": False,
                "store_data_equal_to_fill_value": True,
                "recheck_cached_data": False,
            },
            context=self._context,
        ).result()

    def _change_if(
        self, path: str, value: bytes | None, generation: bytes, action: str
    ) -> bytes | None:
        if not generation:  # TensorStore reads the empty generation as "whatever is there"
            raise StoreError(f"{self.location}: cannot {action} {path}: its generation is unknown")
        with self._errors(f"{action} {path}"):
            try:
                return self._kv.write(path, value, if_equal=generation).result().generation or None
            except ValueError as error:
                if value is None and str(error).startswith("NOT_FOUND"):
                    return None  # its folder was removed meanwhile
                raise

    def _failure(self, action: str, error: BaseException) -> StoreError:
        return StoreError(f"{self.location}: cannot {action}: {_one_line(error)}")

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except _ERRORS as error:
            raise self._failure(action, error) from error


def _remove_lock(path: str | os.PathLike[str], before: float, dry_run: bool) -> bool:
    """Remove a lock file last used before a time and not held; whether it is (to be) gone.

    It is locked first, as TensorStore does: who waits for a lock file notices that it is gone.
    """
    if not os.fspath(path).endswith(LOCK_SUFFIX):
        return False
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        if os.fstat(file.fileno()).st_mtime > before:
            return False
        if dry_run:
            return True
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            os.unlink(path)
            return True
    return False


def _remove_empty(folder: str | os.PathLike[str]) -> bool:
    """Remove a folder that is empty; whether it is gone."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _range(prefix: str) -> ts.KvStore.KeyRange:
    """All keys that start with ``prefix``, which ends in "/"; "0" is the next character."""
    return ts.KvStore.KeyRange(prefix, prefix[:-1] + "0")


def _one_line(error: BaseException) -> str:
    """TensorStore's status and innermost reason, on one line and without the paths around it."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
    status, _, detail = text.partition(": ")
    reason = detail.rpartition('": ')[2].partition(" [os_error_code")[0]
    return f"{status}: {reason}" if reason else text
