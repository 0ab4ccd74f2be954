"""The header of a GGUF file: its metadata, and which tensors lie where.

Nothing of it is believed: counts, lengths and offsets are held against the size of the file before
anything is made of them, so that what is read is never larger than a few times the file. Arrays are
passed over and only read when they are asked for.
"""

import dataclasses
import functools
import mmap
import reprlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.errors import ModelError

VERSIONS = (2, 3)
_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_FLOAT = 6
_MOST_ENTRIES = 1 << 16  # keys, and tensors
_MOST_STRINGS = 1 << 22  # of one array: no vocabulary and no merges are larger
_LONGEST_NAME = 1 << 7  # bytes of a key or of a tensor's name
_FIX = "download or copy it again"


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of the metadata, still in the file."""

    kind: int  # of its items
    count: int
    start: int  # byte of the file


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor as the header describes it; nothing but its name and dimensions is checked.

    Attributes:
      shape: rows first, so the reverse of the file's order.
      kind: number of its type.
      start: first byte in the file.
    """

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says of itself. Make one with ``read_header``.

    Attributes:
      metadata: numbers, texts and arrays by key.
      tensors: by name, in the file's order.
      alignment: of which each tensor's place is a multiple.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    alignment: int

    def get(self, key: str, default: Any = None) -> Any:
        """A number or a text; ``default`` where the key is absent. Raises ModelError."""
        value = self.metadata.get(key, default)
        if isinstance(value, StoredArray):
            raise ModelError(f"{self.path}: {key} is an array, expected one value")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        """A text; ``default`` where the key is absent. Raises ModelError."""
        value = self.get(key, default)
        if not (value is None or isinstance(value, str)):
            raise ModelError(f"{self.path}: {key}={value!r}: expected a text")
        return value

    def number(self, key: str, default: float | None = None) -> Any:
        """A number, true or false; raises ModelError where there is neither it nor a default."""
        value = self.get(key, default)
        if value is None or isinstance(value, str):
            said = "is missing" if value is None else f"is {reprlib.repr(value)}"
            raise ModelError(f"{self.path}: {key} {said}, expected a number")
        return value

    def texts(self, key: str) -> list[str]:
        """An array of texts, [] where the key is absent. Raises ModelError."""
        array = self._array(key, (_STRING,))
        if array is None:
            return []
        if array.count > _MOST_STRINGS:
            raise ModelError(
                f"{self.path}: {key} has {array.count} texts, expected at most {_MOST_STRINGS}"
            )
        unpack, at, found = struct.Struct("<Q").unpack_from, array.start, []
        with self.path.open("rb") as file, _mapped(file, self.path) as data:
            for _ in range(array.count):
                start = at + 8
                at = start + unpack(data, at)[0]
                found.append(_decoded(data[start:at], self.path, key))
        return found

    def numbers(self, key: str) -> np.ndarray[Any, np.dtype[Any]]:
        """An array of numbers, empty where the key is absent. Raises ModelError."""
        array = self._array(key, tuple(_NUMBERS))
        if array is None:
            return np.zeros(0, np.float32)
        dtype = np.dtype("<" + _NUMBERS[array.kind])
        with self.path.open("rb") as file:
            file.seek(array.start)
            return np.frombuffer(file.read(array.count * dtype.itemsize), dtype)

    def _array(self, key: str, kinds: tuple[int, ...]) -> StoredArray | None:
        value = self.metadata.get(key)
        if not (value is None or (isinstance(value, StoredArray) and value.kind in kinds)):
            expected = "texts" if kinds == (_STRING,) else "numbers"
            raise ModelError(f"{self.path}: {key}: expected an array of {expected}")
        return value


