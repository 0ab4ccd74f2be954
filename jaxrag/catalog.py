"""The catalog: the truth about a knowledge base's documents and chunks, in one SQLite file.

A document and all its chunks appear, change and vanish in one transaction; what the chunk store
holds beyond that is unreachable and harmless. The file is in WAL mode with ``synchronous=FULL``:
several processes may read while one writes, and a returned commit survives a power cut.
"""

import contextlib
import dataclasses
import datetime
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxrag.chunking import Chunk
from jaxrag.documents import Document
from jaxrag.errors import KnowledgeBaseError, StoreError
from jaxrag.index.bm25 import BM25Index
from jaxrag.types import HostArray

FORMAT = 1
_APPLICATION = 0x4A524147  # "JRAG", SQLite's application_id
_BUSY_SECONDS = 60.0

_SCHEMA = (
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE documents (
        id TEXT PRIMARY KEY, title TEXT NOT NULL, file TEXT, metadata TEXT NOT NULL,
        digest TEXT NOT NULL, num_chunks INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
        added TEXT NOT NULL) WITHOUT ROWID""",
    # AUTOINCREMENT: an id that was ever handed out never names another chunk.
    """CREATE TABLE chunks (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        document_id TEXT NOT NULL REFERENCES documents(id) ON DELETE CASCADE,
        number INTEGER NOT NULL, first_char INTEGER NOT NULL, last_char INTEGER NOT NULL,
        text TEXT NOT NULL, ids BLOB NOT NULL, UNIQUE (document_id, number))""",
    """CREATE TABLE chunk_keys (
        chunk_id INTEGER NOT NULL REFERENCES chunks(id) ON DELETE CASCADE,
        encoder TEXT NOT NULL, key TEXT NOT NULL, PRIMARY KEY (chunk_id, encoder)) WITHOUT ROWID""",
    "CREATE INDEX chunk_keys_by_key ON chunk_keys (key)",
)


@dataclasses.dataclass(frozen=True)
class DocumentEntry:
    """One row of the documents table."""

    id: str
    title: str
    file: str | None
    metadata: Mapping[str, Any]
    digest: str  # of text, title and metadata
    num_chunks: int
    num_tokens: int  # of all its chunks, overlap counted twice
    added: str  # UTC, ISO 8601


@dataclasses.dataclass(frozen=True, eq=False)
class Hit:
    """A chunk found for a question; a higher score is better."""

    chunk_id: int
    document_id: str
    chunk_index: int
    title: str
    file: str | None
    score: float
    text: str
    ids: HostArray  # [T] int32, the text's tokens without the prompt template's markers


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A document as it is committed: its chunks, and each chunk's store key under each encoder."""

    document: Document
    digest: str
    chunks: Sequence[Chunk]
    keys: Mapping[str, Sequence[str]]  # encoder -> one key per chunk


class Catalog:
    """One open catalog file. Safe to share between threads; other processes open their own."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        """Use ``Catalog.open`` or ``Catalog.create``."""
        self.path = path
        self._connection = connection
        self._index = BM25Index(connection)
        self._lock = threading.RLock()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing catalog.

        Raises KnowledgeBaseError when the file is missing, is something else, or is of another
        format version; StoreError when SQLite cannot read it.
        """
        if not path.is_file():
            raise KnowledgeBaseError(f"{path}: no such catalog; ingest documents to make one")
        catalog = cls(path, _connect(path))
        try:
            with catalog._use() as connection:
                (application,) = connection.execute("PRAGMA application_id").fetchone()
                (found,) = connection.execute("PRAGMA user_version").fetchone()
            if application != _APPLICATION:
                raise KnowledgeBaseError(
                    f"{path} is not a knowledge base catalog; name another folder"
                )
            if found != FORMAT:
                raise KnowledgeBaseError(
                    f"{path} has format {found}, this version reads format {FORMAT}; "
                    "use the version that wrote it or ingest again"
                )
        except BaseException:
            catalog.close()
            raise
        return catalog

    @classmethod
    def create(cls, path: Path, settings: Mapping[str, Any]) -> Self:
        """Make the catalog with these settings, or open the one that is there already.

        Safe against another process that makes it at the same time. Raises what ``open`` raises;
        a file that is something else is left as it is.
        """
        with contextlib.closing(cls(path, _connect(path))) as catalog:
            if catalog._is_empty():
                with catalog._use() as connection:
                    connection.execute("PRAGMA journal_mode = WAL")  # the file remembers it
                with catalog._transaction():
                    if catalog._is_empty():
                        catalog._make_tables(settings)
        return cls.open(path)

    def close(self) -> None:
        """Close the file; the catalog cannot be used afterwards."""
        with self._lock:
            self._connection.close()

    def settings(self) -> dict[str, Any]:
        """The settings by name, as given at creation and extended since."""
        with self._use() as connection:
            rows = connection.execute("SELECT name, value FROM settings").fetchall()
        return {name: json.loads(value) for name, value in rows}

    def extend(self, name: str, values: Sequence[str]) -> list[str]:
        """Append to a setting that is a list what it does not hold yet; returns the new list."""
        with self._transaction() as connection:
            (text,) = connection.execute(
                "SELECT value FROM settings WHERE name = ?", (name,)
            ).fetchone()
            extended = list(dict.fromkeys([*json.loads(text), *values]))
            connection.execute(
                "UPDATE settings SET value = ? WHERE name = ?", (_to_json(extended), name)
            )
        return extended

    def document(self, document_id: str) -> DocumentEntry | None:
        """The document of that id, or None."""
        return next(self._documents("WHERE id = ?", (document_id,)), None)

    def documents(self) -> list[DocumentEntry]:
        """Every document, by id."""
        return list(self._documents("ORDER BY id", ()))

    def chunks(self, document_id: str) -> list[Chunk]:
        """The chunks of a document in order; none when there is no such document."""
        with self._use() as connection:
            rows = connection.execute(
                "SELECT number, first_char, last_char, ids, text FROM chunks "
                "WHERE document_id = ? ORDER BY number",
                (document_id,),
            ).fetchall()
        return [
            Chunk(index, start, end, _from_blob(ids), text) for index, start, end, ids, text in rows
        ]

    def keys(self, document_id: str) -> dict[str, list[str]]:
        """The store keys of a document's chunks in order, by encoder."""
        found: dict[str, list[str]] = {}
        with self._use() as connection:
            rows = connection.execute(
                "SELECT encoder, key FROM chunk_keys JOIN chunks ON id = chunk_id "
                "WHERE document_id = ? ORDER BY encoder, number",
                (document_id,),
            ).fetchall()
        for encoder, key in rows:
            found.setdefault(encoder, []).append(key)
        return found

    def put(self, entries: Sequence[Entry]) -> None:
        """Add or replace whole documents, all in one transaction.

        The chunks' KV must already be in the store. Raises StoreError when it cannot be committed;
        nothing is changed then.
        """
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with self._transaction() as connection:
            for entry in entries:
                self._remove(entry.document.id)
                self._insert(connection, entry, now)

    def search(self, question: str, k: int) -> list[Hit]:
        """The up to ``k`` chunks that BM25 ranks first for the question."""
        with self._use() as connection:
            connection.execute("BEGIN")  # one snapshot for the ranking and the rows it names
            try:
                matches = self._index.search(question, k)
                rows = {
                    row[0]: row[1:]
                    for row in connection.execute(
                        "SELECT chunks.id, document_id, number, title, file, text, ids "
                        "FROM chunks JOIN documents ON documents.id = document_id "
                        "WHERE chunks.id IN (SELECT value FROM json_each(?))",
                        (json.dumps([match.chunk_id for match in matches]),),
                    )
                }
            finally:
                connection.execute("ROLLBACK")
        hits = []
        for match in matches:
            document_id, number, title, file, text, ids = rows[match.chunk_id]
            hits.append(
                Hit(
                    chunk_id=match.chunk_id,
                    document_id=document_id,
                    chunk_index=number,
                    title=title,
                    file=file,
                    score=match.score,
                    text=text,
                    ids=_from_blob(ids),
                )
            )
        return hits

    def counts(self) -> dict[str, Any]:
        """Numbers of documents, chunks and tokens, and of chunks by encoder variant."""
        with self._use() as connection:
            documents, chunks, tokens = connection.execute(
                "SELECT COUNT(*), TOTAL(num_chunks), TOTAL(num_tokens) FROM documents"
            ).fetchone()
            encoders = dict(
                connection.execute("SELECT encoder, COUNT(*) FROM chunk_keys GROUP BY encoder")
            )
        return {"documents": documents, "chunks": int(chunks), "tokens": int(tokens),
                "encoded": encoders}  # fmt: skip

    def _is_empty(self) -> bool:
        with self._use() as connection:
            return connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None

    def _make_tables(self, settings: Mapping[str, Any]) -> None:
        for statement in _SCHEMA:
            self._connection.execute(statement)
        self._index.create()
        self._connection.executemany(
            "INSERT INTO settings VALUES (?, ?)",
            [(name, _to_json(value)) for name, value in settings.items()],
        )
        self._connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        self._connection.execute(f"PRAGMA user_version = {FORMAT}")

    def _documents(self, rest: str, values: tuple[str, ...]) -> Iterator[DocumentEntry]:
        with self._use() as connection:
            rows = connection.execute(
                "SELECT id, title, file, metadata, digest, num_chunks, num_tokens, added "
                f"FROM documents {rest}",
                values,
            ).fetchall()
        for name, title, file, metadata, *numbers in rows:
            yield DocumentEntry(name, title, file, json.loads(metadata), *numbers)

    def _remove(self, document_id: str) -> None:
        rows = self._connection.execute(
            "SELECT id, text FROM chunks WHERE document_id = ?", (document_id,)
        ).fetchall()
        for chunk_id, text in rows:
            self._index.remove(chunk_id, text)
        self._connection.execute("DELETE FROM documents WHERE id = ?", (document_id,))

    def _insert(self, connection: sqlite3.Connection, entry: Entry, now: str) -> None:
        document, chunks = entry.document, entry.chunks
        connection.execute(
            "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (document.id, document.title, document.file, _to_json(document.metadata),
             entry.digest, len(chunks), sum(len(chunk.ids) for chunk in chunks), now),
        )  # fmt: skip
        for place, chunk in enumerate(chunks):
            chunk_id = connection.execute(
                "INSERT INTO chunks (document_id, number, first_char, last_char, text, ids) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (document.id, chunk.index, chunk.start, chunk.end, chunk.text,
                 chunk.ids.astype("<i4").tobytes()),
            ).lastrowid  # fmt: skip
            assert chunk_id is not None
            self._index.add(chunk_id, chunk.text)
            connection.executemany(
                "INSERT INTO chunk_keys VALUES (?, ?, ?)",
                [(chunk_id, encoder, keys[place]) for encoder, keys in entry.keys.items()],
            )

    @contextlib.contextmanager
    def _use(self) -> Iterator[sqlite3.Connection]:
        """The connection, held by this thread; SQLite's errors leave as StoreError."""
        with self._lock, _as_store_errors(self.path):
            yield self._connection

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One write transaction: committed at the end, rolled back when anything is raised."""
        with self._use() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:  # SQLite rolls back by itself when the disk is full
                    connection.execute("ROLLBACK")


def _connect(path: Path) -> sqlite3.Connection:
    with _as_store_errors(path):
        connection = sqlite3.connect(
            path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection


@contextlib.contextmanager
def _as_store_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        if "locked" in str(error):
            fix = f"another process held it for {_BUSY_SECONDS:.0f} s; try again when it is done"
        elif "closed" in str(error):
            fix = "it was closed; open it again"
        else:
            fix = "check the disk, its free space and your permissions, or restore a copy"
        raise StoreError(f"catalog {path}: {error}; {fix}") from error


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _from_blob(blob: bytes) -> HostArray:
    return np.frombuffer(blob, dtype="<i4").astype(np.int32)
