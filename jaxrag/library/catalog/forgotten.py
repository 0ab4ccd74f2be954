"""What is remembered of documents that left, to find later what still derives from them.

Nothing is kept that tells what they were: their ids and the content ids of their chunks are kept as
digests under a secret of the knowledge base. Who knows a document's id can ask what is left of it.
Who has only the catalog learns how many documents left, when, and how many chunks they had.
"""

import dataclasses
import datetime
import hashlib
import itertools
import json
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrag.base.types import Connection, HostArray
from jaxrag.library.catalog.digests import DigestTable, unlike
from jaxrag.library.retrieve.packed import Packed

SECRET = "forgotten_by"  # the setting that holds the key of the digests, 64 hex digits
FORGOTTEN = DigestTable("forgotten", ("name", "removed", "contents", "chunk_ids"))
CREATE_FORGOTTEN = (
    "CREATE TABLE forgotten (name TEXT PRIMARY KEY, removed TEXT NOT NULL, "
    "contents BLOB NOT NULL, chunk_ids BLOB NOT NULL, xxh3 INTEGER NOT NULL) WITHOUT ROWID"
)
_BYTES = 16  # of a digest


class LeftChunk(NamedTuple):
    """A chunk that left the catalog."""

    id: int
    document_id: str
    content_id: str


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """By what one recognises what derives from a document.

    Attributes:
      secret: of the digests.
      removed: when it last was removed or replaced; None: it never was.
      contents: digests of the content ids of all chunks that it has or had.
      chunk_ids: of these, int64 [N] ascending.
      held: content ids that chunks of other documents have now; they are not its own.
    """

    secret: bytes
    removed: datetime.datetime | None
    contents: frozenset[bytes]
    chunk_ids: HostArray
    held: frozenset[str] = frozenset()

    def is_own(self, content_id: str) -> bool:
        """Whether tokens of this name are, or were, its and are no other document's."""
        return content_id not in self.held and _digest(self.secret, content_id) in self.contents


def new_secret() -> str:
    """A value of the setting ``SECRET``."""
    return secrets.token_hex(32)


def remember(connection: Connection, path: Path, secret: bytes, left: Iterable[LeftChunk]) -> None:
    """Note chunks that leave, beside what is known of their documents, in a transaction."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    by_document = sorted(left, key=lambda chunk: chunk.document_id)
    for document_id, chunks in itertools.groupby(by_document, lambda chunk: chunk.document_id):
        these = list(chunks)
        known = recall(connection, path, secret, document_id)
        contents = {_digest(secret, chunk.content_id) for chunk in these}
        ids = {chunk.id for chunk in these}
        if known is not None:
            contents |= known.contents
            ids |= set(known.chunk_ids.tolist())
        row = (
            _digest(secret, document_id).hex(),
            now,
            b"".join(sorted(contents)),
            np.array(sorted(ids), "<i8").tobytes(),
        )
        connection.execute(FORGOTTEN.insert("INSERT OR REPLACE"), FORGOTTEN.row(row))


def recall(connection: Connection, path: Path, secret: bytes, document_id: str) -> Trace | None:
    """What is remembered of a document; None where it was never removed or replaced.

    Raises DamagedCatalogError for a row that is not as written.
    """
    row: Sequence[str | bytes] | None = connection.execute(
        f"SELECT {FORGOTTEN.select()} FROM forgotten WHERE name = ?",
        (_digest(secret, document_id).hex(),),
    ).fetchone()
    if row is None:
        return None
    if not FORGOTTEN.is_whole(row):
        raise unlike(path, "what it remembers of a removed document is")
    _, removed, contents, chunk_ids, _ = row
    assert isinstance(removed, str) and isinstance(contents, bytes) and isinstance(chunk_ids, bytes)
    return Trace(
        secret,
        datetime.datetime.fromisoformat(removed),
        frozenset(contents[i : i + _BYTES] for i in range(0, len(contents), _BYTES)),
        np.frombuffer(chunk_ids, "<i8").astype(np.int64),
    )


def unlike_rows(connection: Connection) -> list[str]:
    """Names of rows that are not as written."""
    rows = connection.execute(f"SELECT {FORGOTTEN.select()} FROM forgotten")
    return [str(row[0]) for row in rows if not FORGOTTEN.is_whole(row)]


def trace_of(
    trace: Trace | None, secret: bytes, here: Sequence[tuple[int, str]], held: Iterable[str]
) -> Trace:
    """What is remembered of a document together with the chunks that it has now.

    Args:
      trace: as of ``recall``.
      secret: of the digests.
      here: ids and content ids of its chunks.
      held: content ids of the chunks of all others.
    """
    known = trace or Trace(secret, None, frozenset(), np.zeros(0, np.int64))
    return dataclasses.replace(
        known,
        contents=known.contents | {_digest(secret, content_id) for _, content_id in here},
        chunk_ids=np.union1d(known.chunk_ids, np.array([i for i, _ in here], np.int64)),
        held=frozenset(held),
    )


@dataclasses.dataclass(frozen=True)
class DerivedRows:
    """What the catalog holds that derives from a document.

    Attributes:
      documents: its own row, 0 or 1.
      chunks: rows of its chunks, with their texts.
      words: rows of the full-text index of chunks that it has or had.
      contexts: chunks of other documents whose KV saw its own, by what they are called: document,
        number and encoder.
    """

    documents: int
    chunks: int
    words: int
    contexts: tuple[tuple[str, int, str], ...]


def rows_of(connection: Connection, path: Path, document_id: str, trace: Trace) -> DerivedRows:
    """Look through all tables."""
    (documents,) = connection.execute(
        "SELECT COUNT(*) FROM documents WHERE id = ?", (document_id,)
    ).fetchone()
    ids = (json.dumps(trace.chunk_ids.tolist()),)
    among = "IN (SELECT value FROM json_each(?))"
    (chunks,) = connection.execute(f"SELECT COUNT(*) FROM chunks WHERE id {among}", ids).fetchone()
    words = sum(
        connection.execute(f"SELECT COUNT(*) FROM {table} WHERE chunk_id {among}", ids).fetchone()[
            0
        ]
        for table in ("postings", "lengths")
    )
    blocks = Packed(connection, path).blocks()
    words += sum(int(np.isin(block.ids, trace.chunk_ids).sum()) for block in blocks)
    seen = [
        content_id
        for (content_id,) in connection.execute("SELECT DISTINCT content_id FROM contexts")
        if trace.is_own(content_id)
    ]
    contexts = connection.execute(
        "SELECT DISTINCT document_id, number, encoder FROM contexts JOIN chunks "
        f"ON chunks.id = chunk_id WHERE contexts.content_id {among} AND document_id != ? "
        "ORDER BY 1, 2, 3",
        (json.dumps(seen), document_id),
    ).fetchall()
    return DerivedRows(documents, chunks, words, tuple(contexts))


def _digest(secret: bytes, name: str) -> bytes:
    return hashlib.blake2b(
        name.encode(), key=secret, digest_size=_BYTES, person=b"jaxrag.forgotten"
    ).digest()
