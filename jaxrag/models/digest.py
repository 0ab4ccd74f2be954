"""Identity of a model's weights, part of the key of every stored chunk.

A digest depends on the names, dtypes, shapes and values of the tensors, not on how they are spread
over files. Hashing a large checkpoint takes as long as reading it, so that result is remembered by
path, size and modification time in the user's cache directory.
"""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jaxrag.base.gguf import is_gguf
from jaxrag.base.sharding import to_host
from jaxrag.models.gguf import stored_tensors
from jaxrag.models.record import is_checkpoint, read_record
from jaxrag.models.spec import Params, by_name
from jaxrag.models.tensor_files import StoredTensor, read_tensors

_WORTH_REMEMBERING = 64 << 20  # bytes; hashing less takes no time
_BLOCK = 64 << 20  # bytes brought to the host at a time


def params_digest(params: Params) -> str:
    """Digest of parameters on devices, 64 hex digits.

    Over several processes every one of them brings the parameters together, a block at a time.
    """
    entries = []
    for name, leaf in by_name(params).items():
        hasher = xxhash.xxh3_128()
        rows = max(1, _BLOCK * leaf.shape[0] // leaf.nbytes)
        for start in range(0, leaf.shape[0], rows):  # no second copy of a whole leaf on the host
            block = np.ascontiguousarray(to_host(leaf[start : start + rows]))
            hasher.update(block.view(np.uint8))
        entries.append([name, leaf.dtype.name, list(leaf.shape), hasher.hexdigest()])
    return _combine(entries)


def weights_digest(directory: str | Path, memo: Path | None = None) -> str:
    """Digest of the weights in a model directory or GGUF file, 64 hex digits.

    A jaxrag checkpoint has recorded its own; of a GGUF file the bytes of its tensors are hashed, as
    they are quantised. ``memo`` is the file that remembers the digests of large models, by default
    ``weights.json`` in ``cache_directory()``; that it cannot be written is no error. Raises
    ModelError when the weights cannot be read.
    """
    directory = Path(directory).resolve()
    if is_checkpoint(directory):
        return read_record(directory).digest
    tensors = stored_tensors(directory) if is_gguf(directory) else read_tensors(directory)
    if sum(tensor.num_bytes for tensor in tensors.values()) < _WORTH_REMEMBERING:
        return _tensors_digest(tensors)
    paths = {tensor.path for tensor in tensors.values()}
    memo = memo or cache_directory() / "weights.json"
    return _remembered(memo, str(directory), paths, lambda: _tensors_digest(tensors))


def file_digest(path: Path) -> str:
    """Digest of all bytes of one file, 64 hex digits; remembered as ``weights_digest`` is."""
    path, memo = path.resolve(), cache_directory() / "files.json"

    def digest() -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()

    return _remembered(memo, str(path), {path}, digest)


def _remembered(memo: Path, name: str, paths: set[Path], make: Callable[[], str]) -> str:
    """What ``make`` said of these files, as long as none of them changes."""
    known, files = _read_memo(memo), _file_states(paths)
    entry = known.get(name)
    if isinstance(entry, dict) and entry.get("files") == files:
        return str(entry["digest"])
    digest = make()
    _write_memo(memo, {**known, name: {"files": files, "digest": digest}})
    return digest


def cache_directory() -> Path:
    """Where this user's caches live: ``$XDG_CACHE_HOME/jaxrag`` or ``~/.cache/jaxrag``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxrag"


def _tensors_digest(tensors: dict[str, StoredTensor]) -> str:
    return _combine(
        [[*t.identity, list(t.shape), xxhash.xxh3_128(t.raw).hexdigest()] for t in tensors.values()]
    )


def _combine(entries: list[list[Any]]) -> str:
    canonical = json.dumps(sorted(entries), separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=32).hexdigest()


def _file_states(paths: set[Path]) -> list[list[Any]]:
    states = [(path.name, path.stat()) for path in sorted(paths)]
    return [[name, state.st_size, state.st_mtime_ns] for name, state in states]


def _read_memo(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write_memo(path: Path, value: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        temporary.write_text(json.dumps(value), encoding="utf-8")
        temporary.replace(path)
