"""Chunks and a store: under which keys it has them, what it lacks, that encoded and put there.

This is the one place that makes keys, records and indexes of chunk KV; who ingests, repairs, brings
up to date or answers asks it. Everything goes chunk by chunk, so that whoever takes the chunks puts
one while the next are being encoded.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrag.base.errors import ChunkNotSealed, StoreError
from jaxrag.base.types import HostArray
from jaxrag.kv.store.base import KVStore
from jaxrag.kv.store.quantise import as_stored
from jaxrag.kv.store.record import Provenance, Record
from jaxrag.models.model import Model
from jaxrag.reuse.attention_index.document import Indexing, is_indexed
from jaxrag.reuse.encode.apart import shape_apart
from jaxrag.reuse.encode.chunks import encode_for_store, gets_indexes
from jaxrag.reuse.encode.encoders import (
    NEIGHBOUR_ENCODER,
    PREFIX_ENCODER,
    chunk_key,
    encoder_named,
    front,
    num_front,
    provenance,
    seen_prefix,
)
from jaxrag.reuse.encode.neighbours import OwnKV

_AT_ONCE = 64  # tokens of one layer's K or V that are looked at together, within the cache
_EXPONENTS: dict[str, np.uint16 | np.uint32] = {
    "float32": np.uint32(0x7F800000),
    "bfloat16": np.uint16(0x7F80),
    "float16": np.uint16(0x7C00),
}


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkInContext:
    """A chunk and what is encoded in front of it.

    Attributes:
      ids: token ids as they stand in a prompt, [T] int32.
      neighbours: the chunks between prefix and chunk in their order, [T'] int32 each.
    """

    ids: HostArray
    neighbours: tuple[HostArray, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """A chunk that was encoded now, with all that is stored of it.

    Attributes:
      kv: [L, 2, T, K, H] in the model's dtype, of the heads that this process holds.
      record: what the KV is made from.
      aux: its indexes by name, where it gets some.
      finite: whether all of the KV, on every process, is numbers.
    """

    key: str
    chunk: ChunkInContext
    kv: HostArray
    record: Provenance
    aux: Mapping[str, HostArray] | None
    finite: bool

    def for_store(self, *, replace: bool = False) -> dict[str, Any]:
        """The arguments of a store's ``put``, or of ``submit`` of its writer.

        ``replace``: also over what is committed under the key, as its read was refused.

        Raises StoreError for KV that holds NaN or infinity; no answer could be made from it.
        """
        if not self.finite:
            raise StoreError(
                f"chunk {self.key}: its KV holds NaN or infinity in {self.kv.dtype} and is not "
                "kept; load the model in a wider dtype, such as bfloat16"
            )
        # Indexes come with their chunk: one that was stored without them is put again.
        replace = replace or self.aux is not None
        own = {"key": self.key, "kv": self.kv, "record": self.record, "aux": self.aux}
        return {**own, "replace": replace}


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkEncoding:
    """How chunks behind one prefix are encoded, and where their KV is kept.

    Attributes:
      store: where their KV is looked for and put.
      prefix: token ids of the prompt's prefix [P] int32, for encoders that see it.
      indexing: what indexes long chunks are stored with; None where they get none.
      apart: a chunk's KV does not depend on what is encoded with it, to the bit on a CPU, as the
        engine needs it of one that no store gives; else many are packed in a row.
      primer: token ids [R] int32 or vectors [R, D] float32, for encoders that see a primer; None
        where none is known.
    """

    model: Model
    store: KVStore
    prefix: HostArray
    indexing: Indexing | None = None
    apart: bool = False
    primer: HostArray | None = None

    @property
    def held(self) -> KVStore:
        """The store as this process of the model reads and writes it."""
        return self.model.held(self.store)

    def key(
        self, encoder: str, ids: HostArray, neighbours: Sequence[HostArray] | None = None
    ) -> str:
        """The key of a chunk's KV; arguments and errors as ``encoders.chunk_key``."""
        return chunk_key(
            self.store.fingerprint, self.model, encoder, self.prefix, ids, neighbours, self.primer
        )

    def num_before(self, encoder: str) -> int:
        """How many tokens its chunks see before neighbours and themselves."""
        chosen = encoder_named(encoder)
        return len(seen_prefix(chosen, self.prefix)) + num_front(chosen, self.primer)

    def missing[C: ChunkInContext](self, encoder: str, by_key: Mapping[str, C]) -> dict[str, C]:
        """Those of the chunks, by key, that the store lacks or holds without indexes they get."""
        return self.looked_up(encoder, by_key)[0]

    def looked_up[C: ChunkInContext](
        self, encoder: str, by_key: Mapping[str, C]
    ) -> tuple[dict[str, C], int]:
        """What is ``missing``, and how many of that stand there without the store's seal."""
        found = self.held.find(by_key)
        missing = {}
        for key, chunk in by_key.items():
            record = found[key]
            indexed = gets_indexes(self.indexing, encoder, len(chunk.ids))
            if not isinstance(record, Record) or (indexed and not is_indexed(record)):
                missing[key] = chunk
        return missing, sum(isinstance(found[key], ChunkNotSealed) for key in missing)

    def encode(
        self, encoder: str, by_key: Mapping[str, ChunkInContext], own_kv: OwnKV | None = None
    ) -> Iterator[Encoded]:
        """Encode chunks, by key, whatever the store holds; in batch order.

        Args:
          encoder: a key of ENCODERS.
          by_key: the chunks by their keys.
          own_kv: gives the neighbours' own KV; None takes it from the store and keeps it there.

        Raises what ``encode_chunks`` raises.
        """
        alone = dict[str, ChunkInContext]()
        if self.apart and len(by_key) > 1:
            alone = {k: it for k, it in by_key.items() if self.shape(encoder, len(it.ids)) is None}
        if alone:
            others = {key: it for key, it in by_key.items() if key not in alone}
            for some in (*({key: it} for key, it in alone.items()), others):
                yield from self.encode(encoder, some, own_kv)
            return
        keys, chunks = list(by_key), list(by_key.values())
        model, before = front(self.model, encoder_named(encoder), self.prefix, self.primer)
        made = encode_for_store(
            model,
            encoder,
            before,
            [chunk.ids for chunk in chunks],
            [chunk.neighbours for chunk in chunks],
            StoredNeighbours(self) if own_kv is None else own_kv,
            self.indexing if self.store.writable else None,
            self.apart,
        )
        for index, kv, aux in made:
            it = chunks[index]
            record = self.provenance(encoder, it)
            own = kv[:, :, : kv.shape[2] - self.store.layout.rows]
            finite = all(self.model.exchange(_is_finite(own)))
            yield Encoded(keys[index], it, kv, record, aux, finite)

    def provenance(self, encoder: str, chunk: ChunkInContext) -> Provenance:
        """What the KV of a chunk is made from."""
        return provenance(
            self.model, encoder, self.prefix, chunk.ids, chunk.neighbours, self.primer
        )

    def shape(self, encoder: str, tokens: int) -> tuple[int, int] | None:
        """Rows and width of the program that encodes a chunk apart; None: one program each."""
        chosen = encoder_named(encoder)
        if chosen.sees_neighbours or gets_indexes(self.indexing, encoder, tokens):
            return None
        return shape_apart(self.model, self.num_before(encoder) + tokens)

    def encode_missing[C: ChunkInContext](
        self, encoder: str, by_key: Mapping[str, C]
    ) -> dict[str, C]:
        """Encode what ``missing`` says; durable when this returns. Returns what was encoded.

        Raises StoreError when it cannot be put.
        """
        missing = self.missing(encoder, by_key)
        with self.held.writer() as writer:
            for made in self.encode(encoder, missing):
                writer.submit(**made.for_store())
        return missing

    def keep_prefix(self) -> None:
        """Make the KV of the prefix durable, if there is one: every prompt begins with it."""
        if not len(self.prefix) or self.store.layout.drops:  # then it is computed in every prompt
            return
        alone = dataclasses.replace(self, prefix=self.prefix[:0], indexing=None)
        key = alone.key(PREFIX_ENCODER, self.prefix)
        alone.encode_missing(PREFIX_ENCODER, {key: ChunkInContext(self.prefix)})

    def offer(self, made: Encoded) -> str | None:
        """Put a chunk where the store takes it; returns why it did not, or None.

        Replaces what is there, as a read was refused: a key with a record but whose bytes are
        gone or damaged is healed by it.
        """
        if not self.store.writable:
            return "the store is open for reading only"
        try:
            self.held.put(**made.for_store(replace=True))
        except StoreError as error:
            return str(error)
        return None


def _is_finite(kv: HostArray) -> bool:
    """Whether no element of ``kv`` [L, 2, T, K, H] is NaN or infinite."""
    if kv.dtype == np.uint8:  # no numbers that could be
        return True
    exponent = _EXPONENTS[kv.dtype.name]  # all ones in both, and in nothing else
    bits = kv.view(exponent.dtype)
    return all(
        bool((part[start : start + _AT_ONCE] & exponent).max() < exponent)
        for part in bits.reshape(-1, *bits.shape[2:])
        for start in range(0, len(part), _AT_ONCE)
    )


@dataclasses.dataclass
class StoredNeighbours:
    """Gives the KV that chunks have directly behind the prefix, an ``OwnKV``.

    It is read from the store where it is there, else computed and kept where the store takes it. A
    store that drops tokens is not asked: it has no more than a part of it.

    Attributes:
      encoding: of the chunks that see them.
      computed: lengths of the chunks that were computed so far.
    """

    encoding: ChunkEncoding
    computed: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, chunks: Sequence[HostArray]) -> list[HostArray]:
        """The KV [L, 2, T, K, H] of distinct chunks, int32 [T] each."""
        plain = dataclasses.replace(self.encoding, indexing=None)
        by_key = {plain.key(NEIGHBOUR_ENCODER, ids): ChunkInContext(ids) for ids in chunks}
        whole = not plain.store.layout.drops
        read = plain.held.get_many(list(by_key) if whole else [], on_missing="skip")
        kv_of = {
            key: read.kv[:, :, start : start + length]
            for key, (start, length) in read.offsets.items()
        }
        missing = {key: chunk for key, chunk in by_key.items() if key not in kv_of}
        keeps = plain.store.writable and whole
        for made in plain.encode(NEIGHBOUR_ENCODER, missing):
            # As a store gives it, so that nothing depends on what it held.
            kv_of[made.key] = as_stored(made.kv, plain.store.layout) if whole else made.kv
            self.computed.append(len(made.chunk.ids))
            # Not to keep it only costs work later; who stores the chunk itself gets the error.
            keeps = keeps and plain.offer(made) is None
        return [kv_of[key] for key in by_key]
