"""What an engine must know to read stored chunks: one folder, written by `jaxrag kb connector`.

``connector.json`` names the repository, the model and the parts of prompts that are stored;
``parts-<digest>.bin`` is the table by which a prompt's tokens find them. Both are replaced as
whole files, the JSON last, so that a reader has one state or the next.
"""

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from blake3 import blake3
from numpy.typing import NDArray

from jaxrag.base.config import RopeConfig, rope_from_dict
from jaxrag.base.errors import ConfigError, StoreError
from jaxrag.base.tables import build
from jaxrag.kv.store.layout import KVLayout

FILE = "connector.json"
PROGRAM, VERSION = "jaxrag connector", 2
FIRST = 16  # tokens that a part is looked up by; a shorter one by all that it has
PART = np.dtype([("start", "<u8"), ("content", "S20")])  # start_of, and the content id's bytes
_AGAIN = "write it with `jaxrag kb connector KB OUT`"
_LOG = logging.getLogger("vllm.jaxrag")  # vLLM shows its own loggers only
_REREAD = 1.0  # seconds between two looks at the file


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
      primer: id of the primer that the chunks are encoded behind, part of their keys; "" without.
    """

    store: str
    fingerprint: str
    layout: KVLayout
    rope: RopeConfig
    tokenizer: str
    weights: Mapping[str, str]
    encoder: str
    sealed: str | None = None
    primer: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Manifest:
    """One state of the folder.

    Attributes:
      engine: what the engine was held against.
      prefix: token ids of the prompts' common beginning, int32 [P]; may be empty.
      gates: what was judged.
      parts: the table, PART [N], by ascending content id.
    """

    engine: ServedModel
    prefix: NDArray[np.int32]
    gates: tuple[Gate, ...]
    parts: NDArray[np.void]


def start_of(ids: NDArray[np.int32]) -> int:
    """By what a part with token ids int32 [T] is looked up: a hash of the first, and how many."""
    return xxhash.xxh32_intdigest(ids[:FIRST].tobytes()) << 32 | len(ids)


def read(folder: Path) -> Manifest:
    """The state of a folder. Raises StoreError where it is none or not as it was written."""
    path = folder / FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        found = fields["program"], fields["version"]
        if found != (PROGRAM, VERSION):
            raise StoreError(f"{path} is of {found}, expected {PROGRAM, VERSION}: {_AGAIN}")
        if fields.pop("digest") != digest_of(fields):
            raise StoreError(f"{path} is not as it was written: {_AGAIN}")
        engine = dict(fields["engine"])
        engine["rope"] = rope_from_dict(engine["rope"], f"{path}: rope")
        engine["layout"] = KVLayout(**engine["layout"])
        gates = tuple(build(Gate, gate, f"{path}: gate") for gate in fields["gates"])
        content = (folder / fields["parts"]).read_bytes()
        if fields["parts"] != parts_name(content):
            raise StoreError(f"{folder / fields['parts']} is not as it was written: {_AGAIN}")
        prefix = np.array(fields["prefix"], np.int32)
        return Manifest(ServedModel(**engine), prefix, gates, np.frombuffer(content, PART))
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise StoreError(f"{path} cannot be read ({error}): {_AGAIN}") from None


class Watched:
    """A folder's state, read again when its file was replaced; looked at once a second."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreError as ``read`` does."""
        self._file = folder / FILE
        self._stamp, self._looked = self._now(), time.monotonic()
        self.manifest = read(folder)  # as it was at the start
        self._current: Manifest | None = self.manifest
        self._said = ""  # of it, when it could not be read

    def current(self) -> Manifest | None:
        """The state of now; None where it cannot be read or is not the running engine's."""
        if time.monotonic() - self._looked >= _REREAD:
            self._looked, stamp = time.monotonic(), self._now()
            if stamp is None or stamp != self._stamp:
                self._reread(stamp)
        return self._current

    def _reread(self, stamp: tuple[int, ...] | None) -> None:
        try:
            found = read(self._file.parent)
            if found.engine != self.manifest.engine:
                raise StoreError(f"{self._file} is of another model or repository: start again")
            self._current, self._stamp = found, stamp
        except StoreError as error:
            if str(error) != self._said:
                _LOG.warning("all prompts are computed: %s", error)
            self._current, self._stamp, self._said = None, None, str(error)

    def _now(self) -> tuple[int, ...] | None:
        with contextlib.suppress(OSError):
            state = self._file.stat()
            return state.st_mtime_ns, state.st_ino, state.st_size
        return None


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
            known[name] = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
        found[path.name] = known[name]
    with contextlib.suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        memo.write_text(json.dumps(known), encoding="utf-8")  # what is cut short is hashed again
    return found


def parts_name(content: bytes) -> str:
    """The name of the file with a table of these bytes."""
    return f"parts-{_digest(content)}.bin"


def digest_of(fields: Mapping[str, Any]) -> str:
    """What ``connector.json`` says of its other fields."""
    return _digest(json.dumps(fields, sort_keys=True).encode())


def _digest(content: bytes) -> str:
    return str(blake3(content).hexdigest(20))
