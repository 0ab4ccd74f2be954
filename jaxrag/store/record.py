"""What the store knows about one chunk: its shape, where its bytes are and what they hash to."""

import dataclasses
import datetime
import json
import math
from typing import Any

import ml_dtypes
import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxrag.config import DTYPES, DType
from jaxrag.errors import ChunkCorrupt, StoreError
from jaxrag.store.keys import ID_DIGITS, chunk_key, is_hex, require_hex

FORMAT = 1  # of records and of the directory layout; another number is refused

MAX_RECORD_BYTES = 1 << 16  # some 2000 layers; longer is refused unread
ATTEMPT_DIGITS = 16
DIGEST_DIGITS = 16
MAX_ENCODER_CHARS = 64

_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """Sizes and dtype of every chunk in a store; a chunk of T tokens is [L, 2, T, K, H].

    Axis 1 holds K before RoPE (0) and V (1).
    """

    num_layers: int  # L
    num_kv_heads: int  # K
    head_dim: int  # H
    dtype: DType

    def __post_init__(self) -> None:
        """Refuse sizes and dtypes that no chunk can have."""
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise StoreError(f"{name}={size!r}: expected a positive integer")
        if self.dtype not in DTYPES:
            raise StoreError(f"dtype={self.dtype!r}: expected one of {', '.join(DTYPES)}")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The element type of KV arrays in memory."""
        return _NUMPY_DTYPES[self.dtype]

    @property
    def bits_dtype(self) -> np.dtype[Any]:
        """The unsigned integer of the same width, as which elements are stored."""
        return np.dtype(f"uint{8 * self.numpy_dtype.itemsize}")

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """[L, 2, tokens, K, H]."""
        return (self.num_layers, 2, tokens, self.num_kv_heads, self.head_dim)

    def nbytes(self, tokens: int) -> int:
        """Bytes of K and V of that many tokens over all layers."""
        return math.prod(self.shape(tokens)) * self.numpy_dtype.itemsize

    def require(self, kv: NDArray[Any], name: str) -> None:
        """Raise StoreError unless ``kv`` is [L, 2, any, K, H] of this layout's dtype."""
        expected = f"{self.dtype} {list(self.shape(0))}".replace(", 0,", ", tokens,")
        if not isinstance(kv, np.ndarray):
            raise StoreError(f"{name} is {type(kv).__name__}: expected a numpy array {expected}")
        fits = kv.ndim == 5 and kv.shape == self.shape(kv.shape[2])
        if not fits or kv.dtype != self.numpy_dtype:
            raise StoreError(f"{name} is {kv.dtype} {list(kv.shape)}: expected {expected}")


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where a chunk's KV comes from; the store's fingerprint and these ids make its key."""

    encoder: str  # name of the chunk encoder
    content_id: str  # keys.content_id of its tokens
    context_id: str  # keys.context_id of what they could see

    def __post_init__(self) -> None:
        """Refuse ids that are not hashes and names that a record cannot hold."""
        require_hex(self.content_id, ID_DIGITS, "content_id")
        require_hex(self.context_id, ID_DIGITS, "context_id")
        if not 1 <= len(self.encoder) <= MAX_ENCODER_CHARS or not self.encoder.isprintable():
            raise StoreError(
                f"encoder={self.encoder!r}: expected 1 to {MAX_ENCODER_CHARS} printable characters"
            )


@dataclasses.dataclass(frozen=True)
class Record:
    """The commit record of one chunk. A chunk exists if and only if its record does."""

    key: str
    attempt: str  # the directory that holds the bytes
    shape: tuple[int, int, int, int, int]  # [L, 2, T, K, H]
    dtype: DType
    xxh3: tuple[str, ...]  # [L] xxh3-64 of each layer's bytes, K then V
    encoder: str
    content_id: str
    context_id: str
    created: str  # UTC, e.g. 2026-01-31T12:00:00Z

    @property
    def tokens(self) -> int:
        """T, the tokens of the chunk."""
        return self.shape[2]

    @property
    def provenance(self) -> Provenance:
        """What the writer said about the origin of the bytes."""
        return Provenance(self.encoder, self.content_id, self.context_id)

    def to_json(self) -> bytes:
        """One line of JSON that carries the format number and a checksum of itself."""
        body = {"format": FORMAT, **dataclasses.asdict(self)}
        return _dumps({**body, "check": _check(body)})

    @classmethod
    def from_json(cls, data: bytes) -> "Record":
        """Inverse of ``to_json``: every field present, of its type, and no other.

        Raises:
            StoreError: the bytes are not a record of this format, or differ from their checksum.
        """
        values = parse_object(data)
        if values.get("format") != FORMAT:
            raise StoreError(f"format is {values.get('format')!r}, expected {FORMAT}")
        names = {field.name for field in dataclasses.fields(cls)}
        odd = names.symmetric_difference(values.keys() - {"format", "check"})
        if odd:
            raise StoreError(f"field {min(odd)!r} is missing or unknown")
        check = values.pop("check", None)
        if check != _check(values):
            raise StoreError("text differs from its checksum")
        del values["format"]
        values["shape"] = _shape(values["shape"])
        values["xxh3"] = _digests(values["xxh3"], values["shape"][0])
        for name, digits in _HEX_FIELDS.items():
            require_hex(values[name], digits, name)
        if values["dtype"] not in DTYPES:
            raise StoreError(f"dtype is {values['dtype']!r}, expected one of {', '.join(DTYPES)}")
        if not isinstance(values["encoder"], str):
            raise StoreError(f"encoder is {values['encoder']!r}, expected a string")
        _require_time(values["created"])
        record = cls(**values)
        _ = record.provenance  # checks the encoder's name
        return record


_HEX_FIELDS = {
    "key": ID_DIGITS,
    "attempt": ATTEMPT_DIGITS,
    "content_id": ID_DIGITS,
    "context_id": ID_DIGITS,
}


def new_record(
    key: str, attempt: str, kv: NDArray[Any], dtype: DType, provenance: Provenance
) -> Record:
    """Describe ``kv`` [L, 2, T, K, H] as written under ``attempt`` at this moment."""
    layers, two, tokens, heads, dim = kv.shape
    return Record(
        key=key,
        attempt=attempt,
        shape=(layers, two, tokens, heads, dim),
        dtype=dtype,
        xxh3=layer_digests(kv),
        encoder=provenance.encoder,
        content_id=provenance.content_id,
        context_id=provenance.context_id,
        created=datetime.datetime.now(datetime.UTC).strftime(_TIME_FORMAT),
    )


def read_record(
    data: bytes, key: str, fingerprint: str, layout: KVLayout, max_tokens: int
) -> Record:
    """Parse the record found under ``key`` and hold it against what the store may contain.

    Raises:
        ChunkCorrupt: malformed, of another chunk or model, or of sizes the store does not declare.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise ChunkCorrupt(
            f"chunk {key}: commit record refused: longer than {MAX_RECORD_BYTES} bytes"
        )
    try:
        record = Record.from_json(data)
    except StoreError as error:
        raise ChunkCorrupt(f"chunk {key}: commit record refused: {error}") from None
    if record.key != key:
        raise ChunkCorrupt(f"chunk {key}: commit record refused: it belongs to {record.key}")
    if chunk_key(fingerprint, record.content_id, record.context_id) != key:
        raise ChunkCorrupt(
            f"chunk {key}: commit record refused: not written under fingerprint {fingerprint}"
        )
    if record.shape != layout.shape(record.tokens) or record.dtype != layout.dtype:
        raise ChunkCorrupt(
            f"chunk {key}: commit record refused: {record.dtype} {list(record.shape)}, expected "
            f"{layout.dtype} {list(layout.shape(record.tokens))}"
        )
    if record.tokens > max_tokens:
        raise ChunkCorrupt(
            f"chunk {key}: commit record refused: {record.tokens} tokens, expected at most "
            f"{max_tokens}"
        )
    return record


