"""Prompts looked at while they are in the pool of the engine that serves them, for measurements."""

import queue
from collections import abc
from collections.abc import Callable
from typing import Any

from jaxrag.base.sharding import processes_of
from jaxrag.engine.engine import Engine
from jaxrag.engine.prefill import Prefilled
from jaxrag.engine.progress import Progress
from jaxrag.engine.request import Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import Sequence
from jaxrag.engine.thread import result_of


class _Client:
    """Looks at a prompt, and passes the news on."""

    def __init__(self, look: Callable[..., Any], hear: Callable[[Progress], None]) -> None:
        self._look, self._hear = look, hear
        self.found: Any = None

    def __call__(self, progress: Progress) -> None:
        """As a sink."""
        self._hear(progress)

    def on_prefill(self, *arguments: Any) -> None:
        """As ``PrefillSink``."""
        self.found = result_of(lambda: self._look(*arguments))


def inspect_prompts[Result](
    engine: Engine,
    requests: abc.Sequence[Request],
    look: Callable[[ModelRunner, Sequence, Prefilled], Result],
) -> list[Result]:
    """Serve requests as far as their first tokens; what ``look`` makes of each in the pool.

    Where several processes hold the model, requests are served to their ends.

    ``look(runner, state, prefilled)`` is called as ``PrefillSink.on_prefill``. Raises what it
    raises, and what ``Progress.error`` would hold.
    """
    news: queue.SimpleQueue[Progress] = queue.SimpleQueue()
    clients = [_Client(look, news.put) for _ in requests]
    numbers = engine.add_all(list(zip(requests, clients, strict=True)))
    waiting = set(numbers)
    # Processes that hold one model take the same steps: each would abort at another moment.
    several = len(processes_of(engine.runner.model.mesh)) > 1
    try:
        while waiting:
            progress = news.get()
            if progress.error is not None:
                raise progress.error
            if progress.last or not several:
                waiting.discard(progress.number)
    finally:
        for number in numbers:
            engine.abort(number)
    results = [client.found for client in clients]
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
