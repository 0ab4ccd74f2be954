"""All rows of a catalog beside what they should be, and the repair of those that are not.

Here rows are read as they are, nothing is refused. What a document's rows should be is for the
caller to say, who knows the tokenizer and the names of KV.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxrag.base.errors import DamagedCatalogError
from jaxrag.base.types import Connection
from jaxrag.library.catalog.database import Database, to_json
from jaxrag.library.catalog.digests import (
    CHUNKS,
    DOCUMENTS,
    KEYS,
    SETTINGS,
    DigestTable,
    Totals,
    contexts,
)
from jaxrag.library.catalog.forgotten import unlike_rows
from jaxrag.library.catalog.rows import ChunkRow, DocumentRow
from jaxrag.library.retrieve.base import searched_text
from jaxrag.library.retrieve.bm25 import BM25Index
from jaxrag.library.retrieve.terms import TERMS, TERMS_VERSION

_INDEXED_AT_ONCE = 4096  # chunks whose words are held

# What a fault is of, as it is counted for people.
DOCUMENT, CHUNK, KEY, WORDS, TOTALS = "document", "chunk", "key", "word", "total"
REMOVAL = "removal"


@dataclasses.dataclass(frozen=True)
class Raw[Row]:
    """A row as it is in the file.

    Attributes:
      row: its values, which may be of any type.
      digest: its column xxh3.
      whole: whether that is the digest of the values; True where rows have none.
    """

    row: Row
    digest: int | None
    whole: bool


@dataclasses.dataclass(frozen=True)
class KeyRow:
    """A row of chunk_keys with those of contexts that belong to it."""

    chunk_id: int
    encoder: str
    key: str
    content_ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StoredDocument:
    """All rows of one document, as they stand in the file."""

    id: str
    document: Raw[DocumentRow] | None
    chunks: Sequence[Raw[ChunkRow]]  # by number
    keys: Sequence[Raw[KeyRow]]


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that is not as it should be.

    Attributes:
      kind: "document", "chunk", "key", "word", "total" or "removal".
      name: of the document, chunk or key, as people name it; "" of words and totals.
    """

    kind: str
    name: str = ""
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Examined:
    """What is wrong with a document's rows, and what takes their places.

    Attributes:
      faults: none where all is well.
      lost: nothing that can be trusted takes the document's place.
      document: its row, where another one is to be written.
      chunks: rows that are to be written.
      dropped: rows of chunk_keys that are to be removed: (chunk id, encoder).
    """

    faults: tuple[Fault, ...] = ()
    lost: bool = False
    document: DocumentRow | None = None
    chunks: tuple[ChunkRow, ...] = ()
    keys: tuple[KeyRow, ...] = ()
    dropped: tuple[tuple[int, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class RowsReport:
    """What a check of every row of the catalog found.

    Attributes:
      documents: that are there at the end.
      faults: what was not as it should be.
      lost: ids of documents that a repair had to drop, or would have to.
      unnamed: documents that are gone and left no name.
      repaired: whether the faults are there no more.
      unchecked: what was not looked at, and why; "" where all was.
    """

    documents: int
    chunks: int
    faults: tuple[Fault, ...]
    lost: tuple[str, ...]
    unnamed: int
    repaired: bool
    unchecked: str = ""

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong or missing now."""
        return (not self.faults or self.repaired) and not self.lost and not self.unnamed


@dataclasses.dataclass(frozen=True)
class Audit:
    """The rows of one open catalog."""

    database: Database

    def check(self, examine: Callable[[StoredDocument], Examined]) -> RowsReport:
        """Look at every row; ``examine`` tells what a document's rows should be."""
        faults: list[Fault] = []
        lost: list[str] = []
        with self.database.use() as connection:
            names = _document_ids(connection)
        for name in names:
            with self.database.snapshot() as connection:
                stored = self._stored(connection, name)
            if stored.document is None and not stored.chunks:
                continue  # removed meanwhile
            examined = examine(stored)
            faults += examined.faults
            lost += [name] * examined.lost
        with self.database.snapshot() as connection:
            more, unnamed = self._sums(connection)
            return self._report(connection, [*faults, *more], lost, unnamed, repaired=False)

    def repair(self, examine: Callable[[StoredDocument], Examined]) -> RowsReport:
        """The same, and write what ``examine`` gives, in one transaction.

        Words and totals are made anew where anything was wrong. Documents without rows that can be
        trusted are dropped.
        """
        faults: list[Fault] = []
        lost: list[str] = []
        with self.database.transaction() as connection:
            more, unnamed = self._sums(connection)
            for name in _document_ids(connection):
                examined = examine(self._stored(connection, name))
                faults += examined.faults
                lost += [name] * examined.lost
                self._write(connection, name, examined)
            faults += more
            if faults or lost or unnamed:
                self._make_sums(connection)
            return self._report(connection, faults, lost, unnamed, repaired=True)

    def _stored(self, connection: Connection, name: str) -> StoredDocument:
        documents = connection.execute(
            f"SELECT {DOCUMENTS.select()} FROM documents WHERE id = ?", (name,)
        ).fetchall()
        chunks = connection.execute(
            f"SELECT {CHUNKS.select()} FROM chunks WHERE document_id = ? ORDER BY number",
            (name,),
        ).fetchall()
        keys = connection.execute(
            f"SELECT {KEYS.select()} FROM chunk_keys "
            "WHERE chunk_id IN (SELECT id FROM chunks WHERE document_id = ?)",
            (name,),
        ).fetchall()
        seen = contexts(
            connection, "WHERE chunk_id IN (SELECT id FROM chunks WHERE document_id = ?)", (name,)
        )
        found = []
        for row in keys:
            behind = seen.get(row[:2], ())
            whole = KEYS.is_whole((*row[:-1], *behind, row[-1]))
            chunk_id, encoder, key, digest = row
            found.append(Raw(KeyRow(chunk_id, encoder, key, tuple(behind)), digest, whole))
        return StoredDocument(
            name,
            next((_raw(DOCUMENTS, DocumentRow, row) for row in documents), None),
            [_raw(CHUNKS, ChunkRow, row) for row in chunks],
            found,
        )

    def _sums(self, connection: Connection) -> tuple[list[Fault], int]:
        """Faults of words, totals and rows of nothing, and how many documents are gone."""
        index = BM25Index(connection, path=self.database.path)
        faults = []
        (homeless,) = connection.execute(
            "SELECT (SELECT COUNT(*) FROM chunk_keys WHERE chunk_id NOT IN (SELECT id FROM chunks))"
            " + (SELECT COUNT(*) FROM contexts WHERE (chunk_id, encoder) NOT IN "
            "(SELECT chunk_id, encoder FROM chunk_keys))"
        ).fetchone()
        if homeless:
            faults.append(Fault(KEY, "of no chunk", homeless))
        statement = "SELECT value FROM settings WHERE name = ?"
        version = connection.execute(statement, (TERMS,)).fetchone()
        own = version == (to_json(TERMS_VERSION),)  # others are made anew, not compared
        if own and (count := index.count_unlike(_texts(connection))):
            faults.append(Fault(WORDS, count=count))
        if count := len(unlike_rows(connection)):
            faults.append(Fault(REMOVAL, count=count))
        counted = Totals.counted(connection)
        try:
            known = Totals.read(connection, self.database.path)
        except DamagedCatalogError:
            return [*faults, Fault(TOTALS)], 0
        if counted != known:
            differ = sum(
                a != b
                for a, b in zip(
                    dataclasses.astuple(counted), dataclasses.astuple(known), strict=True
                )
            )
            faults.append(Fault(TOTALS, count=differ))
        (named,) = connection.execute(
            "SELECT COUNT(*) FROM (SELECT id FROM documents UNION SELECT document_id FROM chunks)"
        ).fetchone()
        return faults, max(0, known.documents - named)

    def _write(self, connection: Connection, name: str, examined: Examined) -> None:
        if examined.lost:
            ids = "SELECT id FROM chunks WHERE document_id = ?"
            connection.execute(f"INSERT OR IGNORE INTO leaving {ids}", (name,))
            connection.execute(f"DELETE FROM chunk_keys WHERE chunk_id IN ({ids})", (name,))
            connection.execute("DELETE FROM chunks WHERE document_id = ?", (name,))
            connection.execute("DELETE FROM documents WHERE id = ?", (name,))
            return
        if examined.document is not None:
            _update(connection, DOCUMENTS, 1, examined.document, ())
        for row in examined.chunks:
            _update(connection, CHUNKS, 1, row, ())
        for key in examined.keys:
            _update(connection, KEYS, 2, (key.chunk_id, key.encoder, key.key), key.content_ids)
        for place in examined.dropped:
            connection.execute("DELETE FROM chunk_keys WHERE chunk_id = ? AND encoder = ?", place)

    def _make_sums(self, connection: Connection) -> None:
        """Make words and totals anew, and drop rows that belong to nothing."""
        connection.execute("DELETE FROM chunk_keys WHERE chunk_id NOT IN (SELECT id FROM chunks)")
        connection.execute(
            "DELETE FROM contexts WHERE (chunk_id, encoder) NOT IN "
            "(SELECT chunk_id, encoder FROM chunk_keys)"
        )
        unlike = [(name,) for name in unlike_rows(connection)]
        connection.executemany("DELETE FROM forgotten WHERE name = ?", unlike)
        self._index(connection)
        Totals.counted(connection).write(connection)

    def _index(self, connection: Connection) -> None:
        """Make the index of words anew."""
        index = BM25Index(connection, path=self.database.path)
        index.clear()
        (chunks,) = connection.execute("SELECT COUNT(*) FROM chunks").fetchone()
        for some in itertools.batched(_texts(connection), _INDEXED_AT_ONCE):
            index.add(dict(some), chunks - len(some))
        # Of which chunks the neighbours were last searched is not known any more.
        connection.execute("DELETE FROM settings WHERE name = 'searched'")
        row = SETTINGS.row((TERMS, to_json(TERMS_VERSION)))
        connection.execute(SETTINGS.insert("INSERT OR REPLACE"), row)

    def renew_words(self) -> None:
        """Make the index of words anew, where its terms are of another version.

        Raises DamagedCatalogError where the totals are not as written.
        """
        with self.database.transaction() as connection:
            known = Totals.read(connection, self.database.path)
            self._index(connection)
            (terms,) = connection.execute("SELECT TOTAL(num_terms) FROM lengths").fetchone()
            made = dataclasses.replace(known, terms=int(terms)).with_words(connection)
            made.with_settings(connection).write(connection)

    def _report(
        self,
        connection: Connection,
        faults: Sequence[Fault],
        lost: Sequence[str],
        unnamed: int,
        repaired: bool,
    ) -> RowsReport:
        (documents,) = connection.execute("SELECT COUNT(*) FROM documents").fetchone()
        (chunks,) = connection.execute("SELECT COUNT(*) FROM chunks").fetchone()
        return RowsReport(documents, chunks, tuple(faults), tuple(lost), unnamed, repaired)


def _raw[Row](table: DigestTable, kind: Callable[..., Row], row: Sequence[Any]) -> Raw[Row]:
    return Raw(kind(*row[:-1]), row[-1], table.is_whole(row))


def _document_ids(connection: Connection) -> list[str]:
    """Of all documents, and of those that only chunks name."""
    return [
        row[0]
        for row in connection.execute(
            "SELECT id FROM documents UNION SELECT document_id FROM chunks ORDER BY 1"
        ).fetchall()
    ]


def _texts(connection: Connection) -> Iterator[tuple[int, str]]:
    """Ids of all chunks, ascending, and what is indexed of them."""
    after = -1
    while True:
        rows = connection.execute(
            "SELECT chunks.id, title, text FROM chunks "
            "JOIN documents ON documents.id = document_id "
            f"WHERE chunks.id > ? ORDER BY chunks.id LIMIT {_INDEXED_AT_ONCE}",
            (after,),
        ).fetchall()
        if not rows:
            return
        for chunk_id, title, text in rows:
            yield chunk_id, searched_text(str(title), str(text))
        after = rows[-1][0]


def _update(
    connection: Connection, table: DigestTable, key: int, row: Sequence[Any], more: Sequence[str]
) -> None:
    """Write a row over the one with the same first ``key`` columns."""
    columns = (*table.columns, "xxh3")
    changed = ", ".join(f"{name} = ?" for name in columns[key:])
    where = " AND ".join(f"{name} = ?" for name in columns[:key])
    connection.execute(
        f"UPDATE {table.name} SET {changed} WHERE {where}",
        (*row[key:], table.digest((*row, *more)), *row[:key]),
    )
