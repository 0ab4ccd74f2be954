"""Texts to token ids for an encoder: special tokens around each, the end cut where too long.

The decoder's tokenizer (jaxrag.models.text.tokenizer) adds and cuts nothing; an encoder's must do
both. Texts of many lengths go in batches of few shapes, so that few programs are compiled.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from jaxrag.base.errors import ConfigError, TokenizerError
from jaxrag.base.shapes import bucket, bucket_below
from jaxrag.base.types import HostArray

_SMALLEST = 16


class EncoderTokenizer:
    """The ``tokenizer.json`` of an encoder. Make one with ``EncoderTokenizer.load``.

    A special token that is spelled inside a text stays ordinary text.

    Attributes:
      max_tokens: of a text, special tokens included; the rest is cut from its end.
      digest: blake2b-256 of ``tokenizer.json``, in hex.
    """

    def __init__(self, data: bytes, max_tokens: int, where: str = "tokenizer.json") -> None:
        """Args: bytes of tokenizer.json; the longest text; the path to name in errors."""
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises Exception itself
            raise TokenizerError(f"{where}: not a readable tokenizer ({error})") from None
        special = tokenizer.num_special_tokens_to_add(False)
        if special == 0:
            raise TokenizerError(
                f"{where}: puts no special tokens around a text, as an encoder needs; save it "
                "again with its post-processor"
            )
        if max_tokens <= special:
            raise ConfigError(
                f"max_tokens={max_tokens}: expected more than {special}, the special tokens around "
                "a text"
            )
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_tokens, direction="right")
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.digest = hashlib.blake2b(data, digest_size=32).hexdigest()

    @classmethod
    def load(cls, directory: Path, max_tokens: int, vocab_size: int) -> "EncoderTokenizer":
        """Load from a model directory.

        Raises TokenizerError when ``tokenizer.json`` is missing, unreadable, adds no special tokens
        or has ids beyond ``vocab_size``; ConfigError when ``max_tokens`` has no room for text.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{directory}: no tokenizer.json; save the model's fast tokenizer there"
            )
        loaded = cls(path.read_bytes(), max_tokens, str(path))
        largest = max(loaded._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= vocab_size:
            raise TokenizerError(
                f"{path}: ids up to {largest}, the model's vocabulary has {vocab_size} entries; "
                "use the tokenizer that belongs to this model"
            )
        return loaded

    def encode(self, texts: Sequence[str]) -> tuple[list[HostArray], int]:
        """Ids of each text, int32 [T] with T <= max_tokens, and how many texts were cut."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
        ids = [np.asarray(encoding.ids, np.int32) for encoding in encodings]
        return ids, sum(bool(encoding.overflowing) for encoding in encodings)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Texts that are embedded at once, and the shape they are padded to."""

    members: tuple[int, ...]  # indices of the texts
    rows: int
    width: int  # tokens


def width_for(length: int, longest: int) -> int:
    """The padded length of a text: 16, 24, 32, 48, 64, 96, ..., at most ``longest``."""
    power = bucket(length, _SMALLEST)
    three_quarters = power // 4 * 3
    return min(three_quarters if length <= three_quarters and power > _SMALLEST else power, longest)


def plan(lengths: Sequence[int], batch_tokens: int, longest: int) -> list[Batch]:
    """Cut texts into batches, longest first.

    Args:
      lengths: tokens of each text, 1 to ``longest``.
      batch_tokens: rows x width of a batch stays within it, but a batch has at least one row.
      longest: the widest a batch may be.

    Returns:
      Batches that hold every text once. Rows are a power of two; rows that texts of a width leave
      empty are filled with shorter texts.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    widths = [width_for(lengths[i], longest) for i in order]
    ends = {width: index + 1 for index, width in enumerate(widths)}  # of each width's run
    batches = []
    start = 0
    while start < len(order):
        width = widths[start]
        most = bucket_below(batch_tokens // width)
        rows = min(bucket(ends[width] - start, 1), most)
        members = tuple(order[start : start + rows])
        batches.append(Batch(members, rows, width))
        start += len(members)
    return batches


def fill(batch: Batch, ids: Sequence[HostArray]) -> tuple[HostArray, HostArray]:
    """Token ids [rows, width] and lengths [rows] of a batch, int32; an empty row has length 1."""
    block = np.zeros((batch.rows, batch.width), np.int32)
    lengths = np.ones(batch.rows, np.int32)
    for row, member in enumerate(batch.members):
        lengths[row] = len(ids[member])
        block[row, : lengths[row]] = ids[member]
    return block, lengths
