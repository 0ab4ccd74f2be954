"""A store over another one: what a wrapper does not change is the inner store's."""

from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from jaxrag.kv.store.base import KVStore, NewChunk
from jaxrag.kv.store.layout import KVLayout
from jaxrag.kv.store.reading import Lookup, ReadRequest, Refused
from jaxrag.kv.store.record import Record
from jaxrag.kv.store.writer import PutResult


class StoreWrapper(KVStore):
    """A store that hands every call to another; subclasses override what they change."""

    def __init__(self, inner: KVStore, layout: KVLayout | None = None) -> None:
        super().__init__(inner.fingerprint, layout or inner.layout, inner.max_tokens)
        self.inner = inner

    @property
    def writable(self) -> bool:
        """As of the inner store."""
        return self.inner.writable

    @property
    def private(self) -> bool:
        """As of the inner store."""
        return self.inner.private

    def keys(self) -> Iterator[str]:
        """Every key of the inner store, ascending, streamed."""
        return self.inner.keys()

    def records(self) -> Iterator[Record]:
        """Every record of the inner store that can be read."""
        return self.inner.records()

    def _put(self, new: NewChunk) -> PutResult:
        return self.inner._put(new)

    def _find(self, keys: Sequence[str]) -> dict[str, Lookup]:
        return self.inner._find(keys)

    def _nearest(self, keys: Sequence[str]) -> dict[str, Lookup]:
        return self.inner._nearest(keys)

    def _load(self, requests: Sequence[ReadRequest]) -> Sequence[Refused | None]:
        return self.inner._load(requests)

    def _read_aux(self, record: Record, name: str) -> NDArray[Any] | Refused:
        return self.inner._read_aux(record, name)

    def _delete(self, key: str) -> bool:
        return self.inner._delete(key)
