"""A store as one of several processes sees it that hold one model together.

Every process holds a share of the KV heads of every chunk, puts that and reads that. What becomes
of a chunk is the same for all of them: a read that one is refused is refused to all, and a chunk is
committed once every share of it is written. They agree through ``exchange``, so that all make the
same calls in the same order, from one thread each.
"""

import concurrent.futures
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxrag.base.errors import StoreError
from jaxrag.kv.store.attempts import Attempt, WrittenShard
from jaxrag.kv.store.base import DEFAULT_INFLIGHT_BYTES, Aux, KVStore, NewChunk
from jaxrag.kv.store.chunk_store import ChunkStore
from jaxrag.kv.store.layout import WHOLE, HeadShare
from jaxrag.kv.store.read_through import ReadThrough
from jaxrag.kv.store.reading import Assembled, Lookup, OnMissing, Refused, SomeLayers
from jaxrag.kv.store.record import Provenance, Record
from jaxrag.kv.store.wrapper import StoreWrapper
from jaxrag.kv.store.writer import ChunkWriter, PutResult

T = TypeVar("T")
# What every process passes, by its number: (value) -> values.
Exchange = Callable[[Any], list[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class OwnRead:
    """What one process read of its share, before it is known what the others read.

    Attributes:
      read: its heads; None where the storage failed.
      failed: how.
    """

    read: Assembled | None
    failed: str | None


class SharedStore(StoreWrapper):
    """A process's share of the heads of a store.

    ``layout`` is that of the share. A store that is private to its process holds just that; of any
    other every process reads and writes its own heads.
    """

    def __init__(self, store: KVStore, share: HeadShare, exchange: Exchange) -> None:
        """Share ``store``; the shares of all who exchange are every one of ``share.ways``.

        Raises:
            StoreError: a store that is neither private nor written by several processes, or whose
                format drops tokens.
        """
        if store.layout.drops:
            raise StoreError(
                f"stored={store.layout.stored!r} chooses tokens by all KV heads of a chunk: "
                "expected one process; open it without a mesh over several, or in another format"
            )
        layout = store.layout if store.private else store.layout.of_share(share)
        super().__init__(store, layout)
        if not store.private and not isinstance(store, ChunkStore | ReadThrough):
            raise StoreError(f"{type(store).__name__}: several processes cannot put a chunk in it")
        self.share = share
        self._exchange = exchange

    def lease(self, key: str) -> bool:
        """``KVStore.lease`` of the process that leads, for all of them, which call it together."""
        if self.inner.private:
            return True
        return all(self._exchange(self.inner.lease(key) if self.share.leads else True))

    def release(self, key: str) -> None:
        """``KVStore.release``; of each process on its own."""
        self.inner.release(key)

    def writer(self, max_inflight_bytes: int = DEFAULT_INFLIGHT_BYTES) -> ChunkWriter:
        """A writer that puts at once: all processes exchange in one order."""
        return _DirectWriter(self.put, max_inflight_bytes)

    def get_many(
        self,
        keys: Sequence[str],
        out: NDArray[Any] | None = None,
        *,
        layers: SomeLayers = None,
        on_missing: OnMissing = "raise",
        share: HeadShare = WHOLE,
    ) -> Assembled:
        """``KVStore.get_many`` of this process's heads; refused is what any process was refused.

        Args:
            keys: the same for all processes, as are the arguments that ``KVStore`` describes.
            out: [layers, 2, S, K / ways, H].
            share: all of it; a share of a share is none of the store.

        Raises:
            StoreError: as there, on all processes where one of them raises it; or they ask for
                different chunks.
        """
        if share != WHOLE:
            raise StoreError(f"share={share}: this store is read by the share of {self.share}")
        own = self.read_own(keys, out, layers=layers)
        read = self.agreed(keys, own)
        if read.refused and on_missing == "raise":
            raise next(iter(read.refused.values()))
        return read

    def read_own(
        self,
        keys: Sequence[str],
        out: NDArray[Any] | None = None,
        *,
        layers: SomeLayers = None,
    ) -> OwnRead:
        """The first half of ``get_many``: read this process's heads; on any thread, at any time."""
        mine = WHOLE if self.inner.private else self.share
        read, failed = _attempt(
            lambda: self.inner.get_many(keys, out, layers=layers, on_missing="skip", share=mine)
        )
        return OwnRead(read, failed)

    def agreed(self, keys: Sequence[str], own: OwnRead) -> Assembled:
        """The second half: what all processes read of these keys; all of them call it in one order.

        Raises:
            StoreError: as ``get_many``.
        """
        refused = self._agree(keys, {} if own.read is None else own.read.refused, own.failed)
        assert own.read is not None
        return _without(own.read, refused)

    def _put(self, new: NewChunk) -> PutResult:
        copied = self.inner if isinstance(self.inner, ReadThrough) else None
        store = self.inner if copied is None else copied.remote
        if not isinstance(store, ChunkStore):
            return self._settled(_attempt(lambda: store._put(new)))
        share = self.share
        attempt: Attempt | None = self._led(
            lambda: store.begin(
                new.key,
                new.kv.shape[2] - self.layout.rows,
                new.record,
                ways=share.ways,
                replace=new.replace,
            )
        )
        if attempt is None:
            return PutResult(won=False, attempt=None)
        shard: tuple[WrittenShard | None, str | None] = (None, None)

        def write() -> WrittenShard:
            if copied is not None:
                copied.local.delete([new.key])  # it may be replaced
            return store.put_shard(attempt, share.rank, new.kv)

        if share.writes:
            shard = _attempt(write)
        written = self._exchange(shard)
        error = next((error for _, error in written if error is not None), None)
        if error is not None:
            if share.leads:
                store.abandon(attempt)
            raise StoreError(error)
        shards = [one for one, _ in written if one is not None]
        return self._led(lambda: store.commit(attempt, shards, aux=new.aux))

    def _find(self, keys: Sequence[str]) -> dict[str, Lookup]:
        found, failed = _attempt(lambda: self.inner.find(keys))
        mine = {} if found is None else found
        refused = {key: one for key, one in mine.items() if not isinstance(one, Record)}
        return mine | self._agree(keys, refused, failed)

    def _nearest(self, keys: Sequence[str]) -> dict[str, Lookup]:
        return self._find(keys)

    def _delete(self, key: str) -> bool:
        if self.inner.private:
            return bool(self._settled(_attempt(lambda: self.inner.delete([key]))))
        return bool(self._led(lambda: self.inner.delete([key])))

    def _agree(
        self, keys: Iterable[str], refused: Mapping[str, Refused], failed: str | None
    ) -> dict[str, Refused]:
        """What any process was refused, in the order of ``keys``, or the failure of any."""
        distinct = list(dict.fromkeys(keys))
        asked = hashlib.blake2b("".join(distinct).encode(), digest_size=8).hexdigest()
        said = self._exchange((asked, dict(refused), failed))
        if len({answer[0] for answer in said}) > 1:
            raise StoreError(
                "the processes of one model ask for different chunks: give all of them the same "
                "requests in the same order"
            )
        _raise_first([answer[2] for answer in said])
        everyone: dict[str, Refused] = {}
        for _, theirs, _ in said:
            everyone = theirs | everyone
        return {key: everyone[key] for key in distinct if key in everyone}

    def _led(self, step: Callable[[], Any]) -> Any:
        """The result of what one process does for all; its StoreError is raised by all."""
        mine = _attempt(step) if self.share.leads else None
        value, error = next(one for one in self._exchange(mine) if one is not None)
        _raise_first([error])
        return value

    def _settled(self, mine: tuple[Any, str | None]) -> Any:
        """The result of what every process did for itself; a StoreError is raised by all."""
        _raise_first(self._exchange(mine[1]))
        return mine[0]


class _DirectWriter(ChunkWriter):
    """A writer whose ``submit`` returns when the chunk is put."""

    def submit(
        self,
        key: str,
        kv: NDArray[Any],
        record: Provenance,
        *,
        aux: Aux | None = None,
        replace: bool = False,
    ) -> concurrent.futures.Future[PutResult]:
        """Put the chunk. Raises what the put raises."""
        done: concurrent.futures.Future[PutResult] = concurrent.futures.Future()
        done.set_result(self._put(key, kv, record=record, aux=aux, replace=replace))
        return done

    def __exit__(self, *raised: object) -> None:
        self._threads.shutdown()


def _attempt(step: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result of a step, or the text of its StoreError, to be sent to the others."""
    try:
        return step(), None
    except StoreError as error:
        return None, str(error)


def _raise_first(errors: Iterable[str | None]) -> None:
    text = next((error for error in errors if error is not None), None)
    if text is not None:
        raise StoreError(text)


def _without(read: Assembled, refused: dict[str, Refused]) -> Assembled:
    """What was read but for the refused chunks, the gaps closed."""
    offsets, end = {}, 0
    for key, (start, size) in read.offsets.items():
        if key in refused:
            continue
        if end != start:
            read.kv[:, :, end : end + size] = np.copy(read.kv[:, :, start : start + size])
        offsets[key] = (end, size)
        end += size
    return Assembled(kv=read.kv[:, :, :end], offsets=offsets, refused=refused)
