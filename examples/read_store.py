"""Read chunk KV from a jaxrag repository without jaxrag: NumPy alone, as docs/format.md has it.

Lists the chunks of a repository of format 2; seals of records of format 3 are not checked. Digests
are checked where xxhash is installed. Example: python examples/read_store.py REPOSITORY
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

try:
    import xxhash
except ImportError:
    xxhash = None


def chunks(repository: str | Path) -> Iterator[tuple[str, str]]:
    """(fingerprint, key) of every committed chunk."""
    for layout in sorted(Path(repository, "layouts").glob("*.json")):
        root = Path(repository, "kv", layout.stem[:16])
        for commit in sorted(root.glob("*/*/commit.json")):
            yield layout.stem, commit.parent.name


def name(tag: str, parts: Iterable[bytes]) -> str:
    """A key or an id, from what it is made of."""
    state = hashlib.blake2b(digest_size=20, person=tag.encode())
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def content_id(tokenizer_digest: str, token_ids: Any) -> str:
    """Of a chunk's tokens, as they stand in the prompt."""
    ids = np.asarray(token_ids, "<i4").tobytes()
    return name("jaxrag.content", [tokenizer_digest.encode(), ids])


def read_chunk(
    repository: str | Path, fingerprint: str, key: str
) -> tuple[np.ndarray, dict[str, Any]]:
    """K before RoPE and V, float32 [L, 2, T, K, H], and the record."""
    folder = Path(repository, "kv", fingerprint[:16], key[:2], key)
    record = json.loads((folder / "commit.json").read_text())
    if record["format"] not in (2, 3) or record["key"] != key:
        raise ValueError(f"{folder}: not a record of this chunk in format 2 or 3")
    attempt = folder / record["attempt"]
    bits = read_array(attempt)
    packed = record["stored"].startswith("int4")
    if not packed and list(bits.shape) != record["shape"]:
        raise ValueError(f"{attempt}: shape {bits.shape}, expected {record['shape']}")
    parts = [fingerprint, record["content_id"], record["context_id"]]
    if key != name("jaxrag.key", [bytes.fromhex(part) for part in parts]):
        raise ValueError(f"{folder}: the key is not that of its record")
    parts = [part for layer in bits for part in np.split(layer, record["ways"], axis=2)]
    check(parts, record["xxh3"], attempt)
    if record["stored"] == "native":
        return as_float(bits, record["dtype"]), record
    if packed:
        return unpack(bits, record), record
    scale = read_aux(attempt, record, "scale")
    return bits.view(np.int8) * scale[..., None], record


def unpack(bits: np.ndarray, record: dict[str, Any]) -> np.ndarray:
    """K and V of packed bytes [L, 2, 1, K, M]; tokens that were dropped are zeros."""
    _, _, tokens, heads, dim = record["shape"]
    out, kept = np.zeros(record["shape"], np.float32), np.arange(tokens)
    if "kept" in record:
        mask = np.frombuffer(bytes.fromhex(record["kept"]), np.uint8)
        kept = np.flatnonzero(np.unpackbits(mask))
    n, wide, groups = len(kept), max(1, dim // 32), -(-len(kept) // 64)
    for layer, head in np.ndindex(len(bits), heads):
        data, place = bits[layer, :, 0, head].tobytes(), 0

        def take(rows: int, columns: int, codes: bool = False, data: bytes = data) -> np.ndarray:
            nonlocal place
            nbytes = -(-rows * columns // 2) if codes else 2 * rows * columns
            part, place = data[place : place + nbytes], place + nbytes
            if not codes:
                return np.frombuffer(part, "<u2").reshape(rows, columns)
            pairs = np.frombuffer(part, np.uint8)
            flat = np.stack((pairs & 15, pairs >> 4), 1).reshape(-1)
            return flat[: rows * columns].reshape(rows, columns).astype(np.float32)

        channels = take(1, wide)[0]
        low, step = (as_float(take(groups, dim), "bfloat16").repeat(64, 0)[:n] for _ in range(2))
        codes, fine = take(n, dim, True), take(n, wide, True)
        codes[:, channels] = 16 * codes[:, channels] + fine
        out[layer, 0, kept, head] = step * codes + low
        steps = as_float(take(n, -(-dim // 32)), "bfloat16").repeat(32, 1)[:, :dim]
        out[layer, 1, kept, head] = steps * (take(n, dim, True) - 8)
    return out


def read_aux(attempt: Path, record: dict[str, Any], name: str) -> np.ndarray:
    """An auxiliary array, in its own dtype (bfloat16 as float32)."""
    entry = record["aux"][name]
    bits = read_array(attempt / "aux" / name)
    axis = 3 if len(entry["xxh3"]) > 1 else 0  # split over heads, or not at all
    check(np.split(bits, len(entry["xxh3"]), axis=axis), entry["xxh3"], attempt / "aux" / name)
    return as_float(bits, "bfloat16") if entry["dtype"] == "bfloat16" else bits.view(entry["dtype"])


def read_array(folder: Path) -> np.ndarray:
    """A zarr v3 array of unsigned bits, in one or several files, sharded or not."""
    meta = json.loads((folder / "zarr.json").read_text())
    shape, dtype = meta["shape"], np.dtype(meta["data_type"]).newbyteorder("<")
    file_shape = meta["chunk_grid"]["configuration"]["chunk_shape"]
    codec = meta["codecs"][0]
    sharded = codec["name"] == "sharding_indexed"
    inner = codec["configuration"]["chunk_shape"] if sharded else file_shape
    out = np.empty(shape, dtype.newbyteorder("="))
    for file in np.ndindex(*(-(-a // b) for a, b in zip(shape, file_shape, strict=True))):
        data = folder.joinpath("c", *map(str, file)).read_bytes()
        grid = [a // b for a, b in zip(file_shape, inner, strict=True)]
        nbytes = math.prod(inner) * dtype.itemsize
        index = [(0, nbytes)]
        if sharded:  # (offset, bytes) of every inner chunk, then a crc32c of these
            index = np.frombuffer(data[-4 - 16 * math.prod(grid) : -4], "<u8").reshape(-1, 2)
        for place, (offset, length) in zip(np.ndindex(*grid), index, strict=True):
            if length != nbytes or int(offset) + nbytes > len(data):
                raise ValueError(f"{folder}: file {file} is truncated or damaged")
            piece = np.frombuffer(data, dtype, math.prod(inner), int(offset)).reshape(inner)
            parts = zip(file, file_shape, place, inner, strict=True)
            starts = (f * a + p * b for f, a, p, b in parts)
            out[tuple(slice(s, s + b) for s, b in zip(starts, inner, strict=True))] = piece
    return out


def as_float(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Stored bits as numbers; bfloat16 is the upper half of a float32."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(dtype).astype(np.float32)


def check(parts: Iterable[np.ndarray], digests: list[str], where: Path) -> None:
    """Compare the xxh3-64 of every part, in C order, with what the record states."""
    for part, digest in zip(parts, digests, strict=True):
        if xxhash and xxhash.xxh3_64_hexdigest(np.ascontiguousarray(part)) != digest:
            raise ValueError(f"{where}: the bytes differ from their digest")


if __name__ == "__main__":
    for fingerprint, key in chunks(sys.argv[1]):
        kv, record = read_chunk(sys.argv[1], fingerprint, key)
        print(fingerprint[:16], key, record["encoder"], list(kv.shape), f"{np.abs(kv).mean():.4g}")
