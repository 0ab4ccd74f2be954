"""RetrievalAttention: the static pattern on the device, the rest through an index on the host."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct

from jaxrag.attention_index import Ivf as IvfIndex
from jaxrag.attention_index import ProjectedGraph, Spec
from jaxrag.decode.base import DecodeRule, Observe, View, highest, require, require_zero_or_more
from jaxrag.models.attention import merge
from jaxrag.types import Array, Partial


class Indexed(struct.PyTreeNode):
    """Where the keys of one layer are that the static pattern leaves out."""

    numbers: Array  # [B] int32 of the requests' indexes on the host
    tail: Array  # [B, 1, 1, room] int32 positions behind the indexed ones


@dataclasses.dataclass(frozen=True)
class Retrieval(DecodeRule):
    """The static pattern, and ``k`` of the other keys that an index finds, per query head.

    RetrievalAttention, algorithm 1; the two parts are merged by its equations 4 and 5. Prompt keys
    between sink and window are indexed once, per layer and KV head, with the queries of ``queries``
    prompt tokens to train on, unless they were stored with an index. Keys that leave the window
    later are scanned exactly; of all that was found the k best are used.

    Attributes:
      rerotate: rotate training queries to where the answer begins; else they stand where they were
        in the prompt, as in the paper, and more keys have to be scanned.
      stored: search the indexes that chunks were stored with, whatever their kind, wherever the
        chunks stand; only keys outside them are indexed for the question.
      max_host_bytes: ceiling of the indexes of one batch on the host, checked before anything is
        built; None for none.
    """

    k: int = 100
    sink: int = 128
    recent: int = 512
    index: Spec = dataclasses.field(default_factory=ProjectedGraph)
    queries: int = 2048
    rerotate: bool = True
    stored: bool = True
    max_host_bytes: int | None = None
    name: str = dataclasses.field(default="retrieval", init=False)

    def __post_init__(self) -> None:
        """Refuse a window without the newest token, k of zero and no queries."""
        require_zero_or_more(self.name, sink=self.sink)
        require(self.name, k=self.k, recent=self.recent, queries=self.queries)
        if self.max_host_bytes is not None:
            require(self.name, max_host_bytes=self.max_host_bytes)

    @property
    def observe(self) -> Observe | None:
        """Queries from all over the prompt."""
        return Observe("strided", self.queries)

    @property
    def searches(self) -> Spec:
        """What kind of index it needs."""
        return self.index

    def tokens(self) -> dict[str, int]:
        """k and the window."""
        return {"k": self.k, "sink + recent": self.sink + self.recent}

    def attend(self, view: View, layer: Array, state: Indexed) -> tuple[Partial, Any]:
        """The window, and what the index and the tail hold of the rest."""
        assert view.host is not None and view.q is not None
        config = view.config
        q = view.q.astype(jnp.float32)
        q = q.reshape(q.shape[0], config.num_kv_heads, config.group_size, config.head_dim)
        found = view.host.find(state.numbers, layer, q, view.position, self.k, config.rope)
        window = view.attend_at(*view.window(self.sink, self.recent))
        edge = view.position[:, None, None, None] - self.recent
        wheres = [found, state.tail]
        # Indexed keys may be kept in fewer bits: the scores of what was found are computed again.
        scores = [view.scores_at(where, where <= edge) for where in wheres]
        both = jnp.concatenate(scores, axis=-1)
        shape = both.shape[:-1]
        where = jnp.concatenate([jnp.broadcast_to(w, (*shape, w.shape[-1])) for w in wheres], -1)
        best, at = highest(both, self.k)
        slots = view.slots_of(jnp.take_along_axis(where, at, axis=-1))
        return merge([window, view.mix(best, slots)]), state


@dataclasses.dataclass(frozen=True)
class Ivf(Retrieval):
    """The same over FAISS's inverted file, which knows nothing of queries: the paper's baseline."""

    index: Spec = dataclasses.field(default_factory=IvfIndex)
    queries: int = 1
    stored: bool = False
    name: str = dataclasses.field(default="ivf", init=False)

    @property
    def observe(self) -> None:
        """None: the file is made of the keys alone."""
        return None
