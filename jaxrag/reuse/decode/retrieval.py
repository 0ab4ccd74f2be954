"""RetrievalAttention (sections 3.2 and 3.3, arXiv:2409.10516): a window, and an index of the rest.

RetrievalAttention: Accelerating Long-Context LLM Inference via Vector Retrieval. The static pattern
is on the device, the index on the host. IVF is the paper's baseline (section 4.1).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args, override

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig, RopeConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.shapes import bucket
from jaxrag.base.types import Array, HostArray, Partial, on_host
from jaxrag.kv.cache import PagePool
from jaxrag.kv.placement import AWAY, KVPlacement
from jaxrag.models.attention import merge
from jaxrag.models.rope import RopeTable
from jaxrag.models.shares import own_heads, with_heads
from jaxrag.reuse.attention_index import (
    AttentionIndex,
    Exact,
    Ivf,
    QueryBank,
    QueryLists,
    Spec,
    build,
)
from jaxrag.reuse.attention_index.spec import Trained, effort_of
from jaxrag.reuse.decode.checks import RecallChecks
from jaxrag.reuse.decode.far import HostPrompt
from jaxrag.reuse.decode.far.memory import HostMemory
from jaxrag.reuse.decode.far.search import Finder, Scanned, Searched, finder_of
from jaxrag.reuse.decode.footprint import Account, Bytes, index_bytes
from jaxrag.reuse.decode.rule import (
    DecodeRule,
    Observe,
    Prompts,
    highest,
    require,
    require_zero_or_more,
)
from jaxrag.reuse.decode.stored import DAMAGED, Carried, Known, StoredIndexes
from jaxrag.reuse.decode.view import PromptSlots, View

_FEWEST = 1024  # positions whose keys are read at once; more in powers of two
_NEWEST = 32  # tokens of the prompt's end whose queries have a say of their own in the effort
_PLACES = 4  # of the answer at which each of them asks


TrainedAt = Literal["answer", "own"]


class Indexed(struct.PyTreeNode):
    """Where the keys of one layer are that the static pattern leaves out.

    Attributes:
      numbers: [B] int32 of the requests' indexes on the host.
      tail: [B, 1, 1, room] int32 positions behind the indexed ones.
    """

    numbers: Array
    tail: Array


@dataclasses.dataclass(frozen=True)
class Retrieval(DecodeRule):
    """The static pattern, and ``k`` of the other keys that an index finds, per query head.

    Algorithm 1 of the paper; the two parts are merged by its equations 4 and 5 (appendix B). Prompt
    keys between sink and window are indexed once, per layer and KV head, unless they were stored
    with an index. Keys that leave the window later are scanned exactly; of all that was found the k
    best are used.

    Attributes:
      k: keys of a query head outside the window.
      sink: tokens of the window from the start of the prompt.
      recent: newest tokens of the window, the newest one included.
      index: kind of the index that is built for a question.
      queries: tokens of the prompt whose queries train it, and choose how much a search scans.
        The newest ones only choose: a question asks otherwise than the text before it.
      trained_at: "answer" spreads the training queries over the positions that the answer may take;
        "own" leaves them where they were in the prompt, as the paper does, and more keys have to
        be scanned.
      stored: search the indexes that chunks were stored with, whatever their kind, wherever the
        chunks stand; only keys outside them are indexed for the question.
      max_host_bytes: ceiling of the indexes of one batch on the host, checked before anything is
        built; None for none.
    """

    k: int = 100
    sink: int = 128
    recent: int = 512
    index: Spec = dataclasses.field(default_factory=QueryLists)
    queries: int = 2048
    trained_at: TrainedAt = "answer"
    stored: bool = True
    max_host_bytes: int | None = None
    name: str = dataclasses.field(default="retrieval", init=False)

    def __post_init__(self) -> None:
        require_zero_or_more(self.name, sink=self.sink)
        require(self.name, k=self.k, recent=self.recent, queries=self.queries)
        if self.trained_at not in get_args(TrainedAt):
            raise RequestError(
                f"decode rule {self.name!r}: trained_at={self.trained_at!r}: expected one of "
                f"{', '.join(get_args(TrainedAt))}"
            )
        if self.max_host_bytes is not None:
            require(self.name, max_host_bytes=self.max_host_bytes)

    @property
    @override
    def observe(self) -> Observe | None:
        opened = not isinstance(self.index, Exact) and effort_of(self.index) is None
        learns = isinstance(self.index, Trained) or opened
        return Observe("strided", self.queries, _NEWEST) if learns else None

    @property
    @override
    def searches(self) -> Spec:
        return self.index

    @property
    @override
    def placement(self) -> KVPlacement:
        return AWAY

    @property
    @override
    def static_pattern(self) -> tuple[int, int]:
        return self.sink, self.recent

    @override
    def tokens(self) -> dict[str, int]:
        return {"k": self.k, "sink + recent": self.sink + self.recent}

    @override
    def beside(self, config: ModelConfig, tokens: int, placement: KVPlacement) -> Bytes:
        keys = max(tokens - self.sink - self.recent, 0)
        return Bytes(host=index_bytes(self.index, config, keys, in_place=placement.away))

    def index_head(
        self,
        keys: HostArray,
        bank: QueryBank | None,
        rope: RopeConfig,
        start: int,
        room: int,
        spec: Spec | None = None,
    ) -> AttentionIndex:
        """The index of one KV head for an answer at positions [start, start + room).

        Args:
            keys: [S, H] rotated to their positions.
            bank: queries of the prompt that the rule observes; None without any.
            start: position of the first generated token.
            room: at most so many are generated.
            spec: another kind than the rule's.
        """
        spec, end = spec or self.index, start + room
        queries = asked = last = None
        if bank is not None:
            rest, newest = bank.apart(_NEWEST)
            if newest is not None:
                last = newest.repeated(_PLACES).over(rope, start, end)
            if isinstance(spec, Trained):
                queries, asked = rest.lessons(rope, start, end, own=self.trained_at == "own")
            else:
                asked = rest.over(rope, start, end)
        return build(keys, queries, spec, asked=asked, last=last, k=self.k)

    @override
    def far(self, prompt: HostPrompt) -> Searched:
        """Index the keys of one layer, as ``begin`` does; what can be searched in place is.

        Raises RequestError where the indexes of all layers take more than ``max_host_bytes``.
        """
        config, documents = prompt.config, prompt.documents or StoredIndexes()
        memory, layer, notes = HostMemory(config, prompt.layer), prompt.index, list[str]()
        heads = slice(prompt.part * config.num_kv_heads, (prompt.part + 1) * config.num_kv_heads)
        at = (prompt.layer.rows, prompt.position, prompt.room, prompt.carried)
        span = _Span.of(self, config, documents, notes.append, *at)
        _check_bytes(span, in_place=True, parts=prompt.parts)
        opened, span = _open(
            span, lambda stored: documents.open_layer(stored.chunk, stored.known, layer, config)
        )
        finders: list[list[Finder]] = [[] for _ in range(config.num_kv_heads)]
        account = Account(index_bytes=memory.nbytes, notes=tuple(notes))
        for stored in span.stored:
            places = (stored.positions, stored.chunk.position)
            for head, index in enumerate(opened[stored.chunk.key][heads]):
                finder, cost = finder_of(memory, head, index, *places, stored=True)
                finders[head].append(finder)
                account += cost
        if len(span.rest):
            banks = _banks(prompt.queries, prompt.positions, config)
            keys = functools.partial(memory.placed_keys, positions=span.rest)
            for head, index in enumerate(span.indexes(keys, banks, prompt.threads.map)):
                finder, cost = finder_of(memory, head, index, span.rest)
                finders[head].append(finder)
                account += cost
        some = any(not isinstance(each, Scanned) for one in finders for each in one)
        checks = span.checks if some else None
        return Searched(memory, finders, account, self.static_pattern, span.end, self.k, checks)

    @override
    def begin(self, prompts: Prompts) -> Indexed:
        """Index the keys of a request on the host, layer by layer.

        Those between the sink and the window of its first generated token. Those of its ``carried``
        chunks are searched in the indexes that the chunks were stored with; over the others an
        index is built.

        Raises RequestError where that takes more than the rule's ceiling of host memory.
        """
        host, number = prompts.host, prompts.number
        assert host is not None and number is not None
        config = with_heads(prompts.config, host.share.ways)  # of the heads that are searched here
        order, position, asked = (
            np.asarray(it)[0]
            for it in (prompts.slots.order, prompts.slots.position, prompts.bank.positions)
        )
        at = (order, int(position), prompts.room, prompts.carried)
        span = _Span.of(self, config, host.documents, functools.partial(host.note, number), *at)
        _check_bytes(span, in_place=False)
        opened, span = _open(span, lambda it: host.documents.open(it.chunk, it.known, config))
        for layer, keys, queries in _read(prompts, span):
            parts = []
            for it in span.stored:
                places = (it.positions, it.chunk.position)
                parts.append(host.open(number, opened[it.chunk.key][layer], None, *places))
            if len(span.rest):
                of_layer = dataclasses.replace(span, config=config.of_layer(layer))
                made = list(of_layer.indexes(keys.__getitem__, _banks(queries, asked, config)))
                parts.append(host.open(number, made, keys, span.rest))
            misses = any(part.misses for part in parts)
            host.add_layer(number, parts, span.checks if misses else None)
        numbers = np.full((config.num_layers, 1), number, np.int32)
        tail = span.end + np.arange(prompts.room, dtype=np.int32)
        return on_host(Indexed, numbers, np.broadcast_to(tail, (len(numbers), 1, 1, 1, len(tail))))

    @override
    def attend(self, view: View, layer: Array, state: Indexed) -> tuple[Partial, Any]:
        """The window, and what the index and the tail hold of the rest."""
        assert view.host is not None and view.q is not None
        config = view.config
        q = view.q.astype(jnp.float32)
        q = q.reshape(q.shape[0], config.num_kv_heads, config.group_size, config.head_dim)
        found = view.host.find(state.numbers, layer, q, view.position, self.k, config)
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
class IvfRetrieval(Retrieval):
    """The same over FAISS's inverted file: the paper's baseline.

    The file is made of the keys alone; ``queries`` of the prompt only choose how many of its
    clusters are scanned, and none are needed where ``index`` says it.
    """

    index: Spec = dataclasses.field(default_factory=Ivf)
    queries: int = 128
    stored: bool = False
    name: str = dataclasses.field(default="ivf", init=False)


@dataclasses.dataclass(frozen=True, eq=False)
class _Stored:
    """A chunk that was stored with indexes, in one request.

    Attributes:
      positions: [T] int32 where its keys are to be found; -1 where they are not.
    """

    chunk: Carried
    known: Known
    positions: HostArray


@dataclasses.dataclass(frozen=True, eq=False)
class _Span:
    """What is to be indexed of one request: the keys from the sink to ``end``.

    Attributes:
      note: is called with what goes wrong.
      start: position of the first generated token.
      room: at most so many are generated.
      rest: [n] int32 positions of the keys that are in none of these.
    """

    rule: Retrieval
    config: ModelConfig
    note: Callable[[str], None]
    start: int
    room: int
    stored: list[_Stored]
    rest: HostArray

    @classmethod
    def of(
        cls,
        rule: Retrieval,
        config: ModelConfig,
        documents: StoredIndexes,
        note: Callable[[str], None],
        order: HostArray,
        position: int,
        room: int,
        carried: Sequence[Carried],
    ) -> "_Span":
        """Of a prompt that ends at ``position``, by the slot or row [S] of every position.

        A key that was computed again for this request stands at another slot than its chunk's, and
        is part of the rest.
        """
        span = cls(rule, config, note, position + 1, room, [], np.zeros(0, np.int32))
        left = np.zeros(len(order), bool)
        left[rule.sink : span.end] = True
        for chunk in carried if rule.stored else ():
            try:
                known = documents.known(chunk, config)
            except DAMAGED as error:
                note(f"a stored index is not used: {error}")
                continue
            if known is None:
                continue
            places = chunk.position + np.arange(len(chunk.slots))
            there = left[places] & (order[places] == chunk.slots)
            if there.any():
                left[places[there]] = False
                where = np.where(there, places, -1).astype(np.int32)
                span.stored.append(_Stored(chunk, known, where))
        return dataclasses.replace(span, rest=np.flatnonzero(left).astype(np.int32))

    @property
    def end(self) -> int:
        """The first position that is not indexed."""
        return max(self.start + 1 - self.rule.recent, self.rule.sink)

    @property
    def spec(self) -> Spec:
        """Of the index over the rest: exact where stored indexes leave only a few keys over."""
        index = self.rule.index
        few = len(self.rest) < getattr(index, "exact_below", 0)
        return Exact(index.storage) if self.stored and few else index

    @property
    def checks(self) -> RecallChecks | None:
        """Of the searches of one layer, while the answer grows."""
        heads = self.config.num_kv_heads, self.config.group_size
        return RecallChecks.of(self.rule.index, self.start, heads)

    def indexes(
        self,
        keys: Callable[[int], HostArray],
        banks: Sequence[QueryBank | None],
        run: Callable[..., Iterable[AttentionIndex]] = map,
    ) -> Iterable[AttentionIndex]:
        """Indexes over the rest, by KV head; ``keys`` of a head gives its keys [n, H] there."""

        def make(head: int) -> AttentionIndex:
            at = (self.start, self.room, self.spec)
            return self.rule.index_head(keys(head), banks[head], self.config.rope, *at)

        return run(make, range(self.config.num_kv_heads))


def _check_bytes(span: _Span, *, in_place: bool, parts: int = 1) -> None:
    """Refuse indexes that may take more host memory than their rule allows.

    ``parts`` as large as these are made of the KV heads.
    """
    rule = span.rule
    if rule.max_host_bytes is None:
        return
    held = {it.chunk.key: it.known.tables if in_place else it.known.nbytes for it in span.stored}
    rest = index_bytes(span.spec, span.config, len(span.rest), in_place=in_place)
    need = sum(held.values()) + parts * rest
    if need > rule.max_host_bytes:
        raise RequestError(
            f"decode rule {rule.name!r}: the indexes of the request may take {need} bytes of host "
            f"memory, max_host_bytes={rule.max_host_bytes}; raise it, or ask of fewer documents"
        )


def _open[T](span: _Span, open_one: Callable[[_Stored], T]) -> tuple[dict[str, T], _Span]:
    """The stored indexes by chunk; the keys of those that cannot be read are part of the rest."""
    opened: dict[str, T] = {}
    for stored in span.stored:
        if stored.chunk.key in opened:
            continue
        try:
            opened[stored.chunk.key] = open_one(stored)
        except DAMAGED as error:
            span.note(f"a stored index is not used: {error}")
    lost = [stored.positions for stored in span.stored if stored.chunk.key not in opened]
    rest = np.concatenate([span.rest, *(where[where >= 0] for where in lost)])
    kept = [stored for stored in span.stored if stored.chunk.key in opened]
    return opened, dataclasses.replace(span, stored=kept, rest=np.sort(rest))


def _read(prompts: Prompts, span: _Span) -> Iterator[tuple[int, HostArray, HostArray]]:
    """Every layer with the keys at the span's rest [K, n, H], and the bank's queries [W, N, H].

    Of the heads that are searched here.
    """
    config, bank, slots, host = prompts.config, prompts.bank, prompts.slots, prompts.host
    assert host is not None
    count = len(span.rest)
    if not count:
        nothing = np.zeros(0, np.float32)
        yield from ((layer, nothing, nothing) for layer in range(config.num_layers))
        return
    rest = np.zeros((1, bucket(count, _FEWEST)), np.int32)
    rest[0, :count] = span.rest

    def read(layer: int, pool: PagePool) -> tuple[HostArray, HostArray]:
        at = (rest, bank.queries, np.int32(layer))
        keys, queries = _keys(config, prompts.rope, pool, slots, *at)
        mine = functools.partial(own_heads, host.mesh, host.share, axis=2)
        return mine(keys)[0], mine(queries)[0]

    for layer in range(config.num_layers):
        keys, queries = prompts.on_pool(functools.partial(read, layer))
        yield layer, np.ascontiguousarray(keys[:count].transpose(1, 0, 2)), queries


@functools.partial(jax.jit, static_argnames=("config",))
def _keys(
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    slots: PromptSlots,
    wanted: Array,
    queries: Array,
    layer: Array,
) -> tuple[Array, Array]:
    """The keys of one layer at positions ``wanted`` [B, n], as they stand: [B, n, K, H] float32.

    And that layer of ``queries`` [L, B, W, N, H], in float32.
    """
    keys = slots.view(config, rope, pool, layer).keys_at(wanted)
    return keys, queries[layer].astype(jnp.float32)


def _banks(
    queries: HostArray, positions: HostArray, config: ModelConfig
) -> Sequence[QueryBank | None]:
    """What was kept of a prompt [W, N, H], by KV head; ``positions`` [W] are -1 for nothing."""
    there = positions >= 0
    if not there.any():
        return [None] * config.num_kv_heads
    kept = queries[there]
    grouped = kept.reshape(-1, config.num_kv_heads, config.group_size, config.head_dim)
    return [QueryBank(heads, positions[there]) for heads in grouped.transpose(1, 2, 0, 3)]
