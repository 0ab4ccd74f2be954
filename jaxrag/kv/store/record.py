"""What the store knows about one chunk: its shape, where its bytes are and what they hash to."""

import dataclasses
import datetime
import json
import math
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxrag.base.errors import ChunkCorrupt, ChunkNotSealed, StoreError
from jaxrag.kv.store.dropping import from_bits
from jaxrag.kv.store.keys import ID_DIGITS, chunk_key, is_hex, require_hex
from jaxrag.kv.store.layout import KEPT, KV_DTYPES, STORED, KVDType, KVLayout, Stored
from jaxrag.kv.store.seal import SEAL_DIGITS, Sealer, same_seal

FORMAT = 2  # of the directory layout and of records without seals; another number is refused
SEALED_FORMAT = 3  # of records with seals

MAX_RECORD_BYTES = 1 << 16  # some 3000 digests; longer is refused
MAX_SEALED_BYTES = 1 << 17  # some 2000 digests and their seals; longer is refused unread
MAX_AUX_BYTES = 1 << 30  # of one auxiliary array
ATTEMPT_DIGITS = 24
DIGEST_DIGITS = 16
MAX_ENCODER_CHARS = 64
SCALE = "scale"  # the auxiliary array that int8 chunks have
AUX_DTYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)

_TIME_DIGITS = 8  # of the attempt: seconds since 1970
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
_AUX_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_MAX_AUX_RANK = 8


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where a chunk's KV comes from; the store's fingerprint and these ids make its key."""

    encoder: str  # name of the chunk encoder
    content_id: str  # keys.content_id of its tokens
    context_id: str  # keys.context_id of what they could see

    def __post_init__(self) -> None:
        require_hex(self.content_id, ID_DIGITS, "content_id")
        require_hex(self.context_id, ID_DIGITS, "context_id")
        if not 1 <= len(self.encoder) <= MAX_ENCODER_CHARS or not self.encoder.isprintable():
            raise StoreError(
                f"encoder={self.encoder!r}: expected 1 to {MAX_ENCODER_CHARS} printable characters"
            )


@dataclasses.dataclass(frozen=True)
class AuxArray:
    """What a record says about one auxiliary array of its chunk."""

    shape: tuple[int, ...]
    dtype: str  # one of AUX_DTYPES
    xxh3: tuple[str, ...]  # xxh3-64 of each file's bytes; scales have as many files as the KV
    seals: tuple[str, ...] = ()  # of each file's bytes; none in a record without seals

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Record:
    """The commit record of one chunk. A chunk exists if and only if its record does."""

    key: str
    attempt: str  # the directory that holds the bytes; opens with the time it was begun
    shape: tuple[int, int, int, int, int]  # [L, 2, T, K, H]
    dtype: KVDType
    stored: Stored
    ways: int  # files that the heads are split over, one for each rank that wrote them
    xxh3: tuple[str, ...]  # [L * ways] xxh3-64 of a layer's stored bytes in a file, K then V
    aux: Mapping[str, AuxArray]
    encoder: str
    content_id: str
    context_id: str
    created: str  # UTC, e.g. 2026-01-31T12:00:00Z
    kept: str = ""  # of a format that drops tokens: a bit for each of T, set where it is stored
    rows: int = 0  # of the shape's T that lie behind the tokens
    seals: tuple[str, ...] = ()  # [L * ways] of the same bytes as ``xxh3``
    seal: str = ""  # of all other fields; "" where nothing is sealed

    @property
    def tokens(self) -> int:
        """The tokens of the chunk."""
        return self.shape[2] - self.rows

    @property
    def layout(self) -> KVLayout:
        """The layout that the record states."""
        layers, _, _, heads, dim = self.shape
        return KVLayout(layers, heads, dim, self.dtype, self.stored, self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes as stored, of K, V and every auxiliary array."""
        layout = self.layout
        elements = math.prod(layout.stored_shape(self.tokens)) * layout.stored_dtype.itemsize
        return elements + sum(array.nbytes for array in self.aux.values())

    @property
    def provenance(self) -> Provenance:
        """What the writer said about the origin of the bytes."""
        return Provenance(self.encoder, self.content_id, self.context_id)

    @property
    def age(self) -> float:
        """Seconds since the chunk was committed, by this machine's clock."""
        return time.time() - _parse_time(self.created)

    def to_json(self) -> bytes:
        """One line of JSON that carries the format number and a checksum of itself."""
        body = self._body()
        if self.seal:
            body["seal"] = self.seal
        return _dumps({**body, "check": _check(body)})

    def sealed(self, sealer: Sealer | None) -> "Record":
        """The record with a seal of all its fields; without any seal where there is no sealer."""
        if sealer is None:
            aux = {name: dataclasses.replace(it, seals=()) for name, it in self.aux.items()}
            return dataclasses.replace(self, aux=aux, seals=(), seal="")
        return dataclasses.replace(self, seal=sealer.of_record(_dumps(self._body())))

    def require_seal(self, sealer: Sealer) -> None:
        """Raise ChunkNotSealed unless whoever knows the secret wrote this record."""
        if not self.seal:
            raise ChunkNotSealed(f"chunk {self.key}: not sealed, which a store with a secret asks")
        if not same_seal(self.seal, sealer.of_record(_dumps(self._body()))):
            raise ChunkNotSealed(f"chunk {self.key}: not sealed with secret {sealer.name}")

    def _body(self) -> dict[str, Any]:
        """The fields that a checksum and a seal are over, with the format number."""
        body = dataclasses.asdict(self)
        del body["seal"]
        if self.stored not in KEPT:
            del body["kept"]
        if not self.rows:
            del body["rows"]
        if not self.seals:
            del body["seals"]
            for entry in body["aux"].values():
                del entry["seals"]
        return {"format": SEALED_FORMAT if self.seals else FORMAT, **body}

    @classmethod
    def from_json(cls, data: bytes) -> "Record":
        """Inverse of ``to_json``: every field present, of its type, and no other.

        Raises:
            StoreError: the bytes are not a record of this format, or differ from their checksum.
        """
        values = parse_object(data)
        version = values.get("format")
        if type(version) is not int or version not in (FORMAT, SEALED_FORMAT):
            raise StoreError(f"format is {version!r}, expected {FORMAT} or {SEALED_FORMAT}")
        sealed = version == SEALED_FORMAT
        names = {field.name for field in dataclasses.fields(cls)}
        if not sealed:
            names -= {"seals", "seal"}
        if values.get("stored") not in (*KEPT,):
            names -= {"kept"}
        if "rows" not in values:
            names -= {"rows"}
        odd = names.symmetric_difference(values.keys() - {"format", "check"})
        if odd:
            raise StoreError(f"field {min(odd)!r} is missing or unknown")
        check = values.pop("check", None)
        if check != _check(values):
            raise StoreError("text differs from its checksum")
        del values["format"]
        values["shape"] = _shape(values["shape"])
        for name, choices in (("dtype", KV_DTYPES), ("stored", STORED)):
            if values[name] not in choices:
                raise StoreError(
                    f"{name} is {values[name]!r}, expected one of {', '.join(choices)}"
                )
        layers, _, tokens, heads, _ = values["shape"]
        rows = values.get("rows", 0)
        if type(rows) is not int or not 0 <= rows < tokens:
            raise StoreError(f"rows is {rows!r}, expected fewer than {tokens}")
        ways = values["ways"]
        if type(ways) is not int or ways < 1 or heads % ways:
            raise StoreError(f"ways is {ways!r}, expected a divisor of {heads} heads")
        values["xxh3"] = _digests(values["xxh3"], layers * ways, "xxh3")
        values["aux"] = _aux(values["aux"], sealed)
        if sealed:
            values["seals"] = _digests(values["seals"], layers * ways, "seals", SEAL_DIGITS)
            require_hex(values["seal"], SEAL_DIGITS, "seal")
        for name, digits in _HEX_FIELDS.items():
            require_hex(values[name], digits, name)
        if not isinstance(values["encoder"], str):
            raise StoreError(f"encoder is {values['encoder']!r}, expected a string")
        _require_time(values["created"])
        record = cls(**values)
        _require_kept(record)
        _ = record.provenance  # checks the encoder's name
        _require_scale(record)
        return record


