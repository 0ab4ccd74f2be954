"""What the folders of chunks held when they were looked at last, so that only changes are read.

A chunk's folder changes its time with every attempt, record and lock that comes or goes in it, and
the bytes under a committed attempt never change. So of a folder that held nothing but a record and
the attempt it names, and has the same time since, everything is known. What is known is kept in
``census/<16 digits of fingerprint>[-secret]/<2 of key>.json``, with a digest; a file that is not as
written counts as none, and nothing is deleted by what it says: a record is read before it goes.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from jaxrag.kv.store.keys import ID_DIGITS, is_hex
from jaxrag.kv.store.ledger import StoredChunk
from jaxrag.kv.store.namespace import COMMIT, Namespace
from jaxrag.kv.store.record import Record

_FOLDER = "census"
_SETTLED_SECONDS = 2.0  # a folder this young may change again within one tick of the clock


class Census:
    """The chunks of a namespace in a local directory, in 256 parts by the first digits of keys."""

    def __init__(self, space: Namespace, root: Path) -> None:
        """``root`` is the directory of the repository."""
        self._space = space
        self._root = root
        self._known: dict[str, dict[str, tuple[int, StoredChunk]]] = {}

    def times(self, part: str) -> dict[str, int]:
        """The keys that have folders, ascending, and the times of these."""
        found = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder(part)) as entries:
            for entry in entries:
                if is_hex(entry.name, ID_DIGITS):
                    with contextlib.suppress(FileNotFoundError):
                        found[entry.name] = entry.stat().st_mtime_ns
        return dict(sorted(found.items()))

    def known(self, part: str, times: Mapping[str, int]) -> dict[str, StoredChunk]:
        """Of folders that did not change since they were looked at, what they hold."""
        if part not in self._known:
            self._known[part] = self._read(part)
        known = self._known[part]
        same = (key for key, at in times.items() if key in known and known[key][0] == at)
        return {key: known[key][1] for key in same}

    def learn(self, part: str, times: Mapping[str, int], found: Mapping[str, Record]) -> None:
        """Keep what was found of folders that had these times before; others are forgotten."""
        kept = {key: (times[key], stored) for key, stored in self.known(part, times).items()}
        settled = time.time_ns() - int(1e9 * _SETTLED_SECONDS)
        for key, record in found.items():
            if times.get(key, settled) < settled and self._is_clean(part, key, record, times[key]):
                kept[key] = (times[key], StoredChunk.of(record))
        if kept != self._known[part]:
            self._known[part] = kept
            self._write(part)

    def _is_clean(self, part: str, key: str, record: Record, at: int) -> bool:
        """Whether a folder holds a record and its attempt, and has its time still."""
        folder = self._folder(part) / key
        try:
            return set(os.listdir(folder)) == {COMMIT, record.attempt} and (
                os.stat(folder).st_mtime_ns == at
            )
        except OSError:
            return False

    def _folder(self, part: str) -> Path:
        return self._root / self._space.prefix / part

    def _file(self, part: str) -> Path:
        """What is believed depends on the secret, so each has files of its own."""
        sealer = self._space.sealer
        secret = "" if sealer is None else f"-{sealer.name[:16]}"
        folder = f"{self._space.fingerprint[:16]}{secret}"
        return self._root / _FOLDER / folder / f"{part}.json"

    def _read(self, part: str) -> dict[str, tuple[int, StoredChunk]]:
        try:
            digest, _, data = self._file(part).read_bytes().partition(b"\n")
            if digest != xxhash.xxh3_64_hexdigest(data).encode():
                return {}
            table: dict[str, Any] = json.loads(data)
        except (OSError, ValueError):
            return {}
        return {key: (at, StoredChunk(*values)) for key, (at, *values) in table.items()}

    def _write(self, part: str) -> None:
        """Write a part; where that is not possible it is read again the next time."""
        chunks = {
            key: (
                at,
                *(getattr(stored, field.name) for field in dataclasses.fields(StoredChunk)),
            )
            for key, (at, stored) in self._known[part].items()
        }
        data = json.dumps(chunks).encode()
        path = self._file(part)
        new = path.with_name(f"{path.name}-{os.getpid()}")
        with contextlib.suppress(OSError):
            if not chunks:
                path.unlink(missing_ok=True)
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(xxhash.xxh3_64_hexdigest(data).encode() + b"\n" + data)
            os.replace(new, path)
