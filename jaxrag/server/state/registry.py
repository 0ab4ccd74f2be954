"""What the server remembers of files and vector stores: one SQLite file in the data folder.

A commit is durable when a method returns (WAL, ``synchronous=FULL``), so what was answered to a
client survives a power cut. Rows that name a tenant are given to no other.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from jaxrag.base.errors import StoreError, disk_errors
from jaxrag.kv.store.sqlite import connect, store_errors, transaction, use_write_ahead_log
from jaxrag.server.durable import PRIVATE_FILE, REGISTRY, make_private

FORMAT = 1
DAY_SECONDS = 86400
RESPONSE_SECONDS = 30 * DAY_SECONDS  # that a response is kept

Status = Literal["in_progress", "completed", "failed", "cancelled"]
STATUSES: tuple[Status, ...] = ("in_progress", "completed", "failed", "cancelled")

_BUSY_SECONDS = 60.0
_FILES = ("", "-wal", "-shm")  # endings of SQLite's files
_APPLICATION = 0x4A524153  # "JRAS", SQLite's application_id
_ID_BYTES = 12
_ADVICE = "check the disk, its free space and your permissions"

_SCHEMA = (
    """CREATE TABLE files (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
        filename TEXT NOT NULL, bytes INTEGER NOT NULL, purpose TEXT NOT NULL,
        created INTEGER NOT NULL)""",
    """CREATE TABLE stores (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
        name TEXT NOT NULL, metadata TEXT NOT NULL, created INTEGER NOT NULL)""",
    """CREATE TABLE members (
        number INTEGER PRIMARY KEY AUTOINCREMENT, store TEXT NOT NULL, file TEXT NOT NULL,
        tenant TEXT NOT NULL, attributes TEXT NOT NULL, batch TEXT, status TEXT NOT NULL,
        code TEXT, message TEXT, counts TEXT NOT NULL, created INTEGER NOT NULL,
        UNIQUE (store, file))""",
    "CREATE INDEX members_by_file ON members (file)",
    "CREATE INDEX files_by_tenant ON files (tenant)",
    "CREATE INDEX stores_by_tenant ON stores (tenant)",
    """CREATE TABLE responses (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
        body TEXT NOT NULL, grounds TEXT NOT NULL, created INTEGER NOT NULL)""",
    """CREATE TABLE ages (
        store TEXT PRIMARY KEY, active INTEGER NOT NULL, days INTEGER,
        gone INTEGER NOT NULL DEFAULT 0)""",
    "CREATE INDEX failed_members ON members (tenant) WHERE status = 'failed'",
)
_AGED = "stores LEFT JOIN ages ON ages.store = id"
_AGE = (
    "INSERT INTO ages (store, active, days) VALUES (:store, :now, :days) "
    "ON CONFLICT DO UPDATE SET active = excluded.active, days = excluded.days"
)


@dataclasses.dataclass(frozen=True)
class FileRow:
    """An uploaded file.

    Attributes:
      number: grows from file to file.
      id: names it.
      tenant: whose it is.
      filename: as it was uploaded.
      bytes: its size.
      purpose: as the client said it.
      created: seconds since 1970.
    """

    number: int
    id: str
    tenant: str
    filename: str
    bytes: int
    purpose: str
    created: int


@dataclasses.dataclass(frozen=True)
class StoreRow:
    """A vector store.

    Attributes:
      number: grows from store to store.
      id: names it, and its folder.
      tenant: whose it is.
      name: as the client calls it, not unique.
      metadata: of the client.
      created: seconds since 1970.
      active: when it was last used, in the same.
      days: after which it expires where nobody uses it; None: never.
      gone: it has expired, and holds nothing any more.
    """

    number: int
    id: str
    tenant: str
    name: str
    metadata: Mapping[str, Any]
    created: int
    active: int
    days: int | None
    gone: bool

    @property
    def expires(self) -> int | None:
        """When it expires if it is not used before; None: never."""
        return None if self.days is None else self.active + self.days * DAY_SECONDS


@dataclasses.dataclass(frozen=True)
class Member:
    """A file in a vector store, or in a served knowledge base.

    Attributes:
      number: grows from one to the next, also where a file is put in again.
      store: id of the vector store, or name of the knowledge base.
      file: id of the file.
      tenant: who put it there.
      attributes: metadata of its documents.
      batch: that it came with; None: alone.
      status: "completed" when its KV is durable and its documents are found.
      code: why it failed, as OpenAI names causes; None where it did not.
      message: the same in words.
      counts: of documents, chunks and tokens, and what was left out; once it is completed.
      created: seconds since 1970.
    """

    number: int
    store: str
    file: str
    tenant: str
    attributes: Mapping[str, Any]
    batch: str | None
    status: Status
    code: str | None
    message: str | None
    counts: Mapping[str, Any]
    created: int


@dataclasses.dataclass(frozen=True)
class Ground:
    """What an answer was made from: chunks of one knowledge base.

    Attributes:
      store: its name or id.
      documents: ids of those that the chunks are of.
      chunk_ids: of these chunks.
      content_ids: of what they were encoded behind.
    """

    store: str
    documents: tuple[str, ...]
    chunk_ids: tuple[int, ...]
    content_ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ResponseRow:
    """A response that is kept.

    Attributes:
      number: grows from one to the next.
      id: names it.
      tenant: whose it is.
      body: the response, without passages, and the messages that led to it.
      grounds: what it, and those before it in its conversation, were made from.
      created: seconds since 1970.
    """

    number: int
    id: str
    tenant: str
    body: Mapping[str, Any]
    grounds: tuple[Ground, ...]
    created: int


class Registry:
    """The open file. Safe to share between threads; one process has it at a time."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """Open the registry of a data folder, or make it; ``clock`` says seconds since 1970.

        Raises StoreError for a file that is something else or cannot be written.
        """
        self.path, self.clock = folder / REGISTRY, clock
        self._used: dict[str, int] = {}  # stores, when
        self._written: dict[str, int] = {}  # the same, as it is durable
        with disk_errors(self.path):  # SQLite gives its other files the mode of this one
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE))
        for ending in _FILES:
            make_private(folder / f"{REGISTRY}{ending}")
        self._lock, self._read_lock = threading.RLock(), threading.Lock()
        with store_errors(self.path, _ADVICE):
            self._connection = connect(self.path, _BUSY_SECONDS)
            # Of its own, so that who reads does not wait for another's commit to reach the disk.
            self._reading = connect(self.path, _BUSY_SECONDS)
            try:
                self._prepare()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the file."""
        with self._lock, self._read_lock:
            self._connection.close()
            self._reading.close()

    # Files

    def add_file(
        self, file_id: str, tenant: str, filename: str, size: int, purpose: str
    ) -> FileRow:
        """Remember a file whose bytes are durable."""
        row = (file_id, tenant, filename, size, purpose, self._now())
        with self._change() as connection:
            connection.execute("INSERT INTO files VALUES (NULL, ?, ?, ?, ?, ?, ?)", row)
        found = self.file(tenant, file_id)
        assert found is not None
        return found

    def file(self, tenant: str, file_id: str) -> FileRow | None:
        """A file of a tenant; None where it has no such."""
        return next(iter(self.files(tenant, file_id)), None)

    def files(self, tenant: str | None = None, file_id: str | None = None) -> list[FileRow]:
        """The files of a tenant, or of all, oldest first."""
        return [FileRow(*row) for row in self._select("files", tenant=tenant, id=file_id)]

    def remove_file(self, file_id: str) -> None:
        """Forget a file, wherever it is a member."""
        with self._change() as connection:
            connection.execute("DELETE FROM members WHERE file = ?", (file_id,))
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self._empty_log()

    # Vector stores

    def add_store(
        self,
        store_id: str,
        tenant: str,
        name: str,
        metadata: Mapping[str, Any],
        days: int | None = None,
    ) -> StoreRow:
        """Remember a vector store whose folder is there."""
        now = self._now()
        with self._change() as connection:
            connection.execute(
                "INSERT INTO stores VALUES (NULL, ?, ?, ?, ?, ?)",
                (store_id, tenant, name, json.dumps(metadata), now),
            )
            connection.execute(_AGE, {"store": store_id, "now": now, "days": days})
        found = self.store(tenant, store_id)
        assert found is not None
        return found

    def store(self, tenant: str, store_id: str) -> StoreRow | None:
        """A vector store of a tenant; None where it has no such."""
        return next(iter(self.stores(tenant, store_id)), None)

    def stores(self, tenant: str | None = None, store_id: str | None = None) -> list[StoreRow]:
        """The vector stores of a tenant, or of all, oldest first."""
        rows = map(_store, self._select(_AGED, tenant=tenant, id=store_id))
        return [
            dataclasses.replace(row, active=max(row.active, self._used.get(row.id, 0)))
            for row in rows
        ]

    def change_store(
        self, store_id: str, name: str, metadata: Mapping[str, Any], days: int | None
    ) -> None:
        """Give a vector store another name, other metadata and another time; that is a use."""
        with self._change() as connection:
            connection.execute(
                "UPDATE stores SET name = ?, metadata = ? WHERE id = ?",
                (name, json.dumps(metadata), store_id),
            )
            connection.execute(_AGE, {"store": store_id, "now": self._now(), "days": days})

    def remove_store(self, store_id: str) -> None:
        """Forget a vector store and its members."""
        with self._change() as connection:
            connection.execute("DELETE FROM members WHERE store = ?", (store_id,))
            connection.execute("DELETE FROM ages WHERE store = ?", (store_id,))
            connection.execute("DELETE FROM stores WHERE id = ?", (store_id,))
        self._empty_log()

    def use_store(self, store_id: str) -> None:
        """A vector store is used now: known at once, and durable by ``write_uses``."""
        self._used[store_id] = self._now()

    def write_uses(self) -> None:
        """Make durable when vector stores were used."""
        used = {it: now for it, now in list(self._used.items()) if self._written.get(it) != now}
        if not used:
            return
        with self._change() as connection:
            connection.executemany(
                "INSERT INTO ages (store, active) SELECT id, :now FROM stores WHERE id = :store "
                "ON CONFLICT DO UPDATE SET active = max(active, excluded.active)",
                [{"store": store, "now": now} for store, now in used.items()],
            )
        self._written |= used

    def is_expired(self, row: StoreRow) -> bool:
        """Whether a vector store's time is over."""
        return row.gone or (row.expires is not None and row.expires <= self.clock())

    def due_stores(self) -> list[StoreRow]:
        """Those whose time is over by what is written, and which hold something still."""
        over = "NOT gone AND active + days * :day <= :now"
        values = {"day": DAY_SECONDS, "now": self.clock()}
        return [_store(it) for it in self._rows(f"SELECT * FROM {_AGED} WHERE {over}", values)]

    def expire_store(self, store_id: str) -> None:
        """Say that a vector store has expired, whatever the clock says later; forget its members.

        Responses that were made from it are forgotten, too.
        """
        self.forget_answers(store_id)
        with self._change() as connection:
            connection.execute("DELETE FROM members WHERE store = ?", (store_id,))
            connection.execute("UPDATE ages SET gone = 1 WHERE store = ?", (store_id,))

    # Members

    def put_members(
        self,
        store: str,
        files: Sequence[tuple[str, Mapping[str, Any]]],
        tenant: str,
        batch: str | None = None,
        failed: Mapping[str, str] = MappingProxyType({}),
    ) -> list[Member]:
        """Put files, (id, attributes) each, into a store, in progress; all in one transaction.

        A file that is there already begins anew. Those of ``failed`` are so, for these reasons.
        """
        now = self._now()
        with self._change() as connection:
            for file, attributes in files:
                why = failed.get(file)
                end = ("in_progress", None) if why is None else ("failed", "invalid_file")
                connection.execute(
                    "INSERT OR REPLACE INTO members VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, '{}', ?)",
                    (store, file, tenant, json.dumps(attributes), batch, *end, why, now),
                )
        made = [self.member(store, file) for file, _ in files]
        return [member for member in made if member is not None]

    def member(self, store: str, file: str) -> Member | None:
        """A file of a store; None where it is no member."""
        return next(iter(self.members(store, file=file)), None)

    def members(
        self,
        store: str | None = None,
        *,
        file: str | None = None,
        batch: str | None = None,
        status: str | None = None,
    ) -> list[Member]:
        """The members of a store, a file, a batch or in one state, oldest first."""
        found = self._select("members", store=store, file=file, batch=batch, status=status)
        return [_member(row) for row in found]

    def settle_member(
        self,
        number: int,
        status: Status,
        *,
        code: str | None = None,
        message: str | None = None,
        counts: Mapping[str, Any] | None = None,
    ) -> bool:
        """Say how a member in progress ended; False where it is none any more."""
        with self._change() as connection:
            done = connection.execute(
                "UPDATE members SET status = ?, code = ?, message = ?, counts = ? "
                "WHERE number = ? AND status = 'in_progress'",
                (status, code, message, json.dumps(counts or {}), number),
            )
            return done.rowcount == 1

    def remove_member(self, store: str, file: str) -> None:
        """Forget a file of a store."""
        with self._change() as connection:
            connection.execute("DELETE FROM members WHERE store = ? AND file = ?", (store, file))

    # Responses

    def add_response(
        self, response_id: str, tenant: str, body: Mapping[str, Any], grounds: Sequence[Ground]
    ) -> None:
        """Keep a response."""
        grounds_json = json.dumps([dataclasses.astuple(it) for it in grounds])
        row = (response_id, tenant, json.dumps(body), grounds_json, self._now())
        with self._change() as connection:
            connection.execute("INSERT INTO responses VALUES (NULL, ?, ?, ?, ?, ?)", row)

    def responses(
        self, tenant: str | None = None, response_id: str | None = None
    ) -> list[ResponseRow]:
        """The responses of a tenant, or of all, oldest first."""
        found = self._select("responses", tenant=tenant, id=response_id)
        return [_response(row) for row in found]

    def expire_responses(self) -> None:
        """Forget those that are older than RESPONSE_SECONDS."""
        with self._change() as connection:
            old = self.clock() - RESPONSE_SECONDS
            gone = connection.execute("DELETE FROM responses WHERE created < ?", (old,)).rowcount
        if gone:
            self._empty_log()

    def remove_responses(self, response_ids: Iterable[str]) -> None:
        """Forget responses."""
        with self._change() as connection:
            for response_id in response_ids:
                connection.execute("DELETE FROM responses WHERE id = ?", (response_id,))
        self._empty_log()

    def forget_answers(self, store: str, documents: Collection[str] | None = None) -> None:
        """Forget the responses that were made from these documents of a store; None: from any."""
        rows = self._rows(
            "SELECT id, grounds FROM responses WHERE instr(grounds, :store)",
            {"store": json.dumps(store)},
        )
        gone = [
            response_id
            for response_id, grounds in rows
            for it in _grounds(grounds)
            if it.store == store and (documents is None or set(documents) & set(it.documents))
        ]
        if gone:
            self.remove_responses(gone)

    def counts(self, store: str, batch: str | None = None) -> dict[str, int]:
        """How many members a store has, by status and in all."""
        rows = self._rows(
            "SELECT status, COUNT(*) FROM members WHERE store = :store "
            "AND (:batch IS NULL OR batch = :batch) GROUP BY status",
            {"store": store, "batch": batch},
        )
        found: dict[str, int] = dict.fromkeys(STATUSES, 0)
        found |= dict(rows)
        return {**found, "total": sum(found.values())}

    def bytes_of_tenant(self, tenant: str) -> int:
        """Bytes of the files and responses of a tenant, and of what failed files leave here."""
        rows = self._rows(
            "SELECT (SELECT TOTAL(MAX(bytes, 1)) FROM files WHERE tenant = :tenant) + "
            "(SELECT TOTAL(LENGTH(body) + LENGTH(grounds)) FROM responses WHERE tenant = :tenant)"
            " + (SELECT TOTAL(LENGTH(file) + LENGTH(attributes) + LENGTH(message)) FROM members "
            "WHERE tenant = :tenant AND status = 'failed')",
            {"tenant": tenant},
        )
        return int(rows[0][0])

    def bytes_of(self, store: str) -> int:
        """Bytes of the files that are members of a store."""
        rows = self._rows(
            "SELECT TOTAL(bytes) FROM members JOIN files ON files.id = file WHERE store = :store",
            {"store": store},
        )
        return int(rows[0][0])

    def _prepare(self) -> None:
        connection = self._connection
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")
        if connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
            use_write_ahead_log(connection, _BUSY_SECONDS)
            with self._change():
                for statement in _SCHEMA:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                connection.execute(f"PRAGMA user_version = {FORMAT}")
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        found = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'ages'").fetchone()
        if (application, version) != (_APPLICATION, FORMAT) or found is None:
            raise StoreError(
                f"{self.path} is no registry of format {FORMAT}, or of version 0.1; name another "
                "data folder"
            )

    def _now(self) -> int:
        return int(self.clock())

    def _rows(self, statement: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        with self._read_lock, store_errors(self.path, _ADVICE):
            return self._reading.execute(statement, values).fetchall()

    def _select(self, table: str, **values: str | None) -> list[tuple[Any, ...]]:
        """Rows whose columns have these values, None: any; oldest first."""
        given = {name: value for name, value in values.items() if value is not None}
        where = " AND ".join(f"{name} = :{name}" for name in given) or "TRUE"
        return self._rows(f"SELECT * FROM {table} WHERE {where} ORDER BY number", given)

    @contextlib.contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """One transaction, durable at its end."""
        with self._lock, store_errors(self.path, _ADVICE), transaction(self._connection):
            yield self._connection

    def _empty_log(self) -> None:
        """What was removed is in no file any more, the write-ahead log among them."""
        with self._lock, self._read_lock, store_errors(self.path, _ADVICE):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def new_id(kind: str) -> str:
    """A name that cannot be guessed, such as "file-0f1e..." for "file-"."""
    return kind + secrets.token_hex(_ID_BYTES)


def _store(row: tuple[Any, ...]) -> StoreRow:
    number, store_id, tenant, name, metadata, created, _, active, days, gone = row
    active = created if active is None else active  # of an earlier server
    return StoreRow(
        number, store_id, tenant, name, _kept(metadata), created, active, days, bool(gone)
    )


def _kept(text: str) -> Any:
    """JSON of a row; an older version took half of a surrogate pair, of which no answer is made."""
    value = json.loads(text)
    if "\\ud" not in text:
        return value
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def _grounds(text: str) -> tuple[Ground, ...]:
    return tuple(Ground(it[0], *map(tuple, it[1:])) for it in json.loads(text))


def _response(row: tuple[Any, ...]) -> ResponseRow:
    number, response_id, tenant, body, grounds, created = row
    return ResponseRow(number, response_id, tenant, _kept(body), _grounds(grounds), created)


def _member(row: tuple[Any, ...]) -> Member:
    number, store, file, tenant, attributes, batch, status, code, message, counts, created = row
    return Member(
        number, store, file, tenant, _kept(attributes), batch, status, code, message,
        json.loads(counts), created,
    )  # fmt: skip