_HEX_FIELDS = {
    "key": ID_DIGITS,
    "attempt": ATTEMPT_DIGITS,
    "content_id": ID_DIGITS,
    "context_id": ID_DIGITS,
}


def new_attempt() -> str:
    """A name that no other attempt has, opening with the time of this moment."""
    random_digits = ATTEMPT_DIGITS - _TIME_DIGITS
    now = min(max(int(time.time()), 0), 16**_TIME_DIGITS - 1)  # however the clock is set
    return f"{now:0{_TIME_DIGITS}x}{secrets.token_hex(random_digits // 2)}"


def attempt_age(attempt: str) -> float:
    """Seconds since ``attempt`` was named, by this machine's clock."""
    return time.time() - attempt_begun(attempt)


def attempt_begun(attempt: str) -> float:
    """When ``attempt`` was named, in whole seconds since 1970."""
    return float(int(attempt[:_TIME_DIGITS], 16))


def new_record(
    key: str,
    attempt: str,
    tokens: int,
    layout: KVLayout,
    provenance: Provenance,
    xxh3: Iterable[str],
    aux: Mapping[str, AuxArray],
    ways: int = 1,
    seals: Iterable[str] = (),
    sealer: Sealer | None = None,
    kept: str = "",
) -> Record:
    """Describe the chunk written under ``attempt`` at this moment.

    With a ``sealer`` the record is sealed; ``seals`` and every auxiliary array then have theirs.

    Raises:
        StoreError: the record would be longer than a reader accepts.
    """
    record = Record(
        key=key,
        attempt=attempt,
        shape=layout.shape(tokens),
        dtype=layout.dtype,
        stored=layout.stored,
        ways=ways,
        xxh3=tuple(xxh3),
        aux=dict(aux),
        encoder=provenance.encoder,
        content_id=provenance.content_id,
        context_id=provenance.context_id,
        created=time.strftime(_TIME_FORMAT, time.gmtime(time.time())),
        kept=kept,
        rows=layout.rows,
        seals=tuple(seals),
    ).sealed(sealer)
    length, most = len(record.to_json()), MAX_SEALED_BYTES if sealer else MAX_RECORD_BYTES
    if length > most:
        raise StoreError(
            f"chunk {key}: its record takes {length} bytes, expected at most {most}: "
            "use fewer ways or auxiliary arrays, or shorter chunks where tokens are dropped"
        )
    return record


