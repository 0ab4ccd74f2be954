"""RetrievalAttention (sections 3.2 and 3.3, arXiv:2409.10516): a window, and an index of the rest.

RetrievalAttention: Accelerating Long-Context LLM Inference via Vector Retrieval. The static pattern
is on the device, the index on the host. IVF is the paper's baseline (section 4.1).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, get_args, override

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base import struct
from jaxrag.base.config import ModelConfig, RopeConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.shapes import bucket
from jaxrag.base.types import Array, HostArray, Partial, on_host
from jaxrag.kv.cache import PagePool, PageTable
from jaxrag.models.attention import merge
from jaxrag.models.rope import RopeTable
from jaxrag.reuse.attention_index import AttentionIndex, Exact, QueryBank, QueryLists, Spec, build
from jaxrag.reuse.attention_index import Ivf as IvfIndex
from jaxrag.reuse.attention_index.spec import Trained, effort_of
from jaxrag.reuse.decode.far import HostPrompt
from jaxrag.reuse.decode.far.memory import Memory
from jaxrag.reuse.decode.far.search import Finder, Searched, finder_of
from jaxrag.reuse.decode.footprint import Account, Bytes, Placement, index_bytes
from jaxrag.reuse.decode.host_search import NOBODY
from jaxrag.reuse.decode.rule import (
    DecodeRule,
    Observe,
    Prompts,
    highest,
    require,
    require_zero_or_more,
)
from jaxrag.reuse.decode.stored import DAMAGED, Carried, Known, StoredIndexes
from jaxrag.reuse.decode.view import View

_FEWEST = 1024  # positions whose keys are read at once; more in powers of two


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
    placement: ClassVar[Placement] = "host"

    def __post_init__(self) -> None:
        """Refuse a window without the newest token, k of zero, no queries, unknown positions."""
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
        return Observe("strided", self.queries) if learns else None

    @property
    @override
    def searches(self) -> Spec:
        return self.index

    @property
    @override
    def static_pattern(self) -> tuple[int, int]:
        return self.sink, self.recent

    @override
    def tokens(self) -> dict[str, int]:
        return {"k": self.k, "sink + recent": self.sink + self.recent}

    @override
    def beside(self, config: ModelConfig, tokens: int, placement: Placement) -> Bytes:
        keys = max(tokens - self.sink - self.recent, 0)
        return Bytes(host=index_bytes(self.index, config, keys, in_place=placement == "host"))

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
            rope: the model's rotation.
            start: position of the first generated token.
            room: at most so many are generated.
            spec: another kind than the rule's.
        """
        spec, end = spec or self.index, start + room
        queries = asked = None
        if bank is not None and isinstance(spec, Trained):
            queries, asked = bank.lessons(rope, start, end, own=self.trained_at == "own")
        elif bank is not None:
            asked = bank.over(rope, start, end)
        return build(keys, queries, spec, asked=asked, k=self.k)

    def _index_rest(
        self,
        config: ModelConfig,
        span: "_Span",
        keys: Callable[[int], HostArray],
        observed: tuple[HostArray, HostArray],
        start: int,
        room: int,
        run: Callable[..., Iterable[AttentionIndex]] = map,
    ) -> Iterable[AttentionIndex]:
        """Indexes by KV head over the keys that no stored one holds, ``keys`` [n, H] of a head."""
        banks, spec = _banks(*observed, config), span.spec(self)

        def make(head: int) -> AttentionIndex:
            return self.index_head(keys(head), banks[head], config.rope, start, room, spec)

        return run(make, range(config.num_kv_heads))

    @override
    def far(self, prompt: HostPrompt) -> Searched:
        """Index the keys of one layer, as ``begin`` does; what can be searched in place is.

        Raises RequestError where the indexes of all layers take more than ``max_host_bytes``.
        """
        config, documents = prompt.config, prompt.documents or StoredIndexes()
        memory = Memory(config, prompt.layer)
        end = max(prompt.position + 2 - self.recent, self.sink)
        notes: list[str] = []
        request = (notes.append, prompt.layer.rows, end, prompt.carried)
        opened, [span] = _open(
            self,
            documents,
            config,
            [request],
            lambda it: documents.open_layer(it.chunk, it.known, prompt.index, config),
            in_place=True,
        )
        finders: list[list[Finder]] = [[] for _ in range(config.num_kv_heads)]
        account = Account(index_bytes=memory.nbytes, notes=tuple(notes))
        for it in span.stored:
            at = (it.positions, it.chunk.position)
            for head, index in enumerate(opened[it.chunk.key]):
                finder, cost = finder_of(memory, head, index, *at, stored=True)
                finders[head].append(finder)
                account += cost
        if len(span.rest):
            made = self._index_rest(
                config,
                span,
                lambda head: memory.placed_keys(head, span.rest),
                (prompt.queries, prompt.positions),
                prompt.position + 1,
                prompt.room,
                prompt.threads.map,
            )
            for head, index in enumerate(made):
                finder, cost = finder_of(memory, head, index, span.rest)
                finders[head].append(finder)
                account += cost
        return Searched(memory, finders, account, self.static_pattern, end, self.k)

    @override
    def begin(self, prompts: Prompts) -> Indexed:
        """Index the keys of a batch on the host, layer by layer.

        Of every request the keys between the sink and the window of its first generated token.
        Those of its ``carried`` chunks are searched in the indexes that the chunks were stored
        with; over the others an index is built.

        Raises RequestError where that takes more than the rule's ceiling of host memory.
        """
        host, config, bank = prompts.host, prompts.config, prompts.bank
        assert host is not None
        position = prompts.position
        bank_positions = np.asarray(bank.positions)
        end = np.maximum(position + 2 - self.recent, self.sink)  # the first that is not indexed
        requests = [
            (functools.partial(host.note, number), prompts.order[row], int(end[row]), carried)
            for row, (number, carried) in enumerate(
                zip(prompts.numbers, prompts.carried, strict=True)
            )
        ]
        opened, spans = _open(
            self,
            host.documents,
            config,
            requests,
            lambda it: host.documents.open(it.chunk, it.known, config),
        )
        for layer, keys, queries in _read(prompts, spans):
            for row, (number, span) in enumerate(zip(prompts.numbers, spans, strict=True)):
                parts = [
                    host.open(
                        number, opened[it.chunk.key][layer], None, it.positions, it.chunk.position
                    )
                    for it in span.stored
                ]
                if len(span.rest):
                    here = np.ascontiguousarray(keys[row, : len(span.rest)].transpose(1, 0, 2))
                    made = self._index_rest(
                        config,
                        span,
                        here.__getitem__,
                        (queries[row], bank_positions[row]),
                        int(position[row]) + 1,
                        prompts.room,
                    )
                    parts.append(host.open(number, list(made), here, span.rest))
                host.add_layer(number, parts)
        rows, room = len(position), prompts.room
        tail = np.where(position[:, None] >= 0, end[:, None] + np.arange(room), -1)
        tail = tail.astype(np.int32)[:, None, None]
        numbers = np.full(rows, NOBODY, np.int32)
        numbers[: len(prompts.numbers)] = prompts.numbers
        return on_host(
            Indexed,
            np.broadcast_to(numbers, (config.num_layers, rows)),
            np.broadcast_to(tail, (config.num_layers, *tail.shape)),
        )

    @override
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
    """The same over FAISS's inverted file: the paper's baseline.

    The file is made of the keys alone; ``queries`` of the prompt only choose how many of its
    clusters are scanned, and none are needed where ``index`` says it.
    """

    index: Spec = dataclasses.field(default_factory=IvfIndex)
    queries: int = 128
    stored: bool = False
    name: str = dataclasses.field(default="ivf", init=False)


