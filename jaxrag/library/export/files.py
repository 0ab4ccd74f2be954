"""Exported files: written beside their place and renamed into it, and kept when they are there.

Chunk KV as the tensors of other programs in safetensors files, keys rotated where these want them
so, or as a zarr v3 hierarchy of what the store holds.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.base.config import ModelConfig, RopeConfig
from jaxrag.base.errors import StoreError
from jaxrag.base.shapes import bucket
from jaxrag.base.types import Array, HostArray
from jaxrag.kv.store import KVLayout, KVStore, Record
from jaxrag.kv.store.backend import Backend
from jaxrag.kv.store.grid import KV_AXES, aux_grid, kv_grid
from jaxrag.kv.store.record import SCALE
from jaxrag.library.export.bundle import Bundle, KeyPlacement, describe, read
from jaxrag.models.rope import RopeTable, place, rope_tables
from jaxrag.models.tensor_files import NewTensor, file_header, write_file

METADATA_KEY = "jaxrag"  # of the JSON record in a safetensors header
_SMALLEST_SHAPE = 256  # tokens and positions are padded to powers of two from here on
LoadKV = Callable[[], HostArray]  # [L, 2, T, K, H]; called once for every tensor
Arrange = Callable[[KVLayout, int, LoadKV], list[NewTensor]]
TREE = "chunks.zarr"


@dataclasses.dataclass(frozen=True)
class WrittenFile:
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
    placement: KeyPlacement,
    settings: Mapping[str, Any],
) -> WrittenFile:
    """Write one bundle to ``chunks/<name>.safetensors`` unless it is there as it would be.

    The header's metadata holds ``settings`` and the description of the bundle. One bundle is in
    memory at a time.
    """
    tokens = sum(record.tokens for record in records)

    @functools.cache
    def load() -> HostArray:
        kv = read(store, bundle)
        if placement.first_position is not None:
            kv[:, 0] = place_keys(kv[:, 0], placement.first_position, placement.config)
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
    return WrittenFile(path.relative_to(out).as_posix(), nbytes, digest, kept)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a JSON file at once."""
    with file_errors(path), placed(path) as temporary:
        temporary.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")


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


def place_keys(keys: HostArray, first_position: int, config: ModelConfig) -> HostArray:
    """Give keys [L, T, K, H] the positions first_position, first_position + 1, ...

    A YaRN attention factor is multiplied in. Computed in float32 and rounded once, to the dtype of
    ``keys``. Runs on the CPU, whatever accelerators there are.
    """
    layers, tokens, heads, dim = keys.shape
    padded = np.zeros((layers, bucket(tokens, _SMALLEST_SHAPE), heads, dim), keys.dtype)
    padded[:, :tokens] = keys
    last = first_position + padded.shape[1]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        table = rope_tables(config, bucket(last, _SMALLEST_SHAPE))
        return np.asarray(_place(padded, np.int32(first_position), table, config.rope))[:, :tokens]


@functools.partial(jax.jit, static_argnames=("rope",))
def _place(keys: Array, first_position: Array, table: RopeTable, rope: RopeConfig) -> Array:
    positions = first_position + jnp.arange(keys.shape[1])

    def layer(index: Array, k: Array) -> Array:
        own = table.of_layer(index)
        return place(k.astype(jnp.float32), positions, own, rope).astype(k.dtype)

    return lax.map(lambda it: layer(*it), (jnp.arange(len(keys)), keys))


def huggingface_tensors(layout: KVLayout, tokens: int, load: LoadKV) -> list[NewTensor]:
    """``layers.{i}.key`` and ``layers.{i}.value``, each [1, K, T, H].

    What ``transformers.Cache.update(key, value, i)`` takes for a batch of one.
    """
    shape = (1, layout.num_kv_heads, tokens, layout.head_dim)

    def heads_first(layer: int, which: int) -> HostArray:
        return load()[layer, which].swapaxes(0, 1)[None]

    return [
        NewTensor(
            name=f"layers.{layer}.{name}",
            dtype=layout.numpy_dtype,
            shape=shape,
            values=functools.partial(heads_first, layer, which),
        )
        for layer in range(layout.num_layers)
        for which, name in enumerate(("key", "value"))
    ]


def lmcache_tensors(layout: KVLayout, tokens: int, load: LoadKV) -> list[NewTensor]:
    """One tensor ``kv`` [2, L, T, K * H], LMCache's memory format ``KV_2LTD``."""
    width = layout.num_kv_heads * layout.head_dim
    shape = (2, layout.num_layers, tokens, width)
    return [
        NewTensor(
            name="kv",
            dtype=layout.numpy_dtype,
            shape=shape,
            values=lambda: load().swapaxes(0, 1).reshape(shape),
        )
    ]


def write_tree(
    out: Path,
    store: KVStore,
    bundle: Bundle,
    records: Sequence[Record],
    placement: KeyPlacement,
    settings: Mapping[str, Any],
) -> WrittenFile:
    """Write one chunk as the group ``chunks.zarr/<key>`` unless it stands there.

    The group's attributes hold ``settings`` and the description of the bundle. Its array ``kv`` is
    [L, 2, T, K, H], K before RoPE; the chunk's auxiliary arrays are in the group ``aux``. Elements
    are unsigned bits, and the attribute ``dtype`` says of what.
    """
    root = out / TREE
    folder = root / bundle.name
    document = _group({"jaxrag": {**settings, **describe(bundle, records)}})
    with file_errors(folder):
        _make_root(root, settings)
        kept = _holds(folder / "zarr.json", document)
        if not kept:
            temporary = out / f".{bundle.name}.tmp"
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                _write_arrays(Backend(temporary), store, bundle, records)
                _write(temporary / "zarr.json", document)
                shutil.rmtree(folder, ignore_errors=True)  # of a chunk that was replaced since
                temporary.rename(folder)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return WrittenFile(folder.relative_to(out).as_posix(), nbytes, None, kept)


def _write_arrays(
    target: Backend, store: KVStore, bundle: Bundle, records: Sequence[Record]
) -> None:
    layout = dataclasses.replace(store.layout, stored="native")  # get_many dequantises
    attributes = {"dtype": layout.dtype, "rope_applied": False}
    kv = read(store, bundle)
    target.write_array("kv/", kv_grid(layout, kv.shape[2]), kv, KV_AXES, attributes)
    if len(records) > 1:  # auxiliary arrays belong to one chunk, not to several side by side
        return
    names = [name for name in records[0].aux if name != SCALE]
    for name in names:
        array = store.aux(records[0].key, name)
        grid = aux_grid(array.shape, array.dtype.name)
        described = {"dtype": records[0].aux[name].dtype}
        target.write_array(f"aux/{name}/", grid, array, None, described)
    if names:
        target.write("aux/zarr.json", _group({}))


def _make_root(root: Path, settings: Mapping[str, Any]) -> None:
    document = _group({"jaxrag": settings})
    if not _holds(root / "zarr.json", document):
        root.mkdir(exist_ok=True)
        _write(root / "zarr.json", document)


def _group(attributes: Mapping[str, Any]) -> bytes:
    node = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    return json.dumps(node).encode()


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except FileNotFoundError:
        return False


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
