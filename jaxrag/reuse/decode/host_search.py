"""The host's side of decoding: indexes over the keys of requests, their search, and attention.

A compiled step asks through callbacks, one or two a layer. It knows requests by a number, so that
nothing of a request is part of a compiled program. Compiled programs name a ``HostSearch`` and
outlive the model; it holds nothing of one. On a mesh every device asks the search of its process,
for its rows and its KV heads.

Where K and V are on the device, ``find`` tells which keys to read. Where they are in host memory,
``start`` begins the host's part of attention and ``wait`` returns it (RetrievalAttention section
3.3, arXiv:2409.10516).
"""

import dataclasses
import functools
import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh

from jaxrag.base.config import ModelConfig, RopeConfig
from jaxrag.base.sharding import by_device, device_axes
from jaxrag.base.types import Array, HostArray
from jaxrag.kv.store.layout import WHOLE, HeadShare
from jaxrag.reuse.attention_index import (
    AttentionIndex,
    Exact,
    FoundKeys,
    Searcher,
    build,
    open_index,
    rotated,
)
from jaxrag.reuse.decode.checks import RecallChecks
from jaxrag.reuse.decode.far.layer import FarAnswer, FarLayer, HostLayer, HostTask
from jaxrag.reuse.decode.far.tickets import HostWork, crew
from jaxrag.reuse.decode.footprint import Account, recall_of
from jaxrag.reuse.decode.parts import Part
from jaxrag.reuse.decode.stored import StoredIndexes

NO_REQUEST = -1  # the number of a padding row
_DROPPED = 1024  # tickets without requests that may still be waited for
_SMALL = 16384  # keys to score, below which handing them to threads costs more than it saves

