"""Chunks that no store gave and that are to be encoded, as many at a time as one program takes."""

from collections.abc import Callable

from jaxrag.engine.pending import PendingChunk


class EncodeQueue:
    """In the order in which they came; for the engine's thread."""

    def __init__(self) -> None:
        self._chunks: list[PendingChunk] = []

    def __len__(self) -> int:
        return len(self._chunks)

    def append(self, chunk: PendingChunk) -> None:
        """It waits behind the others."""
        self._chunks.append(chunk)

    def clear(self) -> None:
        """Nothing is to be encoded any more."""
        self._chunks.clear()

    def take(self, is_wanted: Callable[[PendingChunk], bool]) -> list[PendingChunk]:
        """The first that is wanted, and those that the program which encodes it has rows for.

        None of them depends on the others. What is not wanted any more is dropped.
        """
        self._chunks = [chunk for chunk in self._chunks if is_wanted(chunk)]
        if not self._chunks:
            return []
        first = self._chunks[0].load
        shape = first.encoding.shape(first.encoder, first.tokens)
        taken = [
            chunk
            for chunk in self._chunks
            if chunk.load.encoding is first.encoding
            and chunk.load.encoder == first.encoder
            and first.encoding.shape(first.encoder, chunk.load.tokens) == shape
        ][: 1 if shape is None else shape[0]]
        self._chunks = [chunk for chunk in self._chunks if chunk not in taken]
        return taken
