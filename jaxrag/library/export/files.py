"""Exported files: written beside their place and renamed into it, and kept when they are there."""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrag.base.errors import StoreError
from jaxrag.base.types import HostArray
from jaxrag.kv.store import KVStore, Record
from jaxrag.library.export.bundle import Bundle, Placement, describe, read
from jaxrag.library.export.rotate import place_keys
from jaxrag.library.export.tensors import Arrange
from jaxrag.models.tensor_files import file_header, write_file

METADATA_KEY = "jaxrag"  # of the JSON record in a safetensors header


@dataclasses.dataclass(frozen=True)
class Written:
    """One file, or one folder of a tree, of an export."""

    path: str  # relative to the folder of the export
    nbytes: int
    sha256: str | None  # of the file; None for a folder, whose arrays are covered by xxh3
    kept: bool  # stood there already


def write_safetensors(
    arrange: Arrange,
    out: Path,
    store: KVStore,
    bundle: Bundle,
    records: Sequence[Record],
    placement: Placement,
    settings: Mapping[str, Any],
) -> Written:
    """Write one bundle to ``chunks/<name>.safetensors`` unless it stands there as it would be.

    The header's metadata holds ``settings`` and the description of the bundle. One bundle is in
    memory at a time.
    """
    tokens = sum(record.tokens for record in records)

    @functools.cache
    def load() -> HostArray:
        kv = read(store, bundle)
        if placement.first_position is not None:
            kv[:, 0] = place_keys(kv[:, 0], placement.first_position, placement.config.rope)
        return kv

    tensors = arrange(store.layout, tokens, load)
    metadata = {METADATA_KEY: json.dumps({**settings, **describe(bundle, records)})}
    path = out / "chunks" / f"{bundle.name}.safetensors"
    nbytes = len(file_header(tensors, metadata)) + sum(tensor.num_bytes for tensor in tensors)
    kept = _begins_with(path, file_header(tensors, metadata), nbytes)
    with file_errors(path):
        if not kept:
            with placed(path) as temporary:
                write_file(temporary, tensors, metadata)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Written(path.relative_to(out).as_posix(), nbytes, digest, kept)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a JSON file at once."""
    with file_errors(path), placed(path) as temporary:
        temporary.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other exports out of a folder; the system lets go of it when the process dies.

    Raises StoreError when another one is at work there.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"{folder}: another export is writing there; wait for it, or name another folder"
            ) from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def placed(path: Path) -> Iterator[Path]:
    """A temporary sibling of ``path`` that durably takes its place when the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """The operating system's errors as StoreError naming the file."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be written ({error.strerror or error}); check the disk and its space, "
            "then run the export again: it goes on where it stopped"
        ) from error


def _begins_with(path: Path, header: bytes, nbytes: int) -> bool:
    """Whether a file of that size begins with ``header``: files take their place only whole."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size == nbytes and file.read(len(header)) == header
    except FileNotFoundError:
        return False
