"""Retrievers from outside: any object with ``search``, of LangChain or LlamaIndex, or announced.

Neither framework is imported. What they return are texts with metadata. A text is taken for the
chunk that its metadata names (``chunk_id``), else for the chunks of the document that it names
(``document_id``, or the id that the framework keeps), those with the same text if there are any,
else for the chunks that hold this text.

A package announces a factory under the entry-point group ``jaxrag.retrievers``::

    [project.entry-points."jaxrag.retrievers"]
    mine = "my_package:make"        # make(chunks: jaxrag.library.retrieve.base.Chunks) -> Retriever
"""

import importlib.metadata
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrag.base.errors import RetrievalError
from jaxrag.library.retrieve.base import Chunks, Found, Retriever

GROUP = "jaxrag.retrievers"

RetrieverFactory = Callable[[Chunks], Retriever]


class FoundText(NamedTuple):
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

    def __init__(self, ask: Callable[[str], Iterable[FoundText]], chunks: Chunks) -> None:
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
        return [self._find(query, k) for query in queries]

    def _find(self, query: str, k: int) -> list[Found]:
        hits: dict[int, Found] = {}
        pieces = list(self._ask(query))
        for rank, piece in enumerate(pieces, 1):
            score = piece.score
            if score is None or not math.isfinite(score):
                score = 1 / rank
            for chunk_id in self._chunks_of(piece):
                hits.setdefault(chunk_id, Found(chunk_id, score))
        if pieces and not hits:
            raise RetrievalError(
                f"none of the {len(pieces)} texts found for {query!r} is a chunk of this knowledge "
                "base; give them the metadata 'chunk_id' or 'document_id'"
            )
        return list(hits.values())[:k]

    def _chunks_of(self, piece: FoundText) -> Sequence[int]:
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
        f"{_name(retriever)} is no retriever; expected an object with search(queries, k), and "
        "where= for filters, or a retriever of LangChain (invoke) or LlamaIndex (retrieve)"
    )


def from_langchain(retriever: Any, chunks: Chunks) -> AdaptedRetriever:
    """A LangChain ``BaseRetriever`` (or anything whose ``invoke`` gives LangChain Documents)."""

    def ask(query: str) -> Iterable[FoundText]:
        for document in retriever.invoke(query):
            yield FoundText(document.page_content, document.metadata, document.id, None)

    return AdaptedRetriever(ask, chunks)


def from_llamaindex(retriever: Any, chunks: Chunks) -> AdaptedRetriever:
    """A LlamaIndex ``BaseRetriever`` (or anything whose ``retrieve`` gives scored nodes)."""

    def ask(query: str) -> Iterable[FoundText]:
        for scored in retriever.retrieve(query):
            node = scored.node
            yield FoundText(node.get_content(), node.metadata, node.ref_doc_id, scored.score)

    return AdaptedRetriever(ask, chunks)


def ask_foreign(
    retriever: Any, where: Mapping[str, Any] | None, queries: Sequence[str], k: int
) -> list[list[Found]]:
    """What an object with ``search`` answers, checked: up to ``k`` chunks a query, each once.

    Raises RetrievalError for what is not one list of (chunk id, finite score) per query.
    """
    # One that knows no filters need not take them.
    answer = list(retriever.search(queries, k, **({} if where is None else {"where": where})))
    if len(answer) != len(queries):
        raise RetrievalError(
            f"{_name(retriever)} gave {len(answer)} rankings for {len(queries)} queries; search "
            "must return one list per query"
        )
    return [_checked(retriever, ranking)[:k] for ranking in answer]


def _checked(retriever: Any, ranking: Any) -> list[Found]:
    found: dict[int, Found] = {}
    for item in ranking:
        try:
            chunk_id, score = item
            made = Found(int(chunk_id), float(score))
            if made.chunk_id != chunk_id or not math.isfinite(made.score):
                raise ValueError
        except (TypeError, ValueError):
            raise RetrievalError(
                f"{_name(retriever)} answered {item!r}; expected (chunk id, finite score)"
            ) from None
        found.setdefault(made.chunk_id, made)
    return list(found.values())


def retriever_plugin(name: str) -> RetrieverFactory:
    """The factory that an installed package announces under this name.

    Raises RetrievalError when there is none, when two packages announce it, or when it cannot be
    imported or called.
    """
    announced = importlib.metadata.entry_points(group=GROUP)
    named = {point.value: point for point in announced if point.name == name}
    if not named:
        known = ", ".join(sorted({point.name for point in announced})) or "there are none"
        raise RetrievalError(
            f"retriever {name!r}: no installed package announces it under {GROUP!r}; known: {known}"
        )
    if len(named) > 1:
        raise RetrievalError(
            f"retriever {name!r} is announced as {' and '.join(sorted(named))}; uninstall one"
        )
    (point,) = named.values()
    try:
        factory = point.load()
    except (ImportError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise RetrievalError(
            f"retriever {name!r}: {point.value} cannot be imported ({reason}); repair its package"
        ) from error
    if not callable(factory):
        raise RetrievalError(
            f"retriever {name!r}: {point.value} is not callable; expected make(chunks) -> retriever"
        )
    made: RetrieverFactory = factory
    return made


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
