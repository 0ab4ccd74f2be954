"""Random models, prompts of several parts, and slow attention written from the equations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.engine import decoding as answer
from jaxrag.engine import prefill
from jaxrag.engine.mapping import Prompt, map_request, unmap
from jaxrag.engine.sampling import Sampling
from jaxrag.methods import METHODS
from jaxrag.models.decoder import unembed
from jaxrag.models.model import random_model


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
    """Token ids [B, steps] of greedy decoding after prefill by ``method``."""
    method = dataclasses.replace(METHODS[method], decode=rule)
    mapped = [map_request(model, model.memory, method, p, steps) for p in prompts]
    host, numbers = admitted(model, rule, len(prompts))
    try:
        logits, table, bank = prefill.prefill_observed(model, mapped, rule.observe)
        rows = answer.SamplingRows.of([Sampling()] * len(prompts), logits.shape[0])
        blocks = answer.decode(
            model, mapped, table, logits, rows, block, rule, bank, numbers=numbers
        )
        out = [next(blocks)]
        while sum(part.shape[1] for part in out) < steps:
            out.append(next(blocks))
        return np.concatenate(out, axis=1)[: len(prompts), :steps]
    finally:
        if host is not None:
            host.release(numbers)
        for part in mapped:
            unmap(model, part)


def admitted(model, rule, count):
    """Where the rule searches, and numbers for so many requests; (None, ()) where it does not."""
    if rule.searches is None:
        return None, ()
    host = answer.host_search(model)
    return host, [host.admit() for _ in range(count)]


def _next_logits(model, method, prompts, rule, given):
    """Logits [B, n, V] after each of the ``given`` [B, n] tokens, decoded one at a time."""
    method = dataclasses.replace(METHODS[method], decode=rule)
    mapped = [map_request(model, model.memory, method, p, given.shape[1]) for p in prompts]
    try:
        _, table, bank = prefill.prefill_observed(model, mapped, rule.observe)
        return _rule_logits(model, mapped, table, rule, bank, np.asarray(given))
    finally:
        for part in mapped:
            unmap(model, part)


def _rule_logits(model, mapped, table, rule, bank, given):
    """Logits [B, n, V] after each token of ``given`` [B, n]; the pool is written as in decoding."""
    rows = table.pages.shape[0]
    position = np.full(rows, -1, np.int32)
    slot = np.full(rows, table.slot_position.shape[1], np.int32)
    position[: len(mapped)] = [m.next_position for m in mapped]
    slot[: len(mapped)] = [m.next_slot for m in mapped]
    host, numbers = admitted(model, rule, len(mapped))
    decoding = answer.start_decoding(
        model, mapped, table, rule, bank, position, slot, host, numbers=numbers
    )
    rope = model.rope(table.slot_position.shape[1])
    out = []
    for step in range(given.shape[1]):
        tokens = np.zeros((rows, 1), np.int32)
        tokens[: len(mapped), 0] = given[:, step]
        at = np.where(position >= 0, position + step, -1)[:, None].astype(np.int32)
        to = np.where(position >= 0, slot + step, slot)[:, None].astype(np.int32)
        args = (model.params, model.config, rope, model.cache.pool, table)
        batch = tuple(map(jnp.asarray, (tokens, at, to)))
        if decoding is None:
            hidden, model.cache.pool, table = _DENSE(*args, *batch)
        else:
            hidden, model.cache.pool, table, decoding = _RULE(
                *args, decoding, *batch, rule, host, model.cache.values
            )
        out.append(np.asarray(unembed(model.params, hidden[:, 0]))[: len(mapped)])
    if host is not None:
        _ACCOUNTS.append(host.account_of(numbers))
        host.release(numbers)
    return np.stack(out, axis=1)


_DENSE = jax.jit(prefill.run_tokens, static_argnums=1)
_RULE = jax.jit(answer.run_by_rule, static_argnums=(1, 9, 10, 11))
