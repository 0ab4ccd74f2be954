"""Sizes and types of chunk KV: in memory, and as the elements that are stored."""

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxrag.base.config import DType
from jaxrag.base.errors import StoreError
from jaxrag.kv.int4 import head_nbytes

Stored = Literal["native", "int8", "int4", "int4-half"]
KVDType = DType | Literal["uint8"]  # bytes: what another engine made of them
STORED: tuple[str, ...] = get_args(Stored)

KEPT: Mapping[str, Fraction] = MappingProxyType(
    {"int4-half": Fraction(1, 2)}
)  # of the tokens of a chunk, where not all are
MIN_KEPT = 32  # tokens of a chunk that no format drops

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "uint8": np.dtype(np.uint8),
}
KV_DTYPES: tuple[str, ...] = tuple(_NUMPY_DTYPES)
_SCALE_BYTES = 4  # float32, one for every H elements


@dataclasses.dataclass(frozen=True)
class HeadShare:
    """Which KV heads one of several processes holds that hold a model together.

    Heads rank * K / ways and following, K / ways of them. Processes may hold the same share.

    Attributes:
      rank: of the share, 0 to ways - 1.
      ways: how many equal shares the heads are in.
      writes: whether this process stores the share: one of those that hold it does.
      leads: whether this process begins and commits chunks: one of all does.
    """

    rank: int = 0
    ways: int = 1
    writes: bool = True
    leads: bool = True

    def heads(self, num_kv_heads: int) -> tuple[int, int]:
        """First and end of the share of so many heads."""
        size = num_kv_heads // self.ways
        return self.rank * size, (self.rank + 1) * size


WHOLE = HeadShare()


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """Sizes and dtype of every chunk in a store; a chunk of T tokens is [L, 2, T, K, H].

    Axis 1 holds K before RoPE (0) and V (1). ``dtype`` is what a caller puts and gets; ``stored``
    says whether the same elements are kept, or int8 with scales (``jaxrag.kv.store.quantise``), or
    codes of 4 bits (``jaxrag.kv.int4``), of all tokens or of some (``dropping``). Behind the
    tokens a chunk has ``rows`` rows more, the same number whatever T is: bytes of whoever made it.
    """

    num_layers: int  # L
    num_kv_heads: int  # K
    head_dim: int  # H
    dtype: KVDType
    stored: Stored = "native"
    rows: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise StoreError(f"{name}={size!r}: expected a positive integer")
        if self.dtype not in _NUMPY_DTYPES:
            raise StoreError(f"dtype={self.dtype!r}: expected one of {', '.join(KV_DTYPES)}")
        if self.stored not in STORED:
            raise StoreError(f"stored={self.stored!r}: expected one of {', '.join(STORED)}")
        if type(self.rows) is not int or self.rows < 0 or (self.rows and self.stored != "native"):
            raise StoreError(f"rows={self.rows!r}: expected 0 or more, and more only of native KV")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, for ``KVLayout(**fields)``."""
        fields = dataclasses.asdict(self)
        return fields if self.rows else {name: it for name, it in fields.items() if name != "rows"}

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The element type of KV arrays in memory."""
        return _NUMPY_DTYPES[self.dtype]

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The element type of KV arrays as they are stored."""
        if self.packed:
            return np.dtype(np.uint8)
        return np.dtype(np.int8) if self.stored == "int8" else self.numpy_dtype

    @property
    def packed(self) -> bool:
        """Whether the bytes of a head are no array of its elements (``jaxrag.kv.int4``)."""
        return self.stored not in ("native", "int8")

    @property
    def drops(self) -> bool:
        """Whether tokens of a chunk are left out; they come back as zeros."""
        return self.stored in KEPT

    @property
    def bits_dtype(self) -> np.dtype[Any]:
        """The unsigned integer of the same width, as which stored elements are written."""
        return np.dtype(f"uint{8 * self.stored_dtype.itemsize}")

    def of_share(self, share: HeadShare) -> "KVLayout":
        """The layout of a share of the heads. Raises StoreError for one that they do not have."""
        if share.ways < 1 or self.num_kv_heads % share.ways or not 0 <= share.rank < share.ways:
            raise StoreError(
                f"share {share.rank} of {share.ways} of {self.num_kv_heads} KV heads: expected a "
                "divisor of their number, and a rank below it"
            )
        return dataclasses.replace(self, num_kv_heads=self.num_kv_heads // share.ways)

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """[L, 2, tokens, K, H], with the rows behind them."""
        return (self.num_layers, 2, tokens + self.rows, self.num_kv_heads, self.head_dim)

    def kept_tokens(self, tokens: int) -> int:
        """How many tokens of a chunk of so many are stored."""
        kept = KEPT.get(self.stored, Fraction(1))
        return min(tokens, max(MIN_KEPT, math.ceil(tokens * kept)))

    def stored_shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Of the array that a chunk is stored as: [L, 2, T, K, H], or [L, 2, 1, K, bytes]."""
        if not self.packed:
            return self.shape(tokens)
        nbytes = head_nbytes(self.kept_tokens(tokens), self.head_dim)
        return (self.num_layers, 2, 1, self.num_kv_heads, nbytes // 2)

    def nbytes(self, tokens: int) -> int:
        """Bytes of K and V of that many tokens over all layers, in memory."""
        return math.prod(self.shape(tokens)) * self.numpy_dtype.itemsize

    def stored_nbytes(self, tokens: int) -> int:
        """Bytes of K and V of that many tokens over all layers as stored, scales included."""
        elements = math.prod(self.stored_shape(tokens)) * self.stored_dtype.itemsize
        scales = math.prod(self.shape(tokens)[:-1]) if self.stored == "int8" else 0
        return elements + scales * _SCALE_BYTES

    def require(
        self, kv: NDArray[Any], name: str, *, layers: int | None = None, ways: int = 1
    ) -> None:
        """Raise StoreError unless ``kv`` is [L, 2, any, K, H] of this layout's dtype.

        ``layers`` expects that many, None: L; ``ways`` expects K / ways heads.
        """
        count = self.num_layers if layers is None else layers
        sizes = (count, 2, "tokens", self.num_kv_heads // ways, self.head_dim)
        expected = f"{self.dtype} [{', '.join(map(str, sizes))}]"
        if not isinstance(kv, np.ndarray):
            raise StoreError(f"{name} is {type(kv).__name__}: expected a numpy array {expected}")
        fits = kv.ndim == 5 and kv.shape == (*sizes[:2], kv.shape[2], *sizes[3:])
        if not fits or kv.dtype != self.numpy_dtype:
            raise StoreError(f"{name} is {kv.dtype} {list(kv.shape)}: expected {expected}")
