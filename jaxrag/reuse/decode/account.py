"""What the indexes of some requests cost, and what was asked of them."""

import dataclasses

import numpy as np

from jaxrag.base.types import HostArray


@dataclasses.dataclass(frozen=True)
class Account:
    """What the indexes of some requests cost, and what was asked of them.

    Attributes:
      keys: that were indexed, summed over layers and KV heads.
      index_bytes: of what is built over them on the host, and of copies of the keys.
      stored: of these keys, those in indexes that their chunks were stored with.
      trained: indexes that were built from queries for these requests.
      searches: queries of single heads; this and what follows only where ``HostSearch.measure`` is
        set.
      scanned: keys whose score these computed.
      wanted: keys that an exact search in float32 gives.
      found: how many of the wanted ones were found.
      notes: why an index became an exact scan or was not used, each reason once.
    """

    keys: int = 0
    index_bytes: int = 0
    stored: int = 0
    trained: int = 0
    searches: int = 0
    scanned: int = 0
    wanted: int = 0
    found: int = 0
    notes: tuple[str, ...] = ()

    def __add__(self, other: "Account") -> "Account":
        both = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in dataclasses.fields(self)
        }
        return Account(**{**both, "notes": tuple(dict.fromkeys(both["notes"]))})


def recall_of(found: HostArray, wanted: HostArray, scanned: int) -> Account:
    """Of one search: positions found [n] and wanted [m], -1 where there is none."""
    wanted = wanted[wanted >= 0]
    return Account(
        searches=1,
        scanned=scanned,
        wanted=len(wanted),
        found=int(np.isin(wanted, found).sum()),
    )
