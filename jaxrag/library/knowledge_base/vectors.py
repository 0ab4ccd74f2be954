"""The vectors of a knowledge base's chunks: an embedder and the index that it fills."""

import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.errors import KnowledgeBaseError
from jaxrag.base.types import HostArray
from jaxrag.kv.store.chunk_store import Mode
from jaxrag.library.catalog import Catalog
from jaxrag.library.embed import Embedder, as_embedder, load_embedder
from jaxrag.library.retrieve.lance import VectorIndex

_MANY = 10_000  # vectors; comparing fewer takes no time
_SHARE = 100.0
VECTORS = "vectors"  # folder of the index, in that of the knowledge base


GivenEmbedder = str | os.PathLike[str] | Embedder | Callable[[list[str]], Any]


def choose_embedder(given: GivenEmbedder | None) -> tuple[Embedder | None, str | None]:
    """The embedder that was given, and its directory where it was given as one."""
    if given is None:
        return None, None
    if isinstance(given, str | os.PathLike):
        path = Path(given).absolute()
        return load_embedder(path), str(path)
    return as_embedder(given), None


@dataclasses.dataclass(frozen=True, eq=False)
class Compared:
    """What a vector index and a catalog do not have in common.

    Attributes:
      lost: chunks of the catalog without a vector, int64 [N] ascending.
      strays: vectors of no chunk, of a batch on its way in or of a writer that died, int64 [N]
        ascending.
    """

    lost: HostArray
    strays: HostArray


class ChunkVectors:
    """Embeds texts and keeps their vectors; both parts are opened when they are needed."""

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], embedder: Embedder | None, mode: Mode
    ) -> None:
        """Bind what the setting "vectors" describes.

        Args:
          embedder: the one that was given; None loads it from the remembered directory.
          mode: "rw" may add and remove.
        """
        self.folder = folder
        self.settings = settings
        self._given = embedder
        self._mode: Mode = mode
        self._compared: tuple[tuple[object, int], Compared] | None = None  # the last comparison
        self._compared_at = (-math.inf, 0.0)  # when that was, and how long it took
        self._index: VectorIndex | None = None
        self._opening = threading.Lock()  # two threads that ask first get one index

    @property
    def index(self) -> VectorIndex:
        """The index. Raises StoreError when it cannot be opened."""
        with self._opening:
            if self._index is None:
                dim, kind = self.settings["embedder"]["dim"], self.settings["index"]
                folder = self.folder / VECTORS
                self._index = VectorIndex.open(folder, dim, kind, mode=self._mode)
            return self._index

    @property
    def embedder(self) -> Embedder:
        """The embedder. Raises KnowledgeBaseError when it is not at hand, or is another one."""
        with self._opening:
            if self._given is None:
                self._given = self._remembered()
            return self._given

    def _remembered(self) -> Embedder:
        known = self.settings["embedder"]
        if known["path"] is None:
            raise KnowledgeBaseError(
                f"{self.folder} was embedded by a function of digest {known['digest'][:16]}; open "
                "it with embedder=, or search with mode='bm25'"
            )
        embedder = load_embedder(known["path"])
        if embedder.digest != known["digest"]:
            raise KnowledgeBaseError(
                f"{known['path']} has digest {embedder.digest[:16]}, {self.folder} was embedded "
                f"with {known['digest'][:16]}; restore that embedder or ingest into another folder"
            )
        return embedder

    def make(self) -> None:
        """Make an empty index where there is none."""
        self.index.close()

    def add(self, chunk_ids: Sequence[int], texts: Sequence[str]) -> None:
        """Embed the texts and keep their vectors, durably."""
        if texts:
            self.index.add(np.asarray(chunk_ids, np.int64), self.embedder(texts, "passage"))

    def remove(self, chunk_ids: Sequence[int] | HostArray) -> None:
        """Forget vectors; an id that has none is left out."""
        if len(chunk_ids):
            self.index.remove(np.asarray(chunk_ids, np.int64))

    def compared(self, catalog: Catalog, lately: bool = False) -> "Compared":
        """The ids of the index beside those of the catalog; done again only after a change.

        ``lately`` is content with an earlier comparison of many ids, so that comparing takes at
        most a hundredth of the time.

        A chunk's vector is durable before the catalog names the chunk and goes after it, so while
        every chunk was embedded only damage leaves one without. The ids are compared one by one:
        vectors of chunks that are gone must not stand for others.
        """
        start = time.monotonic()
        at, taken = self._compared_at
        if lately and self._compared is not None and start - at < _SHARE * taken:
            (_, count), compared = self._compared
            if count >= _MANY:
                return compared
        version = (catalog.version(), len(self.index))
        if self._compared is None or self._compared[0] != version:
            self._compare(version, catalog)
            end = time.monotonic()
            self._compared_at = end, end - start
        assert self._compared is not None
        return self._compared[1]

    def _compare(self, version: tuple[object, int], catalog: Catalog) -> None:
        totals, held = catalog.totals(), self.index.ids()
        if totals.has_ids(held):
            self._compared = version, Compared(held[:0], held[:0])
            return
        named = catalog.chunk_ids()
        lost = np.setdiff1d(named, held)
        if len(lost):  # a chunk that left the catalog meanwhile left the index, too
            lost = np.intersect1d(lost, catalog.chunk_ids())
        self._compared = version, Compared(lost, np.setdiff1d(held, named))

    def close(self) -> None:
        """Close the index if it was opened."""
        with self._opening:
            if self._index is not None:
                self._index.close()
