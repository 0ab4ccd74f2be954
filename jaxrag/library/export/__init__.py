"""Chunk KV for other programs: transformers, LMCache, and whatever reads zarr or safetensors."""

from jaxrag.library.export.bundle import (
    Bundle,
    ChunkSelector,
    ExportedChunk,
    ExportSelection,
    KeyPlacement,
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
    "ExportSelection",
    "ExportedChunk",
    "KeyPlacement",
    "export_bundles",
    "export_selected",
]
