"""Turns of a conversation stay in the pool: what is computed, what it equals, and who shares it."""

import dataclasses
import threading

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.engine.admission import SchedulerSettings
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.state import EngineSettings
from jaxrag.kv.cache import PAGE
from jaxrag.kv.placement import AWAY, KVPlacement
from jaxrag.reuse.decode import Quest, Retrieval, StaticWindow, TopN
from jaxrag.reuse.methods import METHODS
from jaxrag.reuse.select import QueryGuided

FULL = dataclasses.replace(METHODS["full_attention"], prefix_cache=True)
PLAIN = METHODS["turborag"]
NONE = np.zeros(0, np.int32)
QUESTION, TOKENS = 19, 21  # of every question and answer


class Talk:
    """A conversation over some chunks, as a server puts it to the engine."""

    def __init__(self, engine, rng, method, *, chunks=(20, 33), prefix=5, **more):
        self.engine, self.method, self.more = engine, method, more
        self.ids = lambda count: rng.integers(3, 101, count).astype(np.int32)
        self.prefix = self.ids(prefix)
        self.chunks, self.turns = [self.ids(count) for count in chunks], []
        self.left = NONE  # of the last answer the token that is not in the pool

    def request(self, **more):
        """What is asked next, of the same words however often this is called."""
        prompt = Prompt(self.prefix, tuple(self.chunks), self.final).with_turns(self.turns)
        more = {"keeps": True, **self.more, **more}
        return Request(prompt, self.engine.memory, self.method, TOKENS, **more)

    def put(self, found=()):
        """Put the next question, with chunks of its own."""
        if found:
            self._say(np.concatenate((self.left, self.ids(6))))
            self.left = NONE
            self.chunks += [self.ids(count) for count in found]
        self.final = np.concatenate((self.left, self.ids(QUESTION)))
        return self.request()

    def heard(self, ids):
        """The answer to what was put."""
        self._say(np.concatenate((self.final, ids[:-1])))
        self.left = np.array(ids[-1:], np.int32)

    def ask(self, found=()):
        """Put a question, and hear what is said: its ids and the outcome."""
        ids, outcome = answered(self.engine, self.put(found))
        again = self.request(keeps=False)
        self.heard(ids)
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


def turns(outcome):
    return [(row.tokens, row.how) for row in outcome.reuse if row.part.startswith("turn")]


def recomputed(engine_on, request, **changes):
    """The answer to the same prompt, of an engine in whose pool nothing is."""
    method = dataclasses.replace(request.method, prefix_cache=False)
    fresh = engine_on(**changes)
    return answered(fresh, dataclasses.replace(request, store=fresh.memory, method=method))[0]


def evict(engine, chosen):
    """Drop pages of turns and chunks from the pool: those whose place among its keys is chosen."""

    def job(runner):
        allocator = runner.cache.allocator
        for place, key in enumerate(list(allocator.chunks)):
            if chosen(place):
                allocator.evict(key)

    engine.call(job)


@pytest.mark.parametrize("method", [FULL, PLAIN, METHODS["full_reuse"]], ids=lambda m: m.name)
def test_three_turns_over_the_same_chunks_compute_what_is_new(engine_on, rng, at_rest, method):
    engine = engine_on()
    talk, said = Talk(engine, rng, method), []
    for turn in range(3):
        ids, outcome, again = talk.ask()
        assert turns(outcome) == [(count, "prefix hit") for count in said]
        new = QUESTION + bool(turn)  # the last answer ends with a token that was never run
        assert outcome.computed == new if turn or method is not FULL else 58 + new
        said.append(new + TOKENS - 1)
        assert ids == recomputed(engine_on, again)
        at_rest(engine)


