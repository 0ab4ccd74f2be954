"""Where answers looked, against dense attention; and that asking for it changes nothing else."""

import dataclasses
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.types import Tokens
from jaxrag.engine.citing import PIECE
from jaxrag.engine.scheduler import SchedulerSettings
from jaxrag.engine.state import EngineSettings
from jaxrag.models.attention import PackedAttend
from jaxrag.models.decoder import forward
from jaxrag.models.rope import place
from jaxrag.models.segments import PREFIX
from jaxrag.models.taps import Tap
from jaxrag.reuse.methods import METHODS


def dense_attribution(model, request, answer):
    """Votes and most of every token, from a full prefill of prompt and answer, in float64."""
    prompt = request.prompt
    ids = np.concatenate((prompt.ids, answer[:-1])).astype(np.int32)
    length = len(ids)
    config, rope = model.config, model.rope(length)
    at = jnp.arange(length, dtype=jnp.int32)[None]
    tokens = Tokens(jnp.asarray(ids)[None], at, jnp.full_like(at, PREFIX))
    attend = Tap(
        PackedAttend(config, rope, True),
        lambda q, k, v: (place(q, at, rope, config.rope), place(k, at, rope, config.rope)),
    )
    _, _, (q, k) = forward(model.params, config, tokens, None, attend)
    q, k = (np.asarray(x[:, 0], np.float64) for x in (q, k))  # [L, T, heads, H]
    of = np.repeat(
        np.arange(-1, len(prompt.chunks) + 1),
        [
            len(prompt.prefix),
            *map(len, prompt.chunks),
            length - prompt.num_tokens + len(prompt.final),
        ],
    )
    votes = np.zeros((len(answer), len(prompt.chunks)))
    most = np.zeros_like(votes)
    group = config.num_heads // config.num_kv_heads
    for i in range(len(answer)):
        query = prompt.num_tokens - 1 + i
        for layer in range(config.num_layers):
            for head in range(config.num_heads):
                scores = k[layer, : query + 1, head // group] @ q[layer, query, head]
                weights = np.exp((scores - scores.max()) * config.head_dim**-0.5)
                own = 0.0
                if config.sink_logits:
                    own = float(model.params.layers.sink_logits[layer, head])
                    own = np.exp(own - scores.max() * config.head_dim**-0.5)
                weights /= weights.sum() + own
                shares = [weights[of[: query + 1] == c].sum() for c in range(votes.shape[1])]
                votes[i] += np.square(shares)
                most[i] = np.maximum(most[i], shares)
    return votes / votes.sum(-1, keepdims=True), most


@pytest.mark.parametrize("tokens", [1, 8, PIECE + 9])
@pytest.mark.parametrize("method", ["full_attention", "cacheblend"])
def test_looks_are_those_of_dense_attention(engine_on, asked, method, tokens):
    """``cacheblend`` at ratio 1, where every chunk token was computed again."""
    engine = engine_on()
    method = METHODS[method]
    method = method.with_ratio(1.0) if method.recomputes else method
    request = asked(engine, method=method, chunks=4, tokens=tokens, cited=True)
    found = list(engine.iterate([request]))
    ids = [token for progress in found for token in progress.new]
    votes, most = dense_attribution(engine.runner.model, request, ids)
    got = found[-1].outcome.attribution
    assert got.votes.shape == (tokens, 4)
    np.testing.assert_allclose(got.votes, votes, atol=2e-5)
    np.testing.assert_allclose(got.most, most, atol=2e-5)


def test_what_sinks_take_is_looked_at_by_nobody(engine_on, asked, shared_models):
    plain = shared_models("float32")
    config = dataclasses.replace(plain.config, sink_logits=True)
    sink_logits = np.linspace(-2, 2, config.num_layers * config.num_heads, dtype=np.float32)
    layers = plain.params.layers.replace(
        sink_logits=jnp.asarray(sink_logits.reshape(config.num_layers, -1))
    )
    engine = engine_on(config=config, params=plain.params.replace(layers=layers))
    request = asked(engine, method="full_attention", chunks=4, tokens=8, cited=True)
    found = list(engine.iterate([request]))
    ids = [token for progress in found for token in progress.new]
    votes, most = dense_attribution(engine.runner.model, request, ids)
    got = found[-1].outcome.attribution
    np.testing.assert_allclose(got.votes, votes, atol=2e-5)
    np.testing.assert_allclose(got.most, most, atol=2e-5)


METHODS_CITED = ["turborag", "turborag_composite", "ape", "fusionrag", "full_attention"]


@pytest.mark.parametrize("method", METHODS_CITED)
def test_law_13_and_that_it_changes_nothing_else(engine_on, asked, at_rest, method):
    """Attributions are bit-equal alone and with others; tokens are those that come without."""
    engine = engine_on(2048)
    requests = [
        asked(engine, method=method, chunks=3, tokens=PIECE + 5 * i, rows=4) for i in range(4)
    ]
    cited = [dataclasses.replace(one, cited=True) for one in requests]
    alone = [list(engine.iterate([one])) for one in cited]
    together = [[], [], [], []]
    for progress in engine.iterate([cited[0], requests[1], *cited[2:]]):
        together[progress.number].append(progress)
    for i, runs in enumerate(zip(alone, together, strict=True)):
        ids, others = ([token for it in run for token in it.new] for run in runs)
        assert ids == others
        mine, theirs = (run[-1].outcome.attribution for run in runs)
        assert (theirs is None) == (i == 1)
        assert i == 1 or same(mine, theirs)
    at_rest(engine)


def same(attribution, others):
    """Bit for bit."""
    return all(np.array_equal(*pair) for pair in zip(attribution, others, strict=True))


@pytest.mark.parametrize("forgets", [False, True], ids=["set aside", "begun again"])
def test_what_happens_on_the_way_changes_no_attribution(engine_on, asked, told, at_rest, forgets):
    settings = EngineSettings(scheduler=SchedulerSettings(classes=2))
    engine = engine_on(256 if not forgets else 512, settings=settings)
    more = {"rows": 2, "watched": True, "tokens": PIECE + 9}
    worst = [asked(engine, cited=True, priority=1, **more) for _ in range(2 - forgets)]
    better = [] if forgets else [asked(engine, tokens=9, rows=2) for _ in range(4)]
    expected = [list(engine.iterate([one]))[-1].outcome.attribution for one in worst]
    client, numbers, over = told(), [], threading.Event()

    def sink(progress):
        client(progress)
        if all(len(ids) == PIECE + 3 for ids in client.ids.values()) and not client.last:
            if forgets:
                engine._core.forget()
            elif len(numbers) == 2:
                numbers.extend(engine.add_all([(request, sink) for request in better]))
        if len(client.last) == len(worst) + len(better):
            over.set()

    numbers += engine.add_all([(request, sink) for request in worst])
    assert over.wait(120)
    for number, attribution in zip(numbers, expected, strict=False):
        assert same(client.last[number].outcome.attribution, attribution)
    assert forgets or engine._core.state.scheduler.preempted >= 1
    at_rest(engine)


def test_a_failure_is_the_requests_own(engine_on, asked, at_rest, monkeypatch):
    engine = engine_on()
    monkeypatch.setattr("jaxrag.engine.core.read_again", lambda *_: 1 / 0)
    bad, good = asked(engine, cited=True, tokens=2 * PIECE, rows=2), asked(engine, rows=2)
    last = {it.number: it for it in engine.iterate([bad, good])}
    assert isinstance(last[0].error, ZeroDivisionError)
    assert last[1].finish_reason == "length" and len(last[1].outcome.reuse)
    at_rest(engine)
