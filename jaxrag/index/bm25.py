"""Okapi BM25 over chunk texts, in tables of the catalog's own SQLite file.

The postings are committed together with the documents they belong to, and a question is answered by
one query. SQLite's own FTS5 does not serve: it gives no weight to a word that half of the chunks
hold, which misranks small knowledge bases, and its tokenizers find no words in running Chinese or
Japanese text. Size and speed are the same. Words are not stemmed and there is no stop list: on
HotpotQA and MuSiQue neither moved recall@5 or @10 by more than its standard error.
"""

import collections
import dataclasses
import itertools
import json
import math
import re
import sqlite3
import unicodedata

from jaxrag.index.base import Found
from jaxrag.index.filters import Filter, Scalar

# Han, Kana and Hangul: scripts searched by single characters and pairs of neighbours.
_CJK = (
    r"\u3005-\u3007\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_CJK}]+|[^\W_{_CJK}]+")
_CJK_FIRST = re.compile(rf"[{_CJK}]")
_MANY_CHUNKS = 10_000  # from here on, words that most chunks hold are not looked at
_LATIN_MARKS = re.compile(r"[\u0300-\u036f]")


def terms(text: str) -> list[str]:
    """The index terms of a text, in order, repeats kept.

    Compatibility forms are unified, case and Latin accents dropped. A run of Chinese, Japanese or
    Korean characters gives each character and each pair of neighbours; other text gives its words.
    """
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text).casefold())
    plain = unicodedata.normalize("NFC", _LATIN_MARKS.sub("", folded))
    found: list[str] = []
    for run in _WORD.findall(plain):
        if _CJK_FIRST.match(run):
            found.extend(run)
            found.extend(left + right for left, right in itertools.pairwise(run))
        else:
            found.append(run)
    return found


@dataclasses.dataclass(frozen=True)
class BM25Index:
    """The full-text index of the chunks in one SQLite database.

    Nothing here commits: adding and removing belong to the caller's transaction.
    """

    connection: sqlite3.Connection
    k1: float = 1.2  # how soon repeats of a word stop counting
    b: float = 0.75  # how much long chunks are held back, 0 to 1

    def create(self) -> None:
        """Make the tables."""
        self.connection.execute(
            "CREATE TABLE postings (term TEXT, chunk_id INTEGER, count INTEGER NOT NULL, "
            "PRIMARY KEY (term, chunk_id)) WITHOUT ROWID"
        )
        self.connection.execute(
            "CREATE TABLE lengths (chunk_id INTEGER PRIMARY KEY, num_terms INTEGER NOT NULL)"
        )

    def add(self, chunk_id: int, text: str) -> None:
        """Index a chunk that is not in the index."""
        found = terms(text)
        self.connection.executemany(
            "INSERT INTO postings VALUES (?, ?, ?)",
            [(term, chunk_id, count) for term, count in collections.Counter(found).items()],
        )
        self.connection.execute("INSERT INTO lengths VALUES (?, ?)", (chunk_id, len(found)))

    def remove(self, chunk_id: int, text: str) -> None:
        """Forget a chunk, given the text it was added with."""
        self.connection.executemany(
            "DELETE FROM postings WHERE term = ? AND chunk_id = ?",
            [(term, chunk_id) for term in set(terms(text))],
        )
        self.connection.execute("DELETE FROM lengths WHERE chunk_id = ?", (chunk_id,))

    def search(self, question: str, k: int, where: Filter | None = None) -> list[Found]:
        """The up to ``k`` chunks that share a term with the question, best first.

        Okapi BM25 with idf = ln(1 + (chunks - holders + 0.5) / (holders + 0.5)), which is positive
        for every term. Equal scores are in order of chunk id. A question without a single word
        finds nothing. From 10,000 chunks on, words that more than half of them hold do not count,
        unless the question has no others.

        With ``where``, only chunks of documents whose metadata matches are ranked (by the tables
        ``chunks`` and ``documents`` of the same database); their scores are the same without it.
        """
        chunks, mean_terms = self.connection.execute(
            "SELECT COUNT(*), AVG(num_terms) FROM lengths"
        ).fetchone()
        idf = {}
        for term in dict.fromkeys(terms(question)):
            (holders,) = self.connection.execute(
                "SELECT COUNT(*) FROM postings WHERE term = ?", (term,)
            ).fetchone()
            if holders:
                idf[term] = math.log(1 + (chunks - holders + 0.5) / (holders + 0.5))
        if not idf:
            return []
        if chunks >= _MANY_CHUNKS:
            # A word of more than half of the chunks costs the most time and weighs the least.
            telling = {term: weight for term, weight in idf.items() if weight > math.log(2)}
            idf = telling or idf
        restriction = ""
        operands: list[Scalar] = []
        if where is not None:
            condition, operands = where.sql("documents.metadata")
            restriction = (
                "WHERE chunk_id IN (SELECT chunks.id FROM chunks JOIN documents "
                f"ON documents.id = chunks.document_id WHERE {condition})"
            )
        base, per_term = self.k1 * (1 - self.b), self.k1 * self.b / mean_terms
        rows = self.connection.execute(
            # CROSS JOIN keeps this order: each term's postings are one range of the table.
            f"""
            SELECT chunk_id, SUM(value * count * ? / (count + ? + ? * num_terms)) AS score
            FROM json_each(?) CROSS JOIN postings ON term = key CROSS JOIN lengths USING (chunk_id)
            {restriction}
            GROUP BY chunk_id ORDER BY score DESC, chunk_id LIMIT ?
            """,
            [self.k1 + 1, base, per_term, json.dumps(idf), *operands, k],
        )
        return [Found(chunk_id, score) for chunk_id, score in rows]
