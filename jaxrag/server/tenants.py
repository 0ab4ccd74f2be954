"""Who asks: keys, what each may do, and what keeps the documents of tenants apart.

The file of keys is TOML, and holds no key but its sha256::

    [tenants.acme]
    weight = 2.0
    requests_per_minute = 600

    [[keys]]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    tenant = "acme"
    read = ["village"]

A tenant's salt is made of its name and of a secret that the server keeps in its data folder, so
that no request can name it and no two tenants share a key of KV. So is the secret that seals its
KV, so that nothing is believed that another put there.
"""

import dataclasses
import functools
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxrag.base.errors import ConfigError, disk_errors
from jaxrag.base.groups import MAX_OWN, wrong_groups
from jaxrag.base.tables import build, read_toml
from jaxrag.kv.store.keys import is_hex
from jaxrag.server.durable import REGISTRY, make_folder, write_durably

SECRET = "secret"  # file in the data folder
EVERY = "*"  # in place of the name of a knowledge base

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # it is the name of a folder, too
_SECRET_BYTES = 32
_CLASSES = (0, 1, 2)

Rights = Literal["none", "read", "write"]


@dataclasses.dataclass(frozen=True)
class Tenant:
    """What all keys of a tenant have in common.

    Attributes:
      weight: of its share: with twice the weight it gets twice the service.
      priority: the best class that it may ask for, 0 before 1 before 2.
      requests_per_minute: that are taken; None: any number.
      tokens_per_minute: of prompts and answers, that are taken; None: any number.
      max_bytes: of its files and vector stores in the data folder; None: any number.
    """

    weight: float = 1.0
    priority: int = 0
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse what would never be served."""
        for name in ("weight", "requests_per_minute", "tokens_per_minute", "max_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value}: expected a finite number above 0")
        if self.priority not in _CLASSES:
            raise ConfigError(
                f"priority={self.priority}: expected one of {', '.join(map(str, _CLASSES))}"
            )


@dataclasses.dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
      sha256: of the key as UTF-8, 64 hex digits.
      tenant: whose it is.
      read: the served knowledge bases that it may ask, by name; "*" is every one.
      write: the same for adding and removing documents; what it may write it may read.
      documents: what it may do with the tenant's own files and vector stores.
      admin: it may look into the engine.
      groups: of documents that name groups, it may read those of one of these, and change nothing;
        None: all.
    """

    sha256: str
    tenant: str
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    documents: Rights = "write"
    admin: bool = False
    groups: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what is no digest, no group, and a tenant that could not be a folder."""
        if not is_hex(self.sha256, 64):
            raise ConfigError(
                f"sha256={self.sha256!r}: expected 64 lower-case hexadecimal digits, the sha256 of "
                "a key"
            )
        if not _NAME.fullmatch(self.tenant):
            raise ConfigError(
                f"tenant={self.tenant!r}: expected 1 to 64 letters, digits, '.', '_' or '-', the "
                "first a letter or digit"
            )
        if self.groups is None:
            return
        wrong = wrong_groups(self.groups, 0, MAX_OWN)
        if wrong is not None:
            raise ConfigError(f"groups={wrong}")
        if self.write or self.documents == "write":
            raise ConfigError(
                f"groups={list(self.groups)}: a key that is limited to groups changes nothing; set "
                'documents = "read" or "none", and read in place of write'
            )


@dataclasses.dataclass(frozen=True)
class KeyFile:
    """The file of keys as it was read: tenants by name, those without a table by default."""

    tenants: Mapping[str, Tenant] = dataclasses.field(default_factory=dict)
    keys: tuple[Key, ...] = ()


@dataclasses.dataclass(frozen=True)
class Access:
    """What the sender of a request may do.

    Attributes:
      tenant: its name, "" where there are no keys.
      limits: of the tenant.
      salt: of its documents' KV.
      read: names of served knowledge bases.
      write: names of served knowledge bases.
      documents: rights on the tenant's own files and vector stores.
      admin: whether it may look into the engine.
      groups: whose documents it may read beside those without groups; None: all.
    """

    tenant: str = ""
    limits: Tenant = dataclasses.field(default_factory=Tenant)
    salt: str = dataclasses.field(default="", repr=False)
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    documents: Rights = "none"
    admin: bool = False
    groups: tuple[str, ...] | None = None

    def limited(self, groups: Sequence[str]) -> "Access":
        """The same for who is in these groups only: reads no more than before, changes nothing."""
        return dataclasses.replace(
            self,
            read=(*self.read, *self.write),
            write=(),
            documents="none" if self.documents == "none" else "read",
            groups=tuple(group for group in groups if self.groups is None or group in self.groups),
        )

    def may_read(self, knowledge_base: str) -> bool:
        """Whether it may ask this served knowledge base."""
        return self.may_write(knowledge_base) or _holds(self.read, knowledge_base)

    def may_write(self, knowledge_base: str) -> bool:
        """Whether it may change the documents of this served knowledge base."""
        return _holds(self.write, knowledge_base)


class Tenants:
    """The keys of a server. Make one with ``Tenants.open``."""

    def __init__(self, file: KeyFile | None = None, secret: bytes | None = None) -> None:
        """Without a file every sender is the one tenant "", which may do everything."""
        self._file = file
        self._secret = secret or secrets.token_bytes(_SECRET_BYTES)

    @classmethod
    def open(cls, path: str | os.PathLike[str] | None, data: Path | None) -> "Tenants":
        """Read the file of keys, and the secret of the data folder, which is made if missing.

        Without a data folder the secret lasts as long as the process: nothing outlives it.

        Raises ConfigError for a file that is missing, malformed or holds a key twice, StoreError
        for a data folder that cannot be written.
        """
        file = None
        if path is not None:
            file = build(KeyFile, read_toml(Path(path)), str(path))
            digests = [key.sha256 for key in file.keys]
            twice = next((digest for digest in digests if digests.count(digest) > 1), None)
            if twice is not None:
                raise ConfigError(f"{path}: the key of sha256 {twice[:16]} is there twice")
            if not digests:
                raise ConfigError(
                    f"{path} holds no key; add a table [[keys]] with sha256 and tenant"
                )
            strangers = set(file.tenants) - {key.tenant for key in file.keys}
            if strangers:
                raise ConfigError(f"{path}: tenant {min(strangers)!r} has no key; add one")
        return cls(file, None if data is None else _secret(data))

    @property
    def names(self) -> tuple[str, ...]:
        """Every tenant."""
        keys = () if self._file is None else self._file.keys
        return tuple(dict.fromkeys(key.tenant for key in keys)) or ("",)

    @property
    def weights(self) -> dict[str, float]:
        """Weights by tenant, for ``SchedulerSettings``."""
        return {name: self.limits(name).weight for name in self.names}

    def access(self, key: str | None) -> Access | None:
        """What a key allows; None for one that is unknown, or missing where one is needed.

        Takes the same time whichever key it is, and whether it is known.
        """
        if self._file is None:
            every = (EVERY,)
            return Access("", Tenant(), self.salt(""), every, every, "write", True)
        given = hashlib.sha256((key or "").encode("utf-8", "surrogatepass")).hexdigest()
        owner = None
        for known in self._file.keys:
            if hmac.compare_digest(known.sha256, given):
                owner = known
        if key is None or owner is None:
            return None
        return Access(
            owner.tenant,
            self.limits(owner.tenant),
            self.salt(owner.tenant),
            owner.read,
            owner.write,
            owner.documents,
            owner.admin,
            owner.groups,
        )

    def share(self, exchange: Callable[[Any], list[Any]]) -> None:
        """Take the secret of the first of several processes; ``exchange`` as ``Model`` has it."""
        self._secret = exchange(self._secret)[0]

    def salt(self, tenant: str) -> str:
        """The salt of a tenant's KV: 64 hex digits of its name and the secret."""
        return hmac.digest(self._secret, b"jaxrag.tenant\0" + tenant.encode(), "sha256").hex()

    def seal_secret(self, tenant: str) -> bytes | None:
        """What seals the KV of a tenant; None where there are no keys, and so no tenants."""
        if self._file is None:
            return None
        return _seal(self._secret, tenant)

    def limits(self, name: str) -> Tenant:
        """What all keys of a tenant have in common."""
        tables = {} if self._file is None else self._file.tenants
        return tables.get(name, Tenant())


