"""What a rule holds of one layer of a request on the host, and what it is given to make it.

The host's half of attention (RetrievalAttention sections 3.3 and algorithm 1, arXiv:2409.10516): K
and V of a request lie in host memory, the static pattern on the device as well. The host attends to
what is outside the static pattern; the device merges both.
"""

import abc
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxrag.base.config import ModelConfig
from jaxrag.base.types import HostArray
from jaxrag.reuse.decode.footprint import Account
from jaxrag.reuse.decode.stored import Carried, StoredIndexes

HostTask = Callable[[], "Sequence[HostTask] | None"]  # returns what is to be done after it


@dataclasses.dataclass(frozen=True, eq=False)
class HostLayer:
    """K and V of one layer of one request in host memory, by position.

    Attributes:
      k: [K, R, H] float32, float16 or bfloat16, the rows of a head contiguous; rows of other
        requests are in there too.
      rows: [S] int32 row of every position, of the prompt and of the tokens to be generated.
      offsets: [S] int32: the key at position p is rotated to p - offsets[p].
    """

    k: HostArray
    v: HostArray
    rows: HostArray
    offsets: HostArray


@dataclasses.dataclass(frozen=True, eq=False)
class HostPrompt:
    """A request whose prompt is in host memory, before its first generated token: one layer of it.

    Attributes:
      position: of the prompt's last token.
      room: at most so many tokens are generated.
      queries: [W, N, H] float32 before rotation, what ``DecodeRule.observe`` asked for; W is 0
        where it asked for nothing.
      positions: [W] int32 of these; -1 where there is no query.
      carried: chunks of the request that may have been stored with indexes; their ``slots`` are
        rows.
      documents: indexes that chunks were stored with; None where there are none.
      part: which of the ``parts`` this is in which the host has the KV heads, one for each run of
        heads that devices have; all else is of this part, but for the documents'.
      sink_logits: [N] float32 of this layer; None where the model has none.
    """

    config: ModelConfig
    layer: HostLayer
    index: int
    position: int
    room: int
    queries: HostArray
    positions: HostArray
    threads: ThreadPoolExecutor
    carried: Sequence[Carried] = ()
    documents: StoredIndexes | None = None
    part: int = 0
    parts: int = 1
    sink_logits: HostArray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class FarAnswer:
    """Where tasks put what they found for one token in one layer.

    Attributes:
      out: [K, G, H] float32, zeros before.
      lse: [K, G] float32, -inf before.
      spent: seconds of search and of attention, in pairs.
      counted: what was scanned and found, where that is measured; None where it is not.
      notes: on heads that are scanned from here on.
    """

    out: HostArray
    lse: HostArray
    spent: list[tuple[float, float]]
    counted: list[Account] | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def searching(self) -> Iterator[None]:
        """The time of the body is spent on search."""
        start = time.perf_counter()
        yield
        self.spent.append((time.perf_counter() - start, 0.0))

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """The time of the body is spent on attention."""
        start = time.perf_counter()
        yield
        self.spent.append((0.0, time.perf_counter() - start))


class FarLayer(abc.ABC):
    """What a rule holds of one layer of one request on the host.

    Attributes:
      account: keys and bytes beside K and V themselves: indexes, tables, copies of keys.
    """

    account: Account

    @abc.abstractmethod
    def tasks(
        self, q: HostArray, position: int, answer: FarAnswer, pieces: int
    ) -> Sequence[HostTask]:
        """What is to be done for the token at ``position``; together it fills the answer.

        Args:
            q: [K, G, H] float32 before rotation, with YaRN's factor.
            pieces: into so many the work of a KV head is cut, where it can be.
        """

    @abc.abstractmethod
    def work(self, position: int) -> int:
        """About how many keys the tasks of a token score, over all KV heads."""


def gathered(
    parts: Sequence[Callable[[], Any]], after: Callable[[list[Any]], Sequence[HostTask] | None]
) -> list[HostTask]:
    """Tasks for ``parts``; the one that ends last also hands all their results to ``after``."""
    results: list[Any] = [None] * len(parts)
    left = len(parts)
    lock = threading.Lock()

    def task(number: int) -> Sequence[HostTask] | None:
        nonlocal left
        results[number] = parts[number]()
        with lock:
            left -= 1
            last = not left
        return after(results) if last else None

    return [functools.partial(task, number) for number in range(len(parts))]
