"""Laws 11 and of bfloat16, and that other lengths run through what is compiled already."""

import re

import jax
import numpy as np
import pytest
from matrix import ALL_METHODS, ALL_RULES
from refusal import refused

from jaxrag.base.errors import ConfigError
from jaxrag.base.sharding import make_mesh
from jaxrag.engine import decoding, prefill, staging, steps
from jaxrag.engine.engine import engine_of
from jaxrag.models.model import random_model
from jaxrag.reuse.decode import retrieval
from jaxrag.reuse.decode import rule as decode_rule
from jaxrag.reuse.methods import METHODS
from jaxrag.reuse.select import cache_craft, kv_deviation, query_guided
from jaxrag.serve.generate import generate


def ids(rng, *lengths):
    return [list(map(int, rng.integers(3, 64, n))) for n in lengths]


def slow(*values):
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("turborag", (2, 2, 2)),
        *slow(
            *(("turborag", sizes) for sizes in ((1, 4, 2), (8, 1, 1), (1, 2, 4))),
            *((name, (2, 2, 2)) for name in ALL_METHODS if name != "turborag"),
        ),
    ],
)
def test_law_11_sharded_is_one_device(rng, tiny_config, caplog, method, sizes):
    """A (data, fsdp, tensor) mesh changes nothing; sizes it does not divide are named.

    Nor does it where q and k are normalised over heads that lie on several devices.
    """
    config = tiny_config("olmo2", vocab_size=104, num_layers=4)
    models = [
        random_model(config, mesh=mesh, cache_tokens=2048) for mesh in (None, make_mesh(*sizes))
    ]
    options = {
        "documents": ids(rng, 30, 17, 25),
        "method": ALL_METHODS[method],
        "max_new_tokens": 5,
    }
    questions = ids(rng, 9, 3, 15, 12)  # as the documents, of one width
    one, many = ([it.token_ids for it in generate(questions, model=it, **options)] for it in models)
    assert one == many
    if sizes[2] == 4:  # 2 KV heads over 4 devices
        assert "kv_heads=2 is not divisible by mesh tensor=4 and is replicated" in caplog.text
    else:
        pool = engine_of(models[1]).runner.cache.pool
        assert not pool.k.sharding.is_fully_replicated or sizes[2] == 1


def test_a_mesh_of_too_many_devices_is_refused():
    with refused(ConfigError, "4096"):
        make_mesh(16, 16, 16)


@pytest.mark.slow
@pytest.mark.parametrize("method", ALL_METHODS)
def test_bfloat16_agrees_with_float32(bench, method):
    """Most of the same tokens are chosen, and what follows differs by rounding only."""
    wide, narrow = bench("joined"), bench("joined", dtype="bfloat16")
    narrow.model.params = jax.tree.map(lambda x: x.astype("bfloat16"), wide.model.params)
    expected, rounded = (it.serve(ALL_METHODS[method], tokens=1) for it in (wide, narrow))
    divergences = []
    for answer, other in zip(expected, rounded, strict=True):
        chosen, again = (set(it.chosen or ()) for it in (answer, other))
        assert len(again) == len(chosen) and len(again & chosen) >= 0.7 * len(chosen)
        assert np.abs(answer.logits - other.logits).max() < 0.1 * np.abs(answer.logits).max()
        log_p, log_q = (jax.nn.log_softmax(it.logits.astype(float)) for it in (answer, other))
        divergences.append(float((np.exp(log_p) * (log_p - log_q)).sum()))
    same = [one.tokens == other.tokens for one, other in zip(expected, rounded, strict=True)]
    assert sum(same) >= 3
    assert np.mean(divergences) < 2e-3 or ALL_METHODS[method].recomputes


@pytest.fixture
def compilations(caplog):
    """Names of the functions that were compiled since the last call, on whatever thread."""

    def since():
        said = [re.match(r"Compiling (?:jit\()?(\w+)", text) for text in caplog.messages]
        caplog.clear()
        return {found[1] for found in said if found}

    jax.config.update("jax_log_compiles", True)  # that of all threads
    yield since
    jax.config.update("jax_log_compiles", False)


USUAL = ("full_attention", "turborag", "turborag_composite")
COMPILED = {
    it.__name__
    for it in (
        prefill._whole_piece, prefill._layer, decoding._join, steps._whole_steps,
        decoding._put_decoding, staging._place, kv_deviation._whole_check,
        kv_deviation._sparse_check, cache_craft._mean_shares, query_guided._received_alone,
        query_guided._received_over_cache, decode_rule.prepare_layers, retrieval._keys,
    )
}  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [
        [(ALL_METHODS[name], "dense") for name in USUAL],
        *slow(
            *([[(it, "dense")]] for name, it in ALL_METHODS.items() if name not in USUAL),
            *([[(METHODS["turborag"], name)]] for name in ALL_RULES if name != "dense"),
        ),
    ],
    ids=lambda asked: "-".join((asked[0][0].name, asked[0][1])),
)
def test_a_new_length_does_not_recompile(rng, tiny_config, compilations, asked):
    """Prompts, chunks and answers of other lengths run through what is compiled already."""
    config = tiny_config(num_layers=4, mlp_dim=41, eos_ids=())  # which nobody else has
    model = random_model(config, cache_tokens=2048)

    def ask(question, documents, new_tokens):
        for method, rule in asked:
            generate(*ids(rng, question), documents=ids(rng, *documents), model=model,
                     method=method, decode=ALL_RULES[rule], max_new_tokens=new_tokens)  # fmt: skip

    ask(30, (100, 90, 80), 9)
    compilations()
    ask(25, (98, 91, 77), 12)
    ask(17, (90, 90, 90), 3)
    assert not compilations() & COMPILED
