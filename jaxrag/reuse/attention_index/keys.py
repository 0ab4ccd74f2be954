"""Keys as an index keeps them: float32, float16, or 8 bits a value over each dimension's range."""

import dataclasses

import numpy as np

from jaxrag.base.errors import RetrievalError
from jaxrag.base.types import HostArray
from jaxrag.reuse.attention_index.spec import Storage

_LEVELS = 255  # FAISS's QT_8bit: level i stands for low + width (i + 1/2) / 255


@dataclasses.dataclass(frozen=True, eq=False)
class Keys:
    """The keys of one KV head, and how to read them.

    Attributes:
      codes: [S, H] float32, float16 or uint8.
      span: [2, H] float32, the least value and the width of each dimension; None unless uint8.
    """

    codes: HostArray
    span: HostArray | None

    @classmethod
    def encode(cls, keys: HostArray, storage: Storage) -> "Keys":
        """Store keys [S, H]. Raises RetrievalError when they are empty or not finite as stored."""
        if keys.ndim != 2 or 0 in keys.shape:
            raise RetrievalError(f"keys of shape {list(keys.shape)}: expected [S, H], not empty")
        with np.errstate(over="ignore"):
            kept = np.float16 if storage == "float16" else np.float32
            codes: HostArray = np.ascontiguousarray(keys, kept)
        if not np.isfinite(codes).all():
            raise RetrievalError(
                f"keys are not finite in {storage}; use storage='float32' or mend the model"
            )
        if storage != "uint8":
            return cls(codes, None)
        low = codes.min(axis=0)
        width = codes.max(axis=0) - low
        width = np.where(width > 0, width, np.float32(1.0))
        levels = np.clip(np.floor((codes - low) / width * _LEVELS), 0, _LEVELS)
        return cls(levels.astype(np.uint8), np.stack([low, width]).astype(np.float32))

    def __len__(self) -> int:
        return int(self.codes.shape[0])

    @property
    def dim(self) -> int:
        """Values of a key, H."""
        return int(self.codes.shape[1])

    @property
    def storage(self) -> Storage:
        """How they are kept."""
        name: Storage = self.codes.dtype.name
        return name

    @property
    def nbytes(self) -> int:
        """Bytes of the keys."""
        return int(self.codes.nbytes) + (0 if self.span is None else int(self.span.nbytes))

    def decode(self, rows: HostArray | slice = slice(None)) -> HostArray:
        """Some rows as float32 [.., H]."""
        codes = self.codes[rows].astype(np.float32)
        if self.span is None:
            return codes
        low, width = self.span
        return low + width * (codes + np.float32(0.5)) / np.float32(_LEVELS)
