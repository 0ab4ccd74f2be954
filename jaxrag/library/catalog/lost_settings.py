"""Settings of a catalog that are not as written are made whole, so that it can be opened."""

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxrag.base.errors import DamagedCatalogError, StoreError
from jaxrag.library.catalog.database import Database, to_json
from jaxrag.library.catalog.digests import SETTINGS, Totals


def mend_settings(
    path: Path,
    needed: Collection[str],
    candidates: Callable[[str, Mapping[str, Any]], Iterable[Any]],
    defaults: Mapping[str, Any],
) -> tuple[str, ...]:
    """Make settings and totals whole that are not as written.

    A setting that is neither needed nor has a default is forgotten.

    Args:
      path: the catalog.
      needed: the settings without which it cannot be opened.
      candidates: what a setting may have been, by its name and the settings that are whole; the one
        that has its digest is taken.
      defaults: what takes its place where there is none.

    Returns the names of those that were mended or forgotten; "" stands for settings that are gone
    without a name, and for totals. Raises StoreError for one that is needed and cannot be told.
    """
    changed: list[str] = []
    with contextlib.closing(Database(path)) as database:
        database.check_format()
        if not database.checked or not database.writable:
            return ()
        with database.transaction() as connection:
            rows = connection.execute(f"SELECT {SETTINGS.select(True)} FROM settings").fetchall()
            whole = {row[0]: json.loads(row[1]) for row in rows if SETTINGS.is_whole(row)}
            digests = {row[0]: row[2] for row in rows if row[0] not in whole}
            gone = set(needed) - whole.keys() - digests.keys()
            for name, digest in [*digests.items(), *((name, None) for name in sorted(gone))]:
                value = _told(name, digest, candidates(name, whole), defaults)
                if value is None and name in needed:
                    raise StoreError(
                        f"catalog {path}: the setting {name!r} is not as written, and nothing "
                        "tells what it was; restore a copy, or ingest again into another folder"
                    )
                connection.execute("DELETE FROM settings WHERE name = ?", (name,))
                if value is not None:
                    connection.execute(SETTINGS.insert(True), SETTINGS.row((name, value), True))
                changed.append(name)
            try:
                known: Totals | None = Totals.read(connection, path)
            except DamagedCatalogError:
                known = None
            totals = (known or Totals.counted(connection)).with_settings(connection)
            if totals != known:
                totals.write(connection)
                changed += [] if changed else [""]
        database.checkpoint()
    return tuple(changed)


def _told(
    name: str, digest: int | None, candidates: Iterable[Any], defaults: Mapping[str, Any]
) -> str | None:
    """The value of a setting as JSON; None where nothing tells it."""
    for text in map(to_json, candidates):
        if SETTINGS.digest((name, text)) == digest:
            return text
    return to_json(defaults[name]) if name in defaults else None
