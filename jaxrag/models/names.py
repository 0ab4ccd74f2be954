"""Parameters by name: ``layers.q`` for ``params.layers.q``. Absent weights have no name."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxrag.models.spec import LayerParams, Params, is_spec

_LAYERS = "layers."


def by_name(tree: Params) -> dict[str, Any]:
    """The leaves of a ``Params`` of arrays, specs or shardings, by dotted name."""
    return {
        ".".join(key.name for key in path): leaf
        for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_spec)
    }


def from_names(leaves: Mapping[str, Any]) -> Params:
    """Inverse of ``by_name``."""
    return nested(Params, LayerParams, leaves)


def nested[P](params: Callable[..., P], layer: Callable[..., Any], leaves: Mapping[str, Any]) -> P:
    """Parameters from leaves by dotted name; those of ``layers`` are a ``layer``."""
    layers = {
        name.removeprefix(_LAYERS): leaf
        for name, leaf in leaves.items()
        if name.startswith(_LAYERS)
    }
    rest = {name: leaf for name, leaf in leaves.items() if not name.startswith(_LAYERS)}
    return params(layers=layer(**layers), **rest)
