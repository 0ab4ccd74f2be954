"""Reading the catalog: documents, chunks, their keys in the store, and search by words."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.catalog.database import Database
from jaxrag.catalog.rows import ChunkTokens, DocumentEntry, Hit, KeyedChunk, from_blob, read_hits
from jaxrag.documents.chunking import Chunk
from jaxrag.retrieve.base import searched_text
from jaxrag.retrieve.bm25 import BM25Index, BM25Snapshot
from jaxrag.retrieve.filters import Filter
from jaxrag.types import HostArray


class Reader:
    """What can be asked of an open catalog. Safe to share between threads."""

    def __init__(self, database: Database) -> None:
        """Use ``Catalog.open`` or ``Catalog.create``."""
        self._database = database
        self._index = BM25Index(database.connection)

    @property
    def path(self) -> Path:
        """The file."""
        return self._database.path

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

    def settings(self) -> dict[str, Any]:
        """The settings by name, as given at creation and changed since."""
        with self._database.use() as connection:
            rows = connection.execute("SELECT name, value FROM settings").fetchall()
        return {name: json.loads(value) for name, value in rows}

    def document(self, document_id: str) -> DocumentEntry | None:
        """The document of that id, or None."""
        return next(self._documents("WHERE id = ?", (document_id,)), None)

    def documents(self, where: Filter | None = None) -> list[DocumentEntry]:
        """Every document whose metadata matches, by id."""
        condition, values = _condition(where)
        return list(self._documents(f"{condition} ORDER BY id", values))

    def ids_beginning(self, prefix: str) -> list[str]:
        """Ids of the documents that begin with a text, which is not empty, in order."""
        with self._database.use() as connection:
            rows = connection.execute(
                "SELECT id FROM documents WHERE id >= ? AND id < ? || char(1114111) ORDER BY id",
                (prefix, prefix),
            ).fetchall()
        return [row[0] for row in rows]

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
        with self._database.use() as connection:
            rows = connection.execute(
                "SELECT number, first_char, last_char, ids, text, page, section FROM chunks "
                "WHERE document_id = ? ORDER BY number",
                (document_id,),
            ).fetchall()
        return [
            Chunk(index, start, end, from_blob(ids), text, page, section)
            for index, start, end, ids, text, page, section in rows
        ]

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
        condition, values = _condition(where)
        join = "JOIN documents ON documents.id = document_id " if where else ""
        return self._ids(
            f"SELECT chunks.id FROM chunks {join}{condition} ORDER BY chunks.id", values
        )

    def ids_of_document(self, document_id: str) -> list[int]:
        """The ids of a document's chunks in order; none when there is no such document."""
        with self._database.use() as connection:
            rows = connection.execute(
                "SELECT id FROM chunks WHERE document_id = ? ORDER BY number", (document_id,)
            )
            return [row[0] for row in rows]

    def texts(self, chunk_ids: Iterable[int]) -> dict[int, str]:
        """The texts of those chunks that the catalog holds, by id."""
        with self._database.use() as connection:
            rows = connection.execute(
                "SELECT id, text FROM chunks WHERE id IN (SELECT value FROM json_each(?))",
                (json.dumps([int(i) for i in chunk_ids]),),
            )
            return dict(rows)

    def searched_texts(self, chunk_ids: Iterable[int]) -> dict[int, str]:
        """What is embedded of those chunks that the catalog holds, by id."""
        with self._database.use() as connection:
            rows = connection.execute(
                "SELECT chunks.id, title, text FROM chunks JOIN documents "
                "ON documents.id = document_id "
                "WHERE chunks.id IN (SELECT value FROM json_each(?))",
                (json.dumps([int(i) for i in chunk_ids]),),
            )
            return {chunk_id: searched_text(title, text) for chunk_id, title, text in rows}

    def tokens(self, chunk_ids: Iterable[int]) -> dict[int, ChunkTokens]:
        """The tokens of those chunks that the catalog holds, by id."""
        with self._database.use() as connection:
            rows = connection.execute(
                "SELECT chunks.id, content_id, title, ids FROM chunks "
                "JOIN documents ON documents.id = document_id "
                "WHERE chunks.id IN (SELECT value FROM json_each(?))",
                (json.dumps([int(i) for i in chunk_ids]),),
            ).fetchall()
        return {i: ChunkTokens(content, title, from_blob(ids)) for i, content, title, ids in rows}

    def with_content(self, content_ids: Iterable[str]) -> dict[str, ChunkTokens]:
        """The tokens of chunks by content id; one that no chunk has is left out."""
        with self._database.use() as connection:
            rows = connection.execute(
                "SELECT MIN(chunks.id), content_id, title, ids FROM chunks "
                "JOIN documents ON documents.id = document_id "
                "WHERE content_id IN (SELECT value FROM json_each(?)) GROUP BY content_id",
                (json.dumps(list(content_ids)),),
            ).fetchall()
        return {
            content: ChunkTokens(content, title, from_blob(ids)) for _, content, title, ids in rows
        }

    def contexts(self, chunk_ids: Iterable[int], encoder: str) -> dict[int, list[str]]:
        """What stood in front of chunks when they were encoded: content ids in order, by chunk id.

        Chunks without a key of this encoder are left out.
        """
        asked = json.dumps([int(i) for i in chunk_ids])
        with self._database.use() as connection:
            rows = connection.execute(
                "SELECT chunk_id, content_id FROM chunk_keys "
                "LEFT JOIN contexts USING (chunk_id, encoder) WHERE encoder = ? "
                "AND chunk_id IN (SELECT value FROM json_each(?)) ORDER BY chunk_id, place",
                (encoder, asked),
            ).fetchall()
        found: dict[int, list[str]] = {}
        for chunk_id, content_id in rows:
            found.setdefault(chunk_id, []).extend([] if content_id is None else [content_id])
        return found

    def last_neighbours(self, encoder: str, count: int) -> tuple[HostArray, HostArray]:
        """The chunks that were encoded behind ``count`` others, and the last of these.

        Returns chunk ids, int64 [N] ascending, and for each the id of a chunk with the content that
        stood last, int64 [N].
        """
        with self._database.use() as connection:
            rows = connection.execute(
                "SELECT contexts.chunk_id, MIN(chunks.id) FROM contexts "
                "JOIN chunks USING (content_id) WHERE encoder = ? AND place = ? "
                "GROUP BY contexts.chunk_id ORDER BY contexts.chunk_id",
                (encoder, count - 1),
            ).fetchall()
        pairs = np.array(rows, np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def encoded_ids(self, encoder: str) -> HostArray:
        """The chunks that have a store key of this encoder, int64 [N] ascending."""
        return self._ids(
            "SELECT chunk_id FROM chunk_keys WHERE encoder = ? ORDER BY chunk_id", (encoder,)
        )

    def copies(self) -> HostArray:
        """The chunks whose content another chunk has as well, int64 [N] ascending."""
        return self._ids(
            "SELECT id FROM chunks WHERE content_id IN (SELECT content_id FROM chunks "
            "GROUP BY content_id HAVING COUNT(*) > 1) ORDER BY id"
        )

    def _ids(self, statement: str, values: Sequence[Any] = ()) -> HostArray:
        with self._database.use() as connection:
            rows = connection.execute(statement, values).fetchall()
        return np.array([row[0] for row in rows], np.int64)

    def counts(self) -> dict[str, Any]:
        """Numbers of documents, chunks and tokens, and of chunks by encoder variant."""
        with self._database.snapshot() as connection:
            documents, chunks, tokens = connection.execute(
                "SELECT COUNT(*), TOTAL(num_chunks), TOTAL(num_tokens) FROM documents"
            ).fetchone()
            encoders = dict(
                connection.execute("SELECT encoder, COUNT(*) FROM chunk_keys GROUP BY encoder")
            )
        return {"documents": documents, "chunks": int(chunks), "tokens": int(tokens),
                "encoded": encoders}  # fmt: skip

    def search(self, question: str, k: int, where: Filter | None = None) -> list[Hit]:
        """The up to ``k`` chunks that BM25 ranks first, of documents whose metadata matches."""
        with self._database.snapshot() as connection:
            matches = self._index.search(question, k, where)
            return read_hits(connection, [(match.chunk_id, match.score) for match in matches])

    def words(self) -> BM25Snapshot:
        """The full-text index in memory, to put many questions to it; ranks as ``search``."""
        with self._database.snapshot():
            return self._index.snapshot()

    def hits(self, found: Sequence[tuple[int, float]], where: Filter | None = None) -> list[Hit]:
        """Chunks found elsewhere, (id, score), in the same order.

        Those that the catalog does not hold, or whose document does not match, are left out.
        """
        with self._database.use() as connection:
            hits = read_hits(connection, found)
        return hits if where is None else [hit for hit in hits if where.matches(hit.metadata)]

    def chunk_of(self, key: str) -> KeyedChunk | None:
        """A chunk that has this store key, and the encoder that makes it; None when none has."""
        with self._database.use() as connection:
            row = connection.execute(
                "SELECT chunk_id, encoder, title, ids "
                "FROM chunk_keys JOIN chunks ON chunks.id = chunk_id "
                "JOIN documents ON documents.id = document_id WHERE key = ? LIMIT 1",
                (key,),
            ).fetchone()
        return None if row is None else KeyedChunk(row[0], row[1], row[2], from_blob(row[3]))

    def place_of(self, key: str) -> tuple[str, int, str] | None:
        """Document, place in it and encoder of a chunk with this store key; None: no chunk's."""
        with self._database.use() as connection:
            found: tuple[str, int, str] | None = connection.execute(
                "SELECT document_id, number, encoder FROM chunk_keys "
                "JOIN chunks ON chunks.id = chunk_id WHERE key = ? ORDER BY 1, 2 LIMIT 1",
                (key,),
            ).fetchone()
        return found

    def all_keys(self) -> Iterator[str]:
        """Every store key of every chunk, ascending, each once; streamed."""
        last = ""
        while True:
            with self._database.use() as connection:
                rows = connection.execute(
                    "SELECT DISTINCT key FROM chunk_keys WHERE key > ? ORDER BY key LIMIT 1000",
                    (last,),
                ).fetchall()
            if not rows:
                return
            yield from (row[0] for row in rows)
            last = rows[-1][0]

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
        with self._database.use() as connection:
            found = connection.execute(
                "SELECT 1 FROM chunk_keys WHERE key = ? LIMIT 1", (key,)
            ).fetchone()
            if found is None and encoder not in own:
                found = connection.execute(
                    "SELECT 1 FROM chunks WHERE content_id = ? LIMIT 1", (content_id,)
                ).fetchone()
        return found is not None

    def _documents(self, rest: str, values: Sequence[Any]) -> Iterator[DocumentEntry]:
        with self._database.use() as connection:
            rows = connection.execute(
                "SELECT id, title, file, metadata, digest, num_chunks, num_tokens, added "
                f"FROM documents {rest}",
                values,
            ).fetchall()
        for name, title, file, metadata, *numbers in rows:
            yield DocumentEntry(name, title, file, json.loads(metadata), *numbers)


def _condition(where: Filter | None) -> tuple[str, Sequence[Any]]:
    """A WHERE clause over the documents table and its values."""
    if where is None:
        return "", ()
    text, values = where.sql()
    return f"WHERE {text}", values
