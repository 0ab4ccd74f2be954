"""Chunk KV for other programs: transformers, LMCache, and whatever reads zarr or safetensors."""

from jaxrag.library.export.bundle import Bundle, Piece, Placement, Selection, Selector
from jaxrag.library.export.export import (
    FORMATS,
    MANIFEST,
    ExportReport,
    ExportRequest,
    export_bundles,
    export_selected,
)

__all__ = [
    "FORMATS",
    "MANIFEST",
    "Bundle",
    "ExportReport",
    "ExportRequest",
    "Piece",
    "Placement",
    "Selection",
    "Selector",
    "export_bundles",
    "export_selected",
]