@dataclasses.dataclass(frozen=True, eq=False)
class _Stored:
    """A chunk that was stored with indexes, in one request.

    Attributes:
      chunk: in the prompt.
      known: in its store.
      positions: [T] int32 where its keys are to be found; -1 where they are not.
    """

    chunk: Carried
    known: Known
    positions: HostArray


@dataclasses.dataclass(frozen=True, eq=False)
class _Span:
    """What is to be indexed of one request.

    Attributes:
      stored: its chunks with indexes.
      rest: [n] int32 positions of the keys that are in none of these.
    """

    stored: list[_Stored]
    rest: HostArray

    def spec(self, rule: Retrieval) -> Spec:
        """Of the index over the rest: exact where stored indexes leave only a few keys over."""
        few = len(self.rest) < getattr(rule.index, "exact_below", 0)
        return Exact(rule.index.storage) if self.stored and few else rule.index


def _span(
    documents: StoredIndexes,
    config: ModelConfig,
    rule: Retrieval,
    note: Callable[[str], None],
    order: HostArray,
    end: int,
    carried: Sequence[Carried],
) -> _Span:
    """Which positions from the sink to ``end`` are in which stored index, and the rest.

    A key that was computed again for this request stands at another slot than its chunk's, and is
    part of the rest.
    """
    left = np.zeros(len(order), bool)
    left[rule.sink : end] = True
    stored = []
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
            stored.append(_Stored(chunk, known, np.where(there, places, -1).astype(np.int32)))
    return _Span(stored, np.flatnonzero(left).astype(np.int32))


