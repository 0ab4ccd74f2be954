"""The neighbours of chunks, and the KV that is encoded behind them (FusionRAG section 3.1).

The neighbours of a chunk are the ``top_n`` other chunks of the knowledge base most similar to it,
the most similar first. The chunk itself is none of them and takes none of the places; nor does one
with the same tokens as the chunk or as a nearer neighbour, nor one that not all of the chunk's
readers may read (``base.groups``). The list ends before the first that does not fit the model's
context behind the prefix and in front of the chunk.

A complete search is remembered in the catalog: of which chunks it was, and how they were searched.
Where nothing came or went since, all lists are as they were. Where vectors rank them, two chunks'
similarity is theirs alone, and the chunks to search again are those that

- have no KV, as new ones, and those whose KV saw a chunk that is gone;
- have fewer neighbours than asked for, because the context ended or there were no more;
- are at least as similar to a new chunk as to the last of their neighbours.

These products are exact in an approximate index, too: what such an index once missed stays missed,
and what comes later is not missed. With BM25 a word weighs less the more chunks hold it: there
every change may reorder every list, and all are searched again.
"""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrag.base.errors import StoreError
from jaxrag.base.groups import all_read
from jaxrag.base.types import HostArray
from jaxrag.library.catalog import Catalog, ChunkTokens
from jaxrag.library.knowledge_base.reports import RefreshReport
from jaxrag.library.knowledge_base.vectors import ChunkVectors
from jaxrag.library.knowledge_base.writers import KeyWriter
from jaxrag.library.options import DEFAULT_TOP_N, SimilarBy
from jaxrag.library.retrieve.base import NOTHING, Found
from jaxrag.library.retrieve.lance import VectorIndex
from jaxrag.models.model import Model
from jaxrag.models.text.progress import announce, progress_bar
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.reuse.encode import ChunkEncoding, ChunkInContext

_BATCH = 64  # chunks between two commits
_COUNTED = (
    "chunks", "encoded", "reused", "unchanged", "encoded_tokens", "context_tokens", "kv_bytes",
)  # fmt: skip
_SETTING = "searched"
_ROWS = 2048  # vectors that are compared at once
_ROUNDING = 1e-4  # of two products of the same vectors in other batches, relative to their lengths


