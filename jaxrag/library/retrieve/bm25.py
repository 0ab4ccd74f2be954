"""Okapi BM25 over chunk texts, in tables of the catalog's own SQLite file.

The postings are committed together with the documents they belong to, and a question is answered by
one query. SQLite's own FTS5 does not serve: it gives no weight to a word that half of the chunks
hold, which misranks small knowledge bases, and its tokenizers find no words in running Chinese or
Japanese text. Size and speed are the same. Words are not stemmed and there is no stop list: on
HotpotQA and MuSiQue neither moved recall@5 or @10 by more than its standard error.

From 10,000 chunks on, postings are packed (``retrieve.packed``): those of many chunks as they come;
those of few are in the table ``postings`` first, which is searched beside the others. The answers
are the same.
"""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxrag.base.errors import DamagedCatalogError
from jaxrag.base.types import Connection
from jaxrag.library.retrieve.base import Found
from jaxrag.library.retrieve.filters import Filter, Scalar
from jaxrag.library.retrieve.maxscore import BestChunks, BM25Weights
from jaxrag.library.retrieve.packed import MOST_CHUNKS, Head, Packed, damaged
from jaxrag.library.retrieve.terms import TermPostings, gathered, terms

_MANY_CHUNKS = 10_000  # from here on, words that most chunks hold are not looked at
_AT_ONCE = 512  # chunks that are packed as they come
_UNIT = 2.0**32  # what a word adds is a whole number of 1 / _UNIT: sums are exact in any order
_LOW = 0xFFFFFFFF
_MOST_SEEN = 2_000  # terms that are remembered
# How many postings there are, and a sum that no one of them is missing from, is added to, or
# trades places with another in.
_POSTINGS = (
    f"COUNT(*) AS holders, COALESCE(SUM((chunk_id * (2 * count + 1)) & {_LOW}), 0) AS weight"
)
_BESIDE = "chunk_id NOT IN (SELECT value FROM json_each(?))"
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


