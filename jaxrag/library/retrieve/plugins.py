"""Retrievers from outside: any object with ``search``, and those that packages announce.

A package announces a factory under the entry-point group ``jaxrag.retrievers``::

    [project.entry-points."jaxrag.retrievers"]
    mine = "my_package:make"        # make(chunks: jaxrag.library.retrieve.base.Chunks) -> Retriever
"""

import importlib.metadata
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrag.base.errors import RetrievalError
from jaxrag.library.retrieve.base import Chunks, Found, Retriever, checked_k

GROUP = "jaxrag.retrievers"

RetrieverFactory = Callable[[Chunks], Retriever]


class ForeignRetriever:
    """An object with ``search``, its answers checked and cut to ``k``.

    It answers every query with (chunk id, score) pairs, best first.
    """

    def __init__(self, retriever: Any) -> None:
        """Raises RetrievalError when ``retriever`` has no ``search``."""
        if not callable(getattr(retriever, "search", None)):
            raise RetrievalError(
                f"{_name(retriever)} is no retriever; expected an object with "
                "search(queries, k), and where= for filters"
            )
        self._retriever = retriever

    def search(
        self, queries: Sequence[str], k: int, *, where: Mapping[str, Any] | None = None
    ) -> list[list[Found]]:
        """For every query up to ``k`` chunks, each once; see ``Retriever``.

        Raises RetrievalError for what is not one list of (chunk id, finite score) per query.
        """
        checked_k(k)
        if where is None:  # one that knows no filters need not take them
            answer = list(self._retriever.search(queries, k))
        else:
            answer = list(self._retriever.search(queries, k, where=where))
        if len(answer) != len(queries):
            raise RetrievalError(
                f"{_name(self._retriever)} gave {len(answer)} rankings for {len(queries)} queries; "
                "search must return one list per query"
            )
        return [self._checked(ranking)[:k] for ranking in answer]

    def _checked(self, ranking: Any) -> list[Found]:
        found: dict[int, Found] = {}
        for item in ranking:
            try:
                chunk_id, score = item
                made = Found(int(chunk_id), float(score))
                if made.chunk_id != chunk_id or not math.isfinite(made.score):
                    raise ValueError
            except (TypeError, ValueError):
                raise RetrievalError(
                    f"{_name(self._retriever)} answered {item!r}; expected (chunk id, finite score)"
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