@dataclasses.dataclass(frozen=True, eq=False)
class Placed(ChunkInContext):
    """A chunk and the chunks in front of it."""

    content_ids: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class GivenChunk:
    """A chunk that no knowledge base holds.

    Attributes:
      text: that similar chunks share words with, or are near to.
      ids: [T] int32, as it stands in the prompt.
    """

    text: str
    ids: HostArray


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """How the neighbours of a knowledge base's chunks are found.

    Attributes:
      vectors: of every chunk; needed to find neighbours by vectors.
      model: whose tokens and context length count.
      top_n: how many a chunk has at most.
      changes: how many of a chunk's neighbours may be others before it is encoded again.
      by: "vectors" ranks by the inner product of the chunks' own vectors, "bm25" by the words of
        the chunk as a question.
      words: by "bm25", what ranks chunks (text, k) in the catalog's place; None asks the catalog.
    """

    catalog: Catalog
    vectors: ChunkVectors | None
    model: Model
    template: PromptTemplate
    top_n: int
    by: SimilarBy
    words: Callable[[str, int], list[Found]] | None = None
    changes: int = 0

    @functools.cached_property
    def prefix(self) -> HostArray:
        """Token ids of the template's prefix, int32 [P]."""
        return self.template.prefix_ids(self.model.text_tokenizer())

    @property
    def index(self) -> VectorIndex | None:
        """What ranks chunks by their vectors; None where words do."""
        if self.by == "bm25":
            return None
        assert self.vectors is not None
        return self.vectors.index

    def find(self, chunk_ids: Sequence[int]) -> dict[int, Placed]:
        """Search the neighbours of chunks; ids of no chunk, or of one that leaves, are left out."""
        own = self.catalog.tokens(chunk_ids)
        found = self._others(
            own, self._rank, lambda chunk_id, other: _may_precede(other, own[chunk_id])
        )
        return {i: self._place(own[i], found[i]) for i in own if i in found}

    def find_given(
        self, chunks: Sequence[GivenChunk], room: int, groups: Sequence[str] | None = None
    ) -> list[Placed]:
        """Search the neighbours of chunks that are not of the knowledge base.

        Args:
          chunks: one with the tokens of a chunk of the knowledge base is not behind that one.
          room: tokens that neighbours and chunk have together.
          groups: of the reader; as of ``KnowledgeBase.search``.
        """
        readers = None if groups is None else frozenset(groups)

        def may_precede(number: int, other: ChunkTokens) -> bool:
            is_read = readers is None or other.readers is None or bool(readers & other.readers)
            return is_read and not np.array_equal(self._prompt_ids(other), chunks[number].ids)

        texts = dict(enumerate(chunk.text for chunk in chunks))
        found = self._others(
            texts,
            lambda numbers, depth: self._rank_texts({i: texts[i] for i in numbers}, depth),
            may_precede,
        )
        return [self._behind(chunk.ids, found[i], room) for i, chunk in enumerate(chunks)]

    def _others(
        self,
        names: Iterable[int],
        rank: Callable[[list[int], int], Mapping[int, list[int]]],
        may_precede: Callable[[int, ChunkTokens], bool],
    ) -> dict[int, list[ChunkTokens]]:
        """By name up to ``top_n`` distinct chunks that may precede it, most similar first.

        ``rank`` gives so many chunk ids for each of some names; one that it leaves out is left out.
        """
        found: dict[int, list[ChunkTokens]] = {}
        waiting, depth = list(names), self.top_n + 1
        while waiting:
            rankings = rank(waiting, depth)
            tokens = self.catalog.tokens(itertools.chain(*rankings.values()))
            waiting = []
            for name, ranking in rankings.items():
                others: dict[str, ChunkTokens] = {}
                for other in ranking:
                    if other in tokens and may_precede(name, tokens[other]):
                        others.setdefault(tokens[other].content_id, tokens[other])
                if len(others) < self.top_n and len(ranking) >= depth:  # others took places
                    waiting.append(name)
                else:
                    found[name] = list(others.values())[: self.top_n]
            depth *= 2
        return found

    def recorded(self, chunk_ids: Sequence[int], encoder: str) -> dict[int, Placed]:
        """The neighbours that chunks were encoded behind; of those with KV of this encoder."""
        contexts = self.catalog.contexts(chunk_ids, encoder)
        own = self.catalog.tokens(contexts)
        others = self.catalog.with_content(set(itertools.chain(*contexts.values())))
        return {
            chunk_id: self._place(own[chunk_id], [others[name] for name in contexts[chunk_id]])
            for chunk_id in own
            if others.keys() >= set(contexts[chunk_id])
        }

    def _rank(self, chunk_ids: Sequence[int], depth: int) -> dict[int, list[int]]:
        """For every chunk up to ``depth`` chunk ids, most similar first, itself perhaps included.

        Where fewer are returned, there are no others. A chunk that left meanwhile is left out.
        """
        if self.by == "bm25":
            return self._rank_texts(self.catalog.searched_texts(chunk_ids), depth)
        index = self.index
        assert index is not None
        try:
            vectors = index.get(np.asarray(chunk_ids, np.int64))
        except StoreError:
            standing = list(self.catalog.tokens(chunk_ids))
            if len(standing) == len(chunk_ids):
                raise
            return self._rank(standing, depth)  # a chunk that left took its vector along
        return _ranked(index, chunk_ids, vectors, depth)

    def _rank_texts(self, texts: Mapping[int, str], depth: int) -> dict[int, list[int]]:
        """As ``_rank``, for texts by name: what would be searched of the chunks."""
        if self.by == "bm25":
            search = self.words or self.catalog.ranked
            return {
                name: [hit.chunk_id for hit in search(text, depth)] for name, text in texts.items()
            }
        assert self.vectors is not None
        vectors = self.vectors.embedder(list(texts.values()), "passage")
        return _ranked(self.vectors.index, list(texts), vectors, depth)

    def _place(self, own: ChunkTokens, others: Sequence[ChunkTokens]) -> Placed:
        room = self.model.config.max_positions - len(self.prefix)
        return self._behind(self._prompt_ids(own), others, room)

    def _behind(self, ids: HostArray, others: Sequence[ChunkTokens], room: int) -> Placed:
        neighbours = that_fit(map(self._prompt_ids, others), room - len(ids))
        return Placed(ids, neighbours, tuple(it.content_id for it in others[: len(neighbours)]))

    def _prompt_ids(self, chunk: ChunkTokens) -> HostArray:
        return self.template.chunk_ids(self.model.text_tokenizer(), chunk.ids, chunk.title)


