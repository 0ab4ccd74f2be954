"""Prompts looked at while they are in the pool of the engine that serves them, for measurements."""

import contextlib
import dataclasses
from collections import abc
from collections.abc import Callable
from typing import Any

from jaxrag.engine.engine import Engine
from jaxrag.engine.prefill import Prefilled
from jaxrag.engine.request import Request
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.sequence import Sequence
from jaxrag.engine.thread import result_of


def prefilled[Result](
    engine: Engine,
    requests: abc.Sequence[Request],
    look: Callable[[ModelRunner, Sequence, Prefilled], Result],
) -> list[Result]:
    """Serve requests as far as their first tokens; what ``look`` makes of each in the pool.

    ``look(runner, state, prefilled)`` is called as ``Request.on_prefill``. Raises what it raises,
    and what ``Progress.error`` would hold.
    """
    found: list[Any] = [None] * len(requests)

    def asked(place: int, request: Request) -> Request:
        def hook(*seen: Any) -> None:
            found[place] = result_of(lambda: look(*seen))

        return dataclasses.replace(request, on_prefill=hook)

    began: set[int] = set()
    news = engine.iterate([asked(*it) for it in enumerate(requests)])
    with contextlib.closing(news):
        while len(began) < len(requests):
            progress = next(news)
            if progress.error is not None:
                raise progress.error
            began.add(progress.number)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found
