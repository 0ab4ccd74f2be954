"""Where a knowledge base lies: its folder, its catalog, and the repository of its chunks."""

import itertools
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrag.base.errors import KnowledgeBaseError
from jaxrag.base.installed import config_names
from jaxrag.kv.store import ChunkStore, KVLayout, ReadThrough
from jaxrag.kv.store.chunk_store import Mode
from jaxrag.kv.store.keys import derive
from jaxrag.kv.store.owners import Owners
from jaxrag.library.catalog import Catalog, salvage
from jaxrag.library.catalog.database import damaged
from jaxrag.library.knowledge_base.settings import (
    CHANGES,
    NEEDED,
    PRIMER,
    REPLACED,
    OpenOptions,
    check_primer,
    check_settings,
    find_folder,
    neighbour_settings,
    new_settings,
    primer_setting,
    vector_settings,
)
from jaxrag.library.knowledge_base.vectors import VECTORS, ChunkVectors
from jaxrag.library.knowledge_base.writers import FOLDER as WRITERS
from jaxrag.library.retrieve.terms import TERMS, TERMS_VERSION
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import TEMPLATES, template_from_dict
from jaxrag.reuse.encode import ENCODERS, encoder_named, primer_named

_LOG = logging.getLogger("jaxrag")
CATALOG = "catalog.sqlite"
TIER = "tier"  # folder of the local copies of a repository that lies elsewhere
_MOST_TRIED = 1 << 20  # counts that a lost one is looked for among


def mend_catalog(folder: Path) -> salvage.Salvage | None:
    """Make a damaged catalog whole from what can be read of it; None where nothing was done.

    Nothing is done to a whole one, nor to one that anybody has open. What its rows say is left to
    ``KnowledgeBase.verify``. Raises StoreError where too little is left or files cannot be written.
    """
    path = folder / CATALOG
    return salvage.salvage(path, NEEDED) if path.is_file() and os.access(folder, os.W_OK) else None


def mend_settings(folder: Path) -> tuple[str, ...]:
    """Make settings whole that are not as written, where something tells what they were.

    Returns their names, "" for what had none. Raises StoreError where nothing tells.
    """
    path = folder / CATALOG
    if not path.is_file() or not os.access(folder, os.W_OK):
        return ()
    return salvage.mend_settings(path, NEEDED, _may_have_been, REPLACED)


def _may_have_been(name: str, settings: Mapping[str, Any]) -> Iterator[Any]:
    """Values that a setting may have had, by the others."""
    yield from (None, "", False, True)
    if name == "template":
        yield from (template.to_dict() for template in TEMPLATES.values())
    if name == "encoders":
        kept = [name for name, encoder in ENCODERS.items() if not encoder.wraps]
        for count in range(1, len(kept) + 1):
            yield from map(list, itertools.permutations(kept, count))
    if name == PRIMER:
        yield from (primer_named(shipped).to_dict() for shipped in config_names("primers"))
    if name == CHANGES:
        yield from range(_MOST_TRIED)
    if name == "fingerprint" and {"model", "layout", "salt"} <= settings.keys():
        model, layout, salt = (settings[key] for key in ("model", "layout", "salt"))
        yield derive(model["fingerprint"], stored=layout["stored"], salt=salt)


def open_catalog(
    folder: Path, model: Model | None, options: OpenOptions, mode: Mode | None
) -> tuple[Catalog, Mode]:
    """Open the catalog in a folder, or make it; add to it what the opening asks for beyond it.

    Returns the catalog and the mode, chosen where it is None. Raises what ``KnowledgeBase.open``
    raises.
    """
    path = folder / CATALOG
    writes = model is not None and mode != "r"
    if path.is_file() and not (writes and _is_new(path)):
        catalog = Catalog.open(path)
    elif model is None or mode == "r":
        raise KnowledgeBaseError(
            f"{folder} holds no knowledge base; make one with `jaxrag ingest PATH... --kb {folder} "
            "--model DIR`"
        )
    else:
        catalog = _create(folder, new_settings(model, options))
    try:
        if mode is None:
            mode = "rw" if model is not None and catalog.writable else "r"
        if mode == "rw" and not catalog.writable:
            raise KnowledgeBaseError(
                f"{folder} cannot be written; open it with mode 'r', or change its permissions"
            )
        settings = catalog.settings()
        seeing = (name for name in settings.get("encoders", ()) if name in ENCODERS)
        primed = any(encoder_named(name).sees_primer for name in seeing)
        for name in (*NEEDED, PRIMER) if primed else NEEDED:
            if name not in settings:
                raise damaged(path, f"the setting {name!r} is missing")
        check_settings(folder, settings, model, options)
        _check_age(folder, catalog, mode, options.accept_older)
        _extend(folder, catalog, model, options, mode)
        if mode == "rw" and settings.get(TERMS) != TERMS_VERSION:
            catalog.audit().renew_words()
            _LOG.warning("%s: its index of words was of another version and was made anew", folder)
    except BaseException:
        catalog.close()
        raise
    return catalog, mode


def owners_of(folder: Path, settings: Mapping[str, Any]) -> Owners:
    """The knowledge bases with chunks of this one's fingerprint in its repository."""
    return Owners(settings["store"] or folder, settings["fingerprint"])


