"""The form in which XLA:CPU gets a computation, where several are equal but for rounding.

Which is fastest differs by processor. The defaults were measured on one (an AMD EPYC).
"""

import contextlib
import dataclasses
from collections.abc import Iterator

KEY_TILES = (128, 256, 512)
DECODE_TILES = (1, 4, 8, 16)
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Forms:
    """What may be chosen by measuring.

    Attributes:
      key_tile: keys that a tile of queries attends to at once, in prefill; one of KEY_TILES.
      heads_apart: the dtypes in which a product of attention is one of matrices for every KV head,
        and not one of all of them.
      decode_tiles: tiles of keys that a decode step visits at once; one of DECODE_TILES.
      layers_apart: whether steps that mostly read weights hold every layer by itself.
      doubled_row: whether one row in bfloat16 is multiplied with a weight twice.
    """

    key_tile: int = 256
    heads_apart: tuple[str, ...] = ("bfloat16",)
    decode_tiles: int = 4
    layers_apart: bool = True
    doubled_row: bool = True

    def __post_init__(self) -> None:
        """ValueError, in one line, for a value that is none of those named above."""
        for name, value, known in (
            ("key_tile", self.key_tile, KEY_TILES),
            ("decode_tiles", self.decode_tiles, DECODE_TILES),
            ("layers_apart", self.layers_apart, (True, False)),
            ("doubled_row", self.doubled_row, (True, False)),
        ):
            if value not in known or type(value) is not type(known[0]):
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(str, known))}")
        if not (isinstance(self.heads_apart, tuple) and set(self.heads_apart) <= set(DTYPES)):
            raise ValueError(f"heads_apart={self.heads_apart!r}: expected some of {DTYPES}")


_used: Forms | None = None


def forms() -> Forms:
    """Those that programs of this process are traced with; from now on they stay."""
    global _used
    if _used is None:
        _used = Forms()
    return _used


def use(chosen: Forms) -> None:
    """Take these, unless some were taken before."""
    global _used
    _used = _used or chosen


@contextlib.contextmanager
def traced_with(chosen: Forms) -> Iterator[None]:
    """Programs that are traced within, in any thread, have these forms: for what measures them."""
    global _used
    before, _used = _used, chosen
    try:
        yield
    finally:
        _used = before
