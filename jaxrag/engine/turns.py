"""An answered turn stays in the pool, page by page, for the prompts that go on from it."""

from collections.abc import Iterator

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.engine.kept import keeps_turns
from jaxrag.engine.live import Live
from jaxrag.engine.scheduler import Scheduler
from jaxrag.kv.cache import PAGE


def leave_turn(scheduler: Scheduler, live: Live) -> None:
    """A request gets no more tokens: its pages with question and answer are shared from now on.

    The answer's last token is not among them, as it may never have been run. Under a sparse decode
    rule none of the answer is: its KV is not what prefill computes. Nothing stays of one that is
    set aside, as its pages are others' now.
    """
    if live.state is None or live.swapped is not None or not live.read:
        return
    if keeps_turns(live.request):
        for key, page, tokens in _pages(live):
            scheduler.share(live.number, key, (page,), tokens)


def _pages(live: Live) -> Iterator[tuple[str, int, int]]:
    """Key, page and number of tokens of every piece of the turn that is in the pool."""
    state, sparse = live.state, live.request.method.decode.sparse
    assert state is not None
    final = live.request.prompt.final
    answer = np.array([] if sparse else live.tokens[: live.read - 1], np.int32)
    said: HostArray = np.concatenate((final, answer)).astype(np.int32)
    pages = state.table.pages[state.first_slot // PAGE :]
    for page, (key, piece) in zip(pages, live.plan.context.pieces(said), strict=False):
        if not sparse or len(piece) == PAGE:  # the rest would begin another page of the whole turn
            yield key, page, len(piece)
