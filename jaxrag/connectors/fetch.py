"""Stored parts read, verified and placed before they are promised to an engine.

An engine is told of a part when its bytes lie in memory, checked and turned to their places. So
what is damaged, missing or late never fails behind a promise: the prompt is computed instead.
"""

import dataclasses
import mmap
import os
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrag.base.config import RopeConfig
from jaxrag.base.errors import ChunkCorrupt, ChunkMissing, JaxragError, StoreError
from jaxrag.connectors.plan import PartsPlan
from jaxrag.connectors.rotation import place, rope_table
from jaxrag.connectors.settings import ConnectorSettings
from jaxrag.kv.store.base import KVStore

_HANGING = 8  # reads beyond their deadline at once: no further one is begun


class NotReadyError(JaxragError):
    """Parts that will not be there in time; ``reason`` is one word for counters."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class SharedArray:
    """KV in memory that other processes of this machine map.

    Attributes:
      path: of its file, below /proc: it has no name on a disk, and ends with its process.
      shape: of the array.
      dtype: its name.
      skip: tokens in front that are not wanted.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    skip: int

    def open(self) -> NDArray[Any]:
        """The array, mapped; [L, 2, T, K, H]."""
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return np.frombuffer(mapped, self.dtype).reshape(self.shape)[:, :, self.skip :]


@dataclasses.dataclass
class Fetch:
    """The parts of one request, on their way or in memory."""

    start: int  # the first token
    nbytes: int
    begun: float
    done: "Future[NDArray[Any]]" = dataclasses.field(default_factory=Future)
    file: int | None = None  # descriptor, where other processes map it
    skip: int = 0
    taken: bool = False  # by the engine, which needs it again only after a preemption
    loading: bool = False  # taken, and not yet said to be written
    ended: bool = False  # its request is over


