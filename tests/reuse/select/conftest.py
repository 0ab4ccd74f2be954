"""Random models of every family, small prompts, and the two ways to run them."""

import contextlib
import copy

import jax
import numpy as np
import pytest
from mixed import Mixed

from jaxrag.base.shapes import bucket
from jaxrag.base.types import FINAL, Tokens
from jaxrag.engine import prefill_queue
from jaxrag.engine.engine import Engine, engine_of
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.engine.request import Prompt, Request
from jaxrag.engine.state import EngineSettings
from jaxrag.models.decoder import forward
from jaxrag.models.model import random_model
from jaxrag.reuse.encode import encode_chunks
from jaxrag.reuse.methods import Method


@pytest.fixture(scope="session")
def model_of(tiny_config):
    """Random models by family and changes, made once: compiled functions are shared by config."""
    made = {}

    def make(family="llama", **changes):
        key = (family, *sorted(changes.items()))
        if key not in made:
            made[key] = model = random_model(tiny_config(family, **changes), cache_tokens=2048)
            # Those who ask at once are in the pool at once, whatever has to be read or encoded.
            model.engine = Engine(model, EngineSettings(lockstep=True))
        return made[key]

    return make


def _filled(weights, limits, total):
    """What chunks take in proportion, none beyond its limit: the common level by bisection."""
    low, high = 0.0, 1e12
    for _ in range(200):
        level = (low + high) / 2
        if np.minimum(level * weights, limits).sum() < total:
            low = level
        else:
            high = level
    return np.minimum(high * weights, limits)


class Work:
    """What the tests of this folder do with a model and a prompt."""

    @staticmethod
    def ids(rng, *lengths):
        return tuple(rng.integers(3, 101, n).astype(np.int32) for n in lengths)

    @classmethod
    def prompt(cls, rng, prefix=5, chunks=(37, 20, 1, 16), final=9):
        return Prompt(cls.ids(rng, prefix)[0], cls.ids(rng, *chunks), cls.ids(rng, final)[0])

    @staticmethod
    def method(selector, ratio, encoder="after_prefix"):
        return Method("tried", encoder=encoder, selector=selector, recompute_ratio=ratio)

    @staticmethod
    def served(model, method, *prompts, stores=None):
        """Of each prompt where its KV lay, and its last token's logits [V].

        All ask at once, each from its own store or all from the model's.
        """
        engine, rows = engine_of(model), bucket(len(prompts), 1)
        stores = stores or [engine.memory] * len(prompts)
        requests = [
            Request(prompt, store, method, 1, rows=rows)
            for prompt, store in zip(prompts, stores, strict=True)
        ]

        def seen(runner, state, there):
            return copy.copy(state), np.asarray(there.logits)[0]

        return inspect_prompts(engine, requests, seen)

    @staticmethod
    @contextlib.contextmanager
    def selecting(before):
        """``before(runner, state)`` is called with each request before its tokens are selected."""
        select = prefill_queue.select_tokens

        def selects(runner, state, ahead):
            before(runner, state)
            select(runner, state, ahead)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefill_queue, "select_tokens", selects)
            yield

    @classmethod
    def scene(cls, model, method, *prompts, look):
        """What ``look(runner, scene)`` makes of each prompt before anything of it is selected."""
        found = []
        with cls.selecting(before=lambda runner, it: found.append(look(runner, it.scene))):
            cls.served(model, method, *prompts)
        return found

    @classmethod
    def online(cls, model, method, *prompts, stores=None):
        """Logits of each prompt's last token, and what was recomputed (None: nothing at all)."""
        served = cls.served(model, method, *prompts, stores=stores)
        chosen = [None if it.choice is None else it.choice.tokens for it, _ in served]
        return np.stack([logits for _, logits in served]), chosen

    @staticmethod
    def dense(model, prompt, chosen, fresh_layers=()):
        """The whole prompt without a pool, chunk tokens but the chosen as stored: hidden, q, k, v.

        ``fresh_layers`` adds, for each layer from 0 on, chunk tokens that are fresh there as well.
        q, k and v are those of all layers, [L, T, heads, H], before rotation.
        """
        whole = np.concatenate((prompt.prefix, *prompt.chunks, prompt.final))
        config = model.config
        fresh = np.ones((config.num_layers, len(whole)), bool)
        first = len(prompt.prefix)
        last = len(whole) - len(prompt.final)
        fresh[:, first:last] = False
        fresh[:, first + np.asarray(chosen, int)] = True
        for layer, tokens in enumerate(fresh_layers):
            fresh[layer, first + np.asarray(tokens, int)] = True
        shape = (config.num_layers, 2, len(whole), config.num_kv_heads, config.head_dim)
        stored = np.zeros(shape, np.float32)
        starts = first + np.cumsum([0, *map(len, prompt.chunks)])
        for i, kv in encode_chunks(model, "after_prefix", prompt.prefix, prompt.chunks):
            stored[:, :, starts[i] : starts[i + 1]] = kv
        ids = jax.numpy.asarray(whole[None])
        tokens = Tokens(ids, jax.numpy.arange(len(whole))[None], jax.numpy.full_like(ids, 2))
        dense = (jax.numpy.asarray(stored)[:, None], jax.numpy.asarray(fresh)[:, None])
        attend = Mixed(config, model.rope(len(whole)), *dense)
        hidden, _, (q, k, v) = forward(model.params, config, tokens, None, attend)
        arrays = (np.asarray(x[:, 0], np.float64) for x in (q, k, v))
        return hidden[0], stored.astype(np.float64), *arrays

    @staticmethod
    def assert_shared_out(counts, weights, limits, total):
        """Whole numbers in proportion to the weights; the largest remainders are rounded up."""
        weights, limits = np.asarray(weights, float), np.asarray(limits, float)
        exact = _filled(weights, limits, min(total, limits[weights > 0].sum()))
        idle = np.where(weights > 0, 0, limits)  # these take what the others have no room for
        exact = exact + _filled(idle, idle, total - exact.sum())
        change = np.asarray(counts) - exact
        assert np.sum(counts) == total
        assert (np.abs(change) < 1).all()
        up, down = 1 - change[change > 1e-6], -change[change < -1e-6]  # remainders
        assert min(up, default=1) >= max(down, default=0) - 1e-6

    @classmethod
    def full_logits(cls, model, prompt):
        """Logits of the last token by one forward, padded so that few lengths are compiled."""
        whole = np.concatenate((prompt.prefix, *prompt.chunks, prompt.final))
        pad = (0, -len(whole) % 128)
        segments = np.pad(np.full(len(whole), FINAL, np.int32), pad)[None]
        logits = model.logits(np.pad(whole, pad)[None], segments=segments)
        return np.asarray(logits[0, len(whole) - 1])


@pytest.fixture(scope="session")
def work():
    return Work
