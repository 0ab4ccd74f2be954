"""Turns of a conversation stay in the pool: what is computed, what it equals, and who shares it."""

import dataclasses

import numpy as np
import pytest

from jaxrag.engine.request import Prompt, Request
from jaxrag.methods import METHODS

FULL = dataclasses.replace(METHODS["full_attention"], prefix_cache=True)
NONE = np.zeros(0, np.int32)
TOKENS = 21  # of every answer


class Talk:
    """A conversation over some chunks, as a server would put it to the engine."""

    def __init__(self, engine, rng, method, *, chunks=(20, 33), prefix=5, **more):
        self.engine, self.method, self.more = engine, method, more
        self.ids = lambda count: rng.integers(3, 101, count).astype(np.int32)
        self.prefix = self.ids(prefix)
        self.chunks, self.turns = [self.ids(count) for count in chunks], []
        self.left = NONE  # of the last answer the token that is not in the pool

    def request(self, question, **more):
        prompt = Prompt(self.prefix, tuple(self.chunks), question, turns=tuple(self.turns))
        more = {"keeps": True, **self.more, **more}
        return Request(prompt, self.engine.memory, self.method, TOKENS, **more)

    def ask(self, question=19, found=()):
        """Ask; the outcome, and a request for the same prompt that reuses no turn."""
        if len(found):
            self._say(np.concatenate((self.left, self.ids(6))))
            self.left = NONE
            self.chunks += [self.ids(count) for count in found]
        final = np.concatenate((self.left, self.ids(question)))
        ids, outcome = answered(self.engine, self.request(final))
        again = self.request(final, keeps=False)
        self._say(np.concatenate((final, ids[:-1])))
        self.left = np.array(ids[-1:], np.int32)
        return ids, outcome, again

    def _say(self, ids):
        self.turns.append(len(self.chunks))
        self.chunks.append(ids.astype(np.int32))


def answered(engine, request):
    ids = []
    for progress in engine.iterate([request]):
        if progress.error is not None:
            raise progress.error
        ids += progress.new
    return ids, progress.outcome


def hows(outcome, kind="turn"):
    return [(row.part, row.tokens, row.how) for row in outcome.reuse if row.part.startswith(kind)]


def recomputed(engine_on, request):
    """The same prompt with an engine of its own, where nothing is in the pool."""
    method = dataclasses.replace(request.method, prefix_cache=False)
    fresh = engine_on()
    request = dataclasses.replace(request, store=fresh.memory, method=method)
    return answered(fresh, request)[0]


METHODS_THAT_KEEP = [FULL, METHODS["turborag"], METHODS["full_reuse"]]


@pytest.mark.parametrize("method", METHODS_THAT_KEEP, ids=lambda m: m.name)
def test_three_turns_compute_what_is_new_and_give_the_tokens_of_recomputation(
    engine_on, rng, at_rest, method
):
    engine = engine_on()
    talk = Talk(engine, rng, method)
    said = []
    for turn in range(3):
        ids, outcome, again = talk.ask()
        assert hows(outcome) == [(f"turn {i}", n, "prefix hit") for i, n in enumerate(said)]
        said.append(19 + bool(turn) + TOKENS - 1)
        if turn:
            assert outcome.computed == 20
        assert ids == recomputed(engine_on, again)
        at_rest(engine)
