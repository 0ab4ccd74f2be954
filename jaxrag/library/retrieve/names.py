"""The vector indexes by name. A new one is a file of its own and a line here."""

from collections.abc import Mapping

from jaxrag.base.errors import RetrievalError
from jaxrag.library.retrieve.base import VectorIndex
from jaxrag.library.retrieve.exact import ExactIndex
from jaxrag.library.retrieve.faiss import FaissIndex
from jaxrag.library.retrieve.lance import LanceIndex

VECTOR_INDEXES: Mapping[str, type[VectorIndex]] = {
    "exact": ExactIndex,
    "faiss": FaissIndex,
    "lance": LanceIndex,
}


def index_named(name: str) -> type[VectorIndex]:
    """The vector index of that name; its ``open`` makes one.

    Raises RetrievalError for an unknown name.
    """
    if name not in VECTOR_INDEXES:
        raise RetrievalError(f"index {name!r}: expected one of {', '.join(sorted(VECTOR_INDEXES))}")
    return VECTOR_INDEXES[name]
