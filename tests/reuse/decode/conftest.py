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
from jaxrag.engine.engine import engine_of
from jaxrag.engine.mapping import batch_tables
from jaxrag.engine.prefilled import prefilled
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.cache import table_width
from jaxrag.models.decoder import unembed
from jaxrag.models.model import random_model
from jaxrag.reuse.decode import PromptQueries
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
def next_logits():
    """Logits after given tokens: ``next_logits(model, method, prompts, rule, given)``."""
    return _next_logits


@pytest.fixture
def accounts():
    """Accounts of the batches that ``next_logits`` searched for, in order."""
    _ACCOUNTS.clear()
    return _ACCOUNTS


_ACCOUNTS = []


def admitted(runner, rule, count):
    """Where the rule searches, and numbers for so many requests; (None, ()) where it does not."""
    if rule.searches is None:
        return None, ()
    host = runner.host_search
    return host, [host.admit() for _ in range(count)]


def _next_logits(model, method, prompts, rule, given):
    """Logits [B, n, V] after each of the ``given`` [B, n] tokens, decoded one at a time."""
    method = dataclasses.replace(METHODS[method], decode=rule)
    given = np.asarray(given)
    engine, rows = engine_of(model), bucket(len(prompts), 1)
    room = given.shape[1] + 1  # the answer's slots are for what is given
    requests = [Request(p, engine.memory, method, room, rows=rows) for p in prompts]
    if len(requests) > 1:  # their chunks are there, so that none waits while another decodes
        prefilled(engine, [dataclasses.replace(it, max_new_tokens=1) for it in requests], _nothing)
    found = []

    def look(runner, state, there):
        found.append((state, there.bank))
        if len(found) < len(requests):
            return None
        found.sort(key=lambda it: _place(prompts, it[0]))
        mapped = [state for state, _ in found]
        table = batch_tables(mapped, rows, max(table_width(it.table) for it in mapped))
        table = jax.tree.map(jnp.asarray, table)
        bank = _together([bank for _, bank in found], rows)
        return _rule_logits(model, mapped, table, rule, bank, given)

    [logits] = [it for it in prefilled(engine, requests, look) if it is not None]
    return logits


def _nothing(runner, state, there):
    pass


def _place(prompts, state):
    """Which of the prompts a request is of."""
    run = state.run.ids
    return next(
        at
        for at, it in enumerate(prompts)
        if it.num_tokens == state.next_position and (it.ids[-len(run) :] == run).all()
    )


def _together(banks, rows):
    """The queries of requests that were prefilled each, in one batch of ``rows``."""
    width = max(bank.positions.shape[1] for bank in banks)

    def padded(x, axis, size, value):
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, size - x.shape[axis])
        return np.pad(x, pad, constant_values=value)

    queries = [padded(np.asarray(bank.queries), 2, width, 0) for bank in banks]
    positions = [padded(np.asarray(bank.positions), 1, width, -1) for bank in banks]
    queries = padded(np.concatenate(queries, 1), 1, rows, 0)
    positions = padded(np.concatenate(positions), 0, rows, -1)
    return PromptQueries(queries=jnp.asarray(queries), positions=jnp.asarray(positions))


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
