"""What goes into one exported file: chunks side by side, and the record that describes them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrag.base.config import ModelConfig, config_to_dict
from jaxrag.base.errors import ChunkCorrupt, ChunkMissing, StoreError
from jaxrag.base.types import HostArray
from jaxrag.kv.store import KVStore, Record
from jaxrag.models.rope import attention_factor


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """One stored chunk of an export."""

    key: str
    token_ids: HostArray | None  # [T] int32, as they stand in the prompt; None if nobody knows them
    content_id: str | None = None  # of these ids, where the record shall be held against it


@dataclasses.dataclass(frozen=True, eq=False)
class Bundle:
    """Chunks that become one file, one behind the other along the token axis.

    A chunk exported alone is a bundle of one; a prompt is one of its prefix and its chunks.
    """

    name: str  # of the file, without its suffix
    pieces: tuple[Piece, ...]
    question: str | None = None
    final_ids: HostArray | None = None  # [T] int32, the final block: what to feed after the cache

    @property
    def keys(self) -> list[str]:
        """The keys of its chunks, in order; a chunk may stand in a prompt twice."""
        return [piece.key for piece in self.pieces]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Whether exported keys are rotated, and how.

    ``first_position`` is the position of each file's first token; the others follow it. None leaves
    K as the store holds it, before RoPE.
    """

    config: ModelConfig
    first_position: int | None

    def __post_init__(self) -> None:
        """Refuse a position that no token can have."""
        first = self.first_position
        if first is not None and not 0 <= first < self.config.max_positions:
            raise StoreError(
                f"first_position={first}: expected 0 to {self.config.max_positions - 1}, the "
                "model's positions"
            )

    def describe(self) -> dict[str, Any]:
        """JSON-able: whether RoPE is applied, from which position on, and every constant of it."""
        rotated = self.first_position is not None
        return {
            "applied": rotated,
            "first_position": self.first_position,
            "attention_factor": attention_factor(self.config.rope),
            "attention_factor_applied": rotated,
            **config_to_dict(self.config)["rope"],
        }

    def check(self, tokens: int, what: str) -> None:
        """Raise StoreError when that many tokens reach behind the model's last position."""
        first, last = self.first_position, self.config.max_positions
        if first is not None and first + tokens > last:
            raise StoreError(
                f"{what}: {tokens} tokens from position {first} on do not fit the model's {last} "
                "positions; start lower or take fewer chunks"
            )


def find_records(store: KVStore, bundle: Bundle) -> list[Record]:
    """The commit record of each piece.

    Raises ChunkMissing or ChunkCorrupt when a chunk is not committed or its record is damaged, and
    ChunkCorrupt when it does not hold the tokens that its piece names.
    """
    records = []
    for piece, record in zip(bundle.pieces, store.head(bundle.keys), strict=True):
        if record is None:
            raise ChunkMissing(f"chunk {piece.key}: not in the store; ingest its document again")
        if piece.token_ids is not None and len(piece.token_ids) != record.tokens:
            raise ChunkCorrupt(
                f"chunk {piece.key}: holds {record.tokens} tokens, expected {len(piece.token_ids)}"
            )
        if piece.content_id not in (None, record.content_id):
            raise ChunkCorrupt(
                f"chunk {piece.key}: holds the content {record.content_id}, expected "
                f"{piece.content_id}"
            )
        records.append(record)
    return records


def describe(bundle: Bundle, records: Sequence[Record]) -> dict[str, Any]:
    """JSON-able: the token ids of a file and, per chunk, its key, its place and its origin."""
    chunks = []
    first = 0
    for record in records:
        chunks.append(
            {
                "key": record.key,
                "first_token": first,
                "tokens": record.tokens,
                "encoder": record.encoder,
                "content_id": record.content_id,
                "context_id": record.context_id,
                "xxh3": list(record.xxh3),
            }
        )
        first += record.tokens
    known = [piece.token_ids for piece in bundle.pieces if piece.token_ids is not None]
    complete = len(known) == len(bundle.pieces)
    fields: dict[str, Any] = {
        "tokens": first,
        "token_ids": np.concatenate(known).tolist() if complete else None,
        "chunks": chunks,
    }
    if bundle.question is not None:
        fields["question"] = bundle.question
    if bundle.final_ids is not None:
        fields["final_ids"] = bundle.final_ids.tolist()
    return fields


def read(store: KVStore, bundle: Bundle) -> HostArray:
    """The verified KV of a bundle, [L, 2, T, K, H] in the store's dtype, K before RoPE.

    Raises ChunkMissing, ChunkCorrupt.
    """
    found = store.get_many(bundle.keys)
    if len(found.offsets) == len(bundle.pieces):
        return found.kv
    spans = [found.offsets[key] for key in bundle.keys]  # a chunk stands here more than once
    return np.concatenate([found.kv[:, :, at : at + size] for at, size in spans], axis=2)
