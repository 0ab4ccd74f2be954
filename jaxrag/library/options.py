"""What a knowledge base is made with, and what may be asked of one: each setting once.

``KnowledgeBase.open`` takes these, `jaxrag ingest` has an option for each, and
``knowledge_base.settings`` reads, checks and remembers them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jaxrag.base.options import option, parse_bytes, parse_count
from jaxrag.reuse.names import DEFAULT_PRIMER

ChunkBy = Literal["tokens", "sentence", "markdown", "passages"]
SimilarBy = Literal["vectors", "bm25"]
SearchMode = Literal["bm25", "vector", "hybrid"]
NeighboursFrom = Literal["corpus", "prompt"]  # of chunks that no knowledge base holds
FORMATS = ("native", "int8", "int4", "int4-half")  # of stored KV: kv.store's STORED
DEFAULT_FORM = "int8"  # of a new knowledge base: docs/results.md, formats of stored KV
DEFAULT_TOP_N = 10  # neighbours of a chunk: FusionRAG section 5.3.2


@dataclasses.dataclass(frozen=True)
class KnowledgeBaseOptions:
    """What an opening asks for; None leaves it to what is remembered, or to the default.

    Attributes: see ``KnowledgeBase.open``.
    """

    encoders: Sequence[str] | None = option(
        None, "isolated, after_prefix, primed, neighbours or neighbours_joint; may be repeated",
        "NAME",
        unset="isolated for a model that was trained to read chunks apart, else primed, or "
        "after_prefix for a small vocabulary",
        flag="--encoder", repeatable=True, parse=str,
    )  # fmt: skip
    primer: Any = option(
        None, "text that --encoder primed encodes every chunk behind, or a .toml file", "NAME",
        unset=DEFAULT_PRIMER, parse=str,
    )  # fmt: skip
    neighbours: int | None = option(
        None, "similar chunks that --encoder neighbours encodes a chunk behind", "N", unset="10"
    )
    neighbour_changes: int | None = option(
        None, "of these that may be others before a chunk is encoded again", "N", unset="0"
    )
    similar_by: SimilarBy | None = option(
        None, "how these are found", unset="vectors where there is an embedder, else bm25"
    )
    template: Any = option(
        None,
        "chat (the model's own chat template), turborag, block_attention, plain or a .toml file",
        "NAME",
        unset="that of the model, else chat where it has a chat template, else turborag or plain",
        parse=str,
    )
    chunk_tokens: int | None = option(None, "largest chunk", "N", unset="512", parse=parse_count)
    overlap: int | None = option(
        None, "tokens two chunks share", "N", unset="a fiftieth of a chunk", parse=parse_count
    )
    chunk_by: Any = option(
        None, "sentence (whole sentences), markdown (and sections under headings), tokens, or "
        "passages (blocks of prompts that files are pasted into)", "HOW",
        unset="sentence", parse=str,
    )  # fmt: skip
    stored: str | None = option(
        None,
        "how KV is stored: in the model's dtype, int8 in half the bytes or less, int4 in three "
        "tenths of bfloat16's, or int4 of half of a chunk's tokens",
        unset="int8; native with --like and --chunk-by passages", choices=FORMATS,
    )  # fmt: skip
    salt: str | None = option(None, "of a tenant; other salts share no KV", "TEXT")
    secret: bytes | None = dataclasses.field(default=None, repr=False)
    reseal: bool = False
    accept_older: bool = False
    tier: Any = None
    store: Any = option(
        None, "repository of the KV: s3://, gs:// or a folder", "URL", unset="in --kb", parse=str
    )
    max_bytes: int | None = option(
        None, "limit of KV on the local disk, such as 200GB; the coldest is dropped", "SIZE",
        unset="none", parse=parse_bytes,
    )  # fmt: skip
    embedder: Any = option(
        None, "embedding model; chunks get vectors, search is hybrid", "DIR", parse=str
    )
    index: str | None = option(
        None, "of the vectors: lance, or exact, comparing all", "NAME", unset="lance"
    )
    attention_index: Any = option(
        None,
        "indexes that long chunks are stored with, for --decode retrieval: lists or "
        "graph, with settings as lists:exact_below=16384,reach=8192",
        "KIND",
        unset="none",
        parse=str,
    )
