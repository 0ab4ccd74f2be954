"""Stored chunks as files for other programs, with a manifest that says what each of them is."""

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrag.base.config import ModelConfig
from jaxrag.base.disk import held
from jaxrag.base.errors import ChunkCorrupt, ChunkMissing, RequestError, StoreError
from jaxrag.kv.store import KVStore
from jaxrag.library.catalog import Hit
from jaxrag.library.export.bundle import (
    Bundle,
    ChunkSelector,
    ExportSelection,
    KeyPlacement,
    describe,
    find_records,
)
from jaxrag.library.export.files import (
    WrittenFile,
    file_errors,
    huggingface_tensors,
    lmcache_tensors,
    write_json,
    write_safetensors,
    write_tree,
)
from jaxrag.library.retrieve.filters import Filter
from jaxrag.models.text.progress import followed

MANIFEST = "manifest.json"
VERSION = 1  # of manifests and of the records in exported files


@dataclasses.dataclass(frozen=True)
class Format:
    """One kind of export."""

    write: Callable[..., WrittenFile]  # of one bundle, as ``files.write_tree``
    rotated: bool | None  # its keys are always (True) or never (False) rotated; None = either


FORMATS: dict[str, Format] = {
    # A transformers cache, layer by layer.
    "safetensors": Format(functools.partial(write_safetensors, huggingface_tensors), rotated=None),
    # An engine's memory format; engines cache keys as their attention made them.
    "lmcache": Format(functools.partial(write_safetensors, lmcache_tensors), rotated=True),
    # What the store holds, array by array.
    "zarr": Format(write_tree, rotated=False),
}


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What became of the chunks that were to be exported."""

    path: str
    format: str
    files: int  # that stand in the folder now
    kept: int  # of these: stood there already
    tokens: int
    nbytes: int
    refused: tuple[tuple[str, str], ...]  # file that was not made, reason
    seconds: float


def export_bundles(
    store: KVStore,
    bundles: Sequence[Bundle],
    placement: KeyPlacement,
    out: str | os.PathLike[str],
    *,
    format: str = "safetensors",
    documents: Sequence[Mapping[str, Any]] = (),
    progress: bool = False,
) -> ExportReport:
    """Write chunks and ``manifest.json`` to a folder; one bundle is in memory at a time.

    Every file appears whole or not at all, and the manifest is completed last. Exporting again to
    the same folder keeps the files that are as they would be written, so an export that was cut
    short goes on where it stopped. A chunk that the store does not hold, or holds damaged, is named
    in the report and in the manifest, and does not stop the others.

    Args:
        store: where the chunks are; what it holds as int8 or int4 is exported dequantised.
        bundles: the files to make; names are distinct.
        placement: whether and where keys are rotated.
        out: a new or empty folder, or that of an earlier export with the same settings.
        format: a key of FORMATS.
        documents: JSON-able, for the manifest: where the chunks' texts come from.
        progress: show how far it is, on stderr.

    Raises:
        StoreError: an unknown format or a placement it cannot have, a store that drops tokens, a
            folder that holds something else or that another export is writing to, tokens behind
            the model's last position, or a disk that cannot be written.
    """
    start = time.perf_counter()
    write = _checked(store, format, placement).write
    folder = Path(out)
    settings = _settings(store, format, placement)
    files: list[dict[str, Any]] = []
    refused: list[tuple[str, str]] = []
    kept = 0
    _make_folder(folder)
    with held(folder, "export"):
        _prepare(folder, settings)
        for bundle in followed(bundles, "export", "file", shown=progress):
            try:
                records = find_records(store, bundle)
                placement.check(sum(record.tokens for record in records), bundle.name)
                written = write(folder, store, bundle, records, placement, settings)
            except (ChunkMissing, ChunkCorrupt) as error:
                refused.append((bundle.name, str(error)))
                continue
            entry = {"path": written.path, "bytes": written.nbytes, "sha256": written.sha256}
            files.append({**entry, **describe(bundle, records)})
            kept += written.kept
        manifest = {
            **settings,
            "complete": True,
            "files": files,
            "documents": list(documents),
            "refused": [{"name": name, "reason": reason} for name, reason in refused],
        }
        write_json(folder / MANIFEST, manifest)
    return ExportReport(
        path=str(folder),
        format=format,
        files=len(files),
        kept=kept,
        tokens=sum(file["tokens"] for file in files),
        nbytes=sum(file["bytes"] for file in files),
        refused=tuple(refused),
        seconds=time.perf_counter() - start,
    )


def _checked(store: KVStore, name: str, placement: KeyPlacement) -> Format:
    if store.layout.drops:
        raise StoreError(
            f"stored={store.layout.stored!r} leaves tokens out, which no exported format can say: "
            "expected native, int8 or int4; ingest the documents in one of these to export them"
        )
    if store.layout.rows:
        raise StoreError(
            "these chunks hold maps of recurrent layers, which no exported format can say; answer "
            "with `jaxrag serve`"
        )
    if name not in FORMATS:
        raise StoreError(f"format={name!r}: expected one of {', '.join(FORMATS)}")
    rotated = placement.first_position is not None
    if FORMATS[name].rotated is True and not rotated:
        raise StoreError(f"format {name!r} holds rotated keys: give the first position, such as 0")
    if FORMATS[name].rotated is False and rotated:
        raise StoreError(
            f"format {name!r} holds keys before RoPE, as they are stored: leave the position out, "
            "or export safetensors"
        )
    return FORMATS[name]


def _settings(store: KVStore, name: str, placement: KeyPlacement) -> dict[str, Any]:
    """What all files of an export have in common."""
    return {
        "program": "jaxrag export",
        "version": VERSION,
        "format": name,
        "fingerprint": store.fingerprint,
        "layout": store.layout.to_dict(),
        "rope": placement.describe(),
    }


def _make_folder(folder: Path) -> None:
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


def _prepare(folder: Path, settings: Mapping[str, Any]) -> None:
    """Put an incomplete manifest into a new folder, or see that it holds this very export."""
    path = folder / MANIFEST
    with file_errors(path):
        if not path.is_file():
            if any(folder.iterdir()):
                raise StoreError(
                    f"{folder} is not empty and holds no {MANIFEST}: expected a new or empty "
                    "folder, or that of an earlier export"
                )
            write_json(path, {**settings, "complete": False})
            return
        try:
            there = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            there = None
    if not isinstance(there, dict) or any(there.get(k) != v for k, v in settings.items()):
        raise StoreError(
            f"{path} belongs to another export (other model, format or positions): name another "
            "folder, or remove this one"
        )


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

    def placement(self, config: ModelConfig) -> KeyPlacement:
        """Whether and from where on keys are rotated."""
        rotate = self._one_file or FORMATS[self.format].rotated is True
        first = 0 if self.first_position is None and rotate else self.first_position
        return KeyPlacement(config, first)

    def select(self, selector: ChunkSelector) -> ExportSelection:
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
    selector: ChunkSelector,
    store: KVStore,
    config: ModelConfig,
    out: str | os.PathLike[str],
    progress: bool,
) -> ExportReport:
    """Write what the request asks for to a folder; see ``export_bundles`` for what is raised."""
    if config.own_kv_heads is not None and request.format != "zarr":
        raise RequestError(
            f"format={request.format!r}: heads of a {config.family} model lie in one shape here, "
            "which no other engine reads; only 'zarr' is written"
        )
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