def test_chunks_belong_to_the_turn_in_which_they_were_found(engine_on, rng):
    engine = engine_on()
    talk = Talk(engine, rng, PLAIN)
    for found, hits in (
        ((), []),
        ((18, 7), [(39, "prefix hit"), (7, "computed")]),
        ((), [(39, "prefix hit"), (7, "prefix hit"), (39, "prefix hit")]),
    ):
        ids, outcome, again = talk.ask(found)
        assert turns(outcome) == hits
        assert [row.part for row in outcome.reuse if row.part[0] == "c"] == [
            f"chunk {i}" for i in range(2 + 2 * ("computed" in str(hits) or len(hits) == 3))
        ]
        assert ids == recomputed(engine_on, again)


@pytest.mark.parametrize("method", [FULL, PLAIN], ids=lambda m: m.name)
@pytest.mark.parametrize("left", [0, 2, 3], ids=["nothing", "every second", "two of three"])
def test_what_left_the_pool_in_between_is_computed_again(engine_on, rng, at_rest, method, left):
    engine = engine_on()
    talk = Talk(engine, rng, method)
    talk.ask()
    talk.ask()
    evict(engine, lambda place: not left or place % left == 0)
    ids, outcome, again = talk.ask()
    of_turns = dict.fromkeys(("prefix hit", "computed"), 0)
    for tokens, how in turns(outcome):
        of_turns[how] += tokens
    assert sum(of_turns.values()) == 79
    assert of_turns["computed"] > 0
    assert (of_turns["prefix hit"] > 0) == bool(left)
    assert ids == recomputed(engine_on, again)
    assert turns(talk.ask()[1]) == [(39, "prefix hit"), (40, "prefix hit"), (40, "prefix hit")]
    at_rest(engine)


@pytest.mark.parametrize("method", [FULL, PLAIN], ids=lambda m: m.name)
def test_tenants_share_no_turn(engine_on, rng, method):
    engine = engine_on()
    talk = Talk(engine, rng, method, tenant="one")
    talk.ask()
    request = talk.put()
    ids, outcome = answered(engine, request)
    assert turns(outcome) == [(39, "prefix hit")]
    other, outcome = answered(engine, dataclasses.replace(request, tenant="other"))
    assert turns(outcome) == [(39, "computed")]
    assert method is PLAIN or {row.how for row in outcome.reuse} == {"computed"}
    assert other == ids


def test_a_turn_behind_anything_else_is_another(engine_on, rng):
    """Another chunk, another order, another prefix, another method: nothing is found."""
    engine = engine_on()
    talk = Talk(engine, rng, PLAIN)
    talk.ask()
    same = talk.put()
    assert turns(answered(engine, same)[1]) == [(39, "prefix hit")]
    a, b, turn = same.prompt.chunks
    for prompt in (
        dataclasses.replace(same.prompt, chunks=(b, a, turn)),
        dataclasses.replace(same.prompt, chunks=(a, talk.ids(33), turn)),
        dataclasses.replace(same.prompt, prefix=talk.ids(5)),
    ):
        outcome = answered(engine, dataclasses.replace(same, prompt=prompt))[1]
        assert turns(outcome) == [(39, "computed")]
    for method in (FULL, METHODS["full_reuse"]):
        outcome = answered(engine, dataclasses.replace(same, method=method))[1]
        assert turns(outcome) == [(39, "computed")]


def test_an_answer_that_was_cut_is_found_up_to_the_page_where_it_was(engine_on, rng):
    """A stop string, or a text that another tokenisation gives other ids."""
    engine = engine_on()
    talk = Talk(engine, rng, PLAIN)
    ids, _, _ = talk.ask()
    talk.chunks[-1] = talk.chunks[-1][:-4]
    talk.left = np.array(ids[-5:-4], np.int32)
    _, outcome, again = talk.ask()
    assert turns(outcome) == [(2 * PAGE, "prefix hit"), (35 - 2 * PAGE, "computed")]
    assert again.prompt.num_tokens == 58 + 35 + 20


