"""/v1/vector_stores: knowledge bases that clients fill and search."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from jaxrag.library.catalog import DocumentEntry, Hit
from jaxrag.library.knowledge_base.search import Hits
from jaxrag.serve.suits import suited
from jaxrag.server.attributes import attributes_of, file_id_of, is_upload
from jaxrag.server.errors import invalid
from jaxrag.server.fields import Body
from jaxrag.server.state.entry import Call
from jaxrag.server.state.library import Library
from jaxrag.server.state.lists import page_of
from jaxrag.server.state.registry import STATUSES, Member, StoreRow, new_id
from jaxrag.server.state.shelf import Shelf, no_member
from jaxrag.server.where import where_of

_FOUND = 10  # chunks of a search that does not say how many
_MOST_FOUND = 50
_MOST_FILES = 500  # of a batch
_MOST_QUESTIONS = 16
_QUESTION_CHARACTERS = 1 << 16
_NAME_CHARACTERS = 256
_ID_CHARACTERS = 64
_ANCHOR, _MOST_DAYS = "last_active_at", 365  # of what expires
_LEAST_CHUNK, _MOST_CHUNK = 1, 4096  # tokens


# Vector stores


def create_store(call: Call) -> dict[str, Any]:
    """Make one, with files or without."""
    library, access, body = call.library, call.access, call.body
    name = _name(body) or ""
    metadata = attributes_of(body, "metadata")
    cut, days = _chunking(body), _days(body)
    file_ids = body.texts("file_ids", most=_MOST_FILES)
    for file_id in file_ids:
        library.file(access, file_id)
    shelf = library.create(access, name, metadata, days, **cut)
    if file_ids:
        library.put(access, shelf.name, [(file_id, {}) for file_id in file_ids])
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
    body, given = call.body, dict[str, Any]()
    if "name" in body:
        given["name"] = _name(body)
    if "metadata" in body:
        given["metadata"] = attributes_of(body, "metadata")
    if "expires_after" in body or "expires_after" in body.nulls:
        given["days"] = _days(body)
    return _shown(call.library, call.library.change(call.access, call.path["store"], **given))


def delete_store(call: Call) -> dict[str, Any]:
    """Remove one; it is found no more when this answers."""
    call.library.remove(call.access, call.path["store"])
    return {"id": call.path["store"], "object": "vector_store.deleted", "deleted": True}


def search_store(call: Call) -> dict[str, Any]:
    """The chunks that fit a question best."""
    body = call.body
    questions = body.texts("query", most=_MOST_QUESTIONS)
    if not questions:
        raise invalid("query: expected a text, or a list of them", "query")
    count = body.integer("max_num_results", 1, _MOST_FOUND) or _FOUND
    if any(len(it) > _QUESTION_CHARACTERS for it in questions):
        raise invalid(
            f"query: expected texts of at most {_QUESTION_CHARACTERS} characters", "query"
        )
    given = body.table("filters")
    base = call.library.base(call.library.shelf(call.access, call.path["store"]), uses=True)
    rankings = base.search(
        list(questions),
        count,
        where=body.table("where") if given is None else where_of(given),
        mode=body.field("search_mode"),
        min_score=body.number("min_score"),
        groups=call.access.groups,
    )
    hits = _together(rankings, count)
    return {
        "object": "vector_store.search_results.page",
        "search_query": list(questions),
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
    file_id = call.body.text("file_id")
    if not file_id:
        raise invalid("file_id: expected the id of an uploaded file", "file_id")
    _refuse_chunking(call.body)
    return _put(call, file_id, attributes_of(call.body, "attributes"))


def change_member(call: Call) -> dict[str, Any]:
    """Give a file other attributes; it is indexed anew, from the KV that is there."""
    attributes = attributes_of(call.body, "attributes")
    get_member(call)
    return _put(call, call.path["file"], attributes)


def list_members(call: Call) -> dict[str, Any]:
    """The files of a vector store, newest first."""
    status, library = _filter(call), call.library
    shelf = library.shelf(call.access, call.path["store"])
    members = library.members(call.access, shelf.name, status=status)
    rows = [_shown_member(library, it) for it in members]
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
    body = call.body
    _refuse_chunking(body)
    given = body.values.get("files")
    files: list[tuple[str, dict[str, Any]]] = []
    if given is None:
        attributes = attributes_of(body, "attributes")
        files = [(it, attributes) for it in body.texts("file_ids", most=_MOST_FILES)]
    elif isinstance(given, list) and all(isinstance(it, dict) for it in given):
        for one in map(Body, given[: _MOST_FILES + 1]):
            _refuse_chunking(one)
            files.append((one.text("file_id") or "", attributes_of(one, "attributes")))
    names = {name for name, _ in files}
    wrong = [it for it in names if not 0 < len(it) <= _ID_CHARACTERS]
    if wrong or not 0 < len(files) <= _MOST_FILES or len(names) < len(files):
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
    told = {
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
        told["expires_after"] = {"anchor": _ANCHOR, "days": row.days}
    return told


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
    counts = {"documents": 1, "chunks": entry.num_chunks, "tokens": entry.num_tokens}
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


# What clients send


def _name(body: Body) -> str | None:
    """That of a vector store; None where the body has none."""
    name = body.text("name")
    if name is not None and len(name) > _NAME_CHARACTERS:
        raise invalid(
            f"name has {len(name)} characters: expected at most {_NAME_CHARACTERS}", "name"
        )
    return name


def _days(body: Body) -> int | None:
    """Those after which a vector store expires; None: never."""
    given = body.table("expires_after")
    if given is None:
        return None
    if given.get("anchor") != _ANCHOR:
        raise body.wrong("expires_after", f'{{"anchor": "{_ANCHOR}", "days": 1 to {_MOST_DAYS}}}')
    days = Body(given).integer("days", 1, _MOST_DAYS)
    if days is None:
        raise body.wrong("expires_after", f"days, 1 to {_MOST_DAYS}")
    return days


def _chunking(body: Body) -> dict[str, int | None]:
    """Settings of how a vector store cuts; {} where the client names none."""
    strategy = body.table("chunking_strategy")
    if strategy is None or strategy.get("type") == "auto":
        return {}
    static = strategy.get("static")
    if strategy.get("type") != "static" or not isinstance(static, dict):
        raise body.wrong("chunking_strategy", '{"type": "auto"} or {"type": "static", "static"}')
    sizes = Body(static)
    size = sizes.integer("max_chunk_size_tokens", _LEAST_CHUNK, _MOST_CHUNK)
    if size is None:
        raise body.wrong("chunking_strategy", "max_chunk_size_tokens in static")
    overlap = sizes.integer("chunk_overlap_tokens", 0, size - 1)
    return {"chunk_tokens": size, "overlap": overlap}


def _filter(call: Call) -> str | None:
    """The status of the files that are listed; None: any."""
    status = call.query.get("filter")
    if status is not None and status not in STATUSES:
        raise invalid(f"filter={status[:80]!r}: expected one of {', '.join(STATUSES)}", "filter")
    return status


def _refuse_chunking(body: Body) -> None:
    """A vector store cuts all its files in one way, so that equal texts have equal KV."""
    if _chunking(body):
        raise invalid(
            "chunking_strategy: a vector store cuts all files in the way it was made with; name it "
            "when the vector store is created",
            "chunking_strategy",
        )
