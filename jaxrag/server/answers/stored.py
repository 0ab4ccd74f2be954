"""Responses that are kept, as long as all that they were made from is there."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrag.server.errors import Problem, not_found
from jaxrag.server.state.registry import RESPONSE_SECONDS, Ground, ResponseRow
from jaxrag.server.state.state import ServerState
from jaxrag.server.tenants import Access

_GONE = (
    f"not stored, is over {RESPONSE_SECONDS // 86400} days old, or a document that it was made "
    "from left"
)
_ITEM = re.compile("[a-z]{2,3}_([0-9a-f]{32})(_[0-9]+)?")


def keeps_responses(state: ServerState, access: Access) -> bool:
    """Whether responses to this key are kept: it may write, and no groups limit it."""
    keeps = state.settings.data is not None
    return keeps and access.documents == "write" and access.groups is None


def kept_response(state: ServerState, access: Access, response_id: str) -> ResponseRow:
    """A response of the tenant; waits for the disk.

    Problem 404 for others, and for one that was made from what left or may not be read; the first
    of these is forgotten.
    """
    if (row := _kept(state, access, response_id)) is None:
        raise not_found(f"there is no response {response_id[:80]!r}: it was {_GONE}")
    return row


def kept_items(
    state: ServerState, access: Access, item_ids: Iterable[str]
) -> tuple[dict[str, Mapping[str, Any]], list[Ground]]:
    """Items of responses that are kept, by their ids, and what these were made from.

    Waits for the disk. Problem 404 for an item of none.
    """
    rows: dict[str, ResponseRow | None] = {}
    items: dict[str, Mapping[str, Any]] = {}
    for item_id in item_ids:
        if named := _ITEM.fullmatch(item_id):
            response_id = f"resp_{named[1]}"
            if response_id not in rows:
                rows[response_id] = _kept(state, access, response_id)
            if row := rows[response_id]:
                items |= {item["id"]: item for item in row.body["response"]["output"]}
        if item_id not in items:
            what = f"there is no item {item_id[:80]!r}: its response was {_GONE}; send the item"
            raise not_found(what, "input")
    return items, [ground for row in rows.values() if row for ground in row.grounds]


def _kept(state: ServerState, access: Access, response_id: str) -> ResponseRow | None:
    registry = state.library.registry
    rows = registry.responses(access.tenant, response_id)
    for row in rows if keeps_responses(state, access) else ():
        if row.created < registry.clock() - RESPONSE_SECONDS:
            break
        served = [ground.store for ground in row.grounds if ground.store in state.knowledge_bases]
        if not all(map(access.may_read, served)):
            break
        if all(_is_current(state, access, ground) for ground in row.grounds):
            return row
        registry.remove_responses([response_id])
    return None


def _is_current(state: ServerState, access: Access, ground: Ground) -> bool:
    try:
        base = state.library.knowledge_base(access, ground.store, uses=False)
    except Problem:
        return False
    return base.holds(ground.chunk_ids, ground.content_ids)


def store_id(state: ServerState, access: Access, name: str) -> str:
    """The id of the vector store that ``Library.knowledge_base`` finds under a name."""
    if name in state.knowledge_bases and access.may_read(name):
        return name
    return next((it.id for it in state.library.named(access, name)), name)
