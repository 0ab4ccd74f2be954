"""Digests of an index's files, which LanceDB writes once and does not check when it reads them.

An index whose files are not those of the record is not used: every row is compared, and the next
change makes it anew. So it is as well where a process was killed between the two, and for an index
of before there was a record.
"""

import json
import os
from pathlib import Path

import xxhash

FILE = "index-files.json"
_PIECE = 1 << 22  # bytes that are read at once


def are_whole(folder: Path, indexes: Path) -> bool:
    """Whether every file below ``indexes`` is as the record in ``folder`` says."""
    known = _read(folder)
    return all(_digest(path) in (known.get(name), None) for name, path in _files(indexes).items())


def record(folder: Path, indexes: Path) -> None:
    """Record the files that there are; those that the record has are not read again."""
    known, files = _read(folder), _files(indexes)
    if known.keys() == files.keys():
        return
    found = {
        name: digest
        for name, path in sorted(files.items())
        if (digest := known.get(name) or _digest(path)) is not None
    }
    new = folder / f"{FILE}.{os.getpid()}"
    new.write_text(json.dumps({"files": found, "xxh3": _of(found)}))
    os.replace(new, folder / FILE)


def forget(folder: Path) -> None:
    """Forget the record, so that nothing is held to be whole."""
    (folder / FILE).unlink(missing_ok=True)


def _files(indexes: Path) -> dict[str, Path]:
    return {str(path.relative_to(indexes)): path for path in indexes.rglob("*") if path.is_file()}


def _read(folder: Path) -> dict[str, str]:
    """The digest of each file; none where there is no record, or it is damaged itself."""
    try:
        known = json.loads((folder / FILE).read_text())
        found = dict(known["files"])
        return found if known["xxh3"] == _of(found) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _of(found: dict[str, str]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(found, sort_keys=True).encode())


def _digest(path: Path) -> str | None:
    """The xxh3-64 of a file; None where it has gone meanwhile."""
    state = xxhash.xxh3_64()
    try:
        with open(path, "rb") as file:
            while piece := file.read(_PIECE):
                state.update(piece)
    except FileNotFoundError:
        return None
    return state.hexdigest()
