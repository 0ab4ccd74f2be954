"""Random parameters without compiling an initialiser for every shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.models.spec import is_spec, param_specs


@pytest.fixture(scope="session")
def random_params():
    """``random_params(config)``: normal values of 1/sqrt(fan_in), norms and biases included."""

    def make(config):
        rng = np.random.default_rng(7)
        return jax.tree.map(
            lambda spec: jnp.asarray(
                rng.normal(1.0 if spec.init == "ones" else 0.0, spec.fan_in**-0.5, spec.shape),
                config.dtype,
            ),
            param_specs(config),
            is_leaf=is_spec,
        )

    return make