Attention = tuple[HostArray, HostArray]  # out [B, K, G, H] and lse [B, K, G], float32


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Where the time of the host's part of attention went.

    Attributes:
      search: of all threads, looking for keys.
      attend: of all threads, attention to what was found.
      elapsed: from every ``start`` to the end of its work.
      waited: for which ``wait`` blocked; what of ``elapsed`` was not hidden behind other work.
    """

    search: float = 0.0
    attend: float = 0.0
    elapsed: float = 0.0
    waited: float = 0.0


@dataclasses.dataclass(eq=False)
class _Request:
    """What is held of a request in decode: of every layer so far, and its account."""

    layers: list[tuple[Sequence[Part], RecallChecks | None]] = dataclasses.field(
        default_factory=list
    )
    memory: dict[int, Sequence[HostLayer]] = dataclasses.field(default_factory=dict)  # by part
    far: dict[int, Sequence[FarLayer | None]] = dataclasses.field(default_factory=dict)
    account: Account = dataclasses.field(default_factory=Account)


@dataclasses.dataclass(eq=False)
class _Begun:
    """The work of some rows in one layer."""

    numbers: set[int]
    ticket: HostWork
    out: HostArray
    lse: HostArray
    answers: list[tuple[int, FarAnswer]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class HostSearch:
    """The indexes of all requests in decode with one model, and what they cost, by request number.

    Attributes:
      threads: that search and attend; None: as many as there are cores.
      measure: count the keys that are scanned and compare what was found with an exact search:
        slower; where keys are on the device also with one more copy of those indexed then.
      documents: indexes that chunks were stored with.
      mesh: the devices that ask; None: one.
      share: of the KV heads, that is searched here.
    """

    threads: int | None = None
    measure: bool = False
    documents: StoredIndexes = dataclasses.field(default_factory=StoredIndexes)
    mesh: Mesh | None = None
    share: HeadShare = WHOLE
    _requests: dict[int, _Request] = dataclasses.field(default_factory=dict)
    _numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    _begun: dict[int, _Begun] = dataclasses.field(default_factory=dict)
    _dropped: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    _tickets: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    _pool: ThreadPoolExecutor | None = None
    _seconds: Seconds = Seconds()

    def admit(self) -> int:
        """A number for a request, until it is released."""
        number = next(self._numbers)
        self._requests[number] = _Request()
        return number

    def release(self, numbers: Iterable[int]) -> None:
        """The requests are done: what was made for them goes, and their accounts.

        Work that is under way for none but released requests is dropped: ``wait`` finds nothing.
        """
        for number in numbers:
            self._requests.pop(number, None)
        with self._lock:
            for ticket, begun in list(self._begun.items()):
                if begun.numbers and not self._requests.keys() & begun.numbers:
                    begun.ticket.drop()
                    self._dropped[ticket] = self._begun.pop(ticket).out.shape
            while len(self._dropped) > _DROPPED:
                self._dropped.pop(next(iter(self._dropped)))

    def close(self) -> None:
        """Nobody asks any more: indexes that were kept go, and the threads end.

        Compiled programs name this object and outlive the model whose requests it served.
        """
        self.release(list(self._requests))
        self.documents = StoredIndexes()
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def account_of(self, numbers: Iterable[int]) -> Account:
        """What these requests cost so far, summed; KeyError for one that was released."""
        return sum((self._requests[number].account for number in numbers), Account())

    @property
    def seconds(self) -> Seconds:
        """What ``wait`` returned so far took, of all requests."""
        return self._seconds

    @property
    def crew(self) -> ThreadPoolExecutor:
        """The threads that search, attend and build."""
        with self._lock:
            if self._pool is None:
                self._pool = crew(self._workers)
            return self._pool

    @property
    def _workers(self) -> int:
        return self.threads or os.cpu_count() or 1

    def begin(
        self,
        number: int,
        layers: Sequence[FarLayer | None],
        memory: Sequence[HostLayer] = (),
        part: int = 0,
    ) -> None:
        """The request attends on the host from now on, with what its rule made of every layer.

        New tokens are written to ``memory``. Both are of one part of the KV heads (``parts``).
        """
        request = self._requests[number]
        request.far[part], request.memory[part] = layers, memory
        request.account = sum((each.account for each in layers if each), request.account)

    def attend(self, number: int, layer: int, q: HostArray, position: int) -> Attention:
        """``start`` and ``wait`` of one request: q [K, G, H] to out [K, G, H] and lse [K, G]."""
        out, lse = self.wait(self.start(layer, np.array([number]), q[None], np.array([position])))
        return out[0], lse[0]

    def write(
        self,
        layer: int,
        numbers: HostArray,
        k: HostArray,
        v: HostArray,
        position: HostArray,
        part: int = 0,
    ) -> None:
        """Put K, at its position, and V [B, K, H] of the newest token of every row into memory.

        ``numbers`` and ``position`` as ``start`` takes them.
        """
        for row, number in enumerate(numbers):
            if number == NO_REQUEST or position[row] < 0:
                continue
            memory = self._requests[int(number)].memory[part][layer]
            at = memory.rows[position[row]]
            memory.k[:, at], memory.v[:, at] = k[row], v[row]

    def start(
        self,
        layer: int,
        numbers: HostArray,
        q: HostArray,
        position: HostArray,
        part: int = 0,
    ) -> int:
        """Begin attention to what is outside the static pattern, of the newest token of every row.

        Does not block, and does not fail: ``wait`` raises what went wrong. Little work is done at
        once, other is handed to threads.

        Args:
            numbers: [B] of the requests; NO_REQUEST is a padding row.
            q: [B, K, G, H] float32 before rotation, with YaRN's factor.
            position: [B] of the tokens; a row with a negative one is done, and gets nothing.
            part: of the KV heads, whose q this is.

        Returns:
            A ticket for ``wait``.
        """
        q = np.array(q, np.float32)  # the caller's may be gone when it is read
        out, lse = np.zeros_like(q), np.full(q.shape[:-1], -np.inf, np.float32)
        begun = _Begun(set(), HostWork(), out, lse)
        try:
            numbers, position = np.asarray(numbers), np.asarray(position)
            rows = [
                (row, int(number), far)
                for row, number in enumerate(numbers)
                if number != NO_REQUEST and position[row] >= 0
                for far in [self._far(int(number), layer, part)]
                if far is not None
            ]
            begun.numbers |= {number for _, number, _ in rows}
            pieces = -(-self._workers // max(1, len(rows) * q.shape[1]))
            todo: list[HostTask] = []
            for row, number, far in rows:
                answer = FarAnswer(begun.out[row], begun.lse[row], [], [] if self.measure else None)
                begun.answers.append((number, answer))
                todo += far.tasks(q[row], int(position[row]), answer, pieces)
            work = sum(far.work(int(position[row])) for row, _, far in rows)
            if work < _SMALL or self._workers == 1:
                begun.ticket.run(todo)
            else:
                begun.ticket.submit(todo, self.crew, self._workers)
        except Exception as error:
            begun.ticket.fail(error)
        with self._lock:
            ticket = next(self._tickets)
            self._begun[ticket] = begun
        return ticket

    def _far(self, number: int, layer: int, part: int) -> FarLayer | None:
        request = self._requests.get(number)
        if request is None or layer >= len(request.far.get(part, ())):
            raise RuntimeError(f"request {number} has no layer {layer} on the host")
        return request.far[part][layer]

    def wait(self, ticket: int) -> Attention:
        """What ``start`` began: out [B, K, G, H] and lse [B, K, G], float32.

        0 and -inf for rows without a request and where nothing is outside the static pattern.
        Raises what went wrong there. A ticket is good for one call.
        """
        with self._lock:
            if (shape := self._dropped.pop(ticket, None)) is not None:
                return np.zeros(shape, np.float32), np.full(shape[:-1], -np.inf, np.float32)
            begun = self._begun.pop(ticket)
        try:
            begun.ticket.wait()
        finally:
            self._add_seconds(begun)
        with self._lock:  # devices ask at the same time
            for number, answer in begun.answers:
                request = self._requests.get(number)
                if request is not None:
                    counted = [*(answer.counted or ()), Account(notes=tuple(answer.notes))]
                    request.account = sum(counted, request.account)
        return begun.out, begun.lse

    def _add_seconds(self, begun: _Begun) -> None:
        spent = [pair for _, answer in begun.answers for pair in answer.spent]
        with self._lock:
            before = self._seconds
            self._seconds = Seconds(
                before.search + sum(search for search, _ in spent),
                before.attend + sum(attend for _, attend in spent),
                before.elapsed + begun.ticket.elapsed,
                before.waited + begun.ticket.waited,
            )

    def open(
        self,
        number: int,
        made: Sequence[AttentionIndex | Searcher],
        keys: HostArray | None,
        positions: HostArray,
        offset: int = 0,
    ) -> Part:
        """Indexes of some keys of one layer of a request.

        Args:
            keys: [K, S, H] that they were built over for this request, rotated to their positions;
                None of indexes that were stored.
            positions: [S] int32 where the keys are in the prompt; -1: not to be found.
            offset: a key at position p is rotated to p less this.
        """
        opened = [index if isinstance(index, Searcher) else open_index(index) for index in made]
        exact: list[Searcher] = []
        if self.measure:
            compared = [index.all_keys() for index in opened] if keys is None else keys
            exact = [open_index(build(head, None, Exact("float32"))) for head in compared]
        part = Part(opened, positions, offset, exact)
        self._requests[number].account += part.account(stored=keys is None)
        return part

    def note(self, number: int, text: str) -> None:
        """Why an index of a request was not used."""
        self._requests[number].account += Account(notes=(text,))

    def add_layer(
        self, number: int, parts: Sequence[Part], checks: RecallChecks | None = None
    ) -> None:
        """The next layer of a request: its parts, which have no position in common.

        ``checks`` of their searches while the answer grows; None: there are none.
        """
        self._requests[number].layers.append((parts, checks))

    def find(
        self, numbers: Array, layer: Array, q: Array, position: Array, k: int, config: ModelConfig
    ) -> Array:
        """Positions of the best k keys for q [B, K, G, H] before rotation: [B, K, G, k] int32.

        -1 where there are fewer. ``numbers`` [B] are the requests', ``position`` [B] the queries'.
        Runs inside a compiled program; search is on the host.
        """

        def search(share: Any, numbers: Any, layer: Any, q: Any, position: Any) -> HostArray:
            q, position, at = np.asarray(q), np.asarray(position), int(layer)
            first, rope = self.first_head(int(share), q.shape[1]), config.rope_of(at)
            return self._search(at, first, np.asarray(numbers), q, position, k, rope)

        def on_device(share: Array | int, *arrays: Array) -> Array:
            shape = jax.ShapeDtypeStruct((*arrays[2].shape[:3], k), jnp.int32)
            found: Array = io_callback(search, shape, share, *arrays, ordered=False)
            return found

        rows, heads = device_axes("batch"), device_axes("batch", "kv_heads")
        split = (rows, device_axes(), heads, rows)
        return by_device(self.mesh, on_device, split, heads)(numbers, layer, q, position)

    def first_head(self, share: int, count: int) -> int:
        """Where a device's ``count`` heads begin among those that are searched here.

        ``share`` is the number of its run of KV heads.
        """
        return self.part(share) * count

    @property
    def parts(self) -> int:
        """How many runs of KV heads are searched here, each for devices of its own."""
        return 1 if self.mesh is None else self.mesh.devices.shape[-1] // self.share.ways

    def part(self, share: int) -> int:
        """Which of them a device's is; ``share`` is the number of its run among all."""
        return share - self.share.rank * self.parts

    def _search(
        self,
        layer: int,
        first: int,
        numbers: HostArray,
        q: HostArray,
        position: HostArray,
        k: int,
        rope: RopeConfig,
    ) -> HostArray:
        out = np.full((*q.shape[:3], k), -1, np.int32)
        todo: list[HostTask] = []
        counted: list[tuple[int, Account]] = []
        for row, number in enumerate(numbers):
            if number == NO_REQUEST or position[row] < 0:  # a padding row, or one that is done
                continue
            parts, checks = self._requests[int(number)].layers[layer]
            check = None if checks is None else (checks, int(position[row]))
            asked = [
                rotated(q[row], np.full(q.shape[2], position[row] - part.offset), rope)
                for part in parts
            ]
            for at in np.ndindex(q.shape[1:3]) if parts else ():
                where = (first + at[0], at[1])
                mine = [one[at] for one in asked]
                found = (out[row][at], int(number), counted)
                todo.append(functools.partial(self._search_one, parts, mine, where, check, *found))
        ticket = HostWork()
        ticket.submit(todo, self.crew, self._workers)
        ticket.wait()
        with self._lock:  # devices ask at the same time
            for number, account in counted:
                self._requests[number].account += account
        return out

    def _search_one(
        self,
        parts: Sequence[Part],
        asked: Sequence[HostArray],
        at: tuple[int, int],
        check: tuple[RecallChecks, int] | None,
        out: HostArray,
        number: int,
        counted: list[tuple[int, Account]],
    ) -> None:
        """Fill ``out`` [k] with what all parts find for one query head of a request, best first.

        Args:
            asked: [H] for each part.
            at: KV head, and the query head of its group.
            check: those of the layer, and the position of the token.
        """
        k = len(out)
        times = 1 if check is None else int(check[0].times[at])
        if not times:
            ids, scanned = self._scan(parts, asked, at, k)
        else:
            ids, scanned = self._best(parts, asked, at, k, times=times)
            if check is not None and check[0].due(at, check[1]):
                exact_ids, also = self._scan(parts, asked, at, k)
                note = check[0].judge(at, check[1], ids, exact_ids)
                counted.append((number, Account(notes=(note,) if note else ())))
                ids, scanned = exact_ids, scanned + also
        out[: len(ids)] = ids
        if self.measure and all(part.exact for part in parts):
            exact_ids, _ = self._best(parts, asked, at, k, exact=True)
            counted.append((number, recall_of(ids, exact_ids, scanned)))

    def _best(
        self,
        parts: Sequence[Part],
        asked: Sequence[HostArray],
        at: tuple[int, int],
        k: int,
        *,
        exact: bool = False,
        times: int = 1,
    ) -> tuple[HostArray, int]:
        count = self.measure and not exact
        both = zip(parts, asked, strict=True)
        found = [part.best(*at, q, k, count=count, exact=exact, times=times) for part, q in both]
        return _joined(found, k)

    def _scan(
        self, parts: Sequence[Part], asked: Sequence[HostArray], at: tuple[int, int], k: int
    ) -> tuple[HostArray, int]:
        return _joined([part.scan(at[0], q, k) for part, q in zip(parts, asked, strict=True)], k)


def _joined(each: Sequence[FoundKeys], k: int) -> tuple[HostArray, int]:
    """The best k positions of what parts found, best first, and how many keys they scanned."""
    scores = np.concatenate([found.scores for found in each])
    ids = np.concatenate([found.ids for found in each])
    best = ids[np.argsort(-scores, kind="stable")[:k]]
    return best, sum(int(found.scanned) for found in each)
