"""What the parts of the engine's loop share, all of it for the engine's thread."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxrag.cache.heat import HALF_LIFE
from jaxrag.engine.admission import SchedulerSettings
from jaxrag.engine.live import Live
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.scheduler import Scheduler

Post = Callable[[Callable[[], None]], None]  # has a function called on the engine's thread


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """How an engine serves.

    Attributes:
      scheduler: order, bounds and classes.
      prefill_tokens: that are run between two decode steps at most, or one piece.
      together_flops: prompts are run as many at once as their lane has rows, whether there are so
        many or not, where a piece of all of them takes no more operations than that: then it is
        the call that costs.
      load_threads: that read chunks and stage them.
      half_life: requests after which a use of a chunk counts half as much; the coldest chunk leaves
        the pool first.
      lockstep: nothing depends on time: loads and indexes are waited for where they are asked for.
        What several processes need that run one model together.
    """

    scheduler: SchedulerSettings = dataclasses.field(default_factory=SchedulerSettings)
    prefill_tokens: int = 1024
    together_flops: float = 1e9
    load_threads: int = 2
    half_life: float = HALF_LIFE
    lockstep: bool = False


@dataclasses.dataclass(eq=False)
class State:
    """The engine's state.

    Attributes:
      runner: the model on its device.
      settings: how it serves.
      scheduler: who is where, and who holds which pages.
      post: has a function called on the engine's thread, from any.
      clock: seconds.
      live: requests whose clients wait, by number.
      ending: those that were told the last, and still are in a step in flight.
      epoch: counts the pools; what was begun for an earlier one is void.
    """

    runner: ModelRunner
    settings: EngineSettings
    scheduler: Scheduler
    post: Post
    clock: Callable[[], float]
    live: dict[int, Live] = dataclasses.field(default_factory=dict)
    ending: dict[int, Live] = dataclasses.field(default_factory=dict)
    epoch: int = 0


class Broken(Exception):
    """A call that failed on the device, or on its way there.

    Attributes:
      error: what was raised.
      suspects: the requests that took part.
      shared: whether others may have lost something with it.
    """

    def __init__(
        self, error: BaseException, suspects: Sequence[Live], *, shared: bool = True
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.suspects = list(suspects)
        self.shared = shared