@dataclasses.dataclass
class _TermCache:
    """What was counted in one state of the file, and is not counted again there."""

    version: Hashable = None
    terms: dict[str, tuple[int, list[Head]]] = dataclasses.field(default_factory=dict)  # holders
    allowed: dict[str, NDArray[np.int64]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class BM25Index:
    """The full-text index of the chunks in one SQLite database.

    Nothing here commits: adding and removing belong to the caller's transaction.

    Attributes:
      k1: how soon repeats of a word stop counting.
      b: how much long chunks are held back, 0 to 1.
      path: of the database, as errors name it.
    """

    connection: Connection
    k1: float = 1.2
    b: float = 0.75
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

    def _look_up(self, words: list[str]) -> dict[str, tuple[int, list[Head]]]:
        """How many chunks hold each term, and the heads of those that are packed.

        Raises DamagedCatalogError where postings were lost.
        """
        heads = self.packed.heads(words)
        asked = (json.dumps(words),)
        if self.packed.clearing():
            statement = "SELECT chunk_id, count FROM postings WHERE term = ?"
            rows = ((it, self.connection.execute(statement, (it,)).fetchall()) for it in words)
            found = ((term, self._beside(own, 0)) for term, own in rows)
            loose = {term: (len(own), _weight(own)) for term, own in found}
        else:
            statement = (
                f"SELECT term, {_POSTINGS} FROM json_each(?) AS words CROSS JOIN postings "
                "ON term = words.value GROUP BY words.key"
            )
            loose = _by_term(self.connection.execute(statement, asked))
        statement = "SELECT terms.* FROM json_each(?) CROSS JOIN terms ON term = value"
        known = _by_term(self.connection.execute(statement, asked))
        made = {}
        for term in words:
            holders, weight = loose.get(term, (0, 0))
            holders += sum(head.holders for head in heads.get(term, ()))
            weight += sum(head.weight for head in heads.get(term, ()))
            if (holders, weight) != known.get(term, (0, 0)):
                raise self._damaged(term)
            made[term] = holders, heads.get(term, [])
        return made

    def _beside(self, rows: list[Any], column: int) -> list[Any]:
        """Those rows of which the chunk, in a column, is in no block."""
        ids = np.fromiter((row[column] for row in rows), np.int64, len(rows))
        return [rows[place] for place in np.flatnonzero(~self.packed.holds(ids)).tolist()]

    def _packed_ids(self) -> tuple[str]:
        """The chunks whose rows in ``postings`` are passed over, as JSON."""
        clearing = self.packed.clearing()
        blocks = self.packed.blocks() if clearing else []
        return (json.dumps([chunk_id for block in blocks for chunk_id in block.ids.tolist()]),)

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
        if version is None or version != self._cache.version or len(self._cache.terms) > _MOST_SEEN:
            self._cache.version, self._cache.terms, self._cache.allowed = version, {}, {}
        words = dict.fromkeys(terms(question))
        self._cache.terms |= self._look_up([w for w in words if w not in self._cache.terms])
        idf = {}
        for term in words:
            if holders := self._cache.terms[term][0]:
                idf[term] = _idf(totals.chunks, holders)
        if not idf:
            return []
        telling = _telling(idf, totals.chunks)
        mean_terms = totals.terms / totals.chunks
        base, per_term = self.k1 * (1 - self.b), self.k1 * self.b / mean_terms
        if self.packed.blocks():
            scoring = BM25Weights(self.k1, base, per_term, _UNIT)
            return self._search_packed(telling, k, where, scoring, version)
        restriction = ""
        operands: list[Scalar] = []
        if where is not None:
            condition, operands = where.sql("documents.metadata")
            restriction = f"WHERE chunk_id IN ({_MATCHING.format(condition)})"
        rows = self.connection.execute(
            # CROSS JOIN keeps this order: each term's postings are one range of the table.
            f"""
            SELECT chunk_id,
            SUM(CAST(value * count * ? / (count + ? + ? * num_terms) * ? + 0.5 AS INTEGER)) AS score
            FROM json_each(?) CROSS JOIN postings ON term = key CROSS JOIN lengths USING (chunk_id)
            {restriction}
            GROUP BY chunk_id ORDER BY score DESC, chunk_id LIMIT ?
            """,
            [
                self.k1 + 1,
                base,
                per_term,
                _UNIT,
                json.dumps(telling),
                *operands,
                k,
            ],
        )
        return [Found(chunk_id, score / _UNIT) for chunk_id, score in rows]

    def _search_packed(
        self,
        idf: Mapping[str, float],
        k: int,
        where: Filter | None,
        scoring: BM25Weights,
        version: Hashable,
    ) -> list[Found]:
        """``search``, of what is packed and what is not yet."""
        rows = self.connection.execute(
            "SELECT value, chunk_id, count, num_terms FROM json_each(?) "
            "CROSS JOIN postings ON term = key CROSS JOIN lengths USING (chunk_id)",
            (json.dumps(idf),),
        ).fetchall()
        if self.packed.clearing():
            rows = self._beside(rows, 1)
        chunks = self.packed.chunks()
        ids = None if where is None else self.matching(where, version)
        allowed = None if ids is None else chunks.hold(ids)
        best: list[tuple[float, int]] = []
        if rows:
            value, chunk_ids, counts, lengths = np.array(rows, np.float64).T
            weights = scoring.weights(value, counts, lengths)
            own, inverse = np.unique(chunk_ids.astype(np.int64), return_inverse=True)
            scores = np.bincount(inverse, weights)
            if ids is not None:
                stay = np.searchsorted(ids, own) < np.searchsorted(ids, own, "right")
                own, scores = own[stay], scores[stay]
            order = np.lexsort((own, -scores))[:k]
            best = list(zip(scores[order].tolist(), own[order].tolist(), strict=True))
        least = best[k - 1][0] if len(best) >= k else 0.0
        heads = {term: self._cache.terms[term][1] for term in idf}
        best += BestChunks(self.packed, chunks, idf, heads, k, scoring, allowed).found(least)
        best.sort(key=lambda pair: (-pair[0], pair[1]))
        return [Found(chunk_id, score / _UNIT) for score, chunk_id in best[:k]]

    def matching(self, where: Filter, version: Hashable = None) -> NDArray[np.int64]:
        """Ids of the chunks whose documents match, ascending; ``version`` as of ``search``."""
        condition, operands = where.sql("documents.metadata")
        name = json.dumps([condition, operands])
        if version is not None and version == self._cache.version and name in self._cache.allowed:
            return self._cache.allowed[name]
        rows = self.connection.execute(_MATCHING.format(condition), operands)
        found = np.sort(np.fromiter((row[0] for row in rows), np.int64))
        if version is not None:
            if version != self._cache.version:
                self._cache.version, self._cache.terms, self._cache.allowed = version, {}, {}
            while len(self._cache.allowed) >= _FILTERS_CACHED:
                del self._cache.allowed[next(iter(self._cache.allowed))]
            self._cache.allowed[name] = found
        return found

    def _sizes(self) -> Sizes:
        return Sizes(
            *self.connection.execute(
                "SELECT COUNT(*), COALESCE(SUM(num_terms), 0) FROM lengths"
            ).fetchone()
        )

    def counted(self) -> list[tuple[str, int, int]]:
        """Of every term, in order, how many postings there are, and the sum that tells which.

        Raises DamagedCatalogError where they are not those that were written.
        """
        counts = sorted((term, *sums) for term, sums in self._sums().items())
        known = self.connection.execute(
            "SELECT term, holders, weight FROM terms ORDER BY term"
        ).fetchall()
        if counts != known:
            term, *_ = min(set(counts) ^ set(known))
            raise self._damaged(term)
        return counts

    def _sums(self) -> dict[str, tuple[int, int]]:
        """Of every term how many postings there are, and the sum that tells which."""
        sums: dict[str, tuple[int, int]] = {
            term: (holders, weight)
            for term, holders, weight in self.connection.execute(
                f"SELECT term, {_POSTINGS} FROM postings WHERE {_BESIDE} GROUP BY term",
                self._packed_ids(),
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

    def _all_postings(self, terms: list[str]) -> NDArray[np.int64]:
        """Chunk ids and counts of these terms, which are all, one term after the other: [P, 2]."""
        postings = np.fromiter(
            itertools.chain.from_iterable(
                self.connection.execute(
                    f"SELECT chunk_id, count FROM postings WHERE {_BESIDE} ORDER BY term, chunk_id",
                    self._packed_ids(),
                )
            ),
            np.int64,
        ).reshape(-1, 2)
        if not self.packed.is_there():
            return postings
        number = {term: place for place, term in enumerate(terms)}
        loose = self.connection.execute(
            f"SELECT term, COUNT(*) FROM postings WHERE {_BESIDE} GROUP BY term ORDER BY term",
            self._packed_ids(),
        ).fetchall()
        owners = [np.repeat([number[term] for term, _ in loose], [count for _, count in loose])]
        parts = [postings]
        for term, ids, counts in self.packed.all_postings():
            owners.append(np.full(len(ids), number[term]))
            parts.append(np.stack([ids, counts], axis=1))
        owner, found = np.concatenate(owners), np.concatenate(parts)
        return found[np.lexsort((found[:, 0], owner))]

    def snapshot(self) -> "BM25Snapshot":
        """The index as it is now, in memory: for many questions, without a filter.

        Raises DamagedCatalogError where the postings of a term are not those that were written.
        """
        sizes = self._sizes()
        own = np.array(
            self.connection.execute(
                "SELECT chunk_id, num_terms FROM lengths ORDER BY chunk_id"
            ).fetchall(),
            np.int64,
        ).reshape(-1, 2)
        holders = [row[:2] for row in self.counted()]
        postings = self._all_postings([term for term, _ in holders])
        counts = [count for _, count in holders]
        ends = np.cumsum(counts).tolist()
        idf = np.array([_idf(sizes.chunks, count) for count in counts], np.float64)
        rows, times = np.searchsorted(own[:, 0], postings[:, 0]), postings[:, 1]
        base = self.k1 * (1 - self.b)
        mean_terms = sizes.terms / sizes.chunks if sizes.chunks else 0.0
        per_term = self.k1 * self.b / mean_terms if mean_terms else 0.0
        # In the order of operations of ``search``, so that every weight is the same number.
        weights: NDArray[np.float64] = np.repeat(idf, counts) * times * (self.k1 + 1)
        weights /= times + base + per_term * own[rows, 1]
        weights = np.floor(weights * _UNIT + 0.5)
        return BM25Snapshot(
            chunk_ids=own[:, 0],
            terms={
                term: (end - count, end) for (term, count), end in zip(holders, ends, strict=True)
            },
            rows=rows,
            weights=weights,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class BM25Snapshot:
    """All postings in memory; ranks as ``BM25Index.search`` did when it was taken.

    A question costs additions for the chunks that hold its words, as it does there, but each is
    done by NumPy.

    Attributes:
      chunk_ids: [N] int64 ascending.
      terms: first and one past the last posting of every term.
      rows: [P] int64, of each posting the place of its chunk.
      weights: [P] float64, what the term adds to the chunk's score, in units.
    """

    chunk_ids: NDArray[np.int64]
    terms: Mapping[str, tuple[int, int]]
    rows: NDArray[np.int64]
    weights: NDArray[np.float64]

    def search(self, question: str, k: int) -> list[Found]:
        """The up to ``k`` chunks that share a term with the question, best first."""
        chunks = len(self.chunk_ids)
        held = {term: self.terms[term] for term in terms(question) if term in self.terms}
        idf = {term: _idf(chunks, end - start) for term, (start, end) in held.items()}
        parts = [slice(*held[term]) for term in _telling(idf, chunks)]
        if not parts:
            return []
        rows = np.concatenate([self.rows[part] for part in parts])
        weights = np.concatenate([self.weights[part] for part in parts])
        scores = np.bincount(rows, weights, chunks)
        best = np.flatnonzero(scores > 0)
        if len(best) > k:
            least = np.partition(scores[best], len(best) - k)[len(best) - k]
            best = best[scores[best] >= least]
        best = best[np.lexsort((best, -scores[best]))][:k]
        return [Found(int(self.chunk_ids[row]), float(scores[row]) / _UNIT) for row in best]


def _by_term(rows: Iterable[Any]) -> dict[str, tuple[int, int]]:
    return {term: (holders, weight) for term, holders, weight in rows}


def _weight(postings: TermPostings) -> int:
    return sum(chunk_id * (2 * count + 1) & _LOW for chunk_id, count in postings)


def _idf(chunks: int, holders: int) -> float:
    return math.log(1 + (chunks - holders + 0.5) / (holders + 0.5))


def _telling(idf: Mapping[str, float], chunks: int) -> Mapping[str, float]:
    """Terms to search by. One of more than half of the chunks costs the most and weighs least."""
    if chunks < _MANY_CHUNKS:
        return idf
    return {term: weight for term, weight in idf.items() if weight > math.log(2)} or idf
