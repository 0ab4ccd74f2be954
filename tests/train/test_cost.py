"""What a run is said to take of layers with states, against sums and what XLA plans for."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from jaxrag.base.types import FINAL, Tokens
from jaxrag.models.attention import PackedAttend
from jaxrag.models.decoder import forward
from jaxrag.models.recurrent import packed
from jaxrag.models.rope import rope_tables
from jaxrag.models.spec import init_params, is_spec, param_specs
from jaxrag.train.cost import PASSES, estimate
from jaxrag.train.step import _policy

B, T = 4, 128


@pytest.fixture
def cost(train_config):
    """``cost(model, **changes)``: of a run of one step over B rows of T tokens."""

    def estimated(model, **changes):
        rows = {"data.rows": B, "data.row_tokens": T, "loss.logits_tokens": 1}
        return estimate(train_config(**rows, **changes), model)

    return estimated


def hybrid(tiny_config, kinds=(True, True, True, False), **sizes):
    config = tiny_config("qwen3_5", num_layers=len(kinds), max_positions=256)
    recurrent = dataclasses.replace(config.recurrent, layers=kinds, **sizes)
    return dataclasses.replace(config, recurrent=recurrent)


def test_products_are_of_every_weight_and_pairs_of_the_layers_that_attend(tiny_config, cost):
    config = hybrid(tiny_config)
    specs = param_specs(config)
    each = jax.tree.leaves((specs.layers, specs.recurrent), is_leaf=is_spec)
    weights = sum(
        math.prod(it.shape)
        for it in each
        if len(it.shape) > 2 and it.shape[-1] != config.recurrent.width  # no norms, no convolution
    )
    r, pairs = config.recurrent, T * (T + 1) // 2
    states = 3 * 3 * r.value_heads * r.key_dim * r.value_dim  # three products in three layers
    head = config.model_dim * config.vocab_size
    row = 2 * T * (weights + states + head) + 4 * config.num_heads * config.head_dim * pairs
    assert cost(config).flops_per_step == PASSES * B * row


@pytest.mark.parametrize("remat", ["full", "dots"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"key_dim": 32, "value_dim": 32},
        {"key_dim": 16, "value_dim": 64, "key_heads": 4, "value_heads": 8},
    ],
)
def test_memory_of_states_is_what_is_planned_for(tiny_config, cost, remat, sizes):
    config = hybrid(tiny_config, **sizes)
    rope, policy = rope_tables(config, 256), _policy(remat)

    def loss(params, tokens):
        wrap = lambda layer: jax.checkpoint(layer, policy=policy, prevent_cse=False)  # noqa: E731
        attend = PackedAttend(config, rope, prefix_visible=False)
        memory = packed(config, tokens, False)
        return (forward(params, config, tokens, None, attend, wrap, memory)[0] ** 2).sum()

    params = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    rows = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    tokens = Tokens(rows, rows, np.full_like(rows, FINAL))
    planned = jax.jit(jax.grad(loss)).lower(params, tokens).compile().memory_analysis()
    said = cost(config, **{"compute.remat": remat}).activation_bytes
    assert 0.8 < said / planned.temp_size_in_bytes < 1.25
