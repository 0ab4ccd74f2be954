"""What the engine says of a request: new tokens, why it ended, and what it took."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxrag.engine.attribution import Attribution
from jaxrag.engine.reuse import PartReuse
from jaxrag.engine.sampling_params import FinishReason

_LOG = logging.getLogger("jaxrag")

# Of a request, in order: its keys are known; its pages are reserved; its chunks are read and
# decoded, on the device, and in the pool; its tokens are laid out, and those to compute again are
# chosen; prefill is handed to the device, and the step for the second token; the first token is on
# the host.
MOMENTS = (
    "added", "admitted", "read", "staged", "ready", "mapped", "prefilled", "stepped", "first",
)  # fmt: skip


Top = list[tuple[int, float]]  # likeliest tokens and the logarithms of their probabilities


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one request took, once it is done.

    Attributes:
      wait_seconds: until its pages were reserved.
      load_seconds: from there until its chunks' KV was in the pool: storage and encoding.
      prefill_seconds: from there until the first token was on the host; waiting for a row is part
        of it.
      first_seconds: from when it was added to its first token, with what compiling took by then.
      compile_seconds: in which the engine compiled, whatever it compiled; no part of waiting,
        loading, prefill and other tokens.
      per_token: mean seconds of the other tokens; 0 where there are none.
      computed: tokens of the prompt that were run: what was not found, and what was chosen to be
        computed again.
      flops: to the first token, TurboRAG appendix C: prefill with what is recomputed, the
        selector's own passes, and encoding on the fly.
      reuse: of the prefix, every chunk and every turn: what was reused, how, and why not.
      indexes: of a decode rule that searches some, summed over layers and KV heads: keys indexed,
        those of them in indexes that were stored with their chunks, and indexes that were trained
        for the question; empty for other rules.
      notes: on chunks that were not found, and on indexes that were not used.
      attribution: of a request that is ``cited``: which chunks its tokens were chosen for.
      moments: when what happened, of MOMENTS, by the engine's clock; what did not is not there.
    """

    wait_seconds: float = 0.0
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    first_seconds: float = 0.0
    compile_seconds: float = 0.0
    per_token: float = 0.0
    computed: int = 0
    flops: int = 0
    reuse: list[PartReuse] = dataclasses.field(default_factory=list)
    indexes: dict[str, int] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    attribution: Attribution | None = None
    moments: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Progress:
    """The news of one request.

    Attributes:
      number: as ``Engine.add`` returned it.
      new: token ids since the last time, without the one that ended the answer.
      logprobs: of each the logarithm of its probability, by the model's own logits.
      finish_reason: "stop" after a token of ``eos_ids`` or ``Engine.stop``, "length" at the bound;
        None while it goes on, and where it failed.
      error: why it failed; nothing follows.
      top: in the place of each token the likeliest, best first; [] where ``top_logprobs`` is 0.
    """

    number: int
    new: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    outcome: Outcome | None = None
    error: BaseException | None = None
    top: list[Top] = dataclasses.field(default_factory=list)

    @property
    def last(self) -> bool:
        """Does nothing follow?"""
        return self.finish_reason is not None or self.error is not None


@dataclasses.dataclass(frozen=True)
class Where:
    """Status of a request.

    Attributes:
      status: such as "waiting", "loading" or "decode".
      there: chunks that it was given and that are in the pool.
      chunks: that it was given pages for; 0 while it waits.
    """

    status: str
    there: int
    chunks: int


# Is called on the engine's thread, and must not wait. True: no more tokens are wanted; the outcome
# still comes.
Sink = Callable[[Progress], bool | None]


@runtime_checkable
class PrefillSink(Protocol):
    """A sink that also looks at its prompt in the pool."""

    def __call__(self, progress: Progress, /) -> bool | None:
        """As a ``Sink``."""

    def on_prefill(self, runner: Any, state: Any, prefilled: Any) -> None:
        """The prompt is in the pool: where its KV lies, and what prefill gave, a batch of one.

        On the engine's thread, before the first token is drawn, and again where the request is
        begun again. It may write to the slots of the answer, which is of no use then.
        """


def unheard(progress: Progress) -> None:
    """A sink of a request that answers nobody."""


class CommandedSink:
    """A client's sink of a request that runs elsewhere, too: what it answers becomes a command."""

    def __init__(
        self, sink: Sink, abort: Callable[[int], None], stop: Callable[[int], None]
    ) -> None:
        """``abort`` and ``stop`` as an engine has them."""
        self._sink, self._abort, self._stop, self._enough = sink, abort, stop, False

    def __call__(self, progress: Progress) -> bool:
        """As a sink."""
        if self._enough:  # it wants nothing more but the outcome
            if not progress.last:
                return False
            ended: FinishReason | None = None if progress.error is not None else "stop"
            progress = dataclasses.replace(progress, new=[], logprobs=[], finish_reason=ended)
        try:
            enough = self._sink(progress)
        except Exception as error:
            _LOG.warning("the client of request %d failed: %s", progress.number, error)
            if not progress.last:
                self._abort(progress.number)
            return False
        if enough and not (self._enough or progress.last):
            self._enough = True
            self._stop(progress.number)
        return False