class _Cursor:
    """A place in a mapped file; what would lie beyond its end is refused."""

    def __init__(self, data: mmap.mmap, path: Path, at: int = 0) -> None:
        self._data, self._size, self._path = data, len(data), path
        self.at = at

    def skip(self, count: int) -> int:
        """The place before ``count`` bytes, which are passed over."""
        start, end = self.at, self.at + count
        if end > self._size:
            raise ModelError(
                f"{self._path}: truncated: its header asks for {count} bytes from byte {start}, "
                f"and it has {self._size}; {_FIX}"
            )
        self.at = end
        return start

    def number(self, kind: str) -> Any:
        """One little-endian number of a ``struct`` format."""
        return struct.unpack_from("<" + kind, self._data, self.skip(struct.calcsize(kind)))[0]

    def text(self, what: str, longest: int | None = None) -> str:
        """A string; ``what`` names it in errors."""
        length = self.number("Q")
        if longest is not None and length > longest:
            raise ModelError(
                f"{self._path}: {what} has {length} bytes, expected at most {longest}; {_FIX}"
            )
        start = self.skip(length)
        return _decoded(self._data[start : self.at], self._path, what)

    def value(self, key: str) -> Any:
        """What follows the name of a key."""
        kind = self.number("I")
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY:
            return self.array(key)
        number = self.number(self._format(kind, key))
        # as it was written: 1e-05, not 9.999999747378752e-06
        return float(str(np.float32(number))) if kind == _FLOAT else number

    def array(self, key: str) -> StoredArray:
        """An array, which is passed over."""
        kind, count = self.number("I"), self.number("Q")
        start = self.at
        if kind != _STRING:
            self.skip(count * struct.calcsize(self._format(kind, key)))
        elif 8 * count > self._size:
            self.skip(8 * count)
        else:
            unpack, data = struct.Struct("<Q").unpack_from, self._data
            try:
                for _ in range(count):
                    self.at += 8 + unpack(data, self.at)[0]
            except (struct.error, OverflowError):
                self.skip(8)
            self.skip(0)
        return StoredArray(kind, count, start)

    def _format(self, kind: int, key: str) -> str:
        if kind not in _NUMBERS:
            nested = "an array of arrays" if kind == _ARRAY else f"of type {kind}"
            raise ModelError(
                f"{self._path}: {key!r} is {nested}; numbers, texts and arrays of them are read"
            )
        return _NUMBERS[kind]


def _decoded(value: bytes, path: Path, what: str) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise ModelError(
            f"{path}: {what} holds {reprlib.repr(value)}, which is no UTF-8; {_FIX}"
        ) from None


def is_gguf(path: str | Path) -> bool:
    """Whether a model is a file; whether it is GGUF is said as its header is read."""
    return Path(path).is_file()


def read_header(path: str | Path) -> Header:
    """Read the header of a file.

    Raises ModelError for a file of another kind, version or byte order, and for one whose header
    is truncated, asks for more than the file has, or repeats a name.
    """
    path = Path(path)
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] != _MAGIC or len(start) < 8:
            raise ModelError(
                f"{path}: no GGUF file, it begins with {start[:4]!r}; a model is a GGUF file, a "
                "Hugging Face directory or a jaxrag checkpoint"
            )
        version = int.from_bytes(start[4:], "little")
        if version not in VERSIONS:
            swapped = int.from_bytes(start[4:], "big") in VERSIONS
            raise ModelError(
                f"{path}: GGUF version {version}, expected 2 or 3"
                + (" (it is big-endian, and little-endian ones are read)" if swapped else "")
            )
        with _mapped(file, path) as data:
            return _read(path, _Cursor(data, path, 8))


def _mapped(file: Any, path: Path) -> mmap.mmap:
    try:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from None


def _read(path: Path, cursor: _Cursor) -> Header:
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    if max(num_tensors, num_keys) > _MOST_ENTRIES:
        raise ModelError(
            f"{path}: {num_tensors} tensors and {num_keys} keys, expected at most {_MOST_ENTRIES} "
            f"of each; {_FIX}"
        )
    once = functools.partial(_once, path)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = once(metadata, cursor.text("a key", _LONGEST_NAME))
        metadata[key] = cursor.value(key)
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = once(entries, cursor.text("the name of a tensor", _LONGEST_NAME))
        dimensions = cursor.number("I")
        if not 1 <= dimensions <= 4:
            raise ModelError(
                f"{path}: {name!r} has {dimensions} dimensions, expected 1 to 4; {_FIX}"
            )
        shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
        entries[name] = (shape, cursor.number("I"), cursor.number("Q"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise ModelError(
            f"{path}: general.alignment={alignment!r}: expected a power of 2 from 8 on"
        )
    first = -(-cursor.at // alignment) * alignment
    tensors = {
        name: TensorEntry(shape, kind, first + offset)
        for name, (shape, kind, offset) in entries.items()
    }
    return Header(path, metadata, tensors, alignment)


def _once(path: Path, known: Mapping[str, Any], name: str) -> str:
    if name in known:
        raise ModelError(f"{path}: {name!r} stands in its header twice; {_FIX}")
    return name