def _check_age(folder: Path, catalog: Catalog, mode: Mode, accept_older: bool) -> None:
    """Refuse a catalog that acknowledged fewer changes than its repository has written down.

    It would answer from documents that were removed since. One that is accepted counts on from
    what is written down, so that it is the newest from now on.
    """
    settings = catalog.settings()
    owners = owners_of(folder, settings)
    # The repository first: it never leads a catalog that is read after it.
    known = owners.changes(settings["id"])
    own = catalog.settings().get(CHANGES, 0)
    if own >= known:
        return
    if not accept_older:
        raise KnowledgeBaseError(
            f"{folder / CATALOG} is older than its store, of change {own} where {known} were "
            "acknowledged: documents added since are missing and removed ones are back; restore a "
            f"newer copy, or run `jaxrag kb verify --accept-older {folder}` and add and remove "
            "again what changed. Make copies while no process has the knowledge base open"
        )
    if mode != "rw":
        raise KnowledgeBaseError(f"{folder}: open it for writing to accept an older catalog")
    catalog.set(CHANGES, known + 1)
    catalog.checkpoint()
    owners.acknowledge(settings["id"], known + 1)


def _is_new(path: Path) -> bool:
    """Whether another process is making this catalog, or died at it.

    Raises DamagedCatalogError for an empty catalog beside what is only made after it.
    """
    if not Catalog.is_empty(path):
        return False
    for name in (VECTORS, WRITERS, TIER):
        if (path.parent / name).exists():
            raise damaged(path, f"it is empty, though {path.parent / name} is there")
    return True


def open_repository(
    folder: Path,
    settings: Mapping[str, Any],
    mode: Mode,
    secret: bytes | None,
    tier: str | os.PathLike[str] | None = None,
) -> ChunkStore | ReadThrough:
    """The repository of the chunks; one that lies elsewhere is read through a local tier.

    Both believe what is sealed with the secret, where there is one. ``tier``: a folder of this
    machine for it, which any repository is read through then.
    """
    location, limit = settings["store"] or str(folder), settings["max_bytes"]
    fingerprint, layout = settings["fingerprint"], KVLayout(**settings["layout"])
    if "://" not in location and tier is None:
        return ChunkStore.open(
            location, fingerprint, layout, mode=mode, max_bytes=limit, secret=secret
        )
    remote = ChunkStore.open(location, fingerprint, layout, mode=mode, secret=secret)
    if tier is None and not os.access(folder, os.W_OK):
        return remote
    local = ChunkStore.open(
        folder / TIER if tier is None else Path(tier) / settings["id"],
        fingerprint,
        layout,
        mode="rw",
        max_bytes=limit,
        durable=False,
        secret=secret,
    )
    return ReadThrough(remote, local)


def room_of(location: str) -> int | None:
    """Bytes that are free on the disk of a folder, made or not; None for a URL of another kind."""
    if "://" in location and not location.startswith("file://"):
        return None
    folder = find_folder(location)
    return shutil.disk_usage(next(it for it in (folder, *folder.parents) if it.exists())).free


def _create(folder: Path, settings: Mapping[str, Any]) -> Catalog:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KnowledgeBaseError(
            f"{folder} cannot be made ({error.strerror}); name a folder you may write to"
        ) from None
    return Catalog.create(folder / CATALOG, settings)


def _extend(
    folder: Path, catalog: Catalog, model: Model | None, options: OpenOptions, mode: Mode
) -> None:
    """Remember what may be added later: a secret, encoders, an embedder, another size limit."""
    settings = catalog.settings()

    def require_writing(what: str) -> None:
        if mode == "r":
            raise KnowledgeBaseError(f"{folder}: open it for writing to {what}")

    def require_model(what: str) -> Model:
        if model is None or mode == "r":
            raise KnowledgeBaseError(
                f"{folder} has no {what}; open it for writing with its model to add them"
            )
        return model

    if options.sealed != settings.get("sealed"):
        if options.reseal:
            require_writing("seal it with this secret")
        if mode == "rw":
            catalog.set("sealed", options.sealed)
    new = [name for name in options.encoders or () if name not in settings["encoders"]]
    if new:
        encoding = require_model(f"{new[0]!r} chunks")
        if settings["neighbours"] is None:
            embedded = options.embedder is not None or settings["vectors"] is not None
            catalog.set("neighbours", neighbour_settings(options, embedded))
        primer = primer_setting(options, new)
        if primer is not None and PRIMER not in settings:
            template = template_from_dict(settings["template"], str(folder))
            check_primer(primer, template, encoding, settings["chunking"]["chunk_tokens"])
            catalog.set(PRIMER, primer.to_dict())
        catalog.extend("encoders", new)
    if options.attention_index is not None and settings.get("attention_index") is None:
        require_model("attention indexes")
        catalog.set("attention_index", options.indexing_table)
    if options.max_bytes is not None and (options.max_bytes or None) != settings["max_bytes"]:
        require_writing("change max_bytes")
        catalog.set("max_bytes", options.max_bytes or None)
    known, changes = settings["neighbours"], options.neighbour_changes
    if known and changes is not None and changes != known.get("changes", 0):
        require_writing("change neighbour_changes")
        catalog.set("neighbours", {**known, "changes": changes})
    vectors = vector_settings(options)
    if vectors is not None and settings["vectors"] is None:
        require_writing("add an embedder")
        ChunkVectors(folder, vectors, options.embedder, mode).make()
        catalog.set("vectors_complete", False)
        catalog.set("vectors", vectors)
        if len(catalog.chunk_ids()) == 0:  # whoever puts documents from now on makes vectors
            catalog.set("vectors_complete", True)
