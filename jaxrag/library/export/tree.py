"""A zarr v3 hierarchy of chunks: what the store holds, as arrays that any zarr reader opens."""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrag.kv.store import KVStore, Record
from jaxrag.kv.store.backend import Backend
from jaxrag.kv.store.record import SCALE
from jaxrag.library.export.bundle import Bundle, Placement, describe, read
from jaxrag.library.export.files import Written, file_errors

TREE = "chunks.zarr"


def write_tree(
    out: Path,
    store: KVStore,
    bundle: Bundle,
    records: Sequence[Record],
    placement: Placement,
    settings: Mapping[str, Any],
) -> Written:
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
    return Written(folder.relative_to(out).as_posix(), nbytes, None, kept)


def _write_arrays(
    target: Backend, store: KVStore, bundle: Bundle, records: Sequence[Record]
) -> None:
    layout = dataclasses.replace(store.layout, stored="native")  # get_many dequantises
    attributes = {"dtype": layout.dtype, "rope_applied": False}
    target.write_array("kv/", layout, read(store, bundle), attributes)
    if len(records) > 1:  # auxiliary arrays belong to one chunk, not to several side by side
        return
    names = [name for name in records[0].aux if name != SCALE]
    for name in names:
        array = store.aux(records[0].key, name)
        target.write_aux(f"aux/{name}/", array, {"dtype": records[0].aux[name].dtype})
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
