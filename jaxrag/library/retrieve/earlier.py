"""Vectors as version 0.1.0 kept them for the indexes "exact" and "faiss": read, and no more.

::

    rows.json     {"dim": E, "format": 1, "generation": g}
    g.vectors     float32 rows of E values, one behind the other
    g.log         frames: count int64, digest of the frame, digest of this header, |count| ids
    g.ivf         of FAISS, made from the rows
    lock          held while something is written

A frame with a count n > 0 says that the next n rows of ``g.vectors`` have these ids; its digest
(xxh3-64) covers ids and rows. A frame with n < 0 forgets its ids. The last frame of an id counts;
what follows the last whole frame was left by a writer that died, and so it seems where
damage did it: the catalog tells it apart (``knowledge_base.vectors``). All numbers are
little-endian.
"""

import contextlib
import fcntl
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxrag.base.errors import StoreError, disk_errors
from jaxrag.library.retrieve.base import Ids, Vectors

FORMAT = 1
_META = "rows.json"
_HEADER = struct.Struct("<qQQ")
_SUFFIXES = (".vectors", ".log", ".ivf")


def files(folder: Path) -> list[Path]:
    """The files that there are, first the one without which the others mean nothing."""
    if not folder.is_dir():
        return []
    with disk_errors(folder):
        parts = [path for path in folder.iterdir() if path.suffix in _SUFFIXES]
    return [path for path in (folder / _META, *parts) if path.is_file()]


def read(folder: Path, dim: int) -> tuple[Ids, Vectors] | None:
    """The ids [N] that count and their vectors, float32 [N, E]; None where there are none.

    Raises StoreError for another dim or format, and for rows whose bytes do not match their
    digests.
    """
    with disk_errors(folder):
        try:
            generation = _generation(folder, dim)
            log = folder / f"{generation}.log"
            data = log.read_bytes()
            values = np.fromfile(folder / f"{generation}.vectors", "<f4")
        except FileNotFoundError as error:
            if (folder / _META).is_file():
                raise StoreError(
                    f"{folder} lacks {Path(error.filename).name}; restore the folder"
                ) from None
            return None
    vectors = values[: len(values) // dim * dim].reshape(-1, dim)
    named, added, offset = _parse(data, vectors)
    if offset < len(data) and _resumes(data, offset):
        raise StoreError(
            f"{log} or its vectors do not match their digests at byte {offset}; remove {folder} "
            "and embed again"
        )
    _, last = np.unique(named[::-1], return_index=True)
    final = np.zeros(len(named), bool)
    final[len(named) - 1 - last] = True
    live = final[added]
    return named[added][live], vectors[: len(live)][live]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other writers out, in this process and in others, also those of version 0.1.0."""
    with disk_errors(folder), open(folder / "lock", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove(folder: Path) -> None:
    """Remove the files; where this is cut short, the rest means nothing."""
    with disk_errors(folder):
        for path in files(folder):
            path.unlink(missing_ok=True)


def _generation(folder: Path, dim: int) -> int:
    data = (folder / _META).read_bytes()
    try:
        meta = json.loads(data.decode())
        found = (meta["format"], meta["dim"], int(meta["generation"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise StoreError(
            f"{folder / _META} is damaged; remove the folder and embed again"
        ) from None
    if found[0] != FORMAT:
        raise StoreError(
            f"{folder} has format {found[0]}, this version reads format {FORMAT}; remove "
            "the folder and embed again"
        )
    if found[1] != dim:
        raise StoreError(
            f"{folder} holds vectors of {found[1]} values, asked for {dim}; use the embedder it "
            "was made with"
        )
    return found[2]


def _header(data: bytes, offset: int) -> tuple[int, int] | None:
    """The count and digest of the frame that begins at ``offset``, None when none does."""
    if offset + _HEADER.size > len(data):
        return None
    count, digest, check = _HEADER.unpack_from(data, offset)
    if count == 0 or check != xxhash.xxh3_64_intdigest(data[offset : offset + 16]):
        return None
    return count, digest


def _parse(data: bytes, vectors: Vectors) -> tuple[Ids, NDArray[np.bool_], int]:
    """The ids that whole frames name, whether each was added, and where the last frame ends."""
    named, added, offset, row = [np.zeros(0, np.int64)], [np.zeros(0, bool)], 0, 0
    while (header := _header(data, offset)) is not None:
        count, digest = header
        start = offset + _HEADER.size
        if start + 8 * abs(count) > len(data) or (count > 0 and row + count > len(vectors)):
            break
        ids = np.frombuffer(data, "<i8", abs(count), start)
        actual = xxhash.xxh3_64(ids.data)
        if count > 0:
            actual.update(vectors[row : row + count].data)
            row += count
        if actual.intdigest() != digest:
            break
        named.append(ids)
        added.append(np.full(len(ids), count > 0))
        offset = start + ids.nbytes
    return np.concatenate(named), np.concatenate(added), offset


def _resumes(data: bytes, offset: int) -> bool:
    """Whether another frame begins behind the broken one: no crash leaves that, but damage does."""
    return any(_header(data, place) is not None for place in range(offset + 8, len(data), 8))
