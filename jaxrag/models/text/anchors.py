"""Where a long text is cut by its own words, so that texts that overlap are cut alike there."""

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.models.text.passage_rules import PassageRules

_WINDOW = 20  # bytes that an anchor is chosen by
_WORD_ENDS = np.isin(np.arange(256), list(b" \t\r\n"))


def anchors(body: str, rules: PassageRules) -> list[int]:
    """Characters where a long text is cut: where words begin, and best of all within reach.

    Best is the least hash of the next bytes.
    """
    data = np.frombuffer(body.encode(), np.uint8)
    hashes = np.zeros(len(data), np.uint64)
    padded = np.concatenate((data, np.zeros(_WINDOW, np.uint8))).astype(np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(_WINDOW):
            hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + padded[offset : offset + len(data)]
        hashes ^= hashes >> np.uint64(29)
        hashes *= np.uint64(0xBF58476D1CE4E5B9)
    begins = np.zeros(len(data), bool)  # of words; in scripts without spaces of characters
    begins[1:] = (_WORD_ENDS[data[:-1]] & ~_WORD_ENDS[data[1:]]) | (data[1:] >= 0xE0)
    hashes[~begins] = np.iinfo(np.uint64).max
    least, width = _sliding_least(hashes, rules.reach), rules.reach + 1
    chosen = np.flatnonzero(begins & (hashes == least))
    chosen = chosen[
        np.diff(chosen, prepend=-width) >= width
    ]  # where text repeats itself, the first
    chosen = chosen[(chosen >= rules.least) & (chosen <= len(data) - rules.least)]
    is_character = (data & 0xC0) != 0x80
    return [int(at) for at in (np.cumsum(is_character)[chosen] - 1)]


def _sliding_least(values: HostArray, reach: int) -> HostArray:
    """The least of the values up to ``reach`` to each side of every place: [N] of the same kind."""
    width = 2 * reach + 1
    top = np.iinfo(values.dtype).max
    total = -(-(len(values) + 2 * reach) // width) * width
    padded = np.full(total, top, values.dtype)
    padded[reach : reach + len(values)] = values
    rows = padded.reshape(-1, width)
    ahead = np.minimum.accumulate(rows, axis=1).ravel()
    behind = np.minimum.accumulate(rows[:, ::-1], axis=1)[:, ::-1].ravel()
    first = np.arange(len(values))
    return np.minimum(behind[first], ahead[first + width - 1])
