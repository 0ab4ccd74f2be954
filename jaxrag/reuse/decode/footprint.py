"""What decode rules cost: bytes by where they lie, and what indexes took."""

import dataclasses

import numpy as np

from jaxrag.base.config import ModelConfig
from jaxrag.base.types import HostArray
from jaxrag.reuse.attention_index import Exact, Hnsw, Ivf, QueryLists, Spec
from jaxrag.reuse.attention_index.spec import STORAGE_BYTES

_FAISS_HEADER = 1024  # of a serialised index, at most


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Of one request while its tokens are generated, over all layers.

    Attributes:
      device: keys, values and what the rule keeps beside them on the device.
      host: in host memory: keys, values, and at most so much of indexes and the like.
      bus: that crosses between the two for every generated token.
    """

    device: int = 0
    host: int = 0
    bus: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.device + other.device, self.host + other.host, self.bus + other.bus)


def on_host(config: ModelConfig, tokens: int, pattern: int) -> Bytes:
    """A static pattern on the device; K, V and the place of every token on the host.

    For every token the queries and its K and V go there, and (out, lse) of every query head comes
    back.
    """
    scalars = 4 * config.num_layers * config.num_heads * (2 * config.head_dim + 1)
    return Bytes(
        pattern * config.kv_bytes_per_token,
        tokens * (config.kv_bytes_per_token + 8 + 2 * config.num_layers),  # row, offset, which
        scalars + config.kv_bytes_per_token,
    )


def index_bytes(spec: Spec, config: ModelConfig, keys: int, *, in_place: bool = False) -> int:
    """At most so many bytes do the indexes of that many keys take on the host, over all layers.

    Keys once per KV head in the spec's storage; links and lists per query head or group.
    ``in_place``: K is in host memory already, where scans and lists read it.
    """
    in_place = in_place and (isinstance(spec, Exact | QueryLists) or keys < spec.exact_below)
    per_key = 0 if in_place else config.head_dim * STORAGE_BYTES[spec.storage]
    each = 1 if getattr(spec, "share", "group") == "group" else config.group_size
    indexes = config.num_kv_heads * config.num_layers
    of_keys = keys * indexes
    match spec:
        case Exact():
            return of_keys * per_key
        case _ if keys < spec.exact_below:
            return of_keys * per_key
        case Ivf():
            clusters = spec.clusters or int(4 * np.sqrt(keys))
            lists = clusters * (4 * config.head_dim + 8) + _FAISS_HEADER
            return of_keys * (per_key + 8) + lists * indexes
        case Hnsw():
            return of_keys * (per_key + 2 * 4 * spec.links + 32) + _FAISS_HEADER * indexes
        case QueryLists():
            lists = spec.clusters * 4 * (spec.cap + config.head_dim) * each
            return of_keys * (per_key + (0 if in_place else 4)) + lists * indexes
        case _:
            doubled = 2 if spec.share == "group" else 1
            links = 4 * spec.degree * doubled * each
            return of_keys * (per_key + 4 + links) + 4 * each * indexes


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


def recall_of(found: HostArray, exact: HostArray, scanned: int) -> Account:
    """Positions that a search found [n], and an exact one [m]; -1 where there is none."""
    exact = exact[exact >= 0]
    return Account(
        searches=1,
        scanned=scanned,
        wanted=len(exact),
        found=int(np.isin(exact, found).sum()),
    )
