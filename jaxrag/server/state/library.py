"""What tenants keep on the server: files, and the vector stores that they are searched in.

A vector store is a knowledge base in the data folder, under its tenant's salt, or one of those that
the server was started with, by name, where the key may read it. Whatever a key may not see is, to
it, not there.
"""

import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrag.base.disk import sync_folder
from jaxrag.base.errors import ConfigError, JaxragError, disk_errors
from jaxrag.library.catalog import DocumentEntry
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.options import KnowledgeBaseOptions
from jaxrag.models.model import Model
from jaxrag.server.attributes import file_id_of, is_upload
from jaxrag.server.durable import make_folder, make_private
from jaxrag.server.errors import Problem, forbidden, invalid, not_found
from jaxrag.server.settings import ServerSettings
from jaxrag.server.state.indexing import Indexer
from jaxrag.server.state.quota import Quota
from jaxrag.server.state.recipe import warm_up
from jaxrag.server.state.registry import FileRow, Member, Registry, StoreRow, new_id
from jaxrag.server.state.shelf import Shelf, check_reads, expired, no_member
from jaxrag.server.state.uploads import TENANTS, Upload, Uploads
from jaxrag.server.tenants import Access, Tenants, folder_name

STORES = "stores"  # folder of a tenant
STORE_ID = "vs_"
_LOCK = "lock"  # file in the data folder
_LOOK_SECONDS = 30.0  # between two looks at what may be closed or collected

_LOG = logging.getLogger("jaxrag.server")


