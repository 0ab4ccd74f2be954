"""Chunk KV in a directory or an object store, shared by any number of processes.

Layout under the location::

    jaxrag.json                                 format of the repository, written once
    layouts/<fingerprint>.json                  sizes and dtype of the chunks of one model
    kv/<16 digits of fingerprint>/<2 of key>/<key>/
        <attempt>/zarr.json, c/0/0/0/0/0        the bytes, a zarr v3 array
        commit.json                             the record, written last: the commit

A writer fills a directory of its own and then creates ``commit.json`` if there is none. Until then
nobody can see the bytes; afterwards nobody changes them. A writer that dies leaves an attempt that
no record names.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from numpy.typing import NDArray

from jaxrag.errors import ChunkCorrupt, ChunkMissing, StoreError
from jaxrag.store.assemble import Found, require_choice, verify_digests
from jaxrag.store.backend import Backend, IOMode, ReadFuture
from jaxrag.store.base import DEFAULT_INFLIGHT_BYTES, DEFAULT_MAX_TOKENS, KVStore, Stats
from jaxrag.store.keys import ID_DIGITS, is_hex
from jaxrag.store.record import (
    ATTEMPT_DIGITS,
    FORMAT,
    MAX_RECORD_BYTES,
    KVLayout,
    Provenance,
    Record,
    new_record,
    parse_object,
    read_record,
)
from jaxrag.store.writer import ChunkWriter, PutResult

Mode = Literal["r", "rw"]

_ROOT = "jaxrag.json"
_ROOT_FIELDS = {"repository": "jaxrag chunks", "format": FORMAT}
_COMMIT = "commit.json"
_RECORDS_AT_ONCE = 1024
_VERIFY_THREADS = 8


class ChunkStore(KVStore):
    """A repository of chunk KV as seen by one model: its fingerprint, sizes and dtype."""

    def __init__(
        self, backend: Backend, fingerprint: str, layout: KVLayout, mode: Mode, max_tokens: int
    ) -> None:
        """Use ``ChunkStore.open``, which checks what is there first."""
        super().__init__(fingerprint, layout, max_tokens)
        self.mode = mode
        self._backend = backend
        threads = min(_VERIFY_THREADS, os.cpu_count() or 1)
        self._verifiers = concurrent.futures.ThreadPoolExecutor(threads, "jaxrag-verify")

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str],
        fingerprint: str,
        layout: KVLayout,
        *,
        mode: Mode = "r",
        io_mode: IOMode = "memmap",
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> "ChunkStore":
        """Open a repository; with mode "rw" it is created where none is.

        Args:
            location: a directory, or a URL that TensorStore can open.
            fingerprint: ``keys.fingerprint`` of the model and its settings.
            layout: the sizes and dtype that every chunk must have.
            mode: "r" changes nothing on disk; "rw" may put.
            io_mode: "memmap" maps files; "default" reads them, which is slower and turns the I/O
                errors of a network file system into exceptions instead of signals.
            max_tokens: largest chunk to accept, in tokens; longer records are refused unread.

        Raises:
            StoreError: no repository (mode "r"), one of another format, one whose chunks of this
                fingerprint have other sizes, or a location that cannot be read or written.
        """
        require_choice(mode, Mode, "mode")
        backend = Backend(location, io_mode)
        store = cls(backend, fingerprint, layout, mode, max_tokens)
        directory = backend.directory
        if directory and os.path.exists(directory) and not os.path.isdir(directory):
            raise StoreError(f"{backend.location} is a file: expected a directory")
        root = store._declare(_ROOT, _ROOT_FIELDS)
        if root is None:
            raise StoreError(
                f"{backend.location} holds no chunk repository (no {_ROOT}): expected one; open "
                "with mode 'rw' to create it"
            )
        if root != _ROOT_FIELDS:
            raise StoreError(
                f"{backend.location}: {_ROOT} is {root}, expected {_ROOT_FIELDS}: written by "
                "another version or program"
            )
        declared = store._declare(_layout_path(fingerprint), _layout_fields(fingerprint, layout))
        if declared is None:
            raise StoreError(
                f"{backend.location} holds no chunks of fingerprint {fingerprint}: ingest with "
                "this model first"
            )
        if declared != _layout_fields(fingerprint, layout):
            raise StoreError(
                f"{backend.location}: chunks of fingerprint {fingerprint} are {declared}, "
                f"expected {_layout_fields(fingerprint, layout)}"
            )
        return store

    @property
    def writable(self) -> bool:
        """Whether the store was opened with mode "rw"."""
        return self.mode == "rw"

    def writer(self, max_inflight_bytes: int = DEFAULT_INFLIGHT_BYTES) -> ChunkWriter:
        """A context manager that puts in the background, at most so many bytes at a time."""
        self._require_writable()
        return super().writer(max_inflight_bytes)

    def keys(self) -> Iterator[str]:
        """Every key committed under the fingerprint, ascending, streamed."""
        return self._keys(self.fingerprint)

    def stats(self) -> dict[str, Stats]:
        """What is committed, per fingerprint; reads every commit record."""
        result = {}
        for name in self._backend.paths("layouts/"):
            fingerprint = name.removesuffix(".json")
            fields = self._read_object(_layout_path(fingerprint))
            if fields is not None:
                result[fingerprint] = self._count(fingerprint, _parse_layout(fingerprint, fields))
        return result

    def _put(self, key: str, kv: NDArray[Any], record: Provenance, replace: bool) -> PutResult:
        self._require_writable()
        commit = _chunk_path(self.fingerprint, key) + _COMMIT
        # The generation is read before the record: whoever commits in between makes ours stale.
        generation = self._backend.generation(commit)
        if not replace and isinstance(self._find([key])[key], Record):
            return PutResult(won=False, attempt=None)
        attempt = secrets.token_hex(ATTEMPT_DIGITS // 2)
        directory = f"{_chunk_path(self.fingerprint, key)}{attempt}/"
        text = new_record(key, attempt, kv, self.layout.dtype, record).to_json()
        attributes = {"jaxrag": json.loads(text), "rope_applied": False}
        try:
            self._backend.write_array(directory, self.layout, kv, attributes)
        except StoreError:
            self._discard(directory)
            raise
        # An error of the commit may hide that it happened, so then the attempt has to stay.
        if self._backend.write_if(commit, text, generation):
            return PutResult(won=True, attempt=attempt)
        self._discard(directory)
        return PutResult(won=False, attempt=None)

    def _find(self, keys: Sequence[str]) -> dict[str, Found]:
        return self._read_records(keys, self.fingerprint, self.layout, self.max_tokens)

    def _load(
        self, wanted: Sequence[tuple[Record, NDArray[Any]]], verify: bool
    ) -> list[ChunkMissing | ChunkCorrupt | None]:
        def finish(
            read: ReadFuture, record: Record, view: NDArray[Any]
        ) -> ChunkMissing | ChunkCorrupt | None:
            refused = self._backend.finish_read(read, record.key)
            if refused is None and verify:
                refused = verify_digests(record, view)
            return refused

        tasks = []
        for record, view in wanted:
            path = f"{_chunk_path(self.fingerprint, record.key)}{record.attempt}/"
            read = self._backend.start_read(path, self.layout, view)
            tasks.append(self._verifiers.submit(finish, read, record, view))
        concurrent.futures.wait(tasks)  # all: until its read is done a view is not the caller's
        return [task.result() for task in tasks]

    def _read_records(
        self, keys: Sequence[str], fingerprint: str, layout: KVLayout, max_tokens: int
    ) -> dict[str, Found]:
        paths = [_chunk_path(fingerprint, key) + _COMMIT for key in keys]
        found: dict[str, Found] = {}
        for key, data in zip(keys, self._backend.read_many(paths, MAX_RECORD_BYTES), strict=True):
            if data is None:
                found[key] = ChunkMissing(f"chunk {key}: not in {self._backend.location}")
                continue
            try:
                found[key] = read_record(data, key, fingerprint, layout, max_tokens)
            except ChunkCorrupt as error:
                found[key] = error
        return found

    def _keys(self, fingerprint: str) -> Iterator[str]:
        for first in range(256):  # one small listing at a time, however many chunks there are
            prefix = f"{_namespace(fingerprint)}{first:02x}/"
            for path in self._backend.paths(prefix):
                key, _, rest = path.partition("/")
                if rest == _COMMIT and is_hex(key, ID_DIGITS):
                    yield key

    def _count(self, fingerprint: str, layout: KVLayout) -> Stats:
        chunks = tokens = corrupt = 0
        for batch in itertools.batched(self._keys(fingerprint), _RECORDS_AT_ONCE):
            for found in self._read_records(batch, fingerprint, layout, sys.maxsize).values():
                if isinstance(found, Record):
                    chunks += 1
                    tokens += found.tokens
                else:  # a missing record was removed since it was listed
                    corrupt += isinstance(found, ChunkCorrupt)
        return Stats(chunks, tokens, layout.nbytes(tokens), corrupt)

    def _declare(self, path: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        """The JSON object at ``path``; where there is none, ``fields`` are written if we may."""
        present = self._read_object(path)
        if present is not None or self.mode == "r":
            return present
        text = json.dumps(fields, indent=1).encode()
        self._backend.write_if(path, text, self._backend.generation(path))
        return self._read_object(path)  # ours, or that of a process that was faster

    def _read_object(self, path: str) -> dict[str, Any] | None:
        data = self._backend.read_many([path], MAX_RECORD_BYTES)[0]
        if data is None:
            return None
        try:
            return parse_object(data)
        except StoreError as error:
            raise StoreError(f"{self._backend.location}: {path} is {error}") from None

    def _require_writable(self) -> None:
        if self.mode != "rw":
            raise StoreError(
                f"{self._backend.location} was opened for reading: open it with mode 'rw' to write"
            )

    def _discard(self, directory: str) -> None:
        """Remove an attempt that no record names; what cannot be removed stays invisible."""
        with contextlib.suppress(StoreError):
            self._backend.delete_prefix(directory)


def _namespace(fingerprint: str) -> str:
    return f"kv/{fingerprint[:16]}/"


def _chunk_path(fingerprint: str, key: str) -> str:
    return f"{_namespace(fingerprint)}{key[:2]}/{key}/"


def _layout_path(fingerprint: str) -> str:
    return f"layouts/{fingerprint}.json"


def _layout_fields(fingerprint: str, layout: KVLayout) -> dict[str, Any]:
    return {"format": FORMAT, "fingerprint": fingerprint, **dataclasses.asdict(layout)}


def _parse_layout(fingerprint: str, fields: dict[str, Any]) -> KVLayout:
    sizes = {field.name: fields.get(field.name) for field in dataclasses.fields(KVLayout)}
    try:
        layout = KVLayout(**sizes)  # type: ignore[arg-type]  # it checks every one of them
    except StoreError as error:
        raise StoreError(f"{_layout_path(fingerprint)} is damaged: {error}") from None
    if fields != _layout_fields(fingerprint, layout):
        raise StoreError(f"{_layout_path(fingerprint)} is {fields}: expected a layout of its name")
    return layout
