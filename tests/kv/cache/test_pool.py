"""What making a pool compiles."""

import jax

from jaxrag.kv.cache.pool import empty_pool
from jaxrag.models.model import random_model


def test_a_second_pool_or_random_model_of_the_same_sizes_compiles_nothing(tiny_config, caplog):
    with jax.log_compiles():
        for seed in range(2):
            empty_pool(random_model(tiny_config(vocab_size=107), seed).config, 5)
    assert [caplog.text.count(f"Compiling jit({it})") for it in ("init_params", "_zeros")] == [1, 1]
