"""What an engine must know to read stored chunks: one folder, written by `jaxrag kb connector`.

``connector.json`` names the repository, the model and the parts of prompts that are stored;
``parts-<digest>.bin`` is the table by which a prompt's tokens find them. Both are replaced as
whole files, the JSON last, so that a reader has one state or the next.
"""

import contextlib
import dataclasses
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from jaxrag.base.config import RopeConfig, rope_from_dict, rope_to_dict
from jaxrag.base.errors import ConfigError, StoreError
from jaxrag.base.tables import build
from jaxrag.kv.store.layout import KVLayout

FILE = "connector.json"
VERSION = 1
FIRST = 16  # tokens that a part is looked up by; a shorter one by all that it has
_REREAD = 1.0  # seconds between two looks at the file
_BASE = np.uint64(0x9E3779B97F4A7C15)  # of the rolling hash, modulo 2**64; odd


@dataclasses.dataclass(frozen=True)
class Gate:
    """What speaks for answers from stored parts alone.

    Attributes:
      method: that was judged, by name.
      compute_last: chunks at the end that are computed.
      questions: that it was judged on; 0 where the weights were trained to read chunks apart.
    """

    method: str
    compute_last: int
    questions: int


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """What must not change while an engine runs: it was held against this at the start.

    Attributes:
      store: folder or URL of the repository.
      fingerprint: of the chunks in it.
      layout: of the chunks.
      rope: of the model.
      tokenizer: its digest, part of every key.
      weights: blake3 of each file of weights that the engine loads, by name.
      encoder: the variant of the chunks that is read.
      sealed: name of the secret that the chunks are sealed with; None without one.
    """

    store: str
    fingerprint: str
    layout: KVLayout
    rope: RopeConfig
    tokenizer: str
    weights: Mapping[str, str]
    encoder: str
    sealed: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Manifest:
    """One state of the folder.

    Attributes:
      engine: what the engine was held against.
      prefix: token ids of the prompts' common beginning, int32 [P]; may be empty.
      gates: what was judged.
      parts: the table, uint64 [5, N]: hash of the first tokens, ascending; hash of all; content id
        (20 bytes) and number of tokens (4) in three.
    """

    engine: ServedModel
    prefix: NDArray[np.int32]
    gates: tuple[Gate, ...]
    parts: NDArray[np.uint64]


def parts_table(contents: Iterable[tuple[str, NDArray[np.int32]]]) -> NDArray[np.uint64]:
    """The table of parts, each a content id and its token ids int32 [T]; each once."""
    distinct = dict(contents)
    table = np.zeros((len(distinct), 5), np.uint64)
    for row, (content, ids) in zip(table, distinct.items(), strict=True):
        sums = running(ids)
        row[0], row[1] = span_hash(sums, 0, min(FIRST, len(ids))), span_hash(sums, 0, len(ids))
        row[2:] = np.frombuffer(bytes.fromhex(content) + len(ids).to_bytes(4, "little"), np.uint64)
    return np.ascontiguousarray(table[np.argsort(table[:, 0], kind="stable")].T)


