"""Searches that are checked while an answer grows, so that none of its heads loses what it wants.

What chooses a search's effort is known before the answer is. A head may want other keys for the
answer than for anything in the prompt. So some tokens are searched exactly as well, and a query
head whose index finds too little of that is scanned from there on.
"""

import dataclasses

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.reuse.attention_index import Spec
from jaxrag.reuse.attention_index.spec import effort_of

_FIRST = 4  # generated tokens that are all checked
_EVERY = 32  # of those behind them one in so many
_SLACK = 0.05  # below the target, for so few queries


@dataclasses.dataclass(eq=False)
class RecallChecks:
    """The checks of one layer of a request.

    Each query head is judged by its own tokens alone: what it gets does not depend on what else is
    in the batch. The heads of a token may be judged in parallel threads.

    Attributes:
      start: position of the first generated token.
      least: share of the best keys that a head's index is to find, over all of its checks.
      found: [K, G] of the wanted keys, so far.
      wanted: [K, G] how many these were.
    """

    start: int
    least: float
    found: HostArray
    wanted: HostArray

    @classmethod
    def of(cls, spec: Spec, start: int, heads: tuple[int, int]) -> "RecallChecks | None":
        """For indexes [K, G] that chose their effort; None where ``spec`` says what it is."""
        if effort_of(spec) is not None:
            return None
        least = getattr(spec, "target_recall", 0.95) - _SLACK
        return cls(start, least, np.zeros(heads, np.int64), np.zeros(heads, np.int64))

    def due(self, position: int) -> bool:
        """Whether the token at a position is one of those that are searched exactly as well."""
        step = position - self.start
        return step < _FIRST or step % _EVERY == 0

    def failed(self, kv_head: int, head: int) -> bool:
        """Whether a query head is to be scanned."""
        at = kv_head, head
        return bool(self.found[at] < self.least * self.wanted[at])

    def judge(self, kv_head: int, head: int, found: HostArray, wanted: HostArray) -> str:
        """Count what an index found [n] of the keys that are wanted [m]; -1 is none.

        Returns a note where the head is scanned from here on, else nothing.
        """
        at, wanted = (kv_head, head), wanted[wanted >= 0]
        self.found[at] += np.isin(wanted, found).sum()
        self.wanted[at] += len(wanted)
        if not self.failed(kv_head, head):
            return ""
        return (
            f"exact: some query heads from some token on, as their indexes found less than "
            f"{self.least:.2f} of the best {len(wanted)} keys in this answer"
        )