def read_record(
    data: bytes,
    key: str,
    fingerprint: str,
    layout: KVLayout,
    max_tokens: int,
    sealer: Sealer | None = None,
) -> Record:
    """Parse the record found under ``key`` and hold it against what the store may contain.

    Raises:
        ChunkNotSealed: sound, but without a seal that the ``sealer`` makes.
        ChunkCorrupt: malformed, of another chunk or model, or of sizes the store does not declare.
    """
    try:
        if len(data) > MAX_SEALED_BYTES:
            raise StoreError(f"longer than {MAX_SEALED_BYTES} bytes")
        record = Record.from_json(data)
        if len(data) > MAX_RECORD_BYTES and not record.seal:
            raise StoreError(f"longer than {MAX_RECORD_BYTES} bytes")
    except StoreError as error:
        raise ChunkCorrupt(f"chunk {key}: commit record refused: {error}") from None
    if record.key != key:
        raise ChunkCorrupt(f"chunk {key}: commit record refused: it belongs to {record.key}")
    if chunk_key(fingerprint, record.content_id, record.context_id) != key:
        raise ChunkCorrupt(
            f"chunk {key}: commit record refused: not written under fingerprint {fingerprint}"
        )
    if record.layout != layout:
        raise ChunkCorrupt(
            f"chunk {key}: commit record refused: {record.stored} {record.dtype} "
            f"{list(record.shape)}, expected {layout.stored} {layout.dtype} "
            f"{list(layout.shape(record.tokens))}"
        )
    if record.tokens > max_tokens:
        raise ChunkCorrupt(
            f"chunk {key}: commit record refused: {record.tokens} tokens, expected at most "
            f"{max_tokens}"
        )
    if sealer is not None:
        record.require_seal(sealer)
    return record


def describe_aux(name: str, array: NDArray[Any]) -> AuxArray:
    """The entry of a record for an auxiliary array in one file.

    Raises:
        StoreError: a name or an array that no record can hold.
    """
    if not isinstance(name, str) or not _AUX_NAME.fullmatch(name) or name == SCALE:
        raise StoreError(
            f"auxiliary array {name!r}: expected a name of up to 32 lower-case letters, digits and "
            f"underscores, opening with a letter, other than {SCALE!r}"
        )
    if not isinstance(array, np.ndarray) or array.dtype.name not in AUX_DTYPES:
        found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise StoreError(
            f"auxiliary array {name!r} is {found}: expected a numpy array of "
            f"{', '.join(AUX_DTYPES)}"
        )
    if not 1 <= array.ndim <= _MAX_AUX_RANK or not 0 < array.nbytes <= MAX_AUX_BYTES:
        raise StoreError(
            f"auxiliary array {name!r} is {list(array.shape)}: expected 1 to {_MAX_AUX_RANK} axes "
            f"and 1 to {MAX_AUX_BYTES} bytes"
        )
    if not array.flags.c_contiguous:
        raise StoreError(f"auxiliary array {name!r} is strided: pass numpy.ascontiguousarray of it")
    return AuxArray(array.shape, array.dtype.name, (digest(array),))