def layer_digests(kv: NDArray[Any]) -> tuple[str, ...]:
    """xxh3-64 of each layer of ``kv`` [L, 2, T, K, H]: K's bytes, then V's; 16 hex digits each.

    Every [T, K, H] block must be contiguous; the layers themselves may be strided.
    """
    bits = kv.view(f"uint{8 * kv.dtype.itemsize}")
    digests = []
    for layer in bits:
        state = xxhash.xxh3_64()
        state.update(layer[0])
        state.update(layer[1])
        digests.append(state.hexdigest())
    return tuple(digests)


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises StoreError when the bytes are anything else."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise StoreError("not valid JSON") from None
    if not isinstance(values, dict):
        raise StoreError("not a JSON object")
    return values


def _dumps(values: dict[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True).encode()


def _check(body: dict[str, Any]) -> str:
    rest = {name: value for name, value in body.items() if name != "check"}
    return xxhash.xxh3_64_hexdigest(_dumps(rest))


def _shape(value: object) -> tuple[int, int, int, int, int]:
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 5 or any(type(size) is not int or size < 1 for size in sizes) or sizes[1] != 2:
        raise StoreError(f"shape is {value!r}, expected [layers, 2, tokens, kv heads, head dim]")
    layers, two, tokens, heads, dim = sizes
    return (layers, two, tokens, heads, dim)


def _digests(value: object, layers: int) -> tuple[str, ...]:
    found = value if isinstance(value, list) else []
    if len(found) != layers or not all(is_hex(digest, DIGEST_DIGITS) for digest in found):
        raise StoreError(f"xxh3 is not a list of {layers} digests of {DIGEST_DIGITS} hex digits")
    return tuple(found)


def _require_time(value: object) -> None:
    try:
        same = datetime.datetime.fromisoformat(str(value)).strftime(_TIME_FORMAT) == value
    except ValueError:
        same = False
    if not same:
        raise StoreError(f"created is {value!r}, expected a time like 2026-01-31T12:00:00Z")
