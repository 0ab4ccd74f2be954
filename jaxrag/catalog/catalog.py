"""Documents, chunks and their keys: read, searched by words, and changed in whole transactions.

A document and all its chunks appear, change and vanish at once; what the chunk store or the vector
index holds beyond that is unreachable and harmless.
"""

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxrag.catalog.database import Database, to_json
from jaxrag.catalog.reader import Reader
from jaxrag.catalog.rows import Entry
from jaxrag.errors import KnowledgeBaseError, StoreError
from jaxrag.retrieve.base import searched_text
from jaxrag.retrieve.bm25 import BM25Index
from jaxrag.types import Connection, HostArray


class Catalog(Reader):
    """One open catalog file. Safe to share between threads; other processes open their own."""

    def __init__(self, database: Database) -> None:
        """Use ``Catalog.open`` or ``Catalog.create``."""
        super().__init__(database)
        self._vectors: str | None = None  # the setting "vectors" as this object saw it last

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing catalog.

        Raises KnowledgeBaseError when the file is missing, is something else, or is of another
        format version; StoreError when SQLite cannot read it.
        """
        if not path.is_file():
            raise KnowledgeBaseError(f"{path}: no such catalog; ingest documents to make one")
        database = Database(path)
        try:
            database.check_format()
            catalog = cls(database)
            catalog._vectors = to_json(catalog.settings().get("vectors"))
        except BaseException:
            database.close()
            raise
        return catalog

    @staticmethod
    def is_empty(path: Path) -> bool:
        """Whether the file is about to become a catalog: another process is inside ``create``.

        Raises StoreError for a file that is no database.
        """
        with contextlib.closing(Database(path)) as database:
            return database.is_empty()

    @classmethod
    def create(cls, path: Path, settings: Mapping[str, Any]) -> Self:
        """Make the catalog with these settings, or open the one that is there already.

        Safe against another process that makes it at the same time. Raises what ``open`` raises;
        a file that is something else is left as it is.
        """
        with contextlib.closing(Database(path)) as database:
            if database.is_empty():
                database.use_wal()
                with database.transaction() as connection:
                    if database.is_empty():
                        database.make_tables()
                        BM25Index(connection).create()
                        connection.executemany(
                            "INSERT INTO settings VALUES (?, ?)",
                            [(name, to_json(value)) for name, value in settings.items()],
                        )
        return cls.open(path)

    def checkpoint(self) -> None:
        """Call when a change is acknowledged: no damage to SQLite's log takes it back then."""
        self._database.checkpoint()

    # Settings

    def set(self, name: str, value: Any) -> None:
        """Change or add a setting to any JSON value.

        After "vectors" was changed, other open catalogs refuse to put documents: they would leave
        them without vectors.
        """
        with self._database.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)",
                               (name, to_json(value)))  # fmt: skip
        if name == "vectors":
            self._vectors = to_json(value)

    def swap(self, name: str, change: Callable[[Any], Any]) -> Any:
        """Change a setting to what ``change`` makes of its value, in one transaction.

        Both are JSON values, None where the setting is not there. Returns the value before.
        """
        with self._database.transaction() as connection:
            row = connection.execute(
                "SELECT value FROM settings WHERE name = ?", (name,)
            ).fetchone()
            before = None if row is None else json.loads(row[0])
            connection.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)",
                               (name, to_json(change(before))))  # fmt: skip
        return before

    def extend(self, name: str, values: Sequence[str]) -> list[str]:
        """Append to a setting that is a list what it does not hold yet; returns the new list."""
        with self._database.transaction() as connection:
            (text,) = connection.execute(
                "SELECT value FROM settings WHERE name = ?", (name,)
            ).fetchone()
            extended = list(dict.fromkeys([*json.loads(text), *values]))
            connection.execute(
                "UPDATE settings SET value = ? WHERE name = ?", (to_json(extended), name)
            )
        return extended

    # Changes

    def reserve(self, count: int) -> range:
        """New chunk ids, which nobody else gets and which never name another chunk.

        Vectors are added under them before the documents are put. Committed at once.
        """
        with self._database.transaction() as connection:
            (last,) = connection.execute("SELECT MAX(last) FROM reservations").fetchone()
            first = (last or 0) + 1
            if count:
                connection.execute(
                    "INSERT INTO reservations VALUES (?, ?, ?)",
                    (first, first + count - 1, time.time()),
                )
        return range(first, first + count)

    def put(self, entries: Sequence[Entry]) -> list[int]:
        """Add or replace whole documents, all in one transaction; returns chunk ids that left.

        The chunks' KV must already be in the store, and their vectors in the index. The ids that
        left are to be removed from the index, and then given to ``settle``.

        Raises KnowledgeBaseError when another process gave the knowledge base an embedder since
        this catalog was opened, StoreError for chunk ids that were not reserved or when nothing
        can be committed; nothing is changed then.
        """
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        left: list[int] = []
        with self._database.transaction() as connection:
            vectors = _vectors(connection)
            if vectors != self._vectors:
                raise KnowledgeBaseError(
                    f"{self.path.parent}: another process changed the embedder; open it again"
                )
            gone: list[str] = []
            for entry in entries:
                left += self._remove(connection, entry.document.id, gone)
                self._insert(connection, entry, now)
            self._forget_contexts(connection, gone)
            if vectors != "null":
                connection.executemany("INSERT INTO leaving VALUES (?)", [(i,) for i in left])
        return left

    def put_keys(self, keys: Iterable[tuple[str, str, Mapping[str, Sequence[str]]]]) -> None:
        """Record store keys of further encoder variants; the chunks stay as they are.

        Args:
          keys: (document id, its digest, encoder -> one key per chunk). A document that has another
            digest by now is left alone.
        """
        with self._database.transaction() as connection:
            for document_id, digest, by_encoder in keys:
                chunk_ids = [
                    row[0]
                    for row in connection.execute(
                        "SELECT chunks.id FROM chunks JOIN documents ON documents.id = document_id "
                        "WHERE document_id = ? AND digest = ? ORDER BY number",
                        (document_id, digest),
                    )
                ]
                for encoder, own in by_encoder.items():
                    if chunk_ids:
                        connection.executemany(
                            "INSERT OR REPLACE INTO chunk_keys VALUES (?, ?, ?)",
                            [(i, encoder, key) for i, key in zip(chunk_ids, own, strict=True)],
                        )

    def put_contexts(
        self, encoder: str, rows: Iterable[tuple[int, str, Sequence[str]]]
    ) -> list[int]:
        """Record the keys of chunks that were encoded behind others, all in one transaction.

        Args:
          encoder: one that sees neighbours.
          rows: (chunk id, store key, content ids of the chunks in front of it, in order). Replaces
            what is recorded of these chunks.

        Returns the chunk ids that were recorded: one that has left, or that has seen a chunk which
        has left, is passed over.
        """
        recorded = []
        with self._database.transaction() as connection:
            for chunk_id, key, content_ids in rows:
                (whole,) = connection.execute(
                    "SELECT EXISTS (SELECT 1 FROM chunks WHERE id = ?) AND NOT EXISTS "
                    "(SELECT 1 FROM json_each(?) WHERE value NOT IN (SELECT content_id FROM chunks "
                    "WHERE content_id = value))",
                    (chunk_id, json.dumps(content_ids)),
                ).fetchone()
                if not whole:
                    continue
                connection.execute(
                    "DELETE FROM chunk_keys WHERE chunk_id = ? AND encoder = ?", (chunk_id, encoder)
                )
                connection.execute(
                    "INSERT INTO chunk_keys VALUES (?, ?, ?)", (chunk_id, encoder, key)
                )
                connection.executemany(
                    "INSERT INTO contexts VALUES (?, ?, ?, ?)",
                    [(chunk_id, encoder, place, c) for place, c in enumerate(content_ids)],
                )
                recorded.append(chunk_id)
        return recorded

    def remove(self, document_ids: Iterable[str]) -> list[int]:
        """Remove documents, in one transaction; returns the chunk ids that left, as ``put`` does.

        An id that names no document is left out.
        """
        left: list[int] = []
        gone: list[str] = []
        with self._database.transaction() as connection:
            for document_id in document_ids:
                left += self._remove(connection, document_id, gone)
            self._forget_contexts(connection, gone)
            if _vectors(connection) != "null":
                connection.executemany("INSERT INTO leaving VALUES (?)", [(i,) for i in left])
        return left

    # What the vector index and the chunk store may drop

    def leaving(self) -> list[int]:
        """Chunk ids that left and that nobody said were removed from the vector index."""
        with self._database.use() as connection:
            return [row[0] for row in connection.execute("SELECT chunk_id FROM leaving")]

    def settle(self, chunk_ids: Iterable[int]) -> None:
        """These ids are in the vector index no more."""
        rows = [(int(i),) for i in chunk_ids]
        if rows:
            with self._database.transaction() as connection:
                connection.executemany("DELETE FROM leaving WHERE chunk_id = ?", rows)

    def strays(self, chunk_ids: HostArray, made_before: float, dry_run: bool = False) -> HostArray:
        """Those of ``chunk_ids`` that are no chunk and were reserved before a moment since 1970.

        A writer that was killed between its vectors and its commit leaves such ids; one that
        reserved later may still be at work. Ids that were reserved before cannot be put any more,
        unless this is a ``dry_run``.
        """
        rule = "made < ? AND first < (SELECT MAX(first) FROM reservations)"
        cutoff = (made_before,)
        if not dry_run:
            with self._database.transaction() as connection:
                connection.execute(f"DELETE FROM reservations WHERE {rule}", cutoff)
        with self._database.use() as connection:
            young = connection.execute(
                f"SELECT first, last FROM reservations WHERE NOT ({rule})", cutoff
            ).fetchall()
        mask = ~np.isin(chunk_ids, self.chunk_ids())
        for first, last in young:
            mask &= (chunk_ids < first) | (chunk_ids > last)
        return chunk_ids[mask]

    def _remove(self, connection: Connection, document_id: str, gone: list[str]) -> list[int]:
        """Remove a document; returns its chunk ids and adds their content ids to ``gone``."""
        rows = connection.execute(
            "SELECT chunks.id, title, text, content_id FROM chunks "
            "JOIN documents ON documents.id = document_id WHERE document_id = ?",
            (document_id,),
        ).fetchall()
        for chunk_id, title, text, content_id in rows:
            self._index.remove(chunk_id, searched_text(title, text))
            gone.append(content_id)
        connection.execute("DELETE FROM documents WHERE id = ?", (document_id,))
        return [row[0] for row in rows]

    def _forget_contexts(self, connection: Connection, gone: list[str]) -> None:
        """Forget the keys of KV that has seen a chunk whose content no chunk has any more."""
        connection.execute(
            "DELETE FROM chunk_keys WHERE (chunk_id, encoder) IN (SELECT chunk_id, encoder "
            "FROM json_each(?) JOIN contexts ON content_id = value "
            "WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE content_id = value))",
            (json.dumps(sorted(dict.fromkeys(gone))),),
        )

    def _insert(self, connection: Connection, entry: Entry, now: str) -> None:
        document, chunks = entry.document, entry.chunks
        connection.execute(
            "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (document.id, document.title, document.file, to_json(document.metadata),
             entry.digest, len(chunks), sum(len(chunk.ids) for chunk in chunks), now),
        )  # fmt: skip
        owned = zip(chunks, entry.chunk_ids, entry.content_ids, strict=True)
        for place, (chunk, chunk_id, content_id) in enumerate(owned):
            self._require_reserved(connection, chunk_id)
            connection.execute(
                "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (chunk_id, document.id, chunk.index, chunk.start, chunk.end, chunk.page,
                 chunk.section, content_id, chunk.text, chunk.ids.astype("<i4").tobytes()),
            )  # fmt: skip
            self._index.add(chunk_id, searched_text(document.title, chunk.text))
            connection.executemany(
                "INSERT INTO chunk_keys VALUES (?, ?, ?)",
                [(chunk_id, encoder, keys[place]) for encoder, keys in entry.keys.items()],
            )

    def _require_reserved(self, connection: Connection, chunk_id: int) -> None:
        row = connection.execute(
            "SELECT last FROM reservations WHERE first <= ? ORDER BY first DESC LIMIT 1",
            (chunk_id,),
        ).fetchone()
        if row is None or chunk_id > row[0]:
            raise StoreError(
                f"catalog {self.path}: chunk id {chunk_id} is not reserved, or was for longer than "
                "the grace of a gc; add the documents again"
            )


def _vectors(connection: Connection) -> str:
    """The setting "vectors" as JSON text, "null" without one."""
    row = connection.execute("SELECT value FROM settings WHERE name = 'vectors'").fetchone()
    return "null" if row is None else str(row[0])
