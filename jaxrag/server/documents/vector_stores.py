"""/v1/vector_stores: knowledge bases that clients fill and search."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from jaxrag.library.catalog import DocumentEntry, Hit
from jaxrag.library.documents.left_out import left_out_of
from jaxrag.library.knowledge_base.search import Hits
from jaxrag.library.options import SearchMode
from jaxrag.serve.compatibility import suited
from jaxrag.server.attributes import Attributes, Metadata, file_id_of, is_upload
from jaxrag.server.errors import invalid
from jaxrag.server.fields import Count, EmbeddedText, Fields, HitCount, Int, listed, wrong
from jaxrag.server.search_filters import where_of
from jaxrag.server.state.entry import Call
from jaxrag.server.state.library import Library
from jaxrag.server.state.lists import page_of
from jaxrag.server.state.registry import STATUSES, Member, StoreRow, new_id
from jaxrag.server.state.shelf import Shelf, no_member

_FOUND = 10  # chunks of a search that does not say how many
_MOST_FILES = 500  # of a batch
_MOST_QUESTIONS = 16
_NAME_CHARACTERS = 256
_Id = Annotated[str, Field(min_length=1, max_length=64)]
_Ids = Annotated[list[_Id], Field(max_length=_MOST_FILES, fail_fast=True), BeforeValidator(listed)]
_ANCHOR, _MOST_DAYS = "last_active_at", 365  # of what expires
_MOST_CHUNK = 4096  # tokens


# What clients send


class _Expiry(Fields):
    anchor: Literal["last_active_at"]
    days: Annotated[Count, Field(le=_MOST_DAYS)]


class _Static(Fields):
    max_chunk_size_tokens: Annotated[Count, Field(le=_MOST_CHUNK)]
    chunk_overlap_tokens: Annotated[Int, Field(ge=0)] | None = None


class _Chunking(Fields):
    type: Literal["auto", "static"]
    static: _Static | None = None


class _Cut(Fields):
    """How files are cut."""

    chunking_strategy: _Chunking | None = None

    def sizes(self) -> dict[str, int | None]:
        """Settings of how a vector store cuts; {} where the client names none."""
        strategy = self.chunking_strategy
        if strategy is None or strategy.type == "auto":
            return {}
        if (static := strategy.static) is None:
            raise wrong("chunking_strategy.static", None, "its sizes")
        size, overlap = static.max_chunk_size_tokens, static.chunk_overlap_tokens
        if overlap is not None and overlap >= size:
            place = "chunking_strategy.static.chunk_overlap_tokens"
            raise wrong(place, overlap, f"an integer, 0 to {size - 1}")
        return {"chunk_tokens": size, "overlap": overlap}


class _ChangeFields(Fields):
    name: Annotated[str, Field(max_length=_NAME_CHARACTERS)] | None = None
    metadata: Metadata | None = None
    expires_after: _Expiry | None = None

    @property
    def days(self) -> int | None:
        """Those after which a vector store expires; None: never."""
        return None if self.expires_after is None else self.expires_after.days


class _StoreFields(_Cut, _ChangeFields):
    file_ids: _Ids = Field([])


class _SearchFields(Fields):
    query: Annotated[
        list[EmbeddedText],
        Field(min_length=1, max_length=_MOST_QUESTIONS, fail_fast=True),
        BeforeValidator(listed),
    ]
    max_num_results: HitCount = _FOUND
    filters: dict[str, Any] | None = None
    where: dict[str, Any] | None = None
    search_mode: SearchMode | None = None
    min_score: float | None = None


class _Members(_Cut):
    """A vector store cuts all its files in one way, so that equal texts have equal KV."""

    attributes: Attributes = Field({})

    def model_post_init(self, _: Any) -> None:
        """Problem 400 for another way."""
        if self.sizes():
            raise invalid(
                "chunking_strategy: a vector store cuts all files in the way it was made with; "
                "name it when the vector store is created",
                "chunking_strategy",
            )


class _MemberFields(_Members):
    file_id: _Id


class _BatchFields(_Members):
    file_ids: _Ids = Field([])
    files: Annotated[list[_MemberFields], Field(max_length=_MOST_FILES, fail_fast=True)] | None = (
        None
    )


# Vector stores


def create_store(call: Call) -> dict[str, Any]:
    """Make one, with files or without."""
    library, access, fields = call.library, call.access, call.read(_StoreFields)
    for file_id in fields.file_ids:
        library.file(access, file_id)
    shelf = library.create(
        access, fields.name or "", fields.metadata or {}, fields.days, **fields.sizes()
    )
    if fields.file_ids:
        library.put(access, shelf.name, [(file_id, {}) for file_id in fields.file_ids])
    return _shown(library, shelf)


def list_stores(call: Call) -> dict[str, Any]:
    """Those that the key may search, newest first."""
    shown = functools.partial(_shown, call.library)
    return page_of(call, call.library.shelves(call.access), lambda it: it.name, shown)


def get_store(call: Call) -> dict[str, Any]:
    """One of them."""
    shelf = call.library.shelf(call.access, call.path["store"], may_be_expired=True)
    return _shown(call.library, shelf)


def change_store(call: Call) -> dict[str, Any]:
    """Rename one, give it other metadata, or another time to expire."""
    fields = call.read(_ChangeFields)
    said = {"name": fields.name, "metadata": fields.metadata}
    given: dict[str, Any] = {name: it for name, it in said.items() if it is not None}
    if "expires_after" in call.body:  # null: never
        given["days"] = fields.days
    return _shown(call.library, call.library.change(call.access, call.path["store"], **given))


def delete_store(call: Call) -> dict[str, Any]:
    """Remove one; it is found no more when this answers."""
    call.library.remove(call.access, call.path["store"])
    return {"id": call.path["store"], "object": "vector_store.deleted", "deleted": True}


def search_store(call: Call) -> dict[str, Any]:
    """The chunks that fit a question best."""
    fields = call.read(_SearchFields)
    questions, count, given = list(fields.query), fields.max_num_results, fields.filters
    base = call.library.base(call.library.shelf(call.access, call.path["store"]), uses=True)
    rankings = base.search(
        questions,
        count,
        where=fields.where if given is None else where_of(given),
        mode=fields.search_mode,
        min_score=fields.min_score,
        groups=call.access.groups,
    )
    hits = _together(rankings, count)
    return {
        "object": "vector_store.search_results.page",
        "search_query": questions,
        "data": [_shown_hit(hit) for hit in hits],
        "has_more": False,
        "next_page": None,
        "jaxrag": {"notes": list(hits.notes)},
    }


def _together(rankings: Sequence[Hits], k: int) -> Hits:
    """The best chunks for several questions: by the best place that a chunk has in any."""
    places: dict[int, tuple[int, Hit]] = {}
    for hits in rankings:
        for place, hit in enumerate(hits):
            before = places.get(hit.chunk_id)
            if before is None or place < before[0]:
                places[hit.chunk_id] = (place, hit)
    ranked = sorted(places.values(), key=lambda it: (it[0], -it[1].score))
    notes = dict.fromkeys(note for hits in rankings for note in hits.notes)
    return Hits((hit for _, hit in ranked[:k]), tuple(notes))


# Their files


def add_member(call: Call) -> dict[str, Any]:
    """Put a file in; its status says when it is found."""
    fields = call.read(_MemberFields)
    return _put(call, fields.file_id, fields.attributes)


def change_member(call: Call) -> dict[str, Any]:
    """Give a file other attributes; it is indexed anew, from the KV that is there."""
    attributes = call.read(_Members).attributes
    get_member(call)
    return _put(call, call.path["file"], attributes)


def list_members(call: Call) -> dict[str, Any]:
    """The files of a vector store, newest first."""
    status, library = _filter(call), call.library
    shelf = library.shelf(call.access, call.path["store"])
    members = library.members(call.access, shelf.name, status=status)
    rows = [_shown_member(library, member) for member in members]
    if shelf.row is None and status in (None, "completed"):
        rows = [*_ingested(call, shelf), *rows]
    return page_of(call, rows, lambda row: str(row["id"]), dict)


def get_member(call: Call) -> dict[str, Any]:
    """One of them."""
    library, name, file_id = call.library, call.path["store"], call.path["file"]
    shelf = library.shelf(call.access, name)
    member = library.member(call.access, name, file_id)
    if member is not None:
        return _shown_member(library, member)
    if shelf.row is None:
        for entry in library.documents(call.access, shelf):
            if entry.id == file_id:
                return _shown_document(library, shelf, entry)
    raise no_member(name, file_id)


def delete_member(call: Call) -> dict[str, Any]:
    """Take a file out; its documents are found no more when this answers."""
    call.library.take_out(call.access, call.path["store"], call.path["file"])
    return {"id": call.path["file"], "object": "vector_store.file.deleted", "deleted": True}


def member_content(call: Call) -> dict[str, Any]:
    """The texts of its chunks, in order."""
    found = call.library.texts(call.access, call.path["store"], call.path["file"])
    return {
        "object": "vector_store.file_content.page",
        "data": [{"type": "text", "text": text} for text in found],
        "has_more": False,
        "next_page": None,
    }


# Files that come together


def create_batch(call: Call) -> dict[str, Any]:
    """Put several files in."""
    fields = call.read(_BatchFields)
    files = [(file_id, fields.attributes) for file_id in fields.file_ids]
    if fields.files is not None:
        files = [(file.file_id, file.attributes) for file in fields.files]
    if not 0 < len(files) == len(dict(files)):
        raise invalid(f"file_ids: expected 1 to {_MOST_FILES} different ids of files", "file_ids")
    batch = new_id("vsfb_")
    call.library.put(call.access, call.path["store"], files, batch)
    return _shown_batch(call, batch)


def get_batch(call: Call) -> dict[str, Any]:
    """How far they are."""
    return _shown_batch(call, call.path["batch"])


def cancel_batch(call: Call) -> dict[str, Any]:
    """Do no more for those that are in progress."""
    get_batch(call)
    call.library.cancel_batch(call.access, call.path["store"], call.path["batch"])
    return get_batch(call)


def list_batch(call: Call) -> dict[str, Any]:
    """The files of a batch, newest first."""
    get_batch(call)
    name, batch, status = call.path["store"], call.path["batch"], _filter(call)
    rows = call.library.members(call.access, name, batch=batch, status=status)
    return page_of(call, rows, lambda it: it.file, functools.partial(_shown_member, call.library))


# What clients see


def _put(call: Call, file_id: str, attributes: dict[str, Any]) -> dict[str, Any]:
    [member] = call.library.put(call.access, call.path["store"], [(file_id, attributes)])
    return _shown_member(call.library, member)


def _shown(library: Library, shelf: Shelf) -> dict[str, Any]:
    row, registry = shelf.row, library.registry
    if row is not None and shelf.expired:
        counts = dict.fromkeys((*STATUSES, "total"), 0)
        return _head(shelf.name, row, "expired", counts) | {"usage_bytes": 0}
    base, counts = library.base(shelf), registry.counts(shelf.name)
    held = base.counts()
    if row is None:
        own = held["documents"] - len(base.ids_beginning("file-"))
        counts["completed"] += own
        counts["total"] += own
        row = StoreRow(0, "", "", shelf.name, {}, library.created, library.created, None, False)
    status = "in_progress" if counts["in_progress"] else "completed"
    return _head(shelf.name, row, status, counts) | {
        "usage_bytes": registry.bytes_of(shelf.name),
        "jaxrag": {
            "served": shelf.row is None,
            "writable": shelf.writes,
            "documents": held["documents"],
            "chunks": held["chunks"],
            "tokens": held["tokens"],
            "chunk_tokens": base.chunking.chunk_tokens,
            "encoders": list(base.encoders),
            "embeds": base.index is not None,
            "suited": list(suited(base)),
        },
    }


def _head(name: str, row: StoreRow, status: str, counts: Mapping[str, int]) -> dict[str, Any]:
    """What is told of every vector store; nothing of a time to expire where it has none."""
    body = {
        "id": name,
        "object": "vector_store",
        "created_at": row.created,
        "last_active_at": row.active,
        "name": row.name,
        "status": status,
        "file_counts": counts,
        "metadata": dict(row.metadata),
        "expires_at": row.expires,
    }
    if row.days is not None:
        body["expires_after"] = {"anchor": _ANCHOR, "days": row.days}
    return body


def _shown_member(library: Library, member: Member) -> dict[str, Any]:
    file = library.registry.file(member.tenant, member.file)
    return _file_of(member, file.bytes if file else 0, file.filename if file else None)


def _file_of(member: Member, nbytes: int, filename: str | None) -> dict[str, Any]:
    failed = member.status == "failed"
    return {
        "id": member.file,
        "object": "vector_store.file",
        "created_at": member.created,
        "vector_store_id": member.store,
        "status": member.status,
        "last_error": {"code": member.code, "message": member.message} if failed else None,
        "usage_bytes": nbytes,
        "attributes": dict(member.attributes),
        "filename": filename,
        "jaxrag": dict(member.counts),
    }


def _ingested(call: Call, shelf: Shelf) -> list[dict[str, Any]]:
    """Documents of a served knowledge base that no upload brought."""
    found = call.library.documents(call.access, shelf)
    return [_shown_document(call.library, shelf, it) for it in found if not is_upload(it.id)]


def _shown_document(library: Library, shelf: Shelf, entry: DocumentEntry) -> dict[str, Any]:
    counts = {
        "documents": 1,
        "chunks": entry.num_chunks,
        "tokens": entry.num_tokens,
        "left_out": left_out_of(entry.metadata),
    }
    member = Member(
        0, shelf.name, entry.id, "", entry.metadata, None, "completed", None, None, counts,
        library.created,
    )  # fmt: skip
    return _file_of(member, 0, PurePath(entry.file or entry.id).name)


def _shown_batch(call: Call, batch: str) -> dict[str, Any]:
    library, name = call.library, call.path["store"]
    shelf = library.shelf(call.access, name)
    members = library.members(call.access, shelf.name, batch=batch)
    if not members:
        raise no_member(name, batch)
    counts = library.registry.counts(shelf.name, batch)
    status = "completed"
    if counts["in_progress"]:
        status = "in_progress"
    elif counts["cancelled"]:
        status = "cancelled"
    elif counts["failed"] == counts["total"]:
        status = "failed"
    return {
        "id": batch,
        "object": "vector_store.files_batch",
        "created_at": min(member.created for member in members),
        "vector_store_id": shelf.name,
        "status": status,
        "file_counts": counts,
    }


def _shown_hit(hit: Hit) -> dict[str, Any]:
    return {
        "file_id": file_id_of(hit.document_id),
        "filename": PurePath(hit.file).name if hit.file else hit.title or hit.document_id,
        "score": hit.score,
        "attributes": dict(hit.metadata),
        "content": [{"type": "text", "text": hit.text}],
        "jaxrag": {
            "document_id": hit.document_id,
            "title": hit.title,
            "chunk": hit.chunk_index,
            "page": hit.page,
            "section": hit.section,
        },
    }


def _filter(call: Call) -> str | None:
    """The status of the files that are listed; None: any."""
    status = call.query.get("filter")
    if status is not None and status not in STATUSES:
        raise invalid(f"filter={status[:80]!r}: expected one of {', '.join(STATUSES)}", "filter")
    return status