def upload_secret(folder: Path) -> bytes | None:
    """What seals a tenant's vector store, by the secret of its data folder; None for another."""
    *data, tenants, tenant, stores, _ = ("", "", "", *folder.resolve().parts)
    if (tenants, stores) != ("tenants", "stores") or tenant == folder_name(""):
        return None
    path = Path(*data)
    return _seal(_secret(path), tenant) if (path / SECRET).is_file() else None


def _seal(secret: bytes, tenant: str) -> bytes:
    return hmac.digest(secret, b"jaxrag.seal\0" + tenant.encode(), "sha256")


def bearer(header: str | None) -> str | None:
    """The key in an Authorization header, "Bearer KEY"; None where there is none."""
    scheme, _, key = (header or "").strip().partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def folder_name(tenant: str) -> str:
    """The name of a tenant's folder; that of "" is no tenant's name."""
    return tenant or "_"


def check_host(host: str, has_keys: bool, open_to_all: bool) -> None:
    """ConfigError for a server that others can reach and that asks for no key, unless wanted."""
    if not (has_keys or open_to_all or is_loopback(host)):
        raise ConfigError(
            f"host {host}: others could reach the server, and without keys anybody may ask and "
            "remove; pass --keys FILE, or --open to have it so"
        )


@functools.lru_cache(256)
def is_loopback(host: str) -> bool:
    """Is it a name or an address of this machine that no other machine reaches?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _holds(names: tuple[str, ...], name: str) -> bool:
    return EVERY in names or name in names


def _secret(data: Path) -> bytes:
    path = data / SECRET
    if not path.exists() and (data / REGISTRY).exists():
        raise ConfigError(
            f"{path} is missing, without which the vector stores in {data} cannot be opened; "
            "restore it, or name another data folder"
        )
    if not path.exists():
        with disk_errors(data):
            make_folder(data)
        write_durably(path, secrets.token_bytes(_SECRET_BYTES))
    found = path.read_bytes()
    if len(found) != _SECRET_BYTES:
        raise ConfigError(
            f"{path} holds {len(found)} bytes: expected {_SECRET_BYTES}; restore it, or remove the "
            "data folder, whose documents cannot be opened without it"
        )
    return found