def test_an_answer_that_ends_by_itself_is_kept_as_well(engine_on, rng):
    engine = engine_on()
    talk = Talk(engine, rng, PLAIN)
    ids, _ = answered(engine, talk.put())
    end = next(at for at in range(3, TOKENS) if ids[at] not in ids[:at])
    engine.forget()
    talk.more["eos_ids"] = frozenset({ids[end]})
    shorter, _ = answered(engine, talk.request())
    assert shorter == ids[:end]
    talk.heard(shorter)
    assert turns(answered(engine, talk.put())[1]) == [(QUESTION + end - 1, "prefix hit")]


@pytest.mark.parametrize(
    "rule",
    [StaticWindow(sink=2, recent=12), Quest(budget=32, dense_layers=1)],
    ids=lambda r: r.name,
)
def test_what_a_sparse_rule_generated_is_computed_as_the_prompt_is(engine_on, rng, rule):
    """Its KV is not what prefill makes of it: found is the question, and from then on all of it."""
    engine = engine_on()
    talk = Talk(engine, rng, dataclasses.replace(PLAIN, decode=rule))
    talk.ask()
    _, outcome, _ = talk.ask()
    assert turns(outcome) == [(PAGE, "prefix hit"), (39 - PAGE, "computed")]
    ids, outcome, again = talk.ask()
    assert turns(outcome)[0] == (39, "prefix hit")
    assert ids == recomputed(engine_on, again)


@pytest.mark.parametrize(
    ("placement", "rule"),
    [
        pytest.param(
            KVPlacement(value_layers=1), TopN(n=12, device_layers=1), marks=pytest.mark.slow
        ),
        (AWAY, Retrieval(k=6, sink=2, recent=12)),
    ],
    ids=["values", "host"],
)
def test_kv_in_host_memory_stays_there(engine_on, rng, placement, rule, at_rest):
    engine = engine_on(placement=placement)
    talk = Talk(engine, rng, dataclasses.replace(PLAIN, decode=rule))
    talk.ask()
    talk.ask()
    ids, outcome, again = talk.ask()
    assert turns(outcome)[0] == (39, "prefix hit")
    assert ids == recomputed(engine_on, again, placement=placement)
    at_rest(engine)


UNFIT = [
    dataclasses.replace(PLAIN, selector=QueryGuided(), recompute_ratio=0.3),
    METHODS["cacheblend"],
    dataclasses.replace(PLAIN, misses="in_place"),
    dataclasses.replace(PLAIN, prefix_cache=True),
    METHODS["full_attention"],
]


@pytest.mark.parametrize("method", UNFIT, ids=["guided", "blend", "gaps", "leading", "one run"])
def test_where_kv_depends_on_more_turns_are_computed_every_time(engine_on, rng, at_rest, method):
    engine = engine_on()
    talk = Talk(engine, rng, method)
    for _ in range(2):
        talk.ask()
    ids, outcome, again = talk.ask()
    assert {how for _, how in turns(outcome)} == {"computed"}
    assert ids == answered(engine, again)[0]
    assert all(row.recomputed == 0 for row in outcome.reuse if row.part.startswith("turn"))
    at_rest(engine)


def test_a_ratio_is_of_the_chunks_and_not_of_what_was_said(engine_on, rng):
    engine = engine_on()
    talk = Talk(engine, rng, UNFIT[0], chunks=(20, 30))
    for _ in range(3):
        _, outcome, _ = talk.ask()
        assert sum(row.recomputed for row in outcome.reuse) == 15


def test_composite_positions_have_no_turns(engine_on, rng):
    talk = Talk(engine_on(), rng, METHODS["turborag_composite"])
    talk.put()
    talk.heard([5, 6])
    with refused(RequestError):
        talk.put()


