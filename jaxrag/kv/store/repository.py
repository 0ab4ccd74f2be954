"""What a repository says about itself: its format, and the layout of each model's chunks."""

import dataclasses
import json
import os
from typing import Any

from jaxrag.base.errors import StoreError
from jaxrag.kv.store.backend import Backend
from jaxrag.kv.store.layout import KVLayout
from jaxrag.kv.store.record import FORMAT, MAX_RECORD_BYTES, parse_object

_ROOT = "jaxrag.json"
_ROOT_FIELDS = {"repository": "jaxrag chunks", "format": FORMAT}
_LAYOUTS = "layouts/"


@dataclasses.dataclass(frozen=True)
class Repository:
    """The few files beside the chunks. Each is written once and never changes."""

    backend: Backend

    def declare(self, layout: KVLayout, fingerprint: str, *, writable: bool) -> None:
        """Make sure that this is a repository whose chunks of ``fingerprint`` have ``layout``.

        What is not declared yet is written, where ``writable``.

        Raises:
            StoreError: there is no repository, one of another format, or one whose chunks of this
                fingerprint have other sizes; it cannot be read or written.
        """
        location, directory = self.backend.location, self.backend.directory
        if directory and os.path.exists(directory) and not os.path.isdir(directory):
            raise StoreError(f"{location} is a file: expected a directory")
        root = self._declare(_ROOT, _ROOT_FIELDS, writable)
        if root is None:
            raise StoreError(
                f"{location} holds no chunk repository (no {_ROOT}): expected one; open with mode "
                "'rw' to create it"
            )
        if root != _ROOT_FIELDS:
            raise StoreError(
                f"{location}: {_ROOT} is {root}, expected {_ROOT_FIELDS}: written by another "
                "version or program"
            )
        expected = _layout_fields(fingerprint, layout)
        declared = self._declare(_layout_path(fingerprint), expected, writable)
        if declared is None:
            raise StoreError(
                f"{location} holds no chunks of fingerprint {fingerprint}: ingest with this model "
                "first"
            )
        if declared != expected:
            raise StoreError(
                f"{location}: chunks of fingerprint {fingerprint} are {declared}, "
                f"expected {expected}"
            )

    def _declare(self, path: str, fields: dict[str, Any], writable: bool) -> dict[str, Any] | None:
        """The JSON object at ``path``; where there is none, ``fields`` are written if we may."""
        present = self._read_object(path)
        if present is not None or not writable:
            return present
        text = json.dumps(fields, indent=1).encode()
        self.backend.write_if(path, text, self.backend.generation(path))
        return self._read_object(path)  # ours, or that of a process that was faster

    def _read_object(self, path: str) -> dict[str, Any] | None:
        data = self.backend.read_many([path], MAX_RECORD_BYTES)[0]
        if data is None:
            return None
        try:
            return parse_object(data)
        except StoreError as error:
            raise StoreError(f"{self.backend.location}: {path} is {error}") from None


def _layout_path(fingerprint: str) -> str:
    return f"{_LAYOUTS}{fingerprint}.json"


def _layout_fields(fingerprint: str, layout: KVLayout) -> dict[str, Any]:
    return {"format": FORMAT, "fingerprint": fingerprint, **layout.to_dict()}
