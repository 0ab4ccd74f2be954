"""Tasks that share what comes after them."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jaxrag.reuse.decode.far.layer import Task


def gathered(
    parts: Sequence[Callable[[], Any]], after: Callable[[list[Any]], Sequence[Task] | None]
) -> list[Task]:
    """Tasks for ``parts``; the one that ends last also hands all their results to ``after``."""
    results: list[Any] = [None] * len(parts)
    left = len(parts)
    lock = threading.Lock()

    def task(number: int) -> Sequence[Task] | None:
        nonlocal left
        results[number] = parts[number]()
        with lock:
            left -= 1
            last = not left
        return after(results) if last else None

    return [functools.partial(task, number) for number in range(len(parts))]
