"""An export of a knowledge base: what was asked for, checked, selected and written."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.kv.store import KVStore
from jaxrag.library.catalog import Hit
from jaxrag.library.export.bundle import Placement
from jaxrag.library.export.export import FORMATS, ExportReport, export_bundles
from jaxrag.library.export.selection import Selection, Selector
from jaxrag.library.retrieve.filters import Filter


@dataclasses.dataclass(frozen=True)
class ExportRequest:
    """What to export, and how.

    Attributes:
      format: a key of FORMATS.
      documents: ids of documents; None exports all whose metadata matches ``where``.
      where: what the metadata of documents must match; None takes all.
      keys: chunks by their keys in the store, instead.
      question: one whose prompt is exported, instead.
      hits: the chunks found for the question.
      joined: one file with the template's prefix and all chunks, as they stand in one prompt; a
        question's always are.
      first_position: where rotated keys begin; None leaves keys as stored where the format can, and
        begins at 0 where it cannot or chunks are joined.
    """

    format: str = "safetensors"
    documents: tuple[str, ...] | None = None
    where: Mapping[str, Any] | None = None
    keys: tuple[str, ...] = ()
    question: str | None = None
    hits: tuple[Hit, ...] = ()
    joined: bool = False
    first_position: int | None = None

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.format not in FORMATS:
            raise RequestError(f"format={self.format!r}: expected one of {', '.join(FORMATS)}")
        named = [self.documents is not None, bool(self.keys), self.question is not None]
        if sum(named) > 1:
            raise RequestError("documents, keys and a question exclude each other: give one")
        if self.where is not None and (self.documents is not None or self.keys):
            raise RequestError("where chooses among all documents: leave documents and keys out")
        if self._one_file and FORMATS[self.format].rotated is False:
            raise RequestError(
                f"format {self.format!r} holds every chunk as it is stored: chunks cannot be "
                "joined there; export safetensors"
            )

    @property
    def _one_file(self) -> bool:
        return self.joined or self.question is not None

    def placement(self, config: ModelConfig) -> Placement:
        """Whether and from where on keys are rotated."""
        rotate = self._one_file or FORMATS[self.format].rotated is True
        first = 0 if self.first_position is None and rotate else self.first_position
        return Placement(config, first)

    def select(self, selector: Selector) -> Selection:
        """The chunks. Raises KnowledgeBaseError for what the catalog does not hold."""
        if self.question is not None:
            return selector.hits(self.hits)
        if self.keys:
            return selector.keys(self.keys)
        if self.where is not None:
            return selector.matching(Filter.parse(self.where))
        return selector.documents(self.documents)


def export_selected(
    request: ExportRequest,
    selector: Selector,
    store: KVStore,
    config: ModelConfig,
    out: str | os.PathLike[str],
    progress: bool,
) -> ExportReport:
    """Write what the request asks for to a folder; see ``export_bundles`` for what is raised."""
    placement = request.placement(config)
    selection = request.select(selector)
    if request.joined or request.question is not None:
        bundles = [selector.joined(selection, request.question)]
    else:
        bundles = selection.separate()
    return export_bundles(
        store,
        bundles,
        placement,
        out,
        format=request.format,
        documents=selection.documents,
        progress=progress,
    )
