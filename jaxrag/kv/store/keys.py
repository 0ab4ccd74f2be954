"""Names of chunk KV: hashes of everything that decides the bytes, equal on every machine.

A key is made of three parts. The *fingerprint* says which model and settings produced the KV, the
*content id* which tokens it holds, the *context id* what those tokens could see while they were
encoded. Every part is hashed with its length in front of it and under a tag of its own, so that no
two different inputs spell the same bytes.
"""

import hashlib
import json
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrag.base.errors import StoreError

FINGERPRINT_DIGITS = 64
ID_DIGITS = 40

_HEX = "0123456789abcdef"

# The ids of arrays that cannot change: of some megabytes, and wanted for every chunk.
_KNOWN: dict[int, tuple[weakref.ref[Any], str]] = {}


def fingerprint(fields: Mapping[str, Any]) -> str:
    """Hash a description of a model and its encoding settings; 64 hex digits.

    Values may be None, bool, int, float, str, and lists, tuples and string-keyed mappings of
    these. The order of keys does not matter, lists and tuples are the same, and a number counts by
    its value: 10000 and 10000.0 give one fingerprint.

    Raises:
        StoreError: a value of another type, a NaN or an infinity.
    """
    text = json.dumps(_canonical(fields, "fields"), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"jaxrag.model").hexdigest()


def content_id(tokenizer_digest: str, token_ids: NDArray[np.int32]) -> str:
    """Hash the tokens of a chunk, int32 [T] with T > 0, and the tokenizer they belong to.

    Raises:
        StoreError: ``token_ids`` is not a non-empty int32 vector.
    """
    tokens = _token_bytes(token_ids, "token_ids")
    if not tokens:
        raise StoreError("token_ids is empty: a chunk has at least one token")
    return _digest(b"jaxrag.content", [tokenizer_digest.encode(), tokens])


def vectors_id(vectors: NDArray[np.float32]) -> str:
    """Hash vectors [R, D] float32 that stand in the place of tokens, or KV [R, L, 2, K, H].

    Raises:
        StoreError: ``vectors`` is no such array, or empty.
    """
    if vectors.dtype != np.float32 or vectors.ndim not in (2, 5) or not vectors.size:
        raise StoreError(f"vectors: expected float32 [R, D], got {vectors.dtype} {vectors.shape}")
    at = id(vectors)
    known = _KNOWN.get(at)
    if known is not None and known[0]() is vectors:
        return known[1]
    shape = np.asarray(vectors.shape, "<i8").tobytes()
    found = _digest(b"jaxrag.vectors", [shape, vectors.astype("<f4").tobytes()])
    if not vectors.flags.writeable:
        _KNOWN[at] = (weakref.ref(vectors, lambda gone: _KNOWN.pop(at, None)), found)
    return found


def context_id(
    encoder: str,
    prefix_ids: NDArray[np.int32],
    neighbours: Sequence[str] = (),
    primer: str = "",
) -> str:
    """Hash what a chunk saw when it was encoded.

    Args:
        encoder: name of the chunk encoder.
        prefix_ids: int32 [T], the prefix tokens the chunk attended to; empty when it saw none.
        neighbours: content ids of the other chunks it attended to, in order.
        primer: id of the primer between prefix and chunk; "" without one.

    Raises:
        StoreError: ``prefix_ids`` is not an int32 vector, or a neighbour or the primer is no id.
    """
    for neighbour in neighbours:
        require_hex(neighbour, ID_DIGITS, "neighbour")
    parts = [encoder.encode(), _token_bytes(prefix_ids, "prefix_ids")]
    if primer:
        require_hex(primer, ID_DIGITS, "primer")
        parts += [b"primer", bytes.fromhex(primer)]  # no neighbour's id is as short as the word
    return _digest(b"jaxrag.context", parts + [bytes.fromhex(name) for name in neighbours])


def chunk_key(fingerprint: str, content_id: str, context_id: str) -> str:
    """The key of one chunk's KV: 40 hex digits from its three parts.

    Raises:
        StoreError: a part is not a hash of the expected length.
    """
    require_hex(fingerprint, FINGERPRINT_DIGITS, "fingerprint")
    require_hex(content_id, ID_DIGITS, "content_id")
    require_hex(context_id, ID_DIGITS, "context_id")
    parts = [bytes.fromhex(part) for part in (fingerprint, content_id, context_id)]
    return _digest(b"jaxrag.key", parts)


def derive(fingerprint: str, stored: str = "native", salt: str = "") -> str:
    """The fingerprint of a variant of the same KV; the fingerprint itself without a difference.

    Args:
        fingerprint: of the model and its settings.
        stored: how elements are kept, a ``KVLayout.stored``.
        salt: any text; repositories or tenants with different salts share no key.

    Raises:
        StoreError: ``fingerprint`` is not one, or ``stored`` or ``salt`` is no text.
    """
    require_hex(fingerprint, FINGERPRINT_DIGITS, "fingerprint")
    for name, value in (("stored", stored), ("salt", salt)):
        if not isinstance(value, str):
            raise StoreError(f"{name}={value!r}: expected text")
    if stored == "native" and not salt:
        return fingerprint
    parts = [bytes.fromhex(fingerprint), stored.encode(), salt.encode()]
    return _digest(b"jaxrag.variant", parts, FINGERPRINT_DIGITS // 2)


def is_hex(value: object, digits: int) -> bool:
    """Whether ``value`` is a string of exactly that many lower-case hexadecimal digits."""
    return isinstance(value, str) and len(value) == digits and not value.strip(_HEX)


def require_hex(value: object, digits: int, name: str) -> None:
    """Raise StoreError unless ``value`` has exactly that many lower-case hexadecimal digits."""
    if not is_hex(value, digits):
        raise StoreError(f"{name}={value!r}: expected {digits} lower-case hexadecimal digits")


def _digest(tag: bytes, parts: Iterable[bytes], size: int = ID_DIGITS // 2) -> str:
    state = hashlib.blake2b(digest_size=size, person=tag)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def _token_bytes(ids: NDArray[np.int32], name: str) -> bytes:
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int32 or ids.ndim != 1:
        found = f"{ids.dtype} {list(ids.shape)}" if hasattr(ids, "dtype") else type(ids).__name__
        raise StoreError(f"{name} is {found}: expected a numpy int32 vector [T]")
    return ids.astype("<i4").tobytes()


def _canonical(value: Any, where: str) -> Any:
    """A form of ``value`` whose JSON text depends on its mathematical value only."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise StoreError(f"{where}={value}: expected a finite number")
        return int(value) if value.is_integer() else float(value)
    if isinstance(value, list | tuple):
        return [_canonical(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise StoreError(f"{where} has the key {key!r}: expected strings")
        return {key: _canonical(item, f"{where}.{key}") for key, item in value.items()}
    raise StoreError(
        f"{where} is {type(value).__name__}: expected None, bool, int, float, str, list or mapping"
    )
