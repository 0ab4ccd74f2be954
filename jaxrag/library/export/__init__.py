"""Chunk KV for other programs: transformers, LMCache, and whatever reads zarr or safetensors."""

from jaxrag.library.export.bundle import Bundle, Piece, Placement
from jaxrag.library.export.export import FORMATS, MANIFEST, ExportReport, export_bundles
from jaxrag.library.export.request import ExportRequest, export_selected
from jaxrag.library.export.selection import Selection, Selector

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
