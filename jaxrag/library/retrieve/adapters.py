"""Retrievers of LangChain and LlamaIndex as retrievers here; neither package is imported.

What they return are texts with metadata. A text is taken for the chunk that its metadata names
(``chunk_id``), else for the chunks of the document that it names (``document_id``, or the id that
the framework keeps), those with the same text if there are any, else for the chunks that hold this
text.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxrag.base.errors import RetrievalError
from jaxrag.library.retrieve.base import Chunks, Found, checked_k

_LOOKED_AT = 20  # chunks whose words are nearest to a text whose chunk is sought


class _TextHit(Protocol):
    @property
    def chunk_id(self) -> int: ...

    @property
    def text(self) -> str: ...


class CatalogChunks:
    """What a catalog's methods tell of its chunks; a ``Chunks``."""

    def __init__(
        self,
        texts: Callable[[Sequence[int]], Mapping[int, str]],
        of_document: Callable[[str], Sequence[int]],
        search: Callable[[str, int], Iterable[_TextHit]],
    ) -> None:
        """``search`` ranks chunks by the words they share with a text."""
        self.texts = texts
        self.of_document = of_document
        self._search = search

    def with_text(self, text: str) -> Sequence[int]:
        """The chunks that have this text, or else those that hold it or lie in it, best first.

        Runs of white space count as one space. A text without words is nobody's.
        """
        wanted = _plain(text)
        near = [
            (hit.chunk_id, _plain(hit.text)) for hit in self._search(text, _LOOKED_AT) if wanted
        ]
        equal = [chunk_id for chunk_id, other in near if other == wanted]
        return equal or [i for i, other in near if wanted in other or other in wanted]


class Piece(NamedTuple):
    """A text that another framework found."""

    text: str
    metadata: Mapping[str, Any]
    document_id: str | None  # as the framework keeps it
    score: float | None  # None where the framework gives ranks only


class AdaptedRetriever:
    """Asks another framework and finds the chunks that its texts stand for.

    The framework decides how many texts it returns, and knows nothing of ``where``: what does not
    match is dropped afterwards.
    """

    def __init__(self, ask: Callable[[str], Iterable[Piece]], chunks: Chunks) -> None:
        """``ask`` returns the pieces for one query, best first."""
        self._ask = ask
        self._chunks = chunks

    def search(
        self, queries: Sequence[str], k: int, *, where: Mapping[str, Any] | None = None
    ) -> list[list[Found]]:
        """For every query up to ``k`` chunks; see ``Retriever``.

        Without a score of the framework's, it is 1 / rank. Raises RetrievalError when none of the
        texts found for a query is a chunk.
        """
        return [self._find(query, checked_k(k)) for query in queries]

    def _find(self, query: str, k: int) -> list[Found]:
        found: dict[int, Found] = {}
        pieces = list(self._ask(query))
        for rank, piece in enumerate(pieces, 1):
            score = piece.score
            if score is None or not math.isfinite(score):
                score = 1 / rank
            for chunk_id in self._chunks_of(piece):
                found.setdefault(chunk_id, Found(chunk_id, score))
        if pieces and not found:
            raise RetrievalError(
                f"none of the {len(pieces)} texts found for {query!r} is a chunk of this knowledge "
                "base; give them the metadata 'chunk_id' or 'document_id'"
            )
        return list(found.values())[:k]

    def _chunks_of(self, piece: Piece) -> Sequence[int]:
        chunk_id = piece.metadata.get("chunk_id")
        if isinstance(chunk_id, int | str) and str(chunk_id).isdecimal():
            known = [int(chunk_id)] if self._chunks.texts([int(chunk_id)]) else []
            if known:
                return known
        for document_id in (piece.metadata.get("document_id"), piece.document_id):
            if isinstance(document_id, str) and (ids := self._chunks.of_document(document_id)):
                texts = self._chunks.texts(ids)
                return [i for i in ids if texts.get(i) == piece.text] or ids
        return self._chunks.with_text(piece.text)


def adopted(retriever: Any, chunks: Chunks) -> Any:
    """A retriever of our kind as it is, one of LangChain or LlamaIndex adapted.

    Raises RetrievalError for what is none of them.
    """
    if callable(getattr(retriever, "search", None)):
        return retriever
    for method, adapt in (("invoke", from_langchain), ("retrieve", from_llamaindex)):
        if callable(getattr(retriever, method, None)):
            return adapt(retriever, chunks)
    raise RetrievalError(
        f"{type(retriever).__module__}.{type(retriever).__qualname__} is no retriever; expected an "
        "object with search(queries, k), and where= for filters, or a retriever of LangChain "
        "(invoke) or LlamaIndex (retrieve)"
    )


def from_langchain(retriever: Any, chunks: Chunks) -> AdaptedRetriever:
    """A LangChain ``BaseRetriever`` (or anything whose ``invoke`` gives LangChain Documents).

    Raises RetrievalError for an object without ``invoke``.
    """
    _require(retriever, "invoke", "a LangChain retriever")

    def ask(query: str) -> Iterable[Piece]:
        for document in retriever.invoke(query):
            yield Piece(document.page_content, document.metadata, document.id, None)

    return AdaptedRetriever(ask, chunks)


def from_llamaindex(retriever: Any, chunks: Chunks) -> AdaptedRetriever:
    """A LlamaIndex ``BaseRetriever`` (or anything whose ``retrieve`` gives scored nodes).

    Raises RetrievalError for an object without ``retrieve``.
    """
    _require(retriever, "retrieve", "a LlamaIndex retriever")

    def ask(query: str) -> Iterable[Piece]:
        for scored in retriever.retrieve(query):
            node = scored.node
            yield Piece(node.get_content(), node.metadata, node.ref_doc_id, scored.score)

    return AdaptedRetriever(ask, chunks)


def _plain(text: str) -> str:
    return " ".join(text.split())


def _require(retriever: Any, method: str, kind: str) -> None:
    if not callable(getattr(retriever, method, None)):
        raise RetrievalError(f"{type(retriever).__qualname__} has no {method}(); expected {kind}")
