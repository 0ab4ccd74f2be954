"""Documents, chunks and their keys: read, searched by words, and changed in whole transactions.

A document and all its chunks appear, change and vanish at once; what the chunk store or the vector
index holds beyond that is unreachable and harmless.
"""

import contextlib
import datetime
import itertools
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxrag.base.errors import KnowledgeBaseError, StoreError
from jaxrag.base.types import Connection, HostArray
from jaxrag.library.catalog.audit import Audit
from jaxrag.library.catalog.database import Database, to_json
from jaxrag.library.catalog.digests import (
    CHUNKS,
    CREATE_TOTALS,
    DOCUMENTS,
    KEYS,
    SETTINGS,
    Totals,
    sum_of_ids,
    unlike,
)
from jaxrag.library.catalog.forgotten import (
    CREATE_FORGOTTEN,
    FORGOTTEN,
    SECRET,
    LeftChunk,
    new_secret,
    remember,
)
from jaxrag.library.catalog.reader import CatalogReader
from jaxrag.library.catalog.readers import MAY_PRECEDE
from jaxrag.library.catalog.rows import ChunkRow, DocumentRow, NewDocument
from jaxrag.library.retrieve.base import searched_text
from jaxrag.library.retrieve.bm25 import BM25Index, IndexChange
from jaxrag.library.retrieve.joining import Joining
from jaxrag.library.retrieve.packing import Packing

_JOIN_STEPS = 64  # of a call
_CHUNKS_OF_STEP = 16  # that bring one more; joining takes a step for 40 of the chunks that come
_TURN = 0.001  # seconds that threads which wait for the catalog have between two transactions
_REMOVED_AT_ONCE = 256  # documents whose texts are held


