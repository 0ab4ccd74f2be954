"""TensorStore behind the chunk store: where bytes go and how a chunk's array is laid out.

A chunk is one zarr v3 array in one shard file; the inner chunk is one layer, K and V. Elements are
stored as unsigned bits, which every zarr reader opens and no conversion can alter. There is no
codec checksum: the commit record's digests are checked where the bytes arrive.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import tensorstore as ts
from numpy.typing import NDArray

from jaxrag.errors import ChunkCorrupt, ChunkMissing, StoreError
from jaxrag.store.record import KVLayout

IOMode = Literal["memmap", "default"]

ReadFuture = ts.WriteFutures  # of a write into memory

_IO_CONCURRENCY = 16  # requests in flight; TensorStore's default of 4 halves cold reads
_ERRORS = (ValueError, IndexError, NotImplementedError, OSError)  # all that TensorStore raises
_DAMAGE = ("DATA_LOSS", "FAILED_PRECONDITION", "OUT_OF_RANGE", "INVALID_ARGUMENT")
_LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}


class Backend:
    """A key-value store under one location, with the few operations that chunks need.

    Paths are relative to the location. A failed operation raises StoreError in one line.
    """

    def __init__(self, location: str | os.PathLike[str], io_mode: IOMode) -> None:
        """Bind a directory, or any key-value store URL that TensorStore knows; creates nothing."""
        self.location = os.fspath(location)
        if io_mode not in get_args(IOMode):
            raise StoreError(f"io_mode={io_mode!r}: expected one of {', '.join(get_args(IOMode))}")
        self._context = ts.Context(
            {
                "file_io_mode": {"mode": io_mode},
                "file_io_sync": True,
                "file_io_concurrency": {"limit": _IO_CONCURRENCY},
                "cache_pool": {"total_bytes_limit": 0},
            }
        )
        with self._errors("open"):
            store = ts.KvStore.open(_address(self.location), context=self._context).result()
            self._kv = store + "/" if store.path and not store.path.endswith("/") else store
            self._spec: dict[str, Any] = self._kv.spec().to_json()

    @property
    def directory(self) -> Path | None:
        """The local directory of a file store, None for any other kind."""
        return Path(self._spec["path"]) if self._spec["driver"] == "file" else None

    def generation(self, path: str) -> bytes:
        """Which value ``path`` holds at this moment, or that it holds none, for ``write_if``."""
        with self._errors(f"read {path}"):
            return self._kv.read(path).result().stamp.generation

    def read_many(self, paths: Sequence[str], limit: int) -> list[bytes | None]:
        """The values at ``paths``: None when absent, cut to ``limit + 1`` bytes when longer."""
        # A range that ends behind the value is an error, so only a longer value answers a probe.
        probes = [self._kv.read(path, byte_range=slice(0, limit + 1)) for path in paths]
        values: list[bytes | None] = [None] * len(paths)
        whole = {}
        for index, probe in enumerate(probes):
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

    def write_if(self, path: str, value: bytes, generation: bytes) -> bool:
        """Write durably if ``path`` is still at ``generation``; whether it was."""
        if not generation:  # TensorStore reads the empty generation as "whatever is there"
            raise StoreError(f"{self.location}: cannot commit {path}: its generation is unknown")
        with self._errors(f"commit {path}"):
            return bool(self._kv.write(path, value, if_equal=generation).result().generation)

    def paths(self, prefix: str) -> list[str]:
        """Every path that starts with ``prefix``, relative to it, sorted."""
        with self._errors(f"list {prefix}"):
            found = self._kv.list(_range(prefix), strip_prefix_length=len(prefix)).result()
            return sorted(path.decode() for path in found)

    def delete_prefix(self, prefix: str) -> None:
        """Remove every path that starts with ``prefix``."""
        with self._errors(f"remove {prefix}"):
            self._kv.delete_range(_range(prefix)).result()

    def write_array(
        self, path: str, layout: KVLayout, kv: NDArray[Any], attributes: dict[str, Any]
    ) -> None:
        """Write ``kv`` [L, 2, T, K, H] durably as a zarr v3 array under ``path``."""
        tokens = kv.shape[2]
        document = {
            "zarr_format": 3,
            "node_type": "array",
            **_metadata(layout, tokens),
            "dimension_names": ["layer", "kv", "token", "kv_head", "head_dim"],
            "attributes": attributes,
        }
        with self._errors(f"write {path}"):
            bits = kv.view(layout.bits_dtype)
            array = self._open_array(path, layout, tokens)
            data = array.write(bits, can_reference_source_data_indefinitely=True).commit
            header = self._kv.write(f"{path}zarr.json", json.dumps(document).encode())
            try:
                header.result()
            finally:  # the source may be reused once this returns or raises
                data.exception()
            data.result()

    def start_read(self, path: str, layout: KVLayout, out: NDArray[Any]) -> ReadFuture:
        """Begin to read the array under ``path`` straight into ``out`` [L, 2, T, K, H].

        ``out`` may be strided and belongs to the read until ``finish_read`` has returned or
        raised. It then holds what is on disk, unverified.
        """
        target = ts.array(
            out.view(layout.bits_dtype), copy=False, write=True, context=self._context
        )
        return target.write(self._open_array(path, layout, out.shape[2]))

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

    def _open_array(self, path: str, layout: KVLayout, tokens: int) -> ts.TensorStore:
        # assume_metadata: nothing that lies on disk decides a shape or an allocation. Without
        # fill_missing_data_reads=False, TensorStore serves zeros for a half-written array.
        return ts.open(
            {
                "driver": "zarr3",
                "kvstore": {**self._spec, "path": self._spec.get("path", "") + path},
                "metadata": _metadata(layout, tokens),
                "open": True,
                "assume_metadata": True,
                "fill_missing_data_reads": False,
                "store_data_equal_to_fill_value": True,
                "recheck_cached_data": False,
            },
            context=self._context,
        ).result()

    def _failure(self, action: str, error: BaseException) -> StoreError:
        return StoreError(f"{self.location}: cannot {action}: {_one_line(error)}")

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except _ERRORS as error:
            raise self._failure(action, error) from error


def _address(location: str) -> str | dict[str, str]:
    """What ``ts.KvStore.open`` takes: a URL as it is, a path as a file store."""
    if not location:
        raise StoreError("the location is empty: expected a directory or a URL")
    if "://" in location:
        return location
    return {"driver": "file", "path": f"{os.path.abspath(location)}/"}


def _metadata(layout: KVLayout, tokens: int) -> dict[str, Any]:
    """The zarr v3 metadata that decides how the bytes of [L, 2, tokens, K, H] lie in the shard."""
    shape = list(layout.shape(tokens))
    sharding = {
        "chunk_shape": [1, *shape[1:]],
        "codecs": [_LITTLE_ENDIAN],
        "index_codecs": [_LITTLE_ENDIAN, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "shape": shape,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "data_type": layout.bits_dtype.name,
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }


def _range(prefix: str) -> ts.KvStore.KeyRange:
    """All keys that start with ``prefix``, which ends in "/"; "0" is the next character."""
    return ts.KvStore.KeyRange(prefix, prefix[:-1] + "0")


def _one_line(error: BaseException) -> str:
    """TensorStore's status and innermost reason, on one line and without the paths around it."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
    status, _, detail = text.partition(": ")
    reason = detail.rpartition('": ')[2].partition(" [os_error_code")[0]
    return f"{status}: {reason}" if reason else text