class Library:
    """Files and vector stores of all tenants in the data folder of a server.

    Attributes:
      data: the folder; where the settings name none, a passing one: nothing can be uploaded then.
      model: encodes documents.
      created: when it was opened, seconds since 1970.
      registry: what is known of files and vector stores.
      quota: what tenants store, and may store.
      uploads: bytes of files.
      indexer: brings files into vector stores.

    Methods wait for the disk; they are for threads, any of them. They raise Problem for what the
    tenant may not do or has not, and JaxragErrors as the knowledge base does.
    """

    def __init__(
        self,
        settings: ServerSettings,
        model: Model,
        served: Mapping[str, KnowledgeBase],
        recipe: KnowledgeBaseOptions,
        tenants: Tenants,
    ) -> None:
        """Open the folder, or make it; sweep what was never acknowledged, go on with the rest.

        Args:
          settings: the folder, and how files are indexed and kept.
          model: encodes documents.
          served: knowledge bases that tenants share, by name.
          recipe: of new vector stores.
          tenants: who there is.

        Raises ConfigError for a folder that another server has open, StoreError for one that cannot
        be written.
        """
        self._keeps = settings.data is not None
        folder = tempfile.mkdtemp(prefix="jaxrag-") if settings.data is None else settings.data
        self.data = data = Path(folder).absolute()
        # Called by ``close``, or when the interpreter ends.
        self._scratch = None if self._keeps else weakref.finalize(self, shutil.rmtree, data, True)
        self.created = int(time.time())
        self.model = model
        self._served, self._recipe, self._tenants = served, recipe, tenants
        self._grace = settings.grace_seconds
        with disk_errors(data):
            make_folder(data)
            self._lock_file = _lock(data)
        make_private(data / TENANTS)
        self.registry = Registry(data)
        self.quota = Quota(self.registry, tenants, self._stores)
        self.uploads = Uploads(data, self.registry, self.quota)
        self.indexer = Indexer(
            self.registry, self.uploads, self.quota, model, self._base_of, settings
        )
        self._opening = threading.Lock()
        self._bases: dict[str, KnowledgeBase] = {}  # own ones that are open, by id
        self._changing: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self._leaving: list[tuple[float, KnowledgeBase | None, Path]] = []
        self._littered: dict[str, float] = {}  # when a document left a store, by its name
        self._closed = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="jaxrag-keeper", daemon=True)
        self._sweep()
        self.indexer.submit(self.registry.members(status="in_progress"))
        self._keeper.start()

    def warm_up(self) -> int:
        """Compile the encoding of chunks of a new vector store; see ``recipe.warm_up``."""
        return warm_up(self._recipe, self.model) if self._keeps else 0

    def close(self) -> None:
        """Stop indexing and close everything; what is in progress is taken up at the next open."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.indexer.close()
        self._keeper.join()
        with contextlib.suppress(JaxragError):
            self.registry.write_uses()
        for _, base, folder in self._leaving:
            _let_go(base, folder)
        with self._opening:
            for base in self._bases.values():
                base.close()
        self.registry.close()
        os.close(self._lock_file)
        if self._scratch is not None:
            self._scratch()

    def check_writes(self, access: Access) -> None:
        """Problem 403 for a key that may not change documents, 400 where none are kept."""
        if access.documents != "write":
            raise forbidden("this key may not upload or change documents; ask for one that may")
        if not self._keeps:
            raise invalid("this server keeps no files; start it with --data DIR")

    # Files

    def begin(self, access: Access) -> Upload:
        """A new file of the tenant, to be written."""
        self.check_writes(access)
        return self.uploads.begin(access.tenant)

    def files(self, access: Access) -> list[FileRow]:
        """The files of the tenant, oldest first."""
        check_reads(access)
        return self.registry.files(access.tenant)

    def file(self, access: Access, file_id: str) -> FileRow:
        """A file of the tenant."""
        check_reads(access)
        found = self.registry.file(access.tenant, file_id)
        if found is None:
            raise not_found(f"there is no file {file_id!r}; GET /v1/files lists what there is")
        return found

    def remove_file(self, access: Access, file_id: str) -> None:
        """Remove a file, and its documents wherever it is a member."""
        self.check_writes(access)
        found = self.file(access, file_id)
        for member in self.registry.members(file=file_id):
            with self._changing[member.store]:
                self._take_out(member)
        self.uploads.remove(found)

    # Vector stores

    def shelves(self, access: Access) -> list[Shelf]:
        """Every vector store that the tenant may search: the served ones, then its own by age."""
        served = [
            self._shelf_of_served(access, name) for name in self._served if access.may_read(name)
        ]
        if access.documents == "none":
            return served
        return served + [self._shelf_of(access, row) for row in self.registry.stores(access.tenant)]

    def shelf(
        self, access: Access, name: str, *, to_write: bool = False, may_be_expired: bool = False
    ) -> Shelf:
        """A vector store by its id, or by the name of a served knowledge base.

        Problem 404 for one that is not there or not the tenant's, 403 for one that it may not
        change, 400 for one that has expired, unless it may be.
        """
        found = None
        if name in self._served and access.may_read(name):
            found = self._shelf_of_served(access, name)
        elif access.documents != "none":
            row = self.registry.store(access.tenant, name)
            if row is not None:
                found = self._shelf_of(access, row)
        if found is None:
            raise not_found(
                f"there is no vector store {name!r}; GET /v1/vector_stores lists what there is"
            )
        if to_write and not found.writes:
            raise forbidden(f"this key may not change the vector store {name!r}; it may read it")
        if found.row is not None and found.expired and not may_be_expired:
            raise expired(found.row)
        return found

    def base(self, shelf: Shelf, *, uses: bool = False) -> KnowledgeBase:
        """The knowledge base of a vector store, which ``uses`` it now."""
        if uses and shelf.row is not None:
            self.registry.use_store(shelf.name)
        return self._base_of(shelf.row.tenant if shelf.row else "", shelf.name)

    def named(self, access: Access, name: str) -> list[StoreRow]:
        """The vector store of the tenant of this id, or those of this name.

        One that has expired only where no other has the name.
        """
        if access.documents == "none":
            return []
        row = self.registry.store(access.tenant, name)
        if row is not None:
            return [row]
        named = [store for store in self.registry.stores(access.tenant) if store.name == name]
        return [it for it in named if not self.registry.is_expired(it)] or named[-1:]

    def knowledge_base(self, access: Access, name: str, *, uses: bool = True) -> KnowledgeBase:
        """A knowledge base that the sender may read, or a vector store of its tenant.

        Waits for the disk where it is opened. Problem 404, the same for one that is not there and
        one that is another's; 400 for one that has expired, and for several. ``uses``: that
        expires the later.
        """
        if name in self._served and access.may_read(name):
            return self._served[name]
        named = self.named(access, name)
        if not named:
            raise not_found(
                f"there is no knowledge base {name!r}; GET /v1/models lists what there is",
                "knowledge_base",
            )
        row = named[0]
        if len(named) > 1:
            raise invalid(
                f"{len(named)} vector stores are called {name!r}; name one by its id, such as "
                f"{row.id}",
                "knowledge_base",
            )
        if self.registry.is_expired(row):
            raise expired(row)
        if uses:
            self.registry.use_store(row.id)
        return self._base_of(access.tenant, row.id)

    def create(
        self,
        access: Access,
        name: str,
        metadata: Mapping[str, Any],
        days: int | None = None,
        **cut: Any,
    ) -> Shelf:
        """Make an empty vector store, for ever or until nobody used it for some days.

        ``cut`` are settings of how it cuts.
        """
        self.check_writes(access)
        self.quota.check(access.tenant)
        recipe = dataclasses.replace(self._recipe, **cut)
        store_id = new_id(STORE_ID)
        folder = self._folder(access.tenant, store_id)
        with disk_errors(folder):
            make_folder(folder.parent)
        try:
            base = self._open(folder, access.tenant, recipe)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        with disk_errors(folder):
            sync_folder(folder)
            sync_folder(folder.parent)
        with self._opening:
            self._bases[store_id] = base
        row = self.registry.add_store(store_id, access.tenant, name, metadata, days)
        return Shelf(store_id, row, True)

    def remove(self, access: Access, name: str) -> None:
        """Remove a vector store: it is not found from now on, its bytes go after the grace."""
        row = self.shelf(access, name, to_write=True, may_be_expired=True).own
        with self._changing[row.id]:
            self.registry.remove_store(row.id)
            self.registry.forget_answers(row.id)
            self._free(row)

    def change(self, access: Access, store: str, **given: Any) -> Shelf:
        """Give a vector store another ``name``, ``metadata`` or ``days`` until it expires."""
        row = self.shelf(access, store, to_write=True).own
        with self._changing[row.id]:
            row = dataclasses.replace(self.shelf(access, store).own, **given)
            self.registry.change_store(row.id, row.name, row.metadata, row.days)
        return self.shelf(access, store)

    # Members

    def put(
        self,
        access: Access,
        name: str,
        files: Sequence[tuple[str, Mapping[str, Any]]],
        batch: str | None = None,
    ) -> list[Member]:
        """Put files, (id, attributes) each, into a vector store; they are indexed from now on.

        One that is there already is indexed anew, with these attributes. What is no file fails
        alone in a batch for a store of the tenant's own; else Problem 404.
        """
        shelf = self.shelf(access, name, to_write=True)
        lost: dict[str, str] = {}
        for file_id, _ in files:
            try:
                self.file(access, file_id)
            except Problem as problem:
                if batch is None or shelf.row is None or problem.status != 404:
                    raise
                lost[file_id] = problem.message
        self.check_writes(access)
        self.quota.check(access.tenant)
        if self.base(shelf, uses=True).mode != "rw":
            raise forbidden(f"the knowledge base {name!r} is served for reading only")
        with self._changing[name]:
            if shelf.row is not None:
                self.shelf(access, name)  # it may have been removed meanwhile
            self.indexer.drop(name, [file_id for file_id, _ in files])
            members = self.registry.put_members(name, files, access.tenant, batch, lost)
            self.indexer.submit([it for it in members if it.status == "in_progress"])
        return members

    def take_out(self, access: Access, name: str, file_id: str) -> None:
        """Remove a file from a vector store; its documents are not found when this returns."""
        shelf = self.shelf(access, name, to_write=True)
        with self._changing[name]:
            member = self.registry.member(name, file_id)
            if member is not None:
                self._take_out(member)
            elif shelf.row is None and self.base(shelf).remove([file_id]).documents:
                self.registry.forget_answers(name, [file_id])
                self._littered[name] = time.monotonic()
            else:
                raise no_member(name, file_id)

    def cancel_batch(self, access: Access, name: str, batch: str) -> None:
        """Do no more for the files of a batch that are in progress."""
        self.shelf(access, name, to_write=True)
        with self._changing[name]:
            waiting = self.registry.members(name, batch=batch, status="in_progress")
            self.indexer.drop(name, [member.file for member in waiting])
            for member in waiting:
                self.registry.settle_member(member.number, "cancelled")

    def texts(self, access: Access, name: str, file_id: str) -> list[str]:
        """The chunks of a file in a vector store as texts, in order."""
        shelf = self.shelf(access, name)
        chunks, member = self.base(shelf).chunks, self.member(access, name, file_id)
        if member is not None:
            own = _documents_of(self.base(shelf), file_id)
        else:
            own = [file_id] if shelf.row is None else []
        if access.groups is not None:
            readable = {entry.id for entry in self.documents(access, shelf)}
            own = [document for document in own if document in readable]
        ids = [chunk_id for document in own for chunk_id in chunks.of_document(document)]
        if not ids and member is None:
            raise no_member(name, file_id)
        found = chunks.texts(ids)
        return [found[chunk_id] for chunk_id in ids if chunk_id in found]

    # What a key may read of them

    def documents(self, access: Access, shelf: Shelf) -> list[DocumentEntry]:
        """The documents of a vector store, by id."""
        return self.base(shelf).documents(groups=access.groups)

    def members(
        self,
        access: Access,
        name: str,
        *,
        file: str | None = None,
        batch: str | None = None,
        status: str | None = None,
    ) -> list[Member]:
        """The files of a vector store; for a key with groups those of which it may read a text."""
        shelf = self.shelf(access, name)
        found = self.registry.members(name, file=file, batch=batch, status=status)
        if access.groups is None or not found:
            return found
        readable = {file_id_of(entry.id) for entry in self.documents(access, shelf)}
        return [it for it in found if it.file in readable]

    def member(self, access: Access, name: str, file_id: str) -> Member | None:
        """A file of a vector store; None for one that is not there for this key."""
        return next(iter(self.members(access, name, file=file_id)), None)

    def _take_out(self, member: Member) -> None:
        """The store's lock is held. Documents go first, as what the registry has is known still."""
        self.indexer.drop(member.store, [member.file])
        base = self._base_of(member.tenant, member.store)
        own = _documents_of(base, member.file)
        base.remove(own)
        self.registry.forget_answers(member.store, own)
        self.registry.remove_member(member.store, member.file)
        self._littered[member.store] = time.monotonic()

    def _shelf_of(self, access: Access, row: StoreRow) -> Shelf:
        writes = access.documents == "write"
        return Shelf(row.id, row, writes, self.registry.is_expired(row))

    def _shelf_of_served(self, access: Access, name: str) -> Shelf:
        return Shelf(name, None, access.may_write(name))

    def _folder(self, tenant: str, store_id: str) -> Path:
        return self._stores(tenant) / store_id

    def _stores(self, tenant: str) -> Path:
        return self.data / TENANTS / folder_name(tenant) / STORES

    def _base_of(self, tenant: str, name: str) -> KnowledgeBase:
        """The knowledge base of a served name, or of a store of the tenant; opened once."""
        if name in self._served:
            return self._served[name]
        with self._opening:
            if name not in self._bases:
                row = self.registry.store(tenant, name)
                if row is None or row.gone:
                    raise not_found(f"there is no vector store {name!r} any more")
                only = KnowledgeBaseOptions(embedder=self._recipe.embedder)
                self._bases[name] = self._open(self._folder(tenant, name), tenant, only)
            return self._bases[name]

    def _open(self, folder: Path, tenant: str, recipe: KnowledgeBaseOptions) -> KnowledgeBase:
        salt, secret = self._tenants.salt(tenant), self._tenants.seal_secret(tenant)
        own = dataclasses.replace(recipe, salt=salt, secret=secret)
        return KnowledgeBase.open(folder, self.model, mode="rw", **vars(own))

    # Upkeep

    def _sweep(self) -> None:
        """Remove what was begun and never acknowledged, and what was removed but for its bytes."""
        self.uploads.sweep()
        known = {row.id for row in self.registry.stores() if not row.gone}
        for folder in (self.data / TENANTS).glob(f"*/{STORES}/*"):
            if folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)

    def _keep(self) -> None:
        while not self._closed.wait(min(_LOOK_SECONDS, max(self._grace, 0.1))):
            try:
                self._keep_once(time.monotonic())
            except Exception:
                _LOG.exception("the bytes of what was removed could not be freed")

    def _keep_once(self, now: float) -> None:
        """Close and remove what cannot be in use any more."""
        due = [it for it in self._leaving if it[0] <= now]
        for item in due:
            self._leaving.remove(item)
            _let_go(*item[1:])
        self.registry.expire_responses()
        self.registry.write_uses()
        self._expire()
        for name, left in list(self._littered.items()):
            if left + self._grace <= now:
                self._collect(name)

    def _expire(self) -> None:
        """Empty the vector stores whose time is over; their rows stay."""
        for row in self.registry.due_stores():
            with self._changing[row.id]:
                now = self.registry.store(row.tenant, row.id)  # it may be used or removed meanwhile
                if now is not None and self.registry.is_expired(now):
                    self.registry.expire_store(row.id)
                    self._free(row)
                    _LOG.info("the vector store %s has expired", row.id)

    def _free(self, row: StoreRow) -> None:
        """Its lock is held. No more comes into a store; its bytes go after the grace."""
        self.indexer.drop(row.id)
        with self._opening:
            base = self._bases.pop(row.id, None)
        due = time.monotonic() + self._grace
        self._leaving.append((due, base, self._folder(row.tenant, row.id)))

    def _collect(self, name: str) -> None:
        """Free what left a store, while nothing comes into it: later, if something does."""
        with self._changing[name]:
            if self.indexer.works_on(name):
                return
            del self._littered[name]
            base = self._served.get(name) or self._bases.get(name)
            if base is not None:
                base.gc(grace_seconds=self._grace)


def _documents_of(base: KnowledgeBase, file_id: str) -> list[str]:
    """Ids of the documents of an upload; none of what a batch named and is no upload."""
    return base.ids_beginning(file_id) if is_upload(file_id) else []


def _let_go(base: KnowledgeBase | None, folder: Path) -> None:
    if base is not None:
        with contextlib.suppress(JaxragError):
            base.close()
    shutil.rmtree(folder, ignore_errors=True)


def _lock(data: Path) -> int:
    """Keep other servers out of the folder; returns what holds the lock."""
    descriptor = os.open(data / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"{data} is in use by another server; stop it, or name another --data folder"
        ) from None
    return descriptor
