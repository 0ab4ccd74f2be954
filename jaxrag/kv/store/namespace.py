"""The chunks of one fingerprint in a repository: paths, records, commits and removals.

Layout under the location::

    jaxrag.json                                 format of the repository, written once
    layouts/<fingerprint>.json                  sizes and dtype of the chunks of one model
    kv/<16 digits of fingerprint>/<2 of key>/<key>/
        <attempt>/zarr.json, c/0/0/0/<rank>/0   the KV, a zarr v3 array of one file per rank
        <attempt>/aux/<name>/zarr.json, c/...   an auxiliary array
        commit.json                             the record, written last: the commit
"""

import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from jaxrag.base.errors import ChunkAbsent, ChunkCorrupt, ChunkMissing, StoreError
from jaxrag.kv.store.backend import Backend
from jaxrag.kv.store.grid import Grid, aux_grid, kv_grid
from jaxrag.kv.store.keys import ID_DIGITS, is_hex
from jaxrag.kv.store.layout import KVLayout
from jaxrag.kv.store.ledger import Ledger
from jaxrag.kv.store.reading import Lookup
from jaxrag.kv.store.record import MAX_SEALED_BYTES, Record, read_record
from jaxrag.kv.store.seal import Sealer

COMMIT = "commit.json"
SWEPT = "swept-"  # opens the name of a mark in an attempt: gc takes it, it must not be committed

_RECORDS_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True)
class Namespace:
    """Where the chunks of one fingerprint are, and what may be found there."""

    backend: Backend
    fingerprint: str
    layout: KVLayout
    max_tokens: int = sys.maxsize
    sealer: Sealer | None = None  # what its seals are believed, and made, by
    ledger: Ledger | None = None  # told of every record that comes or goes

    @property
    def prefix(self) -> str:
        """The path that all chunks are under."""
        return f"kv/{self.fingerprint[:16]}/"

    def folders(self, part: str) -> list[str]:
        """The keys of a part, its first two digits, that have folders in a directory."""
        assert self.backend.directory is not None
        try:
            names = os.listdir(self.backend.directory / self.prefix / part)
        except FileNotFoundError:
            return []
        return [name for name in names if is_hex(name, ID_DIGITS)]

    def changing(
        self, key: str
    ) -> contextlib.AbstractContextManager[Callable[[Record | None], None]]:
        """``Ledger.changing``, where there is a ledger."""
        if self.ledger is None:
            return contextlib.nullcontext(lambda record: None)
        return self.ledger.changing(key)

    def listings(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """Every (key, path under the chunk), in listings of one prefix each, ascending.

        Folders are listed in small parts, an object store in one go: there a listing is a request,
        and its client asks for one page of it after the other.
        """
        if self.backend.directory is None:
            prefixes = [self.prefix]
        else:
            prefixes = [f"{self.prefix}{first:02x}/" for first in range(256)]
        for prefix in prefixes:
            found = []
            for path in self.backend.paths(prefix):
                parts = f"{prefix}{path}".removeprefix(self.prefix).split("/", 2)
                if len(parts) == 3 and is_hex(parts[1], ID_DIGITS):
                    found.append((parts[1], parts[2]))
            yield prefix, found

    def chunk(self, key: str) -> str:
        """The path that everything of a key is under."""
        return f"{self.prefix}{key[:2]}/{key}/"

    def commit(self, key: str) -> str:
        """The path of a key's record."""
        return self.chunk(key) + COMMIT

    def attempt(self, key: str, attempt: str) -> str:
        """The path that the bytes of one attempt are under."""
        return f"{self.chunk(key)}{attempt}/"

    def bytes_of(self, record: Record) -> str:
        """The path that the bytes of a record are under."""
        return self.attempt(record.key, record.attempt)

    def arrays(self, record: Record) -> dict[str, Grid]:
        """The arrays of a record by their paths."""
        base = self.bytes_of(record)
        found = {base: kv_grid(self.layout, record.tokens, record.ways)}
        for name, array in record.aux.items():
            found[aux_path(base, name)] = aux_grid(array.shape, array.dtype, len(array.xxh3))
        return found

    def files(self, record: Record) -> list[str]:
        """Every path that the bytes of a record are at."""
        return [path + name for path, grid in self.arrays(record).items() for name in grid.paths()]

    def find(self, keys: Sequence[str]) -> dict[str, Lookup]:
        """Per key its record or why there is none."""
        values = self.backend.read_many([self.commit(key) for key in keys], MAX_SEALED_BYTES)
        records: dict[str, Lookup] = {}
        for key, data in zip(keys, values, strict=True):
            if data is None:
                records[key] = ChunkAbsent(f"chunk {key}: not in {self.backend.location}")
                continue
            try:
                records[key] = read_record(
                    data, key, self.fingerprint, self.layout, self.max_tokens, self.sealer
                )
            except ChunkCorrupt as error:
                records[key] = error
        return records

    def keys(self) -> Iterator[str]:
        """Every key with a record, ascending, streamed."""
        for _, paths in self.listings():
            yield from (key for key, rest in paths if rest == COMMIT)

    def find_all(self) -> Iterator[Lookup]:
        """What ``find`` tells of every key with a record, streamed."""
        keys = self.keys()
        while batch := tuple(itertools.islice(keys, _RECORDS_AT_ONCE)):
            yield from self.find(batch).values()

    def complete(self, record: Record) -> bool:
        """Whether every byte of a record that was committed is there to stay.

        Asked by its writer after the commit. ``jaxrag.kv.store.sweep`` marks an attempt before it
        looks for a commit, and removes the mark last. So either it saw this commit and keeps the
        attempt, or its mark or the lack of a file is seen here.
        """
        base = self.bytes_of(record)
        if any(name.startswith(SWEPT) for name in self.backend.names(base)):
            return False
        return self.backend.holds(base, self.files(record))  # not before the marks

    def delete(
        self,
        key: str,
        attempt: str | None = None,
        keep: Callable[[Record], bool] | None = None,
    ) -> Record | None:
        """Remove the commit of a key, then its bytes; the record if there was one to remove.

        The commit goes first, so that no reader finds a record whose bytes are being removed. The
        bytes of a record that cannot be read are left to gc, as are those of writers at work.

        Args:
            attempt: spares a record that names another.
            keep: asked once more when no reader can find the record; true puts it back.
        """
        commit = self.commit(key)
        generation = self.backend.generation(commit)
        record = self.find([key])[key]
        if isinstance(record, ChunkMissing):
            return None
        if isinstance(record, Record) and attempt not in (None, record.attempt):
            return None
        with self.changing(key) as note:
            if not self.backend.delete_if(commit, generation):
                return None  # somebody else removed or replaced it
            if not isinstance(record, Record):
                note(None)
                return None
            if keep is not None and keep(record) and self._restore(record):
                return None
            note(None)
        self.discard(key, record.attempt)
        return record

    def _restore(self, record: Record) -> bool:
        """Put back a record that was removed; False when another took its place."""
        commit = self.commit(record.key)
        absent = self.backend.generation(commit)
        if not isinstance(self.find([record.key])[record.key], ChunkMissing):
            return False
        return self.backend.write_if(commit, record.to_json(), absent) is not None

    def discard(self, key: str, attempt: str) -> None:
        """Remove an attempt that no record names; what cannot be removed stays invisible."""
        with contextlib.suppress(StoreError):
            self.backend.delete_prefix(self.attempt(key, attempt))


def aux_path(attempt_path: str, name: str) -> str:
    """The path of an auxiliary array under its attempt's."""
    return f"{attempt_path}aux/{name}/"
