"""FusionRAG's query-guided selection: the tokens that the question attends to in the last layer.

From Prefix Cache to Fusion RAG Cache: Accelerating LLM Inference in Retrieval-Augmented Generation,
section 3.2, arXiv:2601.12904.
"""

import dataclasses
import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.shapes import bucket
from jaxrag.base.sharding import to_host
from jaxrag.base.types import EMPTY, FINAL, HIDDEN, Array, HostArray, Step, Tokens
from jaxrag.kv.cache import PagedCache, PagePool, PageTable, batch_table, pages_for
from jaxrag.models.attention import PackedAttend, PagedAttend
from jaxrag.models.decoder import Decoder, forward
from jaxrag.models.flops import score_flops, turborag_flops
from jaxrag.models.model import Model
from jaxrag.models.taps import LastQueries, attention_received
from jaxrag.reuse.select.base import SelectionInput, Selector, put_row

Over = Literal["question", "cache"]
Place = Literal["as_cached", "behind"]
Voters = Literal["to_end", "question", "final"]


@dataclasses.dataclass(frozen=True)
class QueryGuided(Selector):
    """FusionRAG section 3.2: sum the columns of the last layer's attention from the question.

    Two variants were published:

    ``over="question"`` (the paper's text): the final block is prefilled alone, from position 0 on.
    Its last-layer queries meet each chunk's cached keys in a softmax of that chunk's own, without a
    mask, so that a token's score depends neither on the chunk's place in the prompt nor on other
    chunks. ``place`` says where the keys stand: "as_cached" leaves them where the encoder put them,
    behind the prefix, as the paper does; "behind" moves the question to directly behind the chunk.

    ``over="cache"`` (later code): the final block is prefilled over the assembled cache at its true
    positions; one causal softmax over everything it sees, so that chunks compete. Costs a prefill
    of the final block with all of the context.

    A model's sink logits are in either softmax: a head that attends to its own has less of a vote.
    Scores are summed over the heads and over the tokens that vote, ``voters``: "to_end" are the
    question's and what the template says behind it, to the end; "question" its own alone; "final"
    the whole final block. A template that instructs the model between the documents and the
    question has words there that are the same in every question, and would outvote it.
    """

    over: Over = "question"
    place: Place = "as_cached"
    voters: Voters = "to_end"
    name: str = dataclasses.field(default="query_guided", init=False)

    def __post_init__(self) -> None:
        for field, kind in (("over", Over), ("place", Place), ("voters", Voters)):
            if getattr(self, field) not in get_args(kind):
                raise RequestError(
                    f"query_guided: {field}={getattr(self, field)!r}: expected one of "
                    f"{', '.join(get_args(kind))}"
                )

    @property
    def reads_values(self) -> bool:
        """Over the cache the final block runs through the layers; alone it meets keys only."""
        return self.over == "cache"

    @property
    def reads_question(self) -> bool:
        """Its tokens vote."""
        return True

    def ahead(self, model: Model, final: HostArray) -> Array | None:
        """The question's queries where it meets the chunks alone: [1, T', N, H]."""
        if self.over != "question":
            return None
        return _question_queries(model, final)

    def observe(self, model: Model, cache: PagedCache, scene: SelectionInput) -> HostArray:
        """Attention that every slot of the request gets from the tokens that vote: [S] float32."""
        variant = self._alone if self.over == "question" else self._over_cache
        return to_host(variant(model, cache, scene))[0]

    def score(self, scene: SelectionInput) -> HostArray:
        """Attention that every chunk token gets."""
        received: HostArray = scene.observed[scene.chunk_slots]
        return received

    def _alone(self, model: Model, cache: PagedCache, scene: SelectionInput) -> Array:
        queries = scene.ahead
        if queries is None:
            queries = _question_queries(model, scene.final)
        votes = self._votes(scene)
        voters = np.where(votes, np.arange(votes.shape[1]), -1).astype(np.int32)
        table = batch_table([scene.table], 1, model.put_batch)
        offsets, groups = np.zeros((2, *table.pages.shape), np.int32)
        slot_position = np.full(table.slot_position.shape, HIDDEN, np.int32)
        slots = scene.chunk_slots[np.repeat(np.logical_not(scene.in_place), scene.lengths)]
        slot_position[0, slots[~scene.table.hidden(slots)]] = 0
        for chunk, length in enumerate(scene.lengths):
            first = scene.first_page(chunk)
            pages = slice(first, first + pages_for(length))
            start = len(scene.prefix) if self.place == "as_cached" else -length
            offsets[0, pages], groups[0, pages] = start, first
        placed, shown, grouped, at = put_row(model, offsets, slot_position, groups, voters)
        table = PageTable(pages=table.pages, offsets=placed, slot_position=shown)
        decoder = model.decoder(table.slot_position.shape[1])
        received: Array = _received_alone(cache.pool, decoder, table, grouped, queries, at)
        return received

    def _over_cache(self, model: Model, cache: PagedCache, scene: SelectionInput) -> Array:
        ids, order = _final_row(scene.final)
        table = batch_table([scene.table], 1, model.put_batch)
        num_slots = table.slot_position.shape[1]
        positions = np.where(order >= 0, scene.num_prompt_tokens + order, -1)
        slots = np.where(order >= 0, scene.scratch + order, num_slots)
        step = Step(*put_row(model, ids, positions.astype(np.int32), slots.astype(np.int32)))
        [votes] = put_row(model, self._votes(scene))
        received: Array = cache.update(
            _received_over_cache, model.decoder(num_slots), table, step, votes
        )
        return received

    def _votes(self, scene: SelectionInput) -> HostArray:
        """Which tokens of the final block vote, bool [1, T']."""
        votes = np.zeros((1, bucket(len(scene.final))), bool)
        first, behind = scene.question
        last = behind if self.voters == "question" else len(scene.final)
        votes[0, 0 if self.voters == "final" else first : last] = True
        return votes

    def flops(self, model: Model, scene: SelectionInput) -> int:
        """One pass of the final block, and its scores with the chunks."""
        config, final, chunks = model.config, len(scene.final), scene.num_chunk_tokens
        if self.over == "question":
            return turborag_flops(config, final, final) + score_flops(config, final, chunks)
        context = len(scene.prefix) + chunks + final
        return turborag_flops(config, final, context) + score_flops(config, final, context)


