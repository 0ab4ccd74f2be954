"""Random models, prompts of several parts, and slow attention written from the equations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.shapes import bucket
from jaxrag.base.types import Step
from jaxrag.engine import decoding as answer
from jaxrag.engine import direct
from jaxrag.engine.direct import map_request, unmap
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.cache import table_width
from jaxrag.models.decoder import unembed
from jaxrag.models.model import random_model
from jaxrag.reuse.methods import METHODS


@pytest.fixture(scope="session")
def model_of(tiny_config):
    """Random models by family and changes, made once: compiled functions are shared by config."""
    made = {}

    def make(family="llama", **changes):
        key = (family, *sorted(changes.items()))
        if key not in made:
            config = tiny_config(family, **{"eos_ids": (), **changes})
            made[key] = random_model(config, cache_tokens=2048)
        return made[key]

    return make


def random_ids(rng, *lengths):
    return tuple(rng.integers(3, 101, n).astype(np.int32) for n in lengths)


@pytest.fixture
def ids(rng):
    """``ids(*lengths)``: random token ids, one array a length."""
    return lambda *lengths: random_ids(rng, *lengths)


@pytest.fixture
def a_prompt(rng):
    """``a_prompt(prefix=5, chunks=(...), final=9)``: a prompt of random ids."""

    def make(prefix=5, chunks=(37, 20, 1, 16), final=9):
        return Prompt(
            random_ids(rng, prefix)[0], random_ids(rng, *chunks), random_ids(rng, final)[0]
        )

    return make


@pytest.fixture(scope="session")
def decoded():
    """Greedy decoding of a batch by a rule: ``decoded(model, method, prompts, rule)``."""
    return _decoded


@pytest.fixture(scope="session")
def next_logits():
    """Logits after given tokens: ``next_logits(model, method, prompts, rule, given)``."""
    return _next_logits


@pytest.fixture(scope="session")
def rule_logits():
    """The same of requests that are mapped and prefilled already."""
    return _rule_logits


@pytest.fixture
def accounts():
    """Accounts of the batches that ``next_logits`` and ``rule_logits`` searched for, in order."""
    _ACCOUNTS.clear()
    return _ACCOUNTS


_ACCOUNTS = []


def _decoded(model, method, prompts, rule, steps=12, block=4):
    """Token ids [B, steps] of greedy decoding in a lane, each prompt prefilled by ``method``."""
    method = dataclasses.replace(METHODS[method], decode=rule)
    store = engine_of(model).memory
    requests = [Request(p, store, method, steps, rows=len(prompts)) for p in prompts]
    return engine_of(model).call(lambda runner: _in_a_lane(runner, requests, steps, block))


def _in_a_lane(runner, requests, steps, block):
    """As the engine does it: every request is prefilled, joins a row, and all rows step."""
    rule = requests[0].method.decode
    mapped = []
    host, numbers = admitted(runner, rule, len(requests))
    try:
        for request in requests:
            mapped.append(map_request(runner, request, request.room))
        width = max(table_width(part.table) for part in mapped)
        lane = answer.Lane(runner, answer.lane_of(requests[0], width))
        out = []
        for row, (request, part) in enumerate(zip(requests, mapped, strict=True)):
            logits, _, bank = direct.prefill_observed(runner, [part], rule.observe)
            decoding = answer.start_decoding(
                runner, [part], rule, bank, lane.key.room, numbers[row : row + 1]
            )
            out.append(lane.join([row], [(request, part)], logits, decoding)[0][0])
        out = [np.asarray(out)[:, None]]
        while sum(part.shape[1] for part in out) < steps:
            out.append(np.asarray(lane.step(block)[0])[:, :block])
        return np.concatenate(out, axis=1)[:, :steps]
    finally:
        if host is not None:
            host.release(numbers)
        for part in mapped:
            unmap(runner, part)


def admitted(runner, rule, count):
    """Where the rule searches, and numbers for so many requests; (None, ()) where it does not."""
    if rule.searches is None:
        return None, ()
    host = runner.host_search
    return host, [host.admit() for _ in range(count)]


def _next_logits(model, method, prompts, rule, given):
    """Logits [B, n, V] after each of the ``given`` [B, n] tokens, decoded one at a time."""
    method = dataclasses.replace(METHODS[method], decode=rule)
    requests = [Request(p, engine_of(model).memory, method, 1) for p in prompts]
    given = np.asarray(given)

    def logits(runner):
        mapped = []
        try:
            for request in requests:
                mapped.append(map_request(runner, request, given.shape[1]))
            _, table, bank = direct.prefill_observed(runner, mapped, rule.observe)
            return _rule_logits(model, mapped, table, rule, bank, given)
        finally:
            for part in mapped:
                unmap(runner, part)

    return engine_of(model).call(logits)


def _rule_logits(model, mapped, table, rule, bank, given):
    """Logits [B, n, V] after each token of ``given`` [B, n]; the pool is written as in decoding."""
    rows = table.pages.shape[0]
    position = np.full(rows, -1, np.int32)
    slot = np.full(rows, table.slot_position.shape[1], np.int32)
    position[: len(mapped)] = [m.next_position for m in mapped]
    slot[: len(mapped)] = [m.next_slot for m in mapped]
    runner = engine_of(model).runner
    host, numbers = admitted(runner, rule, len(mapped))
    room = bucket(max(m.table.num_slots - m.next_slot for m in mapped))
    decoding = answer.start_decoding(runner, mapped, rule, bank, room, numbers)
    decoder = model.decoder(table.slot_position.shape[1])
    plan = answer.Plan(rule, host, runner.cache.values)
    out = []
    for step in range(given.shape[1]):
        tokens = np.zeros((rows, 1), np.int32)
        tokens[: len(mapped), 0] = given[:, step]
        at = np.where(position >= 0, position + step, -1)[:, None].astype(np.int32)
        to = np.where(position >= 0, slot + step, slot)[:, None].astype(np.int32)
        new = Step(*map(jnp.asarray, (tokens, at, to)))
        if decoding is None:
            hidden, table = runner.cache.run(_dense, decoder, table, new)
        else:
            hidden, table, decoding = runner.cache.run(
                _by_rule, decoder, table, decoding, new, plan
            )
        out.append(np.asarray(unembed(model.params, hidden[:, 0]))[: len(mapped)])
    if host is not None:
        _ACCOUNTS.append(host.account_of(numbers))
        host.release(numbers)
    return np.stack(out, axis=1)


@jax.jit
def _dense(pool, decoder, table, step):
    hidden, pool, table = answer.run_tokens(decoder, pool, table, step)
    return pool, hidden, table


@functools.partial(jax.jit, static_argnames="plan")
def _by_rule(pool, decoder, table, decoding, step, plan):
    hidden, pool, table, decoding = answer.run_by_rule(decoder, pool, table, decoding, step, plan)
    return pool, hidden, table, decoding