def _ranked(
    index: VectorIndex, names: Sequence[int], vectors: HostArray, depth: int
) -> dict[int, list[int]]:
    """By name the ids of the chunks nearest to each of some vectors, float32 [N, E]."""
    rows, _ = index.search(vectors, depth)
    return {name: row[row != NOTHING].tolist() for name, row in zip(names, rows, strict=True)}


def _may_precede(other: ChunkTokens, own: ChunkTokens) -> bool:
    return other.content_id != own.content_id and all_read(own.readers, other.readers)


def each_other(
    chunks: Sequence[HostArray], room: int, top_n: int = DEFAULT_TOP_N
) -> Iterator[tuple[HostArray, ...]]:
    """For each of some chunks, int32 [T], the others as its neighbours, in their order.

    At most ``top_n``, equal chunks once, and no more than fit ``room`` tokens with the chunk.
    """
    distinct = {ids.tobytes(): ids for ids in chunks}
    for own in chunks:
        others = [ids for name, ids in distinct.items() if name != own.tobytes()]
        yield that_fit(others[:top_n], room - len(own))


def that_fit(chunks: Iterable[HostArray], room: int) -> tuple[HostArray, ...]:
    """Chunks up to the first that does not fit ``room`` tokens any more."""
    fitting: list[HostArray] = []
    for ids in chunks:
        room -= len(ids)
        if room < 0:
            break
        fitting.append(ids)
    return tuple(fitting)


def refresh(
    neighbours: Neighbours,
    encoding: ChunkEncoding,
    encoders: Sequence[str],
    progress: bool,
    every: bool,
) -> RefreshReport:
    """Encode every chunk whose neighbours, their order included, are not those of its KV.

    With ``neighbours.changes``, only those of which more neighbours than that are others. KV that
    is stored already is not encoded again, so a run that was cut short is continued by the next.
    Passed over are chunks of documents that leave meanwhile, and those that would see them.

    Args:
      encoders: those of its variants that see neighbours.
      progress: show how far it is, on stderr.
      every: search the neighbours of every chunk, whatever is known of an earlier search.
    """
    start = time.perf_counter()
    count = collections.Counter(dict.fromkeys(_COUNTED, 0))
    search = NeighbourSearch.begin(neighbours.catalog, _how(neighbours, encoding, encoders))
    if every:
        search = dataclasses.replace(search, known=None)
    outdated = search.outdated(encoders, neighbours.top_n, neighbours.index)
    if neighbours.by == "bm25" and len(outdated) > _BATCH:
        neighbours = dataclasses.replace(neighbours, words=neighbours.catalog.words())
    left_alone = (len(search.chunk_ids) - len(outdated)) * len(encoders)
    count.update(chunks=left_alone, unchanged=left_alone)
    known = np.setdiff1d(outdated, _lacking(neighbours.catalog, search.chunk_ids, encoders))
    if len(known):
        announce(
            f"neighbours: {len(known)} of {len(search.chunk_ids)} chunks may have others now, and "
            "are encoded again if so",
            shown=progress,
        )
    with (
        KeyWriter.at_work(neighbours.catalog.path.parent) as at_work,
        progress_bar(
            len(outdated) * len(encoders), "encode behind neighbours", "chunk", shown=progress
        ) as bar,
    ):
        for batch in itertools.batched(map(int, outdated), _BATCH):
            placed = neighbours.find(batch)
            for encoder in encoders:
                count.update(_refresh_batch(neighbours, encoding, encoder, placed, at_work))
                bar.update(len(batch))
            search.check()
    search.finish()
    seconds = time.perf_counter() - start
    return RefreshReport(searched=len(outdated), seconds=seconds, **count)


def _how(
    neighbours: Neighbours, encoding: ChunkEncoding, encoders: Sequence[str]
) -> dict[str, Any]:
    """What decides the lists besides the chunks there are; JSON-able."""
    readers: dict[str, Any] = {"groups": True} if neighbours.catalog.has_groups() else {}
    if neighbours.changes:  # with another number, lists that were left as they were may not be
        readers["changes"] = neighbours.changes
    return readers | {
        "by": neighbours.by,
        "top_n": neighbours.top_n,
        "vectors": None if neighbours.vectors is None else dict(neighbours.vectors.settings),
        "encoders": sorted(encoders),
        "fingerprint": encoding.store.fingerprint,
        "prefix": encoding.prefix.tolist(),
    }


