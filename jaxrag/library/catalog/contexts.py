"""Reading the catalog: contents of chunks, and behind which of them others were encoded."""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.library.catalog.database import Database
from jaxrag.library.catalog.digests import KEYS, unlike


class ContextReader:
    """What can be asked about the contents and contexts of chunks."""

    def __init__(self, database: Database) -> None:
        """Read an open file."""
        self._database = database

    @property
    def path(self) -> Path:
        """The file."""
        return self._database.path

    def contexts(self, chunk_ids: Iterable[int], encoder: str) -> dict[int, list[str]]:
        """What stood in front of chunks when they were encoded: content ids in order, by chunk id.

        Chunks without a key of this encoder are left out.
        """
        asked = json.dumps([int(i) for i in chunk_ids])
        with self._database.use() as connection:
            rows = connection.execute(
                f"SELECT {KEYS.select()}, content_id FROM chunk_keys "
                "LEFT JOIN contexts USING (chunk_id, encoder) WHERE chunk_keys.encoder = ? "
                "AND chunk_keys.chunk_id IN (SELECT value FROM json_each(?)) "
                "ORDER BY chunk_keys.chunk_id, place",
                (encoder, asked),
            ).fetchall()
        found: dict[int, list[str]] = {}
        for chunk_id, group in itertools.groupby(rows, key=lambda row: int(row[0])):
            these = list(group)
            found[chunk_id] = [row[-1] for row in these if row[-1] is not None]
            *key, xxh3, _ = these[0]
            if not KEYS.is_whole((*key, *found[chunk_id], xxh3)):
                raise unlike(self.path, f"the {encoder} key of chunk {chunk_id} is")
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

    def contents_only_of(self, document_ids: Sequence[str]) -> list[str]:
        """The content ids that only chunks of these documents have."""
        return self._column(
            "WITH these AS MATERIALIZED (SELECT value AS id FROM json_each(?)) "
            "SELECT DISTINCT content_id FROM chunks WHERE document_id IN these AND NOT EXISTS "
            "(SELECT 1 FROM chunks AS other WHERE other.content_id = chunks.content_id "
            "AND other.document_id NOT IN these)",
            (json.dumps(list(document_ids)),),
        )

    def ids_with_content(self, content_ids: Sequence[str]) -> HostArray:
        """The chunks that have one of these contents, int64 [N] ascending."""
        return self._ids(
            "SELECT id FROM chunks WHERE content_id IN (SELECT value FROM json_each(?)) "
            "ORDER BY id",
            (json.dumps(list(content_ids)),),
        )

    def ids_behind(self, content_ids: Sequence[str], encoder: str) -> HostArray:
        """The chunks that were encoded behind one of these contents, int64 [N] ascending."""
        return self._ids(
            "SELECT DISTINCT chunk_id FROM contexts WHERE encoder = ? AND content_id IN "
            "(SELECT value FROM json_each(?)) ORDER BY chunk_id",
            (encoder, json.dumps(list(content_ids))),
        )

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
        return np.array(self._column(statement, values), np.int64)

    def _column(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """The first column of what a statement finds."""
        with self._database.use() as connection:
            return [row[0] for row in connection.execute(statement, values)]

    def _any(self, statement: str, values: Sequence[Any] = ()) -> bool:
        """Whether a statement finds a row."""
        with self._database.use() as connection:
            return connection.execute(statement, values).fetchone() is not None
