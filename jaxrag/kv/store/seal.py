"""Keyed digests: who does not know a secret can make nothing that is believed.

xxh3 finds accidents; whoever may write a store can compute it. A seal is BLAKE3 under a key made of
a secret. Every layer in a file and every file of an auxiliary array has one in the record, and the
record has one over all its other fields, these seals among them. So a chunk is believed as a whole,
under its own key, or not at all.
"""

import hmac
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from jaxrag.base.errors import StoreError

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 1 << 16
SEAL_DIGITS = 32  # 128 bits: nobody guesses one

_NAME_BYTES = 8


class Sealer:
    """Makes and checks seals under one secret. Safe to share between threads."""

    def __init__(self, secret: bytes) -> None:
        """Take the secret of a tenant or an owner, random bytes.

        Raises:
            StoreError: it is too short to be one, or no bytes.
        """
        if not isinstance(secret, bytes):
            raise StoreError(f"a secret that is {type(secret).__name__}: expected bytes")
        _require_length(secret, "a secret")
        self._bytes = _key(secret, "jaxrag: seal of bytes in a chunk store")
        self._record = _key(secret, "jaxrag: seal of a record in a chunk store")
        named = blake3(key=_key(secret, "jaxrag: name of a secret"))
        self.name = str(named.hexdigest(length=_NAME_BYTES))
        """Tells one secret from another, and nothing about it; 16 hex digits."""

    def __repr__(self) -> str:
        """Which secret, without it."""
        return f"<Sealer {self.name}>"

    def of_array(self, array: NDArray[Any]) -> str:
        """The seal of the bytes of a contiguous array, 32 hex digits."""
        return self._of([array])

    def of_layer(self, layer: NDArray[Any]) -> str:
        """The seal of ``layer`` [2, T, K, H]: K's bytes, then V's; K and V may lie apart."""
        return self._of(layer)

    def of_layers(self, kv: NDArray[Any]) -> tuple[str, ...]:
        """``of_layer`` of each layer of ``kv`` [L, 2, T, K, H]."""
        return tuple(self.of_layer(layer) for layer in kv)

    def of_record(self, text: bytes) -> str:
        """The seal of a record: of its fields without this seal and the checksum, as they stand."""
        return str(blake3(text, key=self._record).hexdigest(length=SEAL_DIGITS // 2))

    def _of(self, blocks: Iterable[NDArray[Any]]) -> str:
        state = blake3(key=self._bytes)
        for block in blocks:
            bits = np.ascontiguousarray(block).view(f"uint{8 * block.dtype.itemsize}")
            state.update(bits.reshape(-1).view(np.uint8))
        return str(state.hexdigest(length=SEAL_DIGITS // 2))


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file, all of them, as a secret.

    Raises:
        StoreError: it cannot be read, or holds no secret.
    """
    try:
        with open(path, "rb") as file:
            secret = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise StoreError(
            f"{os.fspath(path)}: the secret cannot be read ({error.strerror}); name the file that "
            "holds it"
        ) from None
    _require_length(secret, os.fspath(path))
    return secret


def same_seal(one: str, other: str) -> bool:
    """Whether two seals are equal; takes the same time wherever they differ."""
    return hmac.compare_digest(one, other)


def _require_length(secret: bytes, name: str) -> None:
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        more = "more than " if len(secret) > MAX_SECRET_BYTES else ""
        raise StoreError(
            f"{name} has {more}{min(len(secret), MAX_SECRET_BYTES)} bytes: expected "
            f"{MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}, such as `head -c 32 /dev/urandom` gives"
        )


def _key(secret: bytes, purpose: str) -> bytes:
    return blake3(secret, derive_key_context=purpose).digest()
