"""Reading the catalog: documents, chunks, their keys in the store, and search by words."""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrag.base.types import Connection, HostArray
from jaxrag.kv.store.keys import ID_DIGITS, is_hex
from jaxrag.library.catalog.contexts import ContextReader
from jaxrag.library.catalog.database import Database
from jaxrag.library.catalog.digests import (
    CHUNKS,
    DOCUMENTS,
    SETTINGS,
    Totals,
    check_rows,
    check_settings,
    unlike,
)
from jaxrag.library.catalog.forgotten import SECRET, DerivedRows, Trace, recall, rows_of, trace_of
from jaxrag.library.catalog.rows import (
    ChunkRow,
    ChunkTokens,
    DocumentEntry,
    DocumentRow,
    Hit,
    KeyedChunk,
)
from jaxrag.library.documents.chunking import Chunk
from jaxrag.library.retrieve.base import Found, searched_text
from jaxrag.library.retrieve.bm25 import BM25Index, Sizes, in_memory
from jaxrag.library.retrieve.filters import Filter

_MANY_CHUNKS = 10_000  # from here on, counting all rows takes time
_INDEXED_AT_ONCE = 4096  # chunks whose rows are held
_SHARE = 100.0
_CONNECTIONS = 2  # of a database


class CatalogReader(ContextReader):
    """What can be asked of an open catalog. Safe to share between threads."""

    def __init__(self, database: Database) -> None:
        """Use ``Catalog.open`` or ``Catalog.create``."""
        super().__init__(database)
        self._words: dict[Connection, BM25Index] = {}  # of the connections there are
        self._whole: tuple[tuple[int, int], Totals] | None = None  # what was found whole last
        self._counted = (-math.inf, 0.0)  # when all rows were counted last, and how long it took

    @property
    def writable(self) -> bool:
        """Whether anything can be changed; not where the file's folder is read-only."""
        return self._database.writable

    def close(self) -> None:
        """Close the file; the catalog cannot be used afterwards."""
        self._database.close()

    def version(self) -> tuple[int, int]:
        """Another value after every change of the file, by this object or anybody else."""
        return self._database.version()

    def copy_to(self, path: Path, told: Callable[[int], object]) -> None:
        """As of ``Database.copy_to``."""
        self._database.copy_to(path, told)

    def settings(self) -> dict[str, Any]:
        """The settings by name, as given at creation and changed since."""
        with self._database.snapshot() as connection:
            rows = connection.execute(f"SELECT {SETTINGS.select()} FROM settings").fetchall()
            check_settings(self.path, rows, Totals.read(connection, self.path))
        return {name: json.loads(value) for name, value, _ in rows}

    def document(self, document_id: str) -> DocumentEntry | None:
        """The document of that id, or None."""
        with self._database.use() as connection:
            found = self._documents(connection, "WHERE id = ?", (document_id,))
        return found[0] if found else None

    def documents(self, where: Filter | None = None) -> list[DocumentEntry]:
        """Every document whose metadata matches, by id."""
        condition, values = ("true", []) if where is None else where.sql()
        with self._database.snapshot() as connection:
            found = self._documents(connection, f"WHERE {condition} ORDER BY id", values)
            if where is None:
                self._check_documents(connection, len(found))
        return found

    def has_documents(self) -> bool:
        """Whether there is any document."""
        return self._any("SELECT 1 FROM documents LIMIT 1")

    def has_groups(self) -> bool:
        """Whether any document may name groups of readers: what it says of one is seen later."""
        return self._any("SELECT 1 FROM documents WHERE instr(metadata, '\"groups\"') LIMIT 1")

    def ids_beginning(self, prefix: str) -> list[str]:
        """Ids of the documents that begin with a text, which is not empty, in order."""
        return self._column(
            "SELECT id FROM documents WHERE id >= ? AND id < ? || char(1114111) ORDER BY id",
            (prefix, prefix),
        )

    def metadata_kinds(self) -> dict[str, dict[str, int]]:
        """How many documents have each field of metadata, by JSON type ("text", "integer", ...).

        Items of a list count, not the list.
        """
        with self._database.use() as connection:
            rows = connection.execute(
                "SELECT field.key, COALESCE(item.type, field.type), COUNT(DISTINCT documents.id) "
                "FROM documents JOIN json_each(metadata) AS field LEFT JOIN json_each("
                "CASE field.type WHEN 'array' THEN field.value ELSE '[]' END) AS item "
                "GROUP BY 1, 2 ORDER BY 1, 2"
            ).fetchall()
        found: dict[str, dict[str, int]] = {}
        for field, kind, count in rows:
            found.setdefault(field, {})[kind] = count
        return found

    def chunks(self, document_id: str) -> list[Chunk]:
        """The chunks of a document in order; none when there is no such document."""
        with self._database.snapshot() as connection:
            found = self._chunks(connection, "document_id = ? ORDER BY number", (document_id,))
        for place, (row, document) in enumerate(found):
            if row.number != place or document.num_chunks != len(found):
                raise unlike(self.path, f"the chunks of document {document_id!r} are")
        return [row.chunk() for row, _ in found]

    def keys(self, document_id: str) -> dict[str, list[str]]:
        """The store keys of a document's chunks in order, by encoder."""
        found: dict[str, list[str]] = {}
        with self._database.use() as connection:
            rows = connection.execute(
                "SELECT encoder, key FROM chunk_keys JOIN chunks ON id = chunk_id "
                "WHERE document_id = ? ORDER BY encoder, number",
                (document_id,),
            ).fetchall()
        for encoder, key in rows:
            found.setdefault(encoder, []).append(key)
        return found

    def chunk_ids(self, where: Filter | None = None) -> HostArray:
        """Ids of the chunks of every document whose metadata matches, int64 [N] ascending."""
        with self._database.snapshot() as connection:
            version = self.version()
            self._totals(connection)
            if where is not None:
                return self._index.matching(where, version)
            return self._ids("SELECT chunks.id FROM chunks ORDER BY chunks.id")

    def ids_of_document(self, document_id: str) -> list[int]:
        """The ids of a document's chunks in order; none when there is no such document."""
        statement = "SELECT id FROM chunks WHERE document_id = ? ORDER BY number"
        return self._column(statement, (document_id,))

    def texts(self, chunk_ids: Iterable[int]) -> dict[int, str]:
        """The texts of those chunks that the catalog holds, by id."""
        return {row.id: row.text for row, _ in self._with_ids(chunk_ids)}

    def searched_texts(self, chunk_ids: Iterable[int]) -> dict[int, str]:
        """What is embedded of those chunks that the catalog holds, by id."""
        return {
            row.id: searched_text(document.title, row.text)
            for row, document in self._with_ids(chunk_ids)
        }

    def tokens(self, chunk_ids: Iterable[int]) -> dict[int, ChunkTokens]:
        """The tokens of those chunks that the catalog holds, by id."""
        return {row.id: row.tokens(document) for row, document in self._with_ids(chunk_ids)}

    def with_content(self, content_ids: Iterable[str]) -> dict[str, ChunkTokens]:
        """The tokens of chunks by content id; one that no chunk has is left out."""
        with self._database.use() as connection:
            found = self._chunks(
                connection,
                "chunks.id IN (SELECT MIN(id) FROM chunks WHERE content_id IN "
                "(SELECT value FROM json_each(?)) GROUP BY content_id)",
                (json.dumps(list(content_ids)),),
            )
        return {row.content_id: row.tokens(document) for row, document in found}

    def counts(self) -> dict[str, Any]:
        """Numbers of documents, chunks and tokens, and of chunks by encoder variant."""
        with self._database.snapshot() as connection:
            documents, chunks, tokens = connection.execute(
                "SELECT COUNT(*), TOTAL(num_chunks), TOTAL(num_tokens) FROM documents"
            ).fetchone()
            encoders = dict(
                connection.execute("SELECT encoder, COUNT(*) FROM chunk_keys GROUP BY encoder")
            )
            self._check_documents(connection, documents)
        return {"documents": documents, "chunks": int(chunks), "tokens": int(tokens),
                "encoded": encoders}  # fmt: skip

    def search(self, question: str, k: int, where: Filter | None = None) -> list[Hit]:
        """The up to ``k`` chunks that BM25 ranks first, of documents whose metadata matches."""
        return self.hits(self.ranked(question, k, where))

    def ranked(self, question: str, k: int, where: Filter | None = None) -> list[Found]:
        """What ``search`` finds, without the chunks' rows: these are counted, not read."""
        with self._database.snapshot() as connection:
            version = self.version()
            totals = self._totals(connection)
            sizes = Sizes(totals.chunks, totals.terms)
            matches = self._index.search(question, k, where, sizes, version)
            asked = (json.dumps([match.chunk_id for match in matches]),)
            statement = "SELECT COUNT(*) FROM chunks WHERE id IN (SELECT value FROM json_each(?))"
            rows = connection.execute(statement, asked).fetchone()
            if rows != (len(matches),):
                raise unlike(self.path, "the rows of chunks that were found are")
        return matches

    def words(self) -> Callable[[str, int], list[Found]]:
        """``ranked`` (question, k) of the chunks there are now, in memory: for many questions."""
        parts = itertools.batched(self.chunk_ids().tolist(), _INDEXED_AT_ONCE)
        texts = (self.searched_texts(part).items() for part in parts)
        return in_memory(itertools.chain.from_iterable(texts))

    def hits(self, found: Sequence[tuple[int, float]], where: Filter | None = None) -> list[Hit]:
        """Chunks found elsewhere, (id, score), in the same order.

        Those that the catalog does not hold, or whose document does not match, are left out.
        """
        with self._database.snapshot() as connection:
            self._totals(connection)
            hits = self._hits(connection, found)  # whose rows are as written
            if where is None or not hits:
                return hits
            condition, values = where.sql()
            ids = json.dumps([hit.chunk_id for hit in hits])
            rows = connection.execute(
                "SELECT chunks.id FROM chunks JOIN documents ON documents.id = document_id "
                f"WHERE chunks.id IN (SELECT value FROM json_each(?)) AND {condition}",
                (ids, *values),
            )
            fitting = {row[0] for row in rows}
        return [hit for hit in hits if hit.chunk_id in fitting]

    def chunk_of(self, key: str) -> KeyedChunk | None:
        """The first chunk that has this store key; None when none has."""
        with self._database.use() as connection:
            found = connection.execute(
                "SELECT document_id, number, encoder, chunk_id FROM chunk_keys "
                "JOIN chunks ON chunks.id = chunk_id WHERE key = ? ORDER BY 1, 2, 3 LIMIT 1",
                (key,),
            ).fetchone()
        return None if found is None else KeyedChunk(*found)

    def all_keys(self) -> Iterator[str]:
        """Every store key of every chunk, ascending, each once, streamed; not what is none."""
        last = ""
        while True:
            keys = self._column(
                "SELECT DISTINCT key FROM chunk_keys WHERE key > ? ORDER BY key LIMIT 1000", (last,)
            )
            if not keys:
                return
            yield from (key for key in keys if is_hex(key, ID_DIGITS))
            last = keys[-1]

    def num_keys(self) -> int:
        """How many ``all_keys`` are, and what is none."""
        return int(self._column("SELECT COUNT(DISTINCT key) FROM chunk_keys")[0])

    def keys_beginning(self, prefix: str) -> set[str]:
        """Every store key that begins with hex digits."""
        statement = "SELECT key FROM chunk_keys WHERE key >= ? AND key < ? || 'g'"
        return set(self._column(statement, (prefix, prefix)))

    def keys_of(self, chunk_ids: Iterable[int], encoder: str) -> dict[int, str]:
        """The store keys of chunks under one encoder, by chunk id."""
        with self._database.use() as connection:
            rows = connection.execute(
                "SELECT chunk_id, key FROM chunk_keys WHERE encoder = ? "
                "AND chunk_id IN (SELECT value FROM json_each(?))",
                (encoder, json.dumps([int(i) for i in chunk_ids])),
            )
            return dict(rows)

    def is_live(self, key: str, content_id: str, encoder: str, own: Sequence[str]) -> bool:
        """Whether a record of the chunk store belongs to a chunk of this catalog.

        It does when a chunk has this key; or has these tokens, and the encoder is not one of the
        knowledge base's ``own``: such a variant was encoded while a question was answered.
        """
        return self.has_key(key) or (
            encoder not in own
            and self._any("SELECT 1 FROM chunks WHERE content_id = ? LIMIT 1", (content_id,))
        )

    def trace(self, document_id: str) -> tuple[Trace, DerivedRows]:
        """By what one recognises what derives from a document, and which rows do.

        The trace names no chunk where the catalog holds no such document and remembers no removal
        or replacement of one.
        """
        secret = bytes.fromhex(self.settings().get(SECRET) or "")
        with self._database.snapshot() as connection:
            known = recall(connection, self.path, secret, document_id)
            here = connection.execute(
                "SELECT id, content_id FROM chunks WHERE document_id = ?", (document_id,)
            ).fetchall()
            held = connection.execute(
                "SELECT DISTINCT content_id FROM chunks WHERE document_id != ?", (document_id,)
            )
            trace = trace_of(known, secret, here, (row[0] for row in held))
            return trace, rows_of(connection, self.path, document_id, trace)

    def holds(self, chunk_ids: Sequence[int], content_ids: Sequence[str]) -> bool:
        """Whether all these chunks, and chunks with these contents, are there."""
        return not self._any(
            "SELECT 1 FROM json_each(?) WHERE value NOT IN "
            "(SELECT id FROM chunks WHERE id = value) UNION ALL SELECT 1 FROM json_each(?) "
            "WHERE value NOT IN (SELECT content_id FROM chunks WHERE content_id = value)",
            (json.dumps([int(i) for i in chunk_ids]), json.dumps(list(content_ids))),
        )

    def has_key(self, key: str) -> bool:
        """Whether a chunk has this store key."""
        return self._any("SELECT 1 FROM chunk_keys WHERE key = ? LIMIT 1", (key,))

    def check_whole(self) -> None:
        """Raise DamagedCatalogError where chunks, lengths or postings were lost or added.

        Counted once after every change of the file.
        """
        with self._database.snapshot() as connection:
            self._totals(connection)

    def totals(self) -> Totals:
        """What the tables hold together, as remembered and found."""
        with self._database.snapshot() as connection:
            return self._totals(connection)

    @property
    def _index(self) -> BM25Index:
        """The full-text index; another one on another connection."""
        connection = self._database.connection
        found = self._words.get(connection)
        if found is None:
            found = BM25Index(connection, path=self.path)
            known = self._words if len(self._words) < _CONNECTIONS else {}
            self._words = {**known, connection: found}
        return found

    def _totals(self, connection: Connection) -> Totals:
        """What the tables hold together; counted again after every change of the file.

        Of many chunks not at every one: counting takes at most 1 / _SHARE of the time.
        """
        version = self.version()
        if self._whole is not None and self._whole[0] == version:
            return self._whole[1]
        totals = Totals.read(connection, self.path)
        start = time.monotonic()
        at, taken = self._counted
        if totals.chunks >= _MANY_CHUNKS and start - at < _SHARE * taken:
            self._whole = version, totals
            return totals
        check_rows(connection, self.path, totals)
        self._whole = version, totals
        end = time.monotonic()
        self._counted = end, end - start
        return totals

    def _check_documents(self, connection: Connection, count: int) -> None:
        if count != Totals.read(connection, self.path).documents:
            raise unlike(self.path, "its documents are")

    def _documents(
        self, connection: Connection, rest: str, values: Sequence[Any]
    ) -> list[DocumentEntry]:
        """Documents, their rows held against their digests."""
        rows = connection.execute(f"SELECT {DOCUMENTS.select()} FROM documents {rest}", values)
        return [DocumentEntry.of_row(self._whole_document(row)) for row in rows]

    def _whole_document(self, row: Sequence[Any]) -> Sequence[Any]:
        if not DOCUMENTS.is_whole(row):
            raise unlike(self.path, f"document {row[0]!r} is")
        return row

    def _chunks(
        self, connection: Connection, condition: str, values: Sequence[Any]
    ) -> list[tuple[ChunkRow, DocumentRow]]:
        """Rows of chunks and of their documents, held against their digests."""
        rows = connection.execute(
            f"SELECT {CHUNKS.select()}, {DOCUMENTS.select()} FROM chunks "
            f"JOIN documents ON documents.id = document_id WHERE {condition}",
            values,
        ).fetchall()
        width = len(CHUNKS.columns) + 1
        found: list[tuple[ChunkRow, DocumentRow]] = []
        documents: dict[Sequence[Any], DocumentRow] = {}  # each is checked once
        for row in rows:
            own, its = row[:width], row[width:]
            if not CHUNKS.is_whole(own):
                raise unlike(self.path, f"chunk {own[2]} of document {own[1]!r} is")
            if its not in documents:
                documents[its] = DocumentRow(*self._whole_document(its)[:-1])
            found.append((ChunkRow(*own[:-1]), documents[its]))
        return found

    def _with_ids(self, chunk_ids: Iterable[int]) -> list[tuple[ChunkRow, DocumentRow]]:
        with self._database.snapshot() as connection:
            return self._among(connection, chunk_ids)

    def _among(
        self, connection: Connection, chunk_ids: Iterable[int]
    ) -> list[tuple[ChunkRow, DocumentRow]]:
        """The chunks with these ids; ids of no chunk are left out."""
        asked = {int(chunk_id) for chunk_id in chunk_ids}
        among, values = "IN (SELECT value FROM json_each(?))", (json.dumps(sorted(asked)),)
        found = self._chunks(connection, f"chunks.id {among}", values)
        if len(found) < len(asked):
            statement = f"SELECT COUNT(*) FROM chunks WHERE id {among}"
            if connection.execute(statement, values).fetchone() != (len(found),):
                raise unlike(self.path, "the documents of its chunks are")
        return found

    def _hits(self, connection: Connection, found: Sequence[tuple[int, float]]) -> list[Hit]:
        """The chunks of (id, score) pairs, in the same order; ids of no chunk are left out."""
        rows = self._among(connection, [chunk_id for chunk_id, _ in found])
        by_id = {row.id: (row, document) for row, document in rows}
        hits = []
        for chunk_id, score in found:
            if chunk_id in by_id:
                row, document = by_id[chunk_id]
                hits.append(row.hit(document, score))
        return hits
