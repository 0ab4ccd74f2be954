"""What decodes rows that have KV and states of their own, beside the pool that requests share."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray, TokenRun
from jaxrag.kv.store.layout import KVLayout

ROWS = 8  # sequences that are decoded together
READ = ("isolated", "after_prefix", "primed")  # encoders


class RowBackend(Protocol):
    """A model that encodes chunks, puts them into rows as they are stored, and runs tokens there.

    Calls of rows raise EngineError where what runs them failed; ``life`` names the one that has
    them, as ``live`` gave it.
    """

    @property
    def engine(self) -> str:
        """The ``engine`` that it was loaded with."""

    @property
    def called(self) -> str:
        """What messages call it."""

    @property
    def identity(self) -> dict[str, str]:
        """What shapes its chunks beside weights and tokens."""

    @property
    def layout(self) -> KVLayout:
        """Of its chunks."""

    @property
    def cells(self) -> int:
        """Tokens of KV of all rows together."""

    @property
    def most_read(self) -> int:
        """Tokens of a chunk, with what it is read behind."""

    def before(self, prefix: HostArray, ids: HostArray) -> HostArray:
        """What a chunk is read behind, int32."""

    def encode(
        self, prefix: HostArray, chunks: Sequence[HostArray]
    ) -> Iterator[tuple[int, HostArray]]:
        """As ``encode_chunks``: yields (index, chunk of ``layout``) of chunks behind one prefix."""

    def live(self) -> int:
        """Have it run; which of its lives this is."""

    def restore(self, row: int, kv: HostArray, first: int, place: int, life: int) -> None:
        """Put a chunk that was read behind ``first`` tokens to ``place`` of a row, its end."""

    def step(self, runs: Sequence[TokenRun], life: int) -> HostArray:
        """Run tokens at the ends of rows; logits [n, V] float32 where they are wanted, in order."""

    def leave(self, row: int) -> None:
        """Nobody has the row any more."""


def check_encoders(backend: RowBackend, encoders: Sequence[str]) -> None:
    """RequestError for chunks that rows cannot be made of."""
    for name in encoders:
        if name not in READ:
            raise RequestError(
                f"encoder {name!r}: {backend.called} reads chunks as {', '.join(READ)}"
            )


def check_length(backend: RowBackend, before: int, tokens: int) -> None:
    """RequestError for a chunk that is too long to be read behind so many tokens."""
    if not 0 < before + tokens <= backend.most_read or not tokens:
        raise RequestError(
            f"a chunk of {tokens} tokens behind {before}: {backend.called} reads 1 to "
            f"{backend.most_read}; use smaller chunks"
        )