class Fetches:
    """Reads the parts of requests in threads, within a time and an amount of memory."""

    def __init__(
        self, store: KVStore, rope: RopeConfig, settings: ConnectorSettings, *, shared: bool
    ) -> None:
        """Use ``ready`` from one thread.

        Args:
          store: of the parts.
          rope: of the model.
          settings: threads, deadline and host_bytes.
          shared: whether other processes map what was read.
        """
        self._store, self._rope = store, rope
        self._settings, self._shared = settings, shared
        self._held: dict[str, Fetch] = {}  # by request, the oldest first
        self._abandoned: list[Fetch] = []  # not waited for; their threads still read

    def ready(self, name: str, plan: PartsPlan, start: int) -> bool:
        """Whether the tokens start .. plan.end - 1 of a request lie in memory; begins it if not.

        Raises:
          NotReadyError: too late, too large, or the store does not answer any more.
          ChunkMissing, ChunkCorrupt, StoreError: as the store does.
        """
        one = self._held.get(name)
        if one is None or one.start > start:  # the engine has let go of pages since
            self.drop(name)
            one = self._begin(name, plan, start)
        if one is None or not one.done.done():
            if one is not None and time.monotonic() - one.begun > (most := self._settings.deadline):
                raise NotReadyError("late", f"the store took more than {most:g} s")
            return False
        one.done.result()
        return True

    def take(self, name: str, start: int) -> "NDArray[Any] | SharedArray":
        """What was read, [L, 2, tokens from start on, K, H]; kept until ``loaded``."""
        fetch = self._held[name]
        fetch.taken = fetch.loading = True
        skip = start - fetch.start
        kv = fetch.done.result()
        if fetch.file is None:
            return kv[:, :, skip:]
        whole = self._store.layout.shape(kv.shape[2] + fetch.skip)
        path = f"/proc/{os.getpid()}/fd/{fetch.file}"
        return SharedArray(path, whole, str(kv.dtype), fetch.skip + skip)

    def seconds(self, name: str) -> float:
        """Since the parts of a request were begun to be read."""
        return time.monotonic() - self._held[name].begun

    def loaded(self, name: str) -> None:
        """The engine has written what it took: it may be let go when room is needed."""
        fetch = self._held.get(name)
        if fetch is not None:
            fetch.loading = False
            if fetch.ended:
                self.drop(name)

    def end(self, name: str) -> None:
        """The request is over; what it is writing is kept until it has."""
        fetch = self._held.get(name)
        if fetch is not None:
            fetch.ended = True
            if not fetch.loading:
                self.drop(name)

    def drop(self, name: str) -> None:
        """Let go of a request's parts, or of the wish for them."""
        fetch = self._held.pop(name, None)
        if fetch is None:
            return
        if fetch.done.done():
            _close(fetch)
        else:
            self._abandoned.append(fetch)

    def close(self) -> None:
        """Let go of everything; reads that hang are not waited for."""
        for name in list(self._held):
            self.drop(name)

    def _begin(self, name: str, plan: PartsPlan, start: int) -> Fetch | None:
        """Begin to read; None where there is no thread or no room at present."""
        need = self._store.layout.nbytes(plan.end - _parts_from(plan, start)[0])
        room, most = self._settings.host_bytes, self._settings.threads
        if need > room:
            raise NotReadyError("size", f"{need} bytes of parts: host_bytes={room}")
        for ended in [fetch for fetch in self._abandoned if fetch.done.done()]:
            self._abandoned.remove(ended)
            _close(ended)
        held = [*self._held.values(), *self._abandoned]
        reads = [time.monotonic() - ended.begun for ended in held if not ended.done.done()]
        hanging = sum(seconds > self._settings.deadline for seconds in reads)
        if hanging >= _HANGING:
            raise NotReadyError("late", "the store does not answer")
        if len(reads) - hanging >= most:
            return None
        over = sum(ended.nbytes for ended in held) + need - room
        for other, fetch in list(self._held.items()):
            if over > 0 and fetch.taken and not fetch.loading:
                over -= fetch.nbytes
                self.drop(other)
        if over > 0:
            return None
        ended = self._held[name] = Fetch(start, need, time.monotonic())
        # A daemon: what hangs at a store must not keep the engine from ending.
        threading.Thread(target=self._run, args=(ended, plan, start), daemon=True).start()
        return ended

    def _run(self, fetch: Fetch, plan: PartsPlan, start: int) -> None:
        try:
            fetch.done.set_result(self._read(fetch, plan, start))
        except BaseException as error:
            fetch.done.set_exception(error)

    def _read(self, fetch: Fetch, plan: PartsPlan, start: int) -> NDArray[Any]:
        first, parts = _parts_from(plan, start)
        fetch.skip = start - first
        out = self._room(fetch, self._store.layout.shape(plan.end - first))
        keys = [key for key, _ in parts]
        repeats = len(set(keys)) < len(keys)  # a part that stands twice is read once
        read = self._store.get_many(keys, None if repeats else out)
        at = 0
        for key, tokens in parts:
            begin, size = read.offsets[key]
            if size != tokens:
                raise ChunkCorrupt(f"chunk {key}: holds {size} tokens, expected {tokens}")
            if repeats:
                out[:, :, at : at + size] = read.kv[:, :, begin : begin + size]
            at += tokens
        table = rope_table(self._rope, 0, 1 << plan.end.bit_length())  # few lengths, all kept
        place(out[:, 0], table[:, first : plan.end], self._rope)
        return out[:, :, fetch.skip :]

    def _room(self, fetch: Fetch, shape: tuple[int, ...]) -> NDArray[Any]:
        dtype = self._store.layout.numpy_dtype
        if not self._shared:
            return np.empty(shape, dtype)
        fetch.file = os.memfd_create("jaxrag")
        os.ftruncate(fetch.file, fetch.nbytes)
        return np.frombuffer(mmap.mmap(fetch.file, fetch.nbytes), dtype).reshape(shape)


def reason_of(error: JaxragError) -> str:
    """One word for counters."""
    if isinstance(error, NotReadyError):
        return error.reason
    words = {ChunkMissing: "missing", ChunkCorrupt: "damaged"}
    return next((word for kind, word in words.items() if isinstance(error, kind)), "store")


def _parts_from(plan: PartsPlan, start: int) -> tuple[int, list[tuple[str, int]]]:
    """Where the part with the token ``start`` begins, and the parts from it on."""
    at = 0
    for number, (_, tokens) in enumerate(plan.parts):
        if at + tokens > start:
            return at, list(plan.parts[number:])
        at += tokens
    raise StoreError(f"token {start} is behind the parts, which end at {plan.end}")


def _close(one: Fetch) -> None:
    if one.file is not None:
        os.close(one.file)
