"""Weights that are numbers: a NaN among them would be in every answer and in all stored KV."""

from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrag.base.errors import ModelError
from jaxrag.base.sharding import replicated, to_host
from jaxrag.base.types import Array
from jaxrag.models.names import by_name
from jaxrag.models.spec import Params


def require_finite(directory: str | Path, params: Params, mesh: Mesh | None = None) -> None:
    """Raise ModelError where weights, as they were loaded, hold NaN or infinity.

    They are read once, on the devices where they are; ``mesh`` is theirs.
    """
    leaves = by_name(params)
    place = None if mesh is None else replicated(mesh)
    finite = to_host(jax.jit(_finite, out_shardings=place)(list(leaves.values())))
    bad = [name for name, good in zip(leaves, finite.tolist(), strict=True) if not good]
    if bad:
        raise ModelError(
            f"{directory}: {bad[0]!r} holds NaN or infinity in {leaves[bad[0]].dtype.name}"
            + (f", as do {len(bad) - 1} other parameters" if bad[1:] else "")
            + "; download or copy the weights again, or load them in a wider dtype"
        )


def _finite(leaves: list[Array]) -> Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])
