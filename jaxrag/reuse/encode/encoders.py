"""The chunk encoders: what a chunk may see while it is encoded, and its name in a store by that.

- ``isolated``: TurboRAG section 3.4 (arXiv:2410.07590), Block-Attention section 2.1
  (arXiv:2409.15355)
- ``after_prefix``: full reuse, as FusionRAG section 2.2.1 (arXiv:2601.12904) compares with it
- ``neighbours``: FusionRAG section 3.1, equation 10
- ``neighbours_joint``: an ablation of it
- ``primed``: ours; behind one text that is the same for every chunk and in no prompt
- ``packets``: KV Packet (arXiv:2604.13226); between trained vectors that stay around it
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.kv.store.keys import chunk_key as store_key
from jaxrag.kv.store.keys import content_id, context_id, vectors_id
from jaxrag.kv.store.record import Provenance
from jaxrag.models.model import Model


@dataclasses.dataclass(frozen=True)
class Encoder:
    """What a chunk may see while it is encoded, beside itself.

    Attributes:
      name: as keys and settings hold it.
      sees_prefix: whether the prompt's prefix is in front.
      neighbours: whether other chunks stand between prefix and chunk: "none"; "stored", with the
        KV that each of them has under ``after_prefix``; "joint", prefilled together with the chunk.
      sees_primer: whether a primer stands behind the prefix, or as ``wraps`` says.
      wraps: whether the primer's vectors are in front of the chunk's ids and behind them, as
        ``packets.wrapped`` has them: a part of it, in its KV and in prompts.
    """

    name: str
    sees_prefix: bool
    neighbours: Literal["none", "stored", "joint"] = "none"
    sees_primer: bool = False
    wraps: bool = False

    @property
    def sees_neighbours(self) -> bool:
        """Whether the chunk is encoded behind other chunks."""
        return self.neighbours != "none"


ENCODERS: dict[str, Encoder] = {
    # The chunk alone.
    "isolated": Encoder("isolated", sees_prefix=False),
    # Behind the prompt's prefix, as if it were the first chunk.
    "after_prefix": Encoder("after_prefix", sees_prefix=True),
    # Behind the prefix and the KV of the most similar chunks.
    "neighbours": Encoder("neighbours", sees_prefix=True, neighbours="stored"),
    # As in a prompt under full attention, where the neighbours know of each other.
    "neighbours_joint": Encoder("neighbours_joint", sees_prefix=True, neighbours="joint"),
    # Behind the prefix and a primer.
    "primed": Encoder("primed", sees_prefix=True, sees_primer=True),
    # Behind the prefix, with a primer's vectors around it.
    "packets": Encoder("packets", sees_prefix=True, sees_primer=True, wraps=True),
}

# A prompt's prefix is a chunk of its own: nothing stands before it, whatever the chunks behind it
# see.
PREFIX_ENCODER = "isolated"

# Of the KV in which neighbours stand in front of a chunk (FusionRAG equation 10).
NEIGHBOUR_ENCODER = "after_prefix"


def encoder_named(name: str) -> Encoder:
    """Look an encoder up; RequestError lists what exists."""
    if name not in ENCODERS:
        raise RequestError(f"encoder {name!r}: expected one of {', '.join(ENCODERS)}")
    return ENCODERS[name]


def provenance(
    model: Model,
    encoder: str,
    prefix_ids: HostArray,
    token_ids: HostArray,
    neighbours: Sequence[HostArray] | None = None,
    primer: HostArray | None = None,
) -> Provenance:
    """What a chunk's KV is made from: its tokens, and what it saw while it was encoded.

    The arguments are those of ``chunk_key``.
    """
    tokenizer = "" if model.tokenizer is None else model.tokenizer.digest
    chosen = encoder_named(encoder)
    others = checked_neighbours(chosen, None if neighbours is None else [neighbours], 1)[0]
    prefix = seen_prefix(chosen, prefix_ids)
    named = primer_id(chosen, tokenizer, primer)
    context = context_id(encoder, prefix, [content_id(tokenizer, ids) for ids in others], named)
    return Provenance(encoder, content_id(tokenizer, token_ids), context)


def chunk_key(
    fingerprint: str,
    model: Model,
    encoder: str,
    prefix_ids: HostArray,
    token_ids: HostArray,
    neighbours: Sequence[HostArray] | None = None,
    primer: HostArray | None = None,
) -> str:
    """Deterministic key of a chunk's KV in a store.

    Args:
      fingerprint: the store's: model, how the KV is stored, and the tenant's salt.
      model: whose tokenizer the ids belong to.
      encoder: a key of ENCODERS.
      prefix_ids: [P] int32, what the encoder may see.
      token_ids: [T] int32, as they are encoded.
      neighbours: [T'] int32 each, the chunks in front of it in their order; content and order
        count. Needed by encoders that see neighbours, and refused by the others unless empty.
      primer: as ``Primer.tokens`` gives it, what the encoder may see; needed by one that sees a
        primer.
    """
    origin = provenance(model, encoder, prefix_ids, token_ids, neighbours, primer)
    return store_key(fingerprint, origin.content_id, origin.context_id)


def prefix_provenance(tokenizer_digest: str, prefix_ids: HostArray) -> Provenance:
    """What the KV of a prompt's prefix [P] int32, not empty, is made from."""
    content = content_id(tokenizer_digest, prefix_ids)
    return Provenance(PREFIX_ENCODER, content, context_id(PREFIX_ENCODER, prefix_ids[:0]))


def prefix_key(fingerprint: str, tokenizer_digest: str, prefix_ids: HostArray) -> str:
    """The key of the KV of a prompt's prefix [P] int32, not empty, under a store's fingerprint."""
    origin = prefix_provenance(tokenizer_digest, prefix_ids)
    return store_key(fingerprint, origin.content_id, origin.context_id)


def seen_prefix(encoder: Encoder, prefix_ids: HostArray) -> HostArray:
    """What of the prefix [P] int32 a chunk sees: all of it or nothing."""
    return prefix_ids if encoder.sees_prefix else prefix_ids[:0]


def seen_primer(encoder: Encoder, primer: HostArray | None) -> HostArray:
    """What of the primer a chunk sees, as ``Primer.tokens`` gives it, or nothing.

    Raises RequestError where the encoder sees one and there is none, or a text where it wraps.
    """
    if not encoder.sees_primer:
        return np.zeros(0, np.int32)
    if primer is None:
        raise RequestError(
            f"encoder {encoder.name!r} encodes chunks behind a primer: pass primer=, its tokens"
        )
    if encoder.wraps and primer.ndim != 2:
        raise RequestError(f"encoder {encoder.name!r} wants vectors, float32 [R, D]: pass primer=")
    return primer


def num_front(encoder: Encoder, primer: HostArray | None) -> int:
    """How many tokens of the primer stand before a chunk and are no part of it; errors as above."""
    return 0 if encoder.wraps else len(seen_primer(encoder, primer))


def primer_id(encoder: Encoder, tokenizer_digest: str, primer: HostArray | None) -> str:
    """By which keys name what of the primer a chunk sees; "" for nothing.

    Raises RequestError as ``seen_primer`` does.
    """
    its_primer = seen_primer(encoder, primer)
    if is_soft(its_primer):
        return vectors_id(its_primer)
    return content_id(tokenizer_digest, its_primer) if len(its_primer) else ""


def is_soft(primer: HostArray) -> bool:
    """Whether a primer is vectors [R, D], or KV [R, L, 2, K, H], and not token ids [R]."""
    return primer.ndim > 1


def front(
    model: Model, encoder: Encoder, prefix_ids: HostArray, primer: HostArray | None
) -> tuple[Model, HostArray]:
    """What stands before all chunks of an encoder, prefix and primer: int32 [P + R], and who reads.

    That is the model itself, or one that knows the vectors of the primer by ids of their own.
    Raises RequestError as ``seen_primer`` does.
    """
    first = seen_primer(encoder, primer)
    visible_prefix = seen_prefix(encoder, prefix_ids)
    if is_soft(first):
        model = model.with_soft(first)
        first = np.arange(model.config.vocab_size, model.num_ids, dtype=np.int32)
    first = first[: num_front(encoder, primer)]
    return model, np.concatenate((visible_prefix, first)) if len(first) else visible_prefix


def checked_neighbours(
    encoder: Encoder, neighbours: Sequence[Sequence[HostArray]] | None, count: int
) -> Sequence[Sequence[HostArray]]:
    """The neighbours of ``count`` chunks, empty where the encoder sees none.

    Raises RequestError for neighbours that are missing, or that the encoder does not see.
    """
    if neighbours is None:
        if encoder.sees_neighbours:
            raise RequestError(
                f"encoder {encoder.name!r} needs the neighbours of every chunk; pass neighbours=, "
                "empty for a chunk that has none"
            )
        return [()] * count
    if len(neighbours) != count:
        raise RequestError(f"neighbours of {len(neighbours)} chunks for {count}; give one of each")
    if not encoder.sees_neighbours and any(map(len, neighbours)):
        raise RequestError(
            f"encoder {encoder.name!r} sees no neighbours; leave them out, or use 'neighbours'"
        )
    return neighbours
