"""Searches that are checked while an answer grows, so that none of its heads loses what it wants.

What chooses a search's effort is known before the answer is. A head may want other keys for the
answer than for anything in the prompt. So some tokens are searched exactly as well. A query head
whose index finds too little of that is searched with more effort, and scanned if that falls short.
"""

import dataclasses

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.reuse.attention_index import Spec
from jaxrag.reuse.attention_index.spec import effort_of

_FIRST = 4  # tokens that are all checked, of an answer and behind a change of the effort
_EVERY = 16  # of those behind them one in so many
_LATER, _SELDOM = 64, 64  # behind so many tokens of an answer one in so many
_MOST = 4  # times the effort that was chosen, doubled until then
_SPARED = 0.1  # of one check's keys: a few checks say little, many of them what is true
_SLACK = 0.05  # below the target before a head is scanned


@dataclasses.dataclass(eq=False)
class RecallChecks:
    """The checks of one layer of a request.

    Each query head is judged by its own tokens alone: what it gets does not depend on what else is
    in the batch. The heads of a token may be judged in parallel threads.

    Attributes:
      start: position of the first generated token.
      target: share of the best keys that a head's index is to find.
      checked: [K, G] tokens that were, so far with this effort.
      found: [K, G] share of the wanted keys, summed over these.
      times: [K, G] what the effort of a search is multiplied by; 0 is a scan.
      until: [K, G] position before which every token is checked.
    """

    start: int
    target: float
    checked: HostArray
    found: HostArray
    times: HostArray
    until: HostArray

    @classmethod
    def of(cls, spec: Spec, start: int, heads: tuple[int, int]) -> "RecallChecks | None":
        """For indexes [K, G] that chose their effort; None where ``spec`` says what it is."""
        if effort_of(spec) is not None:
            return None
        target = getattr(spec, "target_recall", 0.95)
        checked, once = np.zeros(heads, np.int64), np.ones(heads, np.int64)
        until = np.full(heads, start + _FIRST)
        return cls(start, target, checked, np.zeros(heads), once, until)

    def due(self, at: tuple[int, int], position: int) -> bool:
        """Whether a query head is searched exactly as well for the token at a position."""
        behind = position - self.start
        every = _EVERY if behind <= _LATER else _SELDOM
        return bool(position < self.until[at]) or behind % every == 0

    def judge(self, at: tuple[int, int], position: int, found: HostArray, exact: HostArray) -> str:
        """Count what an index found [n] of the keys that an exact search gives [m]; -1 is none.

        Returns a note where the head is scanned from here on, else nothing.
        """
        exact = exact[exact >= 0]
        self.checked[at] += 1
        self.found[at] += np.isin(exact, found).mean() if len(exact) else 1.0
        last = self.times[at] == _MOST
        least = self.target - _SLACK if last else self.target
        if self.found[at] + _SPARED >= least * self.checked[at]:
            return ""
        if last and position + 1 < self.until[at]:  # its first tokens are near one another
            return ""
        if not last:
            self.times[at], self.until[at] = 2 * self.times[at], position + 1 + _FIRST
            self.checked[at] = self.found[at] = 0
            return ""
        self.times[at] = 0
        return (
            f"exact: some query heads from some token on, as their indexes found less than "
            f"{least:.2f} of the best {len(exact)} keys in this answer"
        )
