"""A vector store as a tenant sees it, and what it is told where it may not use one."""

import dataclasses
import datetime

from jaxrag.server.errors import forbidden, invalid, not_found
from jaxrag.server.state.registry import StoreRow
from jaxrag.server.tenants import Access


@dataclasses.dataclass(frozen=True)
class Shelf:
    """A vector store that a tenant may use, of its own or served to several.

    Attributes:
      name: what requests call it: an id, or the name of a served knowledge base.
      row: what the registry knows of it; None: it is served.
      writes: whether the tenant may change its documents.
      expired: its time is over, and it holds nothing any more.
    """

    name: str
    row: StoreRow | None
    writes: bool
    expired: bool = False

    @property
    def own(self) -> StoreRow:
        """What the registry knows of it. Problem 403 for one that is served."""
        if self.row is None:
            raise forbidden(
                f"the knowledge base {self.name!r} is served from its own folder; remove documents "
                "of it, or stop serving it"
            )
        return self.row


def check_reads(access: Access) -> None:
    """Problem 403 for a key that may not see files."""
    if access.documents == "none":
        raise forbidden("this key may not see files; ask for one that may")
    if access.groups is not None:  # which of them may read a file is known of its documents only
        raise forbidden(
            "whoever is limited to groups may not see files as they were uploaded; "
            "ask the vector stores"
        )


def no_member(store: str, file_id: str) -> Exception:
    """The problem of a file that is not in a vector store."""
    return not_found(f"there is no file {file_id!r} in the vector store {store!r}")


def expired(row: StoreRow) -> Exception:
    """The problem of a vector store whose time is over."""
    last = datetime.datetime.fromtimestamp(row.active, datetime.UTC)
    return invalid(
        f"the vector store {row.id!r} expired, as nobody used it for {row.days} days after "
        f"{last:%Y-%m-%d %H:%M} UTC; make another and put its files into it",
        code="vector_store_expired",
    )
