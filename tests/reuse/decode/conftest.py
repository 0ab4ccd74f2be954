"""Random models, prompts of several parts, and slow attention written from the equations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.base.shapes import bucket
from jaxrag.base.types import Step
from jaxrag.engine import steps
from jaxrag.engine.decoding import start_decoding
from jaxrag.engine.engine import engine_of
from jaxrag.engine.mapping import batch_tables
from jaxrag.engine.prompt_inspection import inspect_prompts
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
def next_logits():
    """Logits after given tokens: ``next_logits(model, method, prompts, rule, given)``."""
    return _next_logits


@pytest.fixture
def accounts():
    """Accounts of the requests that ``next_logits`` searched for, in order."""
    _ACCOUNTS.clear()
    return _ACCOUNTS


_ACCOUNTS = []


def _next_logits(model, method, prompts, rule, given):
    """Logits [B, n, V] after each of the ``given`` [B, n] tokens, decoded one at a time."""
    method = dataclasses.replace(METHODS[method], decode=rule)
    engine, room = engine_of(model), np.shape(given)[1] + 1  # slots are for what is given

    def alone(prompt, tokens):
        look = functools.partial(_rule_logits, given=tokens)
        return inspect_prompts(engine, [Request(prompt, engine.memory, method, room)], look)

    return np.concatenate([alone(*it) for it in zip(prompts, given, strict=True)])


def _rule_logits(runner, state, there, given):
    """Logits [n, V] after each token of ``given`` [n]; the pool is written as in decoding."""
    rule, width = state.request.method.decode, table_width(state.table)
    table = jax.tree.map(jnp.asarray, batch_tables([state], 1, width))
    host = None if rule.searches is None else runner.host_search
    number = None if host is None else host.admit()
    room = bucket(state.table.num_slots - state.next_slot)
    decoding = start_decoding(runner, state, rule, there.bank, room, number)
    decoder = runner.model.decoder(table.slot_position.shape[1])
    plan = steps.Plan(rule, host, runner.cache.values)
    out = []
    for step, token in enumerate(given):
        at = (token, state.next_position + step, state.next_slot + step)
        new = Step(*(jnp.full((1, 1), x, jnp.int32) for x in at))
        if decoding is None:
            hidden, table = runner.cache.update(_dense, decoder, table, new)
        else:
            hidden, table, decoding = runner.cache.update(
                _by_rule, decoder, table, decoding, new, plan
            )
        out.append(np.asarray(unembed(runner.model.params, runner.model.config, hidden[0, 0])))
    if host is not None:
        _ACCOUNTS.append(host.account_of([number]))
        host.release([number])
    return np.stack(out)


@jax.jit
def _dense(pool, decoder, table, step):
    hidden, pool, table = steps.run_tokens(decoder, pool, table, step)
    return pool, hidden, table


@functools.partial(jax.jit, static_argnames="plan")
def _by_rule(pool, decoder, table, decoding, step, plan):
    hidden, pool, table, decoding = steps.run_by_rule(decoder, pool, table, decoding, step, plan)
    return pool, hidden, table, decoding
