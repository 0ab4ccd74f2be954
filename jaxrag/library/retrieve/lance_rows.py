"""Rows of vectors as LanceDB takes and gives them.

This file and ``lance`` are the only ones that know LanceDB, which is imported when an index is
opened.
"""

import os
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxrag.base.errors import RetrievalError
from jaxrag.library.retrieve.base import Ids, Vectors

NUMBER = "_rowid"  # LanceDB's column of the numbers of rows
CHECK = "check"  # column of the digests of rows


def lancedb_and_arrow() -> tuple[Any, Any]:
    """The two packages. Raises RetrievalError where they are not installed."""
    os.environ.setdefault("LANCEDB_LOG", "error")  # it warns on stderr of what its upkeep meets
    try:
        import lancedb.index
        import pyarrow
    except ImportError:
        raise RetrievalError(
            "an index of vectors needs the package lancedb; pip install lancedb"
        ) from None
    return lancedb, pyarrow


def numbered(table: Any, first: int) -> tuple[Ids, Ids]:
    """The numbers of a table's rows, from one on, and their ids."""
    asked = table.search().where(f"{NUMBER} >= {first}").select(["id"]).with_row_id(True)
    rows = asked.to_arrow()
    return rows[NUMBER].to_numpy().astype(np.int64), rows["id"].to_numpy()


def arrow_rows(ids: Ids, vectors: Vectors, dim: int) -> Any:
    """Rows as LanceDB takes them."""
    _, arrow = lancedb_and_arrow()
    values = arrow.FixedSizeListArray.from_arrays(arrow.array(vectors.reshape(-1)), dim)
    digests = arrow.array(checks(ids, vectors))
    return arrow.table({"id": arrow.array(ids), "vector": values, CHECK: digests})


def schema(dim: int) -> Any:
    """Of a table of vectors of so many values."""
    _, arrow = lancedb_and_arrow()
    return arrow.schema(
        [
            arrow.field("id", arrow.int64(), nullable=False),
            arrow.field("vector", arrow.list_(arrow.float32(), dim), nullable=False),
            arrow.field(CHECK, arrow.int64(), nullable=False),
        ]
    )


def checks(ids: Ids, vectors: Vectors) -> NDArray[np.int64]:
    """The xxh3-64 of every id and its vector, int64 [N]."""
    digests = (
        xxhash.xxh3_64_intdigest(row.data, seed=number)
        for number, row in zip(ids.tolist(), np.ascontiguousarray(vectors), strict=True)
    )
    return np.fromiter(digests, np.uint64, len(ids)).view(np.int64)


def among(ids: Ids) -> str:
    """The condition that chooses the rows with these ids."""
    return f"id IN ({','.join(map(str, ids.tolist()))})"