def _open[T](
    rule: Retrieval,
    documents: StoredIndexes,
    config: ModelConfig,
    requests: Sequence[tuple[Callable[[str], None], HostArray, int, Sequence[Carried]]],
    open_one: Callable[[_Stored], T],
    *,
    in_place: bool = False,
) -> tuple[dict[str, T], list[_Span]]:
    """What is to be indexed of requests, and the stored indexes that are open, by chunk.

    Keys of stored indexes that cannot be read are part of the rest.

    Args:
        rule: which indexes.
        documents: that chunks were stored with.
        config: of the model.
        requests: of each ``_span``'s note, order, end and carried chunks.
        open_one: opens a stored index.
        in_place: K is in host memory already.

    Raises RequestError for indexes that may take more host memory than the rule allows.
    """
    spans = [_span(documents, config, rule, *request) for request in requests]
    _check_bytes(config, rule, spans, in_place=in_place)
    opened: dict[str, T] = {}
    whole = []
    for (note, *_), span in zip(requests, spans, strict=True):
        kept, rest = [], [span.rest]
        for it in span.stored:
            if it.chunk.key not in opened:
                try:
                    opened[it.chunk.key] = open_one(it)
                except DAMAGED as error:
                    note(f"a stored index is not used: {error}")
                    rest.append(it.positions[it.positions >= 0])
                    continue
            kept.append(it)
        whole.append(_Span(kept, np.sort(np.concatenate(rest))))
    return opened, whole


def _check_bytes(
    config: ModelConfig, rule: Retrieval, spans: Sequence[_Span], *, in_place: bool
) -> None:
    """Refuse indexes that may take more host memory than the rule allows."""
    if rule.max_host_bytes is None:
        return
    held = {
        it.chunk.key: it.known.tables if in_place else it.known.nbytes
        for span in spans
        for it in span.stored
    }
    need = sum(held.values())
    need += sum(
        index_bytes(span.spec(rule), config, len(span.rest), in_place=in_place) for span in spans
    )
    if need > rule.max_host_bytes:
        raise RequestError(
            f"decode rule {rule.name!r}: the indexes of {len(spans)} request(s) may take {need} "
            f"bytes of host memory, max_host_bytes={rule.max_host_bytes}; raise it, or ask fewer "
            "at once"
        )


def _read(prompts: Prompts, spans: Sequence[_Span]) -> Iterator[tuple[int, HostArray, HostArray]]:
    """Every layer with the keys at the rest of each row [B, n, K, H], and the bank's queries."""
    config, bank, order, position = prompts.config, prompts.bank, prompts.order, prompts.position
    longest = max(len(span.rest) for span in spans)
    if not longest:
        nothing = np.zeros(0, np.float32)
        yield from ((layer, nothing, nothing) for layer in range(config.num_layers))
        return
    rest = np.zeros((len(position), bucket(longest, _FEWEST)), np.int32)
    for row, span in enumerate(spans):
        rest[row, : len(span.rest)] = span.rest

    def read(layer: int, pool: PagePool) -> tuple[HostArray, HostArray]:
        at = (order, position, rest, bank.queries, np.int32(layer))
        keys, queries = _keys(config, prompts.rope, pool, prompts.table, *at)
        return np.asarray(keys), np.asarray(queries)

    for layer in range(config.num_layers):
        yield layer, *prompts.on_pool(functools.partial(read, layer))


@functools.partial(jax.jit, static_argnames=("config",))
def _keys(
    config: ModelConfig,
    rope: RopeTable,
    pool: PagePool,
    table: PageTable,
    order: Array,
    position: Array,
    wanted: Array,
    queries: Array,
    layer: Array,
) -> tuple[Array, Array]:
    """The keys of one layer at positions ``wanted`` [B, n], as they stand: [B, n, K, H] float32.

    And that layer of ``queries`` [L, B, W, N, H], in float32.
    """
    pages = pool.rows(layer, table.pages, config.num_layers)
    slots = (table.slot_position, order, position)
    keys = View(config, rope, pool, pages, table.offsets, *slots).keys_at(wanted)
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
