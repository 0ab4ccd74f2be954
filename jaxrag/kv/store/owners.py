"""Who uses a repository: one small folder for every knowledge base whose chunks lie in it.

A collection that sweeps what one knowledge base does not need must ask all the others first.
``owners/<16 digits of fingerprint>/<id>/owner.json`` names the host and folder of each. Beside it
``changes.json`` counts the changes that it acknowledged, so that an older copy of its catalog is
known for one.
"""

import contextlib
import dataclasses
import json
import os
import socket
from pathlib import Path

import xxhash

from jaxrag.base.errors import StoreError
from jaxrag.kv.store.backend import Backend
from jaxrag.kv.store.keys import is_hex
from jaxrag.kv.store.record import MAX_RECORD_BYTES, parse_object

OWNER_DIGITS = 32
_FILE = "owner.json"
_CHANGES = "changes.json"


@dataclasses.dataclass(frozen=True)
class Owner:
    """A knowledge base that keeps chunks in a repository."""

    id: str  # 32 hexadecimal digits
    host: str
    folder: str  # absolute, on that host


def this_owner(owner_id: str, folder: Path) -> Owner:
    """A knowledge base in a folder of this machine."""
    return Owner(owner_id, socket.gethostname(), str(folder))


class Owners:
    """The owners of one fingerprint's chunks in a repository."""

    def __init__(self, location: str | os.PathLike[str], fingerprint: str) -> None:
        """Bind the repository at a path or URL; nothing is read yet."""
        self._backend = Backend(location, "default")
        self._prefix = f"owners/{fingerprint[:16]}/"

    def register(self, owner: Owner) -> None:
        """Write the owner down, unless it is there with the same host and folder."""
        path = self._folder(owner.id) + _FILE
        generation = self._backend.generation(path)
        if self._read(owner.id) != owner:
            self._backend.write_if(path, json.dumps(dataclasses.asdict(owner)).encode(), generation)

    def forget(self, owner_id: str) -> None:
        """Strike an owner out; its chunks have no owner then."""
        self._backend.delete_prefix(self._folder(owner_id))

    def all(self) -> list[Owner]:
        """Every owner, by id. Raises StoreError when a file is damaged."""
        split = [path.split("/") for path in self._backend.paths(self._prefix)]
        ids = [parts[0] for parts in split if parts[1:] == [_FILE]]
        found = [self._read(owner_id) for owner_id in ids if is_hex(owner_id, OWNER_DIGITS)]
        return [owner for owner in found if owner is not None]

    def changes(self, owner_id: str) -> int:
        """How many changes an owner acknowledged; 0 where nothing is written down.

        Raises StoreError when the file is damaged.
        """
        path = self._folder(owner_id) + _CHANGES
        data = self._backend.read_many([path], MAX_RECORD_BYTES)[0]
        if data is None:
            return 0
        with contextlib.suppress(StoreError):
            count = parse_object(data).get("changes")
            if type(count) is int and data == _counted(owner_id, count):
                return count
        raise StoreError(
            f"{self._backend.location}: {path} is damaged; remove it if no catalog was restored "
            "from a backup"
        )

    def acknowledge(self, owner_id: str, changes: int) -> None:
        """Write down that an owner acknowledged so many changes, unless it is more by now.

        To be called once they are committed: what is written here never leads the catalog.
        """
        path = self._folder(owner_id) + _CHANGES
        while True:
            generation = self._backend.generation(path)
            if self.changes(owner_id) >= changes:
                return
            if self._backend.write_if(path, _counted(owner_id, changes), generation) is not None:
                return

    def _folder(self, owner_id: str) -> str:
        return f"{self._prefix}{owner_id}/"

    def _read(self, owner_id: str) -> Owner | None:
        path = self._folder(owner_id) + _FILE
        data = self._backend.read_many([path], MAX_RECORD_BYTES)[0]
        if data is None:
            return None
        try:
            fields = parse_object(data)
            return Owner(**{field.name: str(fields[field.name]) for field in _FIELDS})
        except (StoreError, KeyError):
            raise StoreError(
                f"{self._backend.location}: {path} is damaged; remove it, and open the knowledge "
                "base it names once for writing"
            ) from None


def _counted(owner_id: str, changes: int) -> bytes:
    """The file of a count, with a digest that tells damage."""
    digest = xxhash.xxh3_64_hexdigest(f"{owner_id} {changes}".encode())
    return json.dumps({"changes": changes, "xxh3": digest}).encode()


_FIELDS = dataclasses.fields(Owner)
