"""A request in the engine: where it stands, what it holds and what its client was told."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxrag.base.errors import EngineError
from jaxrag.base.types import HostArray
from jaxrag.engine.decoding import FAILED, LaneKey, LaneRows
from jaxrag.engine.loader import Found
from jaxrag.engine.mapping import RequestPlan, RequestState
from jaxrag.engine.progress import Progress, Sink
from jaxrag.engine.request import FinishReason, Request
from jaxrag.engine.scheduler import Ending
from jaxrag.reuse.decode import Decoding


@dataclasses.dataclass(eq=False)
class Swapped:
    """What a request that was set aside had on the device.

    Attributes:
      pages: K and V of its own pages, [L, n, page, K, H] each.
      row: of its lane, and what its rule carried.
    """

    pages: tuple[HostArray, HostArray]
    row: tuple[LaneRows, Decoding | None]


@dataclasses.dataclass(eq=False)
class Live:
    """One request from ``add`` until nothing of it is left.

    Attributes:
      number: names it.
      request: what is asked.
      plan: what it needs.
      lane: that it decodes in; None where a single token is all.
      sink: told of its progress.
      added: when, by the engine's clock; the other times likewise, None before.
      run: counts how often it was begun or set aside; what was started in an earlier run is void.
      found: by key where the chunks came from that were loaded for it.
      state: where its KV lies, once it is mapped.
      tokens: its answer so far, as its client has it.
      read: tokens of this run that were read; fewer than ``tokens`` after it was begun again.
      left: tokens that are still to be run.
      row: its place in the lane.
      search: its number in the host's search.
      ahead: what its selector made of the question before its chunks were there.
      flying: what was started for it and has not come back.
      ended: its client was told the last of it.
      why: it ended.
      strikes: steps that broke while it took part.
    """

    number: int
    request: Request
    plan: RequestPlan
    lane: LaneKey | None
    sink: Sink
    added: float
    run: int = 0
    found: dict[str, Found] = dataclasses.field(default_factory=dict)
    admitted: float | None = None
    ready: float | None = None
    first: float | None = None
    state: RequestState | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    read: int = 0
    left: int = 0
    row: int | None = None
    search: int | None = None
    ahead: Any = None
    flying: int = 0
    ended: bool = False
    why: Ending = "failed"
    strikes: int = 0
    swapped: Swapped | None = None

    def take(self, ids: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """Take what was sampled, up to the end: what is new of it, and why the answer ends here.

        Raises EngineError for logits that hold a NaN, and for an answer that differs from what was
        told before the request was begun again.
        """
        new: list[int] = []
        for token_id in ids:
            if token_id == FAILED:
                raise EngineError(
                    f"the logits of token {self.read} hold a NaN; check the model's weights, and "
                    "encode stored KV that is no numbers again with jaxrag kb verify --repair"
                )
            if token_id in self.request.eos_ids:
                return new, "stop"
            if self.read < len(self.tokens):
                if self.tokens[self.read] != token_id:
                    raise EngineError(
                        f"token {self.read} came out as {token_id} and was "
                        f"{self.tokens[self.read]} before the engine was restarted; ask again"
                    )
            else:
                self.tokens.append(token_id)
                new.append(token_id)
            self.read += 1
            if self.read == self.request.max_new_tokens:
                return new, "length"
        return new, None

    def again(self) -> None:
        """Begin from the start; what was told stays told."""
        self.run += 1
        self.state = self.row = self.swapped = None
        self.read = self.left = self.flying = 0
        self.found = {}
        self.plan.gone.clear()

    def tell(self, progress: Progress) -> bool:
        """Tell the client; True where it wants no more tokens.

        A client that fails ends its request, and no other.
        """
        return bool(self.sink(progress))
