"""Okapi BM25 over chunk texts, in tables of the catalog's own SQLite file.

The postings are committed together with the documents they belong to. SQLite's own FTS5 does not
serve: it gives no weight to a word that half of the chunks hold, which misranks small knowledge
bases, and its tokenizers find no words in running Chinese or Japanese text. Size and speed are the
same. Words are not stemmed and there is no stop list: on HotpotQA and MuSiQue neither moved
recall@5 or @10 by more than its standard error.

From 10,000 chunks on, postings are packed (``retrieve.packed``): those of many chunks as they come;
those of few are in the table ``postings`` first, which is searched beside the others. The answers
are the same.
"""

import array
import collections
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import cachetools
import numpy as np
from numpy.typing import NDArray

from jaxrag.base.errors import DamagedCatalogError
from jaxrag.base.types import Connection
from jaxrag.library.retrieve.base import Found
from jaxrag.library.retrieve.filters import Filter
from jaxrag.library.retrieve.maxscore import BestChunks, BM25Weights
from jaxrag.library.retrieve.packed import MOST_CHUNKS, Head, Packed, damaged
from jaxrag.library.retrieve.terms import TermPostings, gathered, terms

_MANY_CHUNKS = 10_000  # from here on, words that most chunks hold are not looked at
_AT_ONCE = 512  # chunks that are packed as they come
_K1, _B = 1.2, 0.75  # how soon repeats stop counting, and how much long chunks are held back
_UNIT = 2.0**32  # what a word adds is a whole number of 1 / _UNIT: sums are exact in any order
_LOW = 0xFFFFFFFF
_MOST_SEEN = 1 << 21  # postings that are remembered, a term more counting as _OF_A_TERM
_OF_A_TERM = 16
# How many postings there are, and a sum that no one of them is missing from, is added to, or
# trades places with another in.
_POSTINGS = (
    f"COUNT(*) AS holders, COALESCE(SUM((chunk_id * (2 * count + 1)) & {_LOW}), 0) AS weight"
)
_CREATE_TERMS = (
    "CREATE TABLE terms (term TEXT PRIMARY KEY, holders INTEGER NOT NULL, "
    "weight INTEGER NOT NULL) WITHOUT ROWID"
)
_FILTERS_CACHED = 16  # whose chunks are remembered
_MATCHING = (
    "SELECT chunks.id FROM chunks JOIN documents ON documents.id = chunks.document_id WHERE {}"
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of all chunks together."""

    chunks: int
    terms: int  # repeats counted


class IndexChange(NamedTuple):
    """What a change added, or removed."""

    terms: int  # repeats counted
    words: int  # that no other chunk holds


class _Term(NamedTuple):
    """What there is of a term.

    Attributes:
      holders: how many chunks hold it.
      heads: of its rows in blocks, in their order.
      loose: [N, 3] int64 of the others, ascending: chunk id, count, terms of the chunk.
    """

    holders: int
    heads: list[Head]
    loose: NDArray[np.int64]


@dataclasses.dataclass
class _TermCache:
    """What was read in one state of the file, and is not read again there."""

    version: Hashable = None
    terms: dict[str, _Term] = dataclasses.field(default_factory=dict)
    size: int = 0  # of ``terms``
    allowed: "cachetools.LRUCache[str, NDArray[np.int64]]" = dataclasses.field(
        default_factory=lambda: cachetools.LRUCache(_FILTERS_CACHED)
    )

    def renew(self, version: Hashable) -> None:
        """Forget what is of another state of the file, or too much."""
        if version is None or version != self.version:
            self.version, self.size = version, _MOST_SEEN + 1
            self.allowed.clear()
        if self.size > _MOST_SEEN:
            self.terms, self.size = {}, 0


@dataclasses.dataclass(frozen=True)
class BM25Index:
    """The full-text index of the chunks in one SQLite database.

    Nothing here commits: adding and removing belong to the caller's transaction.

    Attributes:
      path: of the database, as errors name it.
    """

    connection: Connection
    path: Path = Path("catalog.sqlite")
    _cache: _TermCache = dataclasses.field(default_factory=_TermCache, compare=False, repr=False)

    def create(self) -> None:
        """Make the tables."""
        self.connection.execute(
            "CREATE TABLE postings (term TEXT, chunk_id INTEGER, count INTEGER NOT NULL, "
            "PRIMARY KEY (term, chunk_id)) WITHOUT ROWID"
        )
        self.connection.execute(
            "CREATE TABLE lengths (chunk_id INTEGER PRIMARY KEY, num_terms INTEGER NOT NULL)"
        )
        self.connection.execute(_CREATE_TERMS)

    @functools.cached_property
    def packed(self) -> Packed:
        """The postings that are packed."""
        return Packed(self.connection, self.path)

    def is_large(self, chunks: int) -> bool:
        """Whether an index of so many chunks is packed."""
        return chunks >= _MANY_CHUNKS

    def clear(self) -> None:
        """Forget every chunk."""
        self.packed.clear()
        for table in ("postings", "lengths", "terms"):
            self.connection.execute(f"DELETE FROM {table}")

    def add(self, texts: Mapping[int, str], chunks: int = 0) -> IndexChange:
        """Index chunks that are not in the index, texts by id.

        Where there are ``chunks`` already, and these are many together and many by themselves, they
        are packed at once.
        """
        by_term, lengths = gathered(texts)
        if self.is_packed_at_once(len(texts), chunks):
            self.packed.start()
            self.packed.put(by_term, lengths)
        else:
            self.connection.executemany(
                "INSERT INTO postings VALUES (?, ?, ?)",
                [(term, *posting) for term, postings in by_term for posting in postings],
            )
        self.connection.executemany("INSERT INTO lengths VALUES (?, ?)", lengths)
        words = len(by_term) - self._count_known([term for term, _ in by_term])
        self.connection.executemany(
            "INSERT INTO terms VALUES (?, ?, ?) ON CONFLICT (term) DO UPDATE SET "
            "holders = holders + excluded.holders, weight = weight + excluded.weight",
            [(term, len(postings), _weight(postings)) for term, postings in by_term],
        )
        return IndexChange(sum(length for _, length in lengths), words)

    def is_packed_at_once(self, count: int, chunks: int) -> bool:
        """Whether ``add`` packs so many chunks, where there are ``chunks``."""
        return self.is_large(chunks + count) and _AT_ONCE <= count <= MOST_CHUNKS

    def _count_known(self, terms: list[str]) -> int:
        """How many of distinct terms the index has."""
        (known,) = self.connection.execute(
            "SELECT COUNT(*) FROM json_each(?) CROSS JOIN terms ON term = value",
            (json.dumps(terms),),
        ).fetchone()
        return int(known)

    def remove(self, texts: Mapping[int, str]) -> IndexChange:
        """Forget chunks, given the texts they were added with by id."""
        by_term, lengths = gathered(texts)
        if self.packed.is_there():
            distinct: dict[int, list[str]] = {chunk_id: [] for chunk_id in texts}
            for term, postings in by_term:
                for chunk_id, _ in postings:
                    distinct[chunk_id].append(term)
            self.packed.remove(distinct)
        self.connection.executemany(
            "DELETE FROM postings WHERE term = ? AND chunk_id = ?",
            [(term, chunk_id) for term, postings in by_term for chunk_id, _ in postings],
        )
        self.connection.executemany(
            "DELETE FROM lengths WHERE chunk_id = ?", [row[:1] for row in lengths]
        )
        known = self._count_known([term for term, _ in by_term])
        self.connection.executemany(
            "UPDATE terms SET holders = holders - ?, weight = weight - ? WHERE term = ?",
            [(len(postings), _weight(postings), term) for term, postings in by_term],
        )
        self.connection.executemany(
            "DELETE FROM terms WHERE term = ? AND holders = 0", [row[:1] for row in by_term]
        )
        words = known - self._count_known([term for term, _ in by_term])
        return IndexChange(sum(length for _, length in lengths), words)

    def _look_up(self, words: list[str]) -> dict[str, _Term]:
        """What there is of each term. Raises DamagedCatalogError where postings were lost."""
        heads = self.packed.heads(words)
        asked = (json.dumps(words),)
        statement = "SELECT terms.* FROM json_each(?) CROSS JOIN terms ON term = value"
        known = {term: sums for term, *sums in self.connection.execute(statement, asked)}
        # As one text a term: to make each number an object takes twice as long. CROSS JOIN keeps
        # this order: a term's postings are one range of the table.
        rows = self.connection.execute(
            "SELECT value, (SELECT group_concat(chunk_id || ' ' || count || ' ' || num_terms, ' ') "
            "FROM postings CROSS JOIN lengths USING (chunk_id) WHERE term = value) "
            "FROM json_each(?)",
            asked,
        )
        clearing, made = self.packed.clearing(), {}
        for term, text in rows:
            try:
                loose = np.fromstring(text or "", np.int64, sep=" ").reshape(-1, 3)
            except ValueError:  # something is no number
                raise self._damaged(term) from None
            if clearing:
                loose = loose[~self.packed.holds(loose[:, 0])]
            own = heads.get(term, [])
            holders = len(loose) + sum(head.holders for head in own)
            weight = int((loose[:, 0] * (2 * loose[:, 1] + 1) & _LOW).sum())
            if [holders, weight + sum(head.weight for head in own)] != known.get(term, [0, 0]):
                raise self._damaged(term)
            made[term] = _Term(holders, own, loose)
        return made

    def _damaged(self, term: str) -> DamagedCatalogError:
        return damaged(self.path, f"the postings of {term!r}")

    def search(
        self,
        question: str,
        k: int,
        where: Filter | None = None,
        sizes: Sizes | None = None,
        version: Hashable = None,
    ) -> list[Found]:
        """The up to ``k`` chunks that share a term with the question, best first.

        Okapi BM25 with idf = ln(1 + (chunks - holders + 0.5) / (holders + 0.5)), which is positive
        for every term. Equal scores are in order of chunk id. A question without a single word
        finds nothing. From 10,000 chunks on, words that more than half of them hold do not count,
        unless the question has no others.

        With ``where``, only chunks of documents whose metadata matches are ranked (by the tables
        ``chunks`` and ``documents`` of the same database); their scores are the same without it.

        Args:
          k: at least 1.
          sizes: of the index; None counts them.
          version: another value after every change of the file: what was counted under the same is
            not counted again; None counts.

        Raises DamagedCatalogError where a term's postings are not those that were written.
        """
        totals = sizes or self._sizes()
        cache = self._cache
        cache.renew(version)
        ids = None if where is None else self.matching(where, version)
        words = dict.fromkeys(terms(question))
        found = self._look_up([term for term in words if term not in cache.terms])
        cache.terms |= found
        cache.size += sum(_OF_A_TERM + len(term.loose) for term in found.values())
        holders = {term: cache.terms[term].holders for term in words}
        held = {term: _idf(totals.chunks, count) for term, count in holders.items() if count}
        if not held:
            return []
        idf = _telling(held, totals.chunks)
        scoring = _scoring(totals)
        best = self._best_loose(idf, k, ids, scoring)
        if self.packed.blocks():
            least = best[k - 1][0] if len(best) >= k else 0.0
            chunks = self.packed.chunks()
            heads = {term: cache.terms[term].heads for term in idf}
            allowed = None if ids is None else chunks.hold(ids)
            best += BestChunks(self.packed, chunks, idf, heads, k, scoring, allowed).found(least)
            best.sort(key=lambda pair: (-pair[0], pair[1]))
        return [Found(chunk_id, score / _UNIT) for score, chunk_id in best[:k]]

    def _best_loose(
        self,
        idf: Mapping[str, float],
        k: int,
        ids: NDArray[np.int64] | None,
        scoring: BM25Weights,
    ) -> list[tuple[float, int]]:
        """The best of the chunks that are in no block: (score in units, chunk id)."""
        parts = [self._cache.terms[term].loose for term in idf]
        chunk_ids, counts, lengths = np.concatenate(parts).T
        values = np.repeat([*idf.values()], [len(part) for part in parts])
        own, places = np.unique(chunk_ids, return_inverse=True)
        scores = np.bincount(places, scoring.weights(values, counts, lengths), len(own))
        if ids is not None:
            stay = np.searchsorted(ids, own) < np.searchsorted(ids, own, "right")
            own, scores = own[stay], scores[stay]
        return _best(own, scores, k)

    def matching(self, where: Filter, version: Hashable = None) -> NDArray[np.int64]:
        """Ids of the chunks whose documents match, ascending; ``version`` as of ``search``."""
        condition, operands = where.sql()
        name = json.dumps([condition, operands])
        self._cache.renew(version)
        found = self._cache.allowed.get(name)
        if found is None:
            rows = self.connection.execute(_MATCHING.format(condition), operands)
            found = np.sort(np.fromiter((row[0] for row in rows), np.int64))
            self._cache.allowed[name] = found
        return found

    def _sizes(self) -> Sizes:
        return Sizes(
            *self.connection.execute(
                "SELECT COUNT(*), COALESCE(SUM(num_terms), 0) FROM lengths"
            ).fetchone()
        )

    def _sums(self) -> dict[str, tuple[int, int]]:
        """Of every term how many postings there are, and the sum that tells which."""
        blocks = self.packed.blocks() if self.packed.clearing() else []
        beside = json.dumps([chunk_id for block in blocks for chunk_id in block.ids.tolist()])
        sums: dict[str, tuple[int, int]] = {
            term: (holders, weight)
            for term, holders, weight in self.connection.execute(
                f"SELECT term, {_POSTINGS} FROM postings "
                "WHERE chunk_id NOT IN (SELECT value FROM json_each(?)) GROUP BY term",
                (beside,),
            )
        }
        for term, ids, counts in self.packed.all_postings():
            holders, weight = sums.get(term, (0, 0))
            weight += int((ids * (2 * counts + 1) & _LOW).sum())
            sums[term] = holders + len(ids), weight
        return sums

    def count_unlike(self, texts: Iterable[tuple[int, str]]) -> int:
        """How many words and lengths are not those of the chunks' texts: (id, text), ascending."""
        words: dict[str, tuple[int, int]] = {}
        lengths: dict[int, int] = {}
        for chunk_id, text in texts:
            by_term, ((_, length),) = gathered({chunk_id: text})
            lengths[chunk_id] = length
            for term, found in by_term:
                holders, weight = words.get(term, (0, 0))
                words[term] = holders + 1, weight + _weight(found)
        unlike = set[str]()
        try:
            sums = self._sums()
        except DamagedCatalogError:
            sums = {}  # of a block that cannot be read nothing is known: all words are made anew
        rows = self.connection.execute("SELECT term, holders, weight FROM terms")
        for table in (sums, {term: (holders, weight) for term, holders, weight in rows}):
            unlike.update(str(term) for term, _ in table.items() ^ words.items())
        held: dict[int, int] = dict(
            self.connection.execute("SELECT chunk_id, num_terms FROM lengths").fetchall()
        )
        return len(unlike) + len(held.items() ^ lengths.items())


def in_memory(texts: Iterable[tuple[int, str]]) -> Callable[[str, int], list[Found]]:
    """``BM25Index.search`` (question, k) among texts, (id, text), all postings in memory.

    A question costs additions for the chunks that hold its words, done by NumPy. Safe to share
    between threads.
    """
    numbers: dict[str, int] = {}  # of terms
    found, named, lengths = array.array("q"), [], []
    for row, (chunk_id, text) in enumerate(texts):
        named.append(chunk_id)
        counts = collections.Counter(terms(text))
        lengths.append(counts.total())
        for term, count in counts.items():
            found.extend((numbers.setdefault(term, len(numbers)), row, count))
    term_of, rows, times = np.frombuffer(found, np.int64).reshape(-1, 3).T
    order = np.argsort(term_of, kind="stable")
    holders = np.bincount(term_of, minlength=len(numbers))
    ends = np.cumsum(holders).tolist()
    chunks = len(named)
    idf = [_idf(chunks, count) for count in holders.tolist()]
    rows, own = rows[order], np.array(lengths)[rows[order]]
    scoring = _scoring(Sizes(chunks, sum(lengths)))
    weights = scoring.weights(np.repeat(idf, holders), times[order], own)
    ids = np.array(named, np.int64)

    def search(question: str, k: int) -> list[Found]:
        held = {term: numbers[term] for term in terms(question) if term in numbers}
        telling = _telling({term: idf[number] for term, number in held.items()}, chunks)
        parts = [
            slice(ends[held[term]] - holders[held[term]], ends[held[term]]) for term in telling
        ]
        if not parts:
            return []
        asked = np.concatenate([rows[part] for part in parts])
        scores = np.bincount(asked, np.concatenate([weights[part] for part in parts]))
        places = np.flatnonzero(scores)
        best = _best(ids[places], scores[places], k)
        return [Found(chunk_id, score / _UNIT) for score, chunk_id in best]

    return search


def _scoring(sizes: Sizes) -> BM25Weights:
    mean_terms = sizes.terms / sizes.chunks if sizes.terms else 1.0
    return BM25Weights(_K1, _K1 * (1 - _B), _K1 * _B / mean_terms, _UNIT)


def _best(ids: NDArray[np.int64], scores: NDArray[np.float64], k: int) -> list[tuple[float, int]]:
    """The k best, (score, id), of equal ones those with the lower ids."""
    if len(ids) > k:
        stay = scores >= np.partition(scores, len(ids) - k)[len(ids) - k]
        ids, scores = ids[stay], scores[stay]
    order = np.lexsort((ids, -scores))[:k]
    return list(zip(scores[order].tolist(), ids[order].tolist(), strict=True))


def _weight(postings: TermPostings) -> int:
    return sum(chunk_id * (2 * count + 1) & _LOW for chunk_id, count in postings)


def _idf(chunks: int, holders: int) -> float:
    return math.log(1 + (chunks - holders + 0.5) / (holders + 0.5))


def _telling(idf: Mapping[str, float], chunks: int) -> Mapping[str, float]:
    """Terms to search by. One of more than half of the chunks costs the most and weighs least."""
    if chunks < _MANY_CHUNKS:
        return idf
    return {term: weight for term, weight in idf.items() if weight > math.log(2)} or idf
