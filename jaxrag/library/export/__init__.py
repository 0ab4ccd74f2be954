"""Chunk KV for other programs: transformers, LMCache, and whatever reads zarr or safetensors."""

from jaxrag.library.export.bundle import (
    Bundle,
    ChunkSelector,
    ExportedChunk,
    KeyPlacement,
    Selection,
)
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
    "ChunkSelector",
    "ExportReport",
    "ExportRequest",
    "ExportedChunk",
    "KeyPlacement",
    "Selection",
    "export_bundles",
    "export_selected",
]