def running(ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Hashes of the first 0 .. T tokens: uint64 [T + 1]."""
    sums = np.zeros(len(ids) + 1, np.uint64)
    np.cumsum((ids.astype(np.int64) + 1).astype(np.uint64) * _powers(len(ids)), out=sums[1:])
    return sums


def span_hash(sums: NDArray[np.uint64], start: int, ends: Any) -> Any:
    """Hashes of the tokens from ``start`` to each of ``ends``, wherever they stand in a text."""
    with np.errstate(over="ignore"):
        return (sums[ends] - sums[start]) * _inverse(start)


def _powers(count: int) -> NDArray[np.uint64]:
    powers = np.full(count, _BASE)
    powers[:1] = 1
    with np.errstate(over="ignore"):
        return np.cumprod(powers, dtype=np.uint64)


def _inverse(power: int) -> np.uint64:
    return np.uint64(pow(int(_BASE), -power, 1 << 64))


def write(folder: Path, manifest: Manifest) -> None:
    """Write or replace the files of a folder. Raises StoreError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = np.ascontiguousarray(manifest.parts).tobytes()
        table = folder / f"parts-{_digest(content)}.bin"
        if not table.exists():
            _replace(table, lambda path: path.write_bytes(content))
        fields = {
            "program": "jaxrag connector",
            "version": VERSION,
            "engine": {
                **dataclasses.asdict(manifest.engine),
                "rope": rope_to_dict(manifest.engine.rope),
            },
            "prefix": manifest.prefix.tolist(),
            "gates": [dataclasses.asdict(gate) for gate in manifest.gates],
            "parts": table.name,
        }
        text = json.dumps(fields | {"digest": _digest_of(fields)}, indent=1)
        _replace(folder / FILE, lambda path: path.write_text(text, encoding="utf-8"))
        for old in folder.glob("parts-*.bin"):
            if old != table:
                old.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written ({error.strerror})") from None


def read(folder: Path) -> Manifest:
    """The state of a folder. Raises StoreError where it is none or not as it was written."""
    path = folder / FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if (fields["program"], fields["version"]) != ("jaxrag connector", VERSION):
            raise StoreError(f"{path} is of {fields['program']!r}, version {fields['version']}: "
                             f"expected jaxrag connector, version {VERSION}")  # fmt: skip
        if fields.pop("digest") != _digest_of(fields):
            raise StoreError(f"{path} is not as it was written: run `jaxrag kb connector` again")
        engine = dict(fields["engine"])
        engine["rope"] = rope_from_dict(engine["rope"], f"{path}: rope")
        engine["layout"] = KVLayout(**engine["layout"])
        gates = tuple(build(Gate, gate, f"{path}: gate") for gate in fields["gates"])
        content = (folder / fields["parts"]).read_bytes()
        if fields["parts"] != f"parts-{_digest(content)}.bin":
            raise StoreError(f"{folder / fields['parts']} is not what was written")
        parts = np.frombuffer(content, np.uint64).reshape(5, -1)
        prefix = np.array(fields["prefix"], np.int32)
        return Manifest(ServedModel(**engine), prefix, gates, parts)
    except FileNotFoundError as error:
        raise StoreError(
            f"{error.filename}: no such file; write the folder with `jaxrag kb connector KB OUT`"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise StoreError(f"{path} is damaged ({error}); run `jaxrag kb connector` again") from None


class Watched:
    """A folder's state, read again when its file was replaced; looked at once a second."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreError as ``read`` does."""
        self._folder = folder
        self._stamp = self._now()
        self._looked = time.monotonic()
        self.manifest = read(folder)
        self.error: str | None = None  # why the newest state is not used

    def current(self) -> Manifest | None:
        """The state of now; None where it cannot be read or is not the running engine's."""
        if time.monotonic() - self._looked >= _REREAD:
            self._looked = time.monotonic()
            stamp = self._now()
            if stamp != self._stamp or self.error is not None:
                self._stamp = stamp
                self._reread()
        return None if self.error else self.manifest

    def _reread(self) -> None:
        try:
            found = read(self._folder)
        except StoreError as error:
            self.error = str(error)
            return
        if found.engine != self.manifest.engine:
            self.error = f"{self._folder} is of another model or repository now: start again"
            return
        self.manifest, self.error = found, None

    def _now(self) -> tuple[int, ...] | None:
        try:
            state = (self._folder / FILE).stat()
        except OSError:
            return None
        return state.st_mtime_ns, state.st_ino, state.st_size


def weights_of(directory: Path, memo: Path) -> dict[str, str]:
    """blake3 of each .safetensors file of a model, by name; remembered by size and time.

    Args:
      directory: of the model.
      memo: file that remembers; that it cannot be read or written is no error.
    """
    try:
        known = json.loads(memo.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        state = path.stat()
        name = f"{path.resolve()} {state.st_size} {state.st_mtime_ns}"
        if name not in known:
            hasher = blake3(max_threads=blake3.AUTO)
            known[name] = hasher.update_mmap(path).hexdigest()
        found[path.name] = known[name]
    with contextlib.suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        _replace(memo, lambda path: path.write_text(json.dumps(known), encoding="utf-8"))
    return found


def _digest(content: bytes) -> str:
    return str(blake3(content).hexdigest(20))


def _digest_of(fields: Mapping[str, Any]) -> str:
    return _digest(json.dumps(fields, sort_keys=True).encode())


def _replace(path: Path, write_to: Callable[[Path], object]) -> None:
    """Give a file new content as a whole, durable when this returns."""
    temporary = path.with_name(f".{uuid.uuid4().hex}{path.suffix}")
    try:
        write_to(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