class Catalog(CatalogReader):
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
                        connection.execute(CREATE_TOTALS)
                        connection.execute(CREATE_FORGOTTEN)
                        connection.executemany(
                            SETTINGS.insert(),
                            [
                                SETTINGS.row((name, to_json(value)))
                                for name, value in settings.items()
                            ],
                        )
                        Totals().with_settings(connection).write(connection)
        return cls.open(path)

    def audit(self) -> Audit:
        """All rows as they are, to be checked and repaired."""
        return Audit(self._database)

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
            self._set(connection, name, value)
        if name == "vectors":
            self._vectors = to_json(value)

    def swap(self, name: str, change: Callable[[Any], Any]) -> Any:
        """Change a setting to what ``change`` makes of its value, in one transaction.

        Both are JSON values, None where the setting is not there. Returns the value before.
        """
        with self._database.transaction() as connection:
            before = self._setting(connection, name)
            self._set(connection, name, change(before))
        return before

    def extend(self, name: str, values: Sequence[str]) -> list[str]:
        """Append to a setting that is a list what it does not hold yet; returns the new list."""
        with self._database.transaction() as connection:
            extended = list(dict.fromkeys([*self._setting(connection, name), *values]))
            self._set(connection, name, extended)
        return extended

    def forget(self, names: Iterable[str]) -> None:
        """Remove settings; one that is not there is passed over."""
        with self._database.transaction() as connection:
            connection.executemany("DELETE FROM settings WHERE name = ?", [(n,) for n in names])
            Totals.read(connection, self.path).with_settings(connection).write(connection)

    def _setting(self, connection: Connection, name: str) -> Any:
        """A setting's value, None where it is not there."""
        row = connection.execute(
            f"SELECT {SETTINGS.select()} FROM settings WHERE name = ?", (name,)
        ).fetchone()
        if row is not None and not SETTINGS.is_whole(row):
            raise unlike(self.path, f"the setting {name!r} is")
        return None if row is None else json.loads(row[1])

    def _set(self, connection: Connection, name: str, value: Any) -> None:
        values = (name, to_json(value))
        connection.execute(SETTINGS.insert("INSERT OR REPLACE"), SETTINGS.row(values))
        Totals.read(connection, self.path).with_settings(connection).write(connection)

    # Changes

    def reserve(self, count: int) -> range:
        """New chunk ids, each given once, which never name another chunk.

        Vectors are added under them before the documents are put. Committed at once.
        """
        with self._database.transaction() as connection:
            # Reservations alone would do, were they never lost.
            (last,) = connection.execute(
                "SELECT MAX(COALESCE((SELECT MAX(last) FROM reservations), 0), "
                "COALESCE((SELECT MAX(id) FROM chunks), 0), "
                "COALESCE((SELECT MAX(chunk_id) FROM lengths), 0), "
                "COALESCE((SELECT MAX(chunk_id) FROM leaving), 0))"
            ).fetchone()
            first = last + 1
            if count:
                connection.execute(
                    "INSERT INTO reservations VALUES (?, ?, ?)",
                    (first, first + count - 1, time.time()),
                )
        return range(first, first + count)

    def put(self, entries: Sequence[NewDocument]) -> list[int]:
        """Add or replace whole documents, all in one transaction; returns chunk ids that left.

        The chunks' KV must already be in the store, and their vectors in the index. The ids that
        left are to be removed from the index, and then given to ``settle``.

        Raises KnowledgeBaseError when another process gave the knowledge base an embedder since
        this catalog was opened, StoreError for chunk ids that were not reserved or when nothing
        can be committed; nothing is changed then.
        """
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with self._database.transaction() as connection:
            vectors = to_json(self._setting(connection, "vectors"))
            if vectors != self._vectors:
                raise KnowledgeBaseError(
                    f"{self.path.parent}: another process changed the embedder; open it again"
                )
            staying = {entry.document.id: entry for entry in entries}  # the last of each id
            gone = self._remove(connection, staying)
            left = [chunk.id for chunk in gone]
            texts = {}
            for entry in entries:
                if staying[entry.document.id] is not entry:
                    left += entry.chunk_ids
                    continue
                self._insert(connection, entry, now)
                title = entry.document.title
                for chunk_id, chunk in zip(entry.chunk_ids, entry.chunks, strict=True):
                    texts[chunk_id] = searched_text(title, chunk.text)
            chunks = Totals.read(connection, self.path).chunks
            at_once = self._index.is_packed_at_once(len(texts), chunks)
            self._count(connection, self._index.add(texts, chunks), 1, texts, len(staying))
            self._forget(connection, gone)
            if vectors != "null":
                connection.executemany("INSERT INTO leaving VALUES (?)", [(i,) for i in left])
        self._pack(len(texts) if at_once else 0)
        return left

    def _pack(self, count: int) -> None:
        """Pack chunks where enough have come; where some were, also ``count`` before, join blocks.

        In many short transactions, and not more than some for each chunk, though there be more to
        join: whoever is killed between two, or ends here, leaves the rest to the next.
        """
        with self._database.snapshot() as connection:
            due = Packing(self._index, Totals.read(connection, self.path).chunks).is_due()
        while due and self._pack_some():
            time.sleep(_TURN)
        steps = _JOIN_STEPS + count // _CHUNKS_OF_STEP if count or due else 0
        while steps and self._join():
            steps -= 1
            time.sleep(_TURN)

    def _pack_some(self) -> bool:
        with self._database.transaction() as connection:

            def texts(chunk_ids: Sequence[int]) -> dict[int, str]:
                found = self._among(connection, chunk_ids)
                return {row.id: searched_text(document.title, row.text) for row, document in found}

            return Packing(self._index, Totals.read(connection, self.path).chunks).step(texts)

    def _join(self) -> bool:
        with self._database.transaction():
            return Joining(self._index.packed).step()

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
                        rows = [(i, encoder, key) for i, key in zip(chunk_ids, own, strict=True)]
                        connection.executemany(
                            KEYS.insert("INSERT OR REPLACE"),
                            [KEYS.row(row) for row in rows],
                        )

    def forget_keys(self, encoders: Iterable[str]) -> None:
        """Forget the store keys of encoder variants; the chunks stay as they are."""
        with self._database.transaction() as connection:
            rows = [(name,) for name in encoders]
            connection.executemany("DELETE FROM chunk_keys WHERE encoder = ?", rows)

    def put_contexts(
        self, encoder: str, rows: Iterable[tuple[int, str, Sequence[str]]]
    ) -> list[int]:
        """Record the keys of chunks that were encoded behind others, all in one transaction.

        Args:
          rows: (chunk id, store key, content ids of the chunks in front of it, in order). Replaces
            what is recorded of these chunks.

        Returns the chunk ids that were recorded: one that has left, or that has seen a chunk which
        has left, or which not all of its readers may read by now, is passed over.
        """
        recorded = []
        with self._database.transaction() as connection:
            for chunk_id, key, content_ids in rows:
                (whole,) = connection.execute(
                    "SELECT EXISTS (SELECT 1 FROM chunks JOIN documents AS reader "
                    "ON reader.id = chunks.document_id WHERE chunks.id = ? AND NOT EXISTS "
                    f"(SELECT 1 FROM json_each(?) WHERE NOT {MAY_PRECEDE}))",
                    (chunk_id, json.dumps(content_ids)),
                ).fetchone()
                if not whole:
                    continue
                connection.execute(
                    "DELETE FROM chunk_keys WHERE chunk_id = ? AND encoder = ?", (chunk_id, encoder)
                )
                row = (chunk_id, encoder, key)
                digest = KEYS.digest((*row, *content_ids))
                connection.execute(KEYS.insert(), (*row, digest))
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
        with self._database.transaction() as connection:
            gone = self._remove(connection, document_ids)
            self._forget(connection, gone)
            left = [chunk.id for chunk in gone]
            if self._setting(connection, "vectors") is not None:
                connection.executemany("INSERT INTO leaving VALUES (?)", [(i,) for i in left])
        return left

    def follow(self, newer: "Catalog") -> None:
        """Remember the removals of a newer catalog, and give no chunk id that it gave.

        It is of the same knowledge base. Documents that are not in it stay here.
        """
        given = newer.reserve(0).start
        with newer._database.snapshot() as connection:
            secret = newer._setting(connection, SECRET)
            rows = connection.execute(f"SELECT {FORGOTTEN.select()} FROM forgotten").fetchall()
        self.reserve(max(0, given - self.reserve(0).start))
        with self._database.transaction() as connection:
            if self._setting(connection, SECRET) is None and secret is not None:
                self._set(connection, SECRET, secret)
            if self._setting(connection, SECRET) == secret:
                connection.executemany(FORGOTTEN.insert("INSERT OR REPLACE"), rows)

    # What the vector index and the chunk store may drop

    def leaving(self) -> list[int]:
        """Chunk ids that left and are not known to be removed from the vector index."""
        return self._column("SELECT chunk_id FROM leaving")

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
        if self.totals().has_ids(chunk_ids):
            return chunk_ids[:0]
        with self._database.use() as connection:
            young = connection.execute(
                f"SELECT first, last FROM reservations WHERE NOT ({rule})", cutoff
            ).fetchall()
        mask = ~np.isin(chunk_ids, self.chunk_ids())
        for first, last in young:
            mask &= (chunk_ids < first) | (chunk_ids > last)
        return chunk_ids[mask]

    def _remove(self, connection: Connection, document_ids: Iterable[str]) -> list[LeftChunk]:
        """Remove documents; returns their chunks."""
        gone: list[LeftChunk] = []
        for some in itertools.batched(document_ids, _REMOVED_AT_ONCE):
            among, values = "IN (SELECT value FROM json_each(?))", (json.dumps(some),)
            texts = {}
            for row, document in self._chunks(connection, f"document_id {among}", values):
                texts[row.id] = searched_text(document.title, row.text)
                gone.append(LeftChunk(row.id, row.document_id, row.content_id))
            (documents,) = connection.execute(
                f"SELECT COUNT(*) FROM documents WHERE id {among}", values
            ).fetchone()
            if documents:
                connection.execute(f"DELETE FROM documents WHERE id {among}", values)
                self._count(connection, self._index.remove(texts), -1, texts, documents)
        return gone

    def _count(
        self,
        connection: Connection,
        indexed: IndexChange,
        sign: int,
        chunk_ids: Collection[int],
        documents: int,
    ) -> None:
        """Add to the totals what a change added, or with ``sign`` -1 removed."""
        totals = Totals.read(connection, self.path).plus(
            documents=sign * documents,
            chunks=sign * len(chunk_ids),
            chunk_ids=sign * sum_of_ids(chunk_ids),
            terms=sign * indexed.terms,
            words=sign * indexed.words,
        )
        totals.write(connection)

    def _forget(self, connection: Connection, gone: Sequence[LeftChunk]) -> None:
        """Forget the keys of KV that has seen a content which no chunk has for its readers now.

        What tells later that nothing is left of the documents is remembered of them.
        """
        if not gone:
            return
        connection.execute(
            "DELETE FROM chunk_keys WHERE (chunk_id, encoder) IN (SELECT chunk_id, encoder "
            "FROM json_each(?) JOIN contexts ON contexts.content_id = value "
            "JOIN chunks ON chunks.id = chunk_id JOIN documents AS reader "
            f"ON reader.id = chunks.document_id WHERE NOT {MAY_PRECEDE})",
            (json.dumps(sorted({chunk.content_id for chunk in gone})),),
        )
        secret = self._setting(connection, SECRET)
        if secret is None:
            secret = new_secret()
            self._set(connection, SECRET, secret)
        remember(connection, self.path, bytes.fromhex(secret), gone)

    def _insert(self, connection: Connection, entry: NewDocument, now: str) -> None:
        document, chunks = entry.document, entry.chunks
        row = DocumentRow(
            document.id, document.title, document.file, to_json(document.metadata),
            entry.digest, len(chunks), sum(len(chunk.ids) for chunk in chunks), now,
        )  # fmt: skip
        connection.execute(DOCUMENTS.insert(), DOCUMENTS.row(row))
        owned = zip(chunks, entry.chunk_ids, entry.content_ids, strict=True)
        rows = [
            ChunkRow(chunk_id, document.id, chunk.index, chunk.start, chunk.end, chunk.page,
                     chunk.section, content_id, chunk.text, chunk.ids.astype("<i4").tobytes())
            for chunk, chunk_id, content_id in owned
        ]  # fmt: skip
        for chunk_id in entry.chunk_ids:
            self._require_reserved(connection, chunk_id)
        connection.executemany(CHUNKS.insert(), [CHUNKS.row(row) for row in rows])
        connection.executemany(
            KEYS.insert(),
            [
                KEYS.row((chunk_id, encoder, key))
                for encoder, keys in entry.keys.items()
                for chunk_id, key in zip(entry.chunk_ids, keys, strict=True)
            ],
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