def _final_row(final: HostArray) -> tuple[HostArray, HostArray]:
    """A final block [1, T'] and its tokens' order in it, -1 in padding."""
    ids = np.zeros((1, bucket(len(final))), np.int32)
    order = np.full(ids.shape, -1, np.int32)
    ids[0, : len(final)], order[0, : len(final)] = final, np.arange(len(final))
    return ids, order


def _no_queries(config: ModelConfig, ids: Array) -> Array:
    return jnp.zeros((*ids.shape, config.num_heads, config.head_dim), config.dtype)


def _question_queries(model: Model, final: HostArray) -> Array:
    """Last-layer queries, unrotated, of a block that sees nothing else: [1, T', N, H]."""
    placed = put_row(model, *_final_row(final))
    queries: Array = _queries_alone(model.decoder(placed[0].shape[1]), *placed)
    return queries


@jax.jit
def _queries_alone(decoder: Decoder, ids: Array, order: Array) -> Array:
    config = decoder.config
    segments = jnp.where(order >= 0, FINAL, EMPTY)
    tokens = Tokens(ids=ids, positions=jnp.maximum(order, 0), segments=segments)
    attend = LastQueries(PackedAttend(config, decoder.rope, prefix_visible=True))
    _, (_, q), _ = forward(decoder.params, config, tokens, (None, _no_queries(config, ids)), attend)
    return q


@jax.jit
def _received_alone(
    pool: PagePool,
    decoder: Decoder,
    table: PageTable,
    groups: Array,
    queries: Array,
    at: Array,
) -> Array:
    """Attention that slots get from the queries [B, T, N, H] that stand at ``at`` >= 0: [B, S]."""
    return attention_received(decoder, pool, table, groups, queries, at, causal=False)


@functools.partial(jax.jit, donate_argnames=("pool",))
def _received_over_cache(
    pool: PagePool, decoder: Decoder, table: PageTable, step: Step, votes: Array
) -> tuple[PagePool, Array]:
    """The pool, and the attention that slots get from what votes, over all that is cached."""
    config, rope = decoder.config, decoder.rope
    table = table.reveal(step.slots, step.positions)
    attend = LastQueries(PagedAttend(config, rope, table, step.slots))
    cache = (pool, _no_queries(config, step.ids))
    _, (pool, q), _ = forward(decoder.params, config, step.tokens, cache, attend)
    groups = jnp.zeros_like(table.pages)
    at = jnp.where(votes, step.positions, -1)
    received = attention_received(decoder, pool, table, groups, q, at, causal=True)
    return pool, received
