"""Safetensors files: read through memory maps, slice by slice, and written tensor by tensor.

A file is an 8-byte little-endian header length, a JSON header, then the tensors' bytes back to
back. Everything the header claims is checked against the file before a tensor is handed out.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrag.base.errors import ModelError
from jaxrag.base.types import HostArray

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Buffers such as BERT's position_ids, and parts of what is quantised (mxfp4.py).
_READABLE = {**DTYPES, "I64": np.dtype(np.int64), "U8": np.dtype(np.uint8)}
MAX_HEADER_BYTES = 100_000_000  # as the reference library has it
MAX_JSON_BYTES = 64 << 20  # of any other JSON file of a model directory
_FIX = "download or copy it again"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, still on disk."""

    name: str
    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def identity(self) -> tuple[str, str]:
        """Name and type, as they are part of a digest."""
        return self.name, self.dtype.name

    @functools.cached_property
    def raw(self) -> HostArray:
        """The tensor's bytes, uint8 [num_bytes], mapped and read only."""
        return np.memmap(self.path, np.uint8, "r", self.start, (self.num_bytes,))

    def view(self) -> HostArray:
        """The tensor as an array of ``dtype`` and ``shape``, mapped and read only."""
        return self.raw.view(self.dtype).reshape(self.shape)


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a directory by name, from one file or from all files of its index.

    Raises ModelError when there are none, when a file is missing, truncated or malformed, when a
    tensor is neither float32, bfloat16, float16, int64 nor uint8, or when index and files disagree.
    """
    if (directory / SINGLE_FILE).is_file():
        return read_file(directory / SINGLE_FILE)
    index = directory / INDEX_FILE
    if not index.is_file():
        raise ModelError(
            f"{directory}: no {SINGLE_FILE} and no {INDEX_FILE}; weights in another format must be "
            "saved as safetensors first"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ModelError(f"{index}: no 'weight_map' object of file names; {_FIX}")
    tensors: dict[str, StoredTensor] = {}
    for file_name in sorted(set(weight_map.values())):
        path = directory / file_name
        if Path(file_name).name != file_name or not path.is_file():
            raise ModelError(f"{path}: missing, although {INDEX_FILE} lists it; {_FIX}")
        for name, tensor in read_file(path).items():
            if weight_map.get(name) != file_name:
                raise ModelError(f"{path}: holds {name!r}, which {INDEX_FILE} does not place there")
            tensors[name] = tensor
    lost = sorted(set(weight_map) - set(tensors))
    if lost:
        raise ModelError(
            f"{directory / weight_map[lost[0]]}: lacks {lost[0]!r}, which {INDEX_FILE} places "
            f"there; {_FIX}"
        )
    return tensors


def read_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Raises ModelError when it is truncated or malformed."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_size = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_size > size - 8:
            raise ModelError(f"{path}: truncated or not a safetensors file ({size} bytes); {_FIX}")
        if header_size > MAX_HEADER_BYTES:
            raise ModelError(
                f"{path}: its header takes {header_size} bytes, expected at most "
                f"{MAX_HEADER_BYTES}; {_FIX}"
            )
        header_bytes = file.read(header_size)
    try:
        header = json.loads(header_bytes)
        entries = {name: _entry(entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{path}: malformed safetensors header; {_FIX}") from None
    tensors = {}
    end_of_data = 0
    for name, (dtype, shape, start, end) in sorted(entries.items(), key=lambda item: item[1][2]):
        if dtype not in _READABLE:
            raise ModelError(
                f"{path}: {name!r} has dtype {dtype}; supported are {', '.join(DTYPES)} "
                "(quantized checkpoints must be dequantized first)"
            )
        tensor = StoredTensor(name, path, _READABLE[dtype], shape, 8 + header_size + start)
        if start != end_of_data or end - start != tensor.num_bytes:
            raise ModelError(f"{path}: {name!r} has inconsistent offsets; {_FIX}")
        end_of_data = end
        tensors[name] = tensor
    if 8 + header_size + end_of_data != size:
        raise ModelError(
            f"{path}: truncated: {size} bytes, its header describes "
            f"{8 + header_size + end_of_data}; {_FIX}"
        )
    return tensors


def _entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape, first and end byte of a header's entry; ValueError for other types."""
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise ValueError(entry)
    start, end = offsets
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError(entry)
    return dtype, tuple(shape), start, end


def require_weight(tensor: StoredTensor, shape: tuple[int, ...], where: Path) -> None:
    """Raise ModelError unless the tensor holds floating-point numbers in this shape."""
    if tensor.shape != shape:
        raise ModelError(
            f"{where}: tensor {tensor.name!r} has shape {list(tensor.shape)}, the config asks for "
            f"{list(shape)}"
        )
    if tensor.dtype not in DTYPES.values():
        raise ModelError(
            f"{where}: tensor {tensor.name!r} has dtype {tensor.dtype}: expected one of "
            f"{', '.join(DTYPES)}"
        )


@dataclasses.dataclass(frozen=True)
class NewTensor:
    """One tensor to write; ``values`` computes it when its turn comes."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    values: Callable[[], HostArray]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file."""
        return self.dtype.itemsize * math.prod(self.shape)


def write_file(
    path: Path, tensors: Sequence[NewTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file; one tensor is in memory at a time.

    ``metadata`` goes into the header beside the format.
    """
    with path.open("wb") as file:
        file.write(file_header(tensors, metadata or {}))
        for tensor in tensors:
            file.write(np.ascontiguousarray(tensor.values()).view(np.uint8).data)


def file_header(tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> bytes:
    """What a file with these tensors begins with, up to the first tensor; computes no values."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # aligns the data
    return len(encoded).to_bytes(8, "little") + encoded


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model directory. Raises ModelError when it is not one."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: {size} bytes, expected at most {MAX_JSON_BYTES}; {_FIX}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error}); {_FIX}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(value).__name__}; {_FIX}")
    return value