def _refresh_batch(
    neighbours: Neighbours,
    encoding: ChunkEncoding,
    encoder: str,
    placed: Mapping[int, Placed],
    at_work: KeyWriter,
) -> dict[str, int]:
    """Bring the KV of some chunks up to date; returns what was counted."""
    keys = {
        chunk_id: encoding.key(encoder, it.ids, it.neighbours) for chunk_id, it in placed.items()
    }
    at_work.needs(keys.values())
    known = neighbours.catalog.keys_of(placed, encoder)
    changed = [chunk_id for chunk_id in placed if known.get(chunk_id) != keys[chunk_id]]
    if neighbours.changes:
        recorded = neighbours.catalog.contexts([i for i in changed if i in known], encoder)
        changed = [
            chunk_id
            for chunk_id in changed
            if chunk_id not in recorded
            or len(set(placed[chunk_id].content_ids) - set(recorded[chunk_id])) > neighbours.changes
        ]
    by_key = {keys[chunk_id]: placed[chunk_id] for chunk_id in changed}
    missing = encoding.encode_missing(encoder, by_key)
    neighbours.catalog.put_contexts(encoder, [(i, keys[i], placed[i].content_ids) for i in changed])
    # What no document held when it was found may have been swept before this commit made it live.
    stored = {key: chunk for key, chunk in by_key.items() if key not in missing}
    encoding.encode_missing(encoder, stored)
    return {
        "chunks": len(placed),
        "unchanged": len(placed) - len(changed),
        "reused": len(changed) - len(missing),
        "encoded": len(missing),
        "encoded_tokens": sum(len(chunk.ids) for chunk in missing.values()),
        "context_tokens": sum(
            len(encoding.prefix) + sum(map(len, chunk.neighbours)) for chunk in missing.values()
        ),
        "kv_bytes": sum(
            encoding.store.layout.stored_nbytes(len(chunk.ids)) for chunk in missing.values()
        ),
    }


def recorded_chunks(
    catalog: Catalog, model: Model, template: PromptTemplate, keys: Iterable[str]
) -> dict[str, dict[str, Placed]]:
    """What is needed to encode store keys again: encoder -> key -> chunk and neighbours.

    A key that no chunk of the catalog has is left out.
    """
    neighbours = Neighbours(catalog, None, model, template, 0, "bm25")
    chunks: dict[str, dict[str, Placed]] = {}
    for key in keys:
        chunk = catalog.chunk_of(key)
        if chunk is not None:
            placed = neighbours.recorded([chunk.chunk_id], chunk.encoder)
            if chunk.chunk_id in placed:
                chunks.setdefault(chunk.encoder, {})[key] = placed[chunk.chunk_id]
    return chunks