def digest(array: NDArray[Any]) -> str:
    """xxh3-64 of the bytes of a contiguous array, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(array.view(f"uint{8 * array.dtype.itemsize}"))


def layer_digest(layer: NDArray[Any]) -> str:
    """xxh3-64 of ``layer`` [2, T, K, H]: K's bytes, then V's; 16 hex digits.

    Fast where each [T, K, H] block is contiguous; K and V may lie apart.
    """
    bits = layer.view(f"uint{8 * layer.dtype.itemsize}")
    state = xxhash.xxh3_64()
    for block in bits:
        state.update(np.ascontiguousarray(block))
    return str(state.hexdigest())


def layer_digests(kv: NDArray[Any]) -> tuple[str, ...]:
    """``layer_digest`` of each layer of ``kv`` [L, 2, T, K, H]."""
    return tuple(layer_digest(layer) for layer in kv)


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


def _digests(value: object, count: int, name: str, digits: int = DIGEST_DIGITS) -> tuple[str, ...]:
    digests = value if isinstance(value, list) else []
    if len(digests) != count or not all(is_hex(digest, digits) for digest in digests):
        raise StoreError(f"{name} is not a list of {count} digests of {digits} hex digits")
    return tuple(digests)


def _aux(value: object, sealed: bool) -> dict[str, AuxArray]:
    if not isinstance(value, dict):
        raise StoreError(f"aux is {value!r}, expected an object")
    expected = {"shape", "dtype", "xxh3", *(["seals"] if sealed else [])}
    arrays = {}
    for name, fields in value.items():
        if not _AUX_NAME.fullmatch(name):
            raise StoreError(f"aux has the name {name!r}")
        if not isinstance(fields, dict) or fields.keys() != expected:
            raise StoreError(f"aux.{name} is not an object of {', '.join(sorted(expected))}")
        if fields["dtype"] not in AUX_DTYPES:
            raise StoreError(f"aux.{name}.dtype is {fields['dtype']!r}")
        shape = fields["shape"] if isinstance(fields["shape"], list) else []
        sound = all(type(size) is int and size > 0 for size in shape)
        if not sound or not 1 <= len(shape) <= _MAX_AUX_RANK:
            raise StoreError(f"aux.{name}.shape is {fields['shape']!r}")
        count = len(fields["xxh3"]) if name == SCALE and isinstance(fields["xxh3"], list) else 1
        digests = _digests(fields["xxh3"], count, f"aux.{name}.xxh3")
        seals = _digests(fields["seals"], count, f"aux.{name}.seals", SEAL_DIGITS) if sealed else ()
        arrays[name] = AuxArray(tuple(shape), fields["dtype"], digests, seals)
        if arrays[name].nbytes > MAX_AUX_BYTES:
            raise StoreError(f"aux.{name} has {arrays[name].nbytes} bytes")
    return arrays


def _require_scale(record: Record) -> None:
    scale = record.aux.get(SCALE)
    if record.stored != "int8":
        if scale is not None:
            raise StoreError(f"aux.scale: {record.stored} chunks have none")
        return
    if scale is None:
        raise StoreError("aux.scale is missing")
    found = (scale.shape, scale.dtype, len(scale.xxh3))
    if found != (record.shape[:-1], "float32", record.ways):
        raise StoreError(f"aux.scale is {scale}: expected the shape and ways of the chunk")


def _require_kept(record: Record) -> None:
    if record.stored not in KEPT:
        return
    try:
        found = len(from_bits(record.kept, record.tokens))
    except (TypeError, ValueError):
        raise StoreError(f"kept is not a bit for each of {record.tokens} tokens") from None
    expected = record.layout.kept_tokens(record.tokens)
    if found != expected:
        raise StoreError(f"kept names {found} tokens, expected {expected}")


def _parse_time(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


def _require_time(value: object) -> None:
    try:
        same = datetime.datetime.fromisoformat(str(value)).strftime(_TIME_FORMAT) == value
    except ValueError:
        same = False
    if not same:
        raise StoreError(f"created is {value!r}, expected a time like 2026-01-31T12:00:00Z")