def test_many_at_once_and_of_one_conversation(engine_on, rng, at_rest):
    """Several go on from the same turn at once, others come and go: law 13 in float32."""
    engine = engine_on(cache_tokens=512)
    talks = [Talk(engine, rng, PLAIN, rows=4) for _ in range(3)]
    for _ in range(3):
        asked = [talk.put() for talk in talks for _ in range(2)]
        said = {number: [] for number in range(len(asked))}
        for progress in engine.iterate(asked):
            assert progress.error is None
            said[progress.number] += progress.new
        for at, talk in enumerate(talks):
            ids = said[2 * at]
            request = talk.request(keeps=False)
            assert said[2 * at + 1] == recomputed(engine_on, request)
            talk.final = asked[2 * at].prompt.final
            assert ids == recomputed(engine_on, talk.request(keeps=False))
            talk.heard(ids)
    at_rest(engine)


@pytest.fixture
def two_classes(engine_on, rng, told):
    """A request that is being answered, and one of a better class that needs its pages.

    ``two_classes(stop)``: its engine, its conversation, and what its client was told until it
    ended; with ``stop``, which was while it was set aside.
    """

    def run(stop):
        settings = EngineSettings(scheduler=SchedulerSettings(classes=2))
        engine = engine_on(cache_tokens=256, settings=settings)
        talk = Talk(engine, rng, PLAIN, chunks=(20,), priority=1, watched=True)
        better = Talk(engine, rng, PLAIN, chunks=(130,), priority=0, keeps=False, watched=True)
        client, begun, ended = told(), threading.Event(), threading.Event()

        def sink(progress):
            client(progress)
            if len(client.ids[progress.number]) == 3:
                begun.set()
            if progress.last:
                ended.set()

        number = engine.add(talk.put(), sink)
        assert begun.wait(300)
        for progress in engine.iterate([better.put()]):
            assert progress.error is None
            if stop and progress.new:
                engine.stop(number)
        assert ended.wait(300) and client.last[number].error is None
        assert engine._core.state.scheduler.preempted == 1
        talk.heard(client.ids[number])
        return engine, talk, client.last[number]

    return run


def test_a_first_turn_that_was_set_aside_is_kept_where_it_lies_now(engine_on, two_classes, at_rest):
    """Its pages are others when it goes on."""
    engine, talk, _ = two_classes(stop=False)
    ids, outcome, again = talk.ask()
    assert turns(outcome) == [(39, "prefix hit")]
    assert ids == recomputed(engine_on, dataclasses.replace(again, priority=0))
    at_rest(engine)


def test_of_one_that_is_stopped_while_it_is_set_aside_nothing_stays(two_classes, at_rest):
    """Its pages are others' by then."""
    engine, talk, last = two_classes(stop=True)
    assert last.finish_reason == "stop" and len(talk.chunks[-1]) < QUESTION + TOKENS - 1
    at_rest(engine)
    _, outcome, _ = talk.ask()
    assert {how for _, how in turns(outcome)} == {"computed"}
    at_rest(engine)


def test_law_13_among_others_that_come_go_and_push_turns_out(engine_on, rng, told, at_rest):
    """A pool of a few conversations, and more of them than it holds; some are aborted."""
    engine = engine_on(cache_tokens=400)
    talks = [Talk(engine, rng, PLAIN, rows=4) for _ in range(6)]
    hits = computed = 0
    for turn in range(3):
        client, doomed = told(), told()
        numbers = {}
        for at in rng.permutation(len(talks)):
            numbers[at] = engine.add(talks[at].put(), client)
            if rng.random() < 0.6:
                other = talks[rng.integers(len(talks))]
                if hasattr(other, "final"):
                    number = engine.add(other.request(), doomed)
                    if rng.random() < 0.5:
                        engine.abort(number)
        for _ in range(6000):
            if len(client.last) == len(talks):
                break
            threading.Event().wait(0.01)
        for at, talk in enumerate(talks):
            last = client.last[numbers[at]]
            assert last.error is None
            said = client.ids[numbers[at]]
            assert said == recomputed(engine_on, talk.request(keeps=False)), (turn, at)
            talk.heard(said)
            for tokens, how in turns(last.outcome):
                hits += tokens * (how == "prefix hit")
                computed += tokens * (how == "computed")
    assert hits and computed
    at_rest(engine)