@dataclasses.dataclass(frozen=True)
class NeighbourSearch:
    """One search of the neighbours of a knowledge base's chunks, from ``begin`` to ``finish``.

    Attributes:
      how: what decides the result besides the chunks, JSON-able.
      chunk_ids: every chunk there was when it began, int64 ascending.
      run: its number; only the search with the highest one may be remembered.
      known: what the last complete search left, where it was such a search.
    """

    catalog: Catalog
    how: Mapping[str, Any]
    chunk_ids: HostArray
    run: int
    known: Mapping[str, Any] | None

    @classmethod
    def begin(cls, catalog: Catalog, how: Mapping[str, Any]) -> "NeighbourSearch":
        """Begin a search. Until it is finished none is remembered, so that a killed one is not."""
        before = catalog.swap(_SETTING, lambda value: {"run": _run_of(value) + 1})
        known = before if before and before.get("how") == how else None
        return cls(catalog, how, catalog.chunk_ids(), _run_of(before) + 1, known)

    def outdated(self, encoders: Sequence[str], top_n: int, index: VectorIndex | None) -> HostArray:
        """The chunks whose neighbours may be others now, or that lack KV: int64 ascending.

        Args:
          encoders: whose KV is looked for.
          top_n: neighbours of a chunk, at most.
          index: what ranks them; None for BM25.
        """
        ids = self.chunk_ids
        if not encoders:
            return ids[:0]
        if self.known is None:
            return ids
        searched = _from_ranges(self.known["chunks"])
        new, gone = np.setdiff1d(ids, searched), np.setdiff1d(searched, ids)
        if not len(new) and not len(gone):
            return _lacking(self.catalog, ids, encoders)
        # Where one of several chunks of a content has left, its content may rank lower now.
        copies = np.isin(gone, _from_ranges(self.known["copies"])).any()
        if index is None or copies or 2 * len(new) >= len(ids):
            return ids
        outdated = np.zeros(len(ids), bool)
        try:
            for encoder in encoders:
                own, last = self.catalog.last_neighbours(encoder, top_n)
                outdated |= ~np.isin(ids, own)
                parts = (new[start : start + _ROWS] for start in range(0, len(new), _ROWS))
                came = entered(index, own, last, map(index.get, parts))
                outdated |= np.isin(ids, own[came])
        except StoreError:
            if np.array_equal(self.catalog.chunk_ids(), ids):
                raise
            return ids  # a chunk that left meanwhile took its vector along: all are searched
        return ids[outdated]

    def check(self) -> None:
        """Call after lists were written: a search that began later is not to be remembered then."""
        if _run_of(self.catalog.settings().get(_SETTING)) != self.run:
            self._give_up()

    def finish(self) -> None:
        """Everything that ``outdated`` named was searched; remember it, if nothing interfered."""
        copies = self.catalog.copies()  # before what they are copies of is looked at
        if not np.array_equal(self.catalog.chunk_ids(), self.chunk_ids):
            self._give_up()
            return
        search = {
            "run": self.run,
            "how": dict(self.how),
            "chunks": _to_ranges(self.chunk_ids),
            "copies": _to_ranges(copies),
        }
        self.catalog.swap(_SETTING, lambda value: search if _run_of(value) == self.run else value)
        self.check()

    def _give_up(self) -> None:
        self.catalog.swap(_SETTING, lambda value: {"run": _run_of(value) + 1})


def _run_of(value: Mapping[str, Any] | None) -> int:
    return 0 if value is None else int(value["run"])


def _lacking(catalog: Catalog, ids: HostArray, encoders: Sequence[str]) -> HostArray:
    """Chunks without KV of one of the encoders."""
    lacking = np.zeros(len(ids), bool)
    for encoder in encoders:
        lacking |= ~np.isin(ids, catalog.encoded_ids(encoder))
    return ids[lacking]


def entered(
    index: VectorIndex, own: HostArray, last: HostArray, blocks: Iterable[HostArray]
) -> HostArray:
    """Whether one of some vectors is at least as similar to each of ``own`` as ``last`` is.

    Rounding counts as similar: a chunk too many is searched, never one too few.

    Args:
      own: chunk ids, int64 [N].
      last: of each the last neighbour.
      blocks: of the vectors, float32 [A, E], none of them empty.

    Returns bool [N].
    """
    near = np.zeros(len(own), bool)
    get = index.getter(2 * len(own))
    for added in blocks:
        longest = np.sqrt(np.square(added).sum(1).max())
        for start in range(0, len(own), _ROWS):
            here = slice(start, start + _ROWS)
            vectors, ends = get(own[here]), get(last[here])
            lengths = np.sqrt(np.square(vectors).sum(1))
            slack = _ROUNDING * lengths * np.maximum(longest, np.sqrt(np.square(ends).sum(1)))
            near[here] |= (vectors @ added.T).max(1) >= (vectors * ends).sum(1) - slack
    return near


def _to_ranges(ids: HostArray) -> list[list[int]]:
    """Ascending ids as first and last of every run."""
    if not len(ids):
        return []
    breaks = np.flatnonzero(np.diff(ids) != 1)
    firsts, lasts = ids[np.r_[0, breaks + 1]], ids[np.r_[breaks, len(ids) - 1]]
    return [[int(first), int(last)] for first, last in zip(firsts, lasts, strict=True)]


def _from_ranges(ranges: Sequence[Sequence[int]]) -> HostArray:
    parts = [np.arange(first, last + 1) for first, last in ranges]
    return np.concatenate([np.zeros(0, np.int64), *parts])
