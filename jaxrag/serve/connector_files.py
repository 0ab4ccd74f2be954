"""The folder that an engine reads of stored chunks, written: see ``connectors.manifest``."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxrag.base.config import rope_to_dict
from jaxrag.base.types import HostArray
from jaxrag.connectors.manifest import (
    FILE,
    PART,
    PROGRAM,
    VERSION,
    Manifest,
    digest_of,
    parts_name,
    start_of,
)  # fmt: skip
from jaxrag.library.export.files import file_errors, placed


def parts_table(contents: Iterable[tuple[str, HostArray]]) -> NDArray[np.void]:
    """The table of parts, PART [N], of content ids and token ids int32 [T]; each once."""
    rows = [(start_of(ids), bytes.fromhex(content)) for content, ids in dict(contents).items()]
    return np.sort(np.array(rows, PART), order="content")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write or replace the files of a folder. Raises StoreError where it cannot be written."""
    content = np.ascontiguousarray(manifest.parts).tobytes()
    table, engine = folder / parts_name(content), dataclasses.asdict(manifest.engine)
    engine["layout"] = manifest.engine.layout.to_dict()
    fields = {
        "program": PROGRAM,
        "version": VERSION,
        "engine": {**engine, "rope": rope_to_dict(manifest.engine.rope)},
        "prefix": manifest.prefix.tolist(),
        "gates": [dataclasses.asdict(gate) for gate in manifest.gates],
        "parts": table.name,
    }
    text = json.dumps(fields | {"digest": digest_of(fields)}, indent=1)
    with file_errors(folder):
        if not table.exists():
            with placed(table) as path:
                path.write_bytes(content)
        with placed(folder / FILE) as path:
            path.write_text(text, encoding="utf-8")
        for old in folder.glob("parts-*.bin"):
            if old != table:
                old.unlink(missing_ok=True)
