"""Weights with an array for every layer, as steps of few rows on a CPU take them.

A scan over stacked weights copies those of a layer before XLA:CPU multiplies with them. For a chunk
of a prompt that is a few percent; a decode step does hardly anything but read weights, and takes
1.7 times as long in float32. Its program then holds every layer by itself, which takes three times
as long to compile.
"""

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrag.base.types import Array
from jaxrag.models.spec import LayerParams, Params

IN_CACHE = 64 << 20  # bytes of layers; a copy of what the processor's caches hold costs little
_IN_PLACE = 64  # bytes; XLA:CPU reads host memory in place from such an address on


def gains_by_layer(params: Params, mesh: Mesh | None) -> bool:
    """Would ``by_layer`` make decoding faster, and hold no weight twice?"""
    if mesh is not None or jax.default_backend() != "cpu":
        return False
    leaves = jax.tree.leaves(params.layers)
    large = [leaf for leaf in leaves if leaf.ndim > 2]  # the others are vectors of a layer
    in_place = all(leaf.nbytes // len(leaf) % _IN_PLACE == 0 for leaf in large)
    return in_place and sum(leaf.nbytes for leaf in leaves) > IN_CACHE


def by_layer(params: Params) -> Params:
    """The same weights, ``layers`` a list of one LayerParams a layer, without the leading L.

    Of weights on a CPU; the arrays lie in the memory of ``params``, and keep it.
    """
    leaves, tree = jax.tree.flatten(params.layers)
    apart = [[_in_place(layer) for layer in np.asarray(leaf)] for leaf in leaves]
    layers: list[LayerParams] = [
        jax.tree.unflatten(tree, weights) for weights in zip(*apart, strict=True)
    ]
    return params.replace(layers=layers)


def _in_place(view: np.ndarray) -> Array:
    return jax.device_put(view, may_alias=True)
