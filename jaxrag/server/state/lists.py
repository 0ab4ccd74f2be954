"""Lists as OpenAI gives them: a page, where it ends, and whether there is more."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxrag.server.errors import invalid
from jaxrag.server.state.entry import Call

_MOST = 100  # entries of a page
_DIGITS = 9  # of a limit, those in front of it that are 0 among them


def page_of[Row](
    call: Call,
    rows: Sequence[Row],
    name: Callable[[Row], str],
    shown: Callable[[Row], dict[str, Any]],
    *,
    default: int = 20,
    most: int = _MOST,
) -> dict[str, Any]:
    """The page that the query's ``limit``, ``order``, ``after`` and ``before`` ask for.

    Args:
      call: whose query is read.
      rows: all there is, oldest first.
      name: of a row.
      shown: a row as the client sees it.
      default: entries where the query names none.
      most: entries of a page.

    Raises Problem 400.
    """
    asked = call.query
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid(f"order={order[:20]!r}: expected asc or desc", "order")
    text = asked.get("limit", str(default))
    digits = text.isascii() and text.isdigit() and len(text) <= _DIGITS
    if not digits or not 1 <= int(text) <= most:
        raise invalid(f"limit={text[:20]!r}: expected an integer, 1 to {most}", "limit")
    limit = int(text)
    chosen = list(rows) if order == "asc" else list(rows)[::-1]
    names = [name(row) for row in chosen]
    first, last = 0, len(chosen)
    if (after := asked.get("after")) is not None:
        first = _place(names, after, "after") + 1
    if (before := asked.get("before")) is not None:
        last = _place(names, before, "before")
        first = max(first, last - limit) if after is None else first
    page = chosen[first:last][:limit]
    return {
        "object": "list",
        "data": [shown(row) for row in page],
        "first_id": name(page[0]) if page else None,
        "last_id": name(page[-1]) if page else None,
        "has_more": first + len(page) < last,
    }


def _place(names: Sequence[str], entry_id: str, param: str) -> int:
    if entry_id not in names:
        raise invalid(f"{param}={entry_id[:80]!r}: expected the id of an entry of this list", param)
    return names.index(entry_id)
