"""NumPy's rotation is that of the models."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrag.base.config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from jaxrag.connectors.rotation import place, rope_table
from jaxrag.models import rope as models

PLAIN = RopeConfig(theta=10000.0, rotary_dim=16, interleaved=False, scaling=None)
ROPES = {
    "plain": PLAIN,
    "partial": dataclasses.replace(PLAIN, rotary_dim=8),
    "interleaved": dataclasses.replace(PLAIN, rotary_dim=8, interleaved=True),
    "linear": dataclasses.replace(PLAIN, scaling=LinearScaling(4.0)),
    "llama3": dataclasses.replace(PLAIN, scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
    "yarn": dataclasses.replace(PLAIN, scaling=YarnScaling(4.0, 64, 32.0, 1.0, 1.3, True)),
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_as_the_models_place_keys(name, dtype, rng):
    rope = ROPES[name]
    keys = rng.standard_normal((600, 2, 16)).astype(dtype)
    table = models.rope_table(rope, 700)
    right = models.place(jnp.asarray(keys), jnp.arange(50, 650), table, rope)
    place(keys[None], rope_table(rope, 50, 650), rope)
    loose = 2e-2 if dtype == ml_dtypes.bfloat16 else 1e-5
    np.testing.assert_allclose(
        keys.astype(np.float32), np.asarray(right, np.float32), atol=loose, rtol=loose
    )
