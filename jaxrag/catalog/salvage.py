"""A damaged catalog is made whole again from what its file still tells.

Every page ends in a checksum, so it is known which are as they were written. Where single bits are
flipped, the checksum also tells which, and nothing is lost. Where more is wrong, the rows of all
other pages are read from their bytes, without the tree above them, held against their digests, and
put into a new file. Documents that lost a row are dropped and named.
"""

import contextlib
import dataclasses
import os
from collections.abc import Collection
from pathlib import Path

import numpy as np

from jaxrag.catalog.catalog import Catalog
from jaxrag.catalog.database import PAGE_BYTES, damaged, is_open, remove_files
from jaxrag.errors import StoreError
from jaxrag.types import HostArray

_WORDS = PAGE_BYTES // 4 - 2  # of a page, under its checksum
_USABLE = PAGE_BYTES - 8
_PAGES = 4096  # that are checked at once
_GAP = 1 << 24  # chunk ids that are left out where reservations may be lost
_INDEXED = 256  # chunks whose texts are indexed together
# Where SQLite locks a file, from its pending byte to the last of its shared ones.
_LOCKS = (0x40000000, 512)


@dataclasses.dataclass(frozen=True)
class Salvage:
    """What became of a damaged catalog.

    Attributes:
      mended: pages whose flipped bits were set right.
      lost: pages that nothing could be read of.
      documents: that are whole.
      dropped: ids of documents that lost rows, to be added again.
      nameless: documents that lost all of theirs, of which only the number is known; 0 also where
        not even that is.
      kept: where the damaged file is now.
    """

    mended: int
    lost: int
    documents: int
    dropped: tuple[str, ...]
    nameless: int
    kept: Path


def salvage(path: Path, needed: Collection[str]) -> Salvage | None:
    """Make a damaged catalog whole; None where it is as it was written, or cannot be told.

    The damaged file is kept beside it as ``catalog.sqlite.damaged``. Whoever is killed meanwhile
    leaves one or the other. Nothing is done to a catalog of format 3, which has no checksums, nor
    while anybody has the catalog open.

    Args:
      path: the file.
      needed: names of settings without which a catalog cannot be used.

    Raises:
      DamagedCatalogError: too little of it is left.
      StoreError: files cannot be written.
    """
    if is_open(path):
        return None
    _fold(path)
    new = path.with_name(f"{path.name}-salvage")
    try:
        with open(path, "r+b") as file:  # the only descriptor: closing another drops the lock
            if not _lock(file.fileno()):
                return None
            with _bytes_of(path, file.fileno()) as data:
                found = _salvage(path, data, new, needed)
            if found is not None:
                _replace(path, new, found.kept)
            return found
    except OSError as error:
        raise StoreError(
            f"catalog {path} cannot be repaired: {error}; check the disk, its free space and your "
            "permissions"
        ) from error
    finally:
        remove_files(new)


def _salvage(path: Path, data: HostArray, new: Path, needed: Collection[str]) -> Salvage | None:
    """Write to ``new`` what can be saved of the pages, [P, PAGE_BYTES] uint8, mended in place."""
    if not len(data):
        raise damaged(path, "it is empty, nothing can be read of it")
    bad = [number for number in range(len(data)) if False]
    bad = _wrong(data)
    if len(bad) == len(data) and _is_unchecked(data[0]):
        return None
    left = [number for number in bad if not _mend(data[number])]
    mended = len(bad) - len(left)
    kept = path.with_name(f"{path.name}.damaged")
    cut = 0 in left or len(data) < int.from_bytes(data[0, 28:32].tobytes(), "big")
    if not left and not cut:
        if not mended:
            return None
        with open(new, "wb") as out:
            out.write(data.tobytes())
            os.fsync(out.fileno())
        log = path.with_name(f"{path.name}-wal")
        if log.exists():
            new.with_name(f"{new.name}-wal").write_bytes(log.read_bytes())
        with contextlib.closing(Catalog.open(new)) as catalog:
            catalog.checkpoint()
            return Salvage(mended, 0, catalog.counts()["documents"], (), 0, kept)
    whole = np.ones(len(data), bool)
    whole[left] = False
    rows = Rows.read(data, whole)
    dropped, nameless = rows.rebuild(path, new, needed)
    return Salvage(mended, len(left), len(rows.documents), dropped, nameless, kept)
