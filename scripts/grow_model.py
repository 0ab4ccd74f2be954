"""A model made deeper: every layer is followed by copies that write nothing yet.

    python scripts/grow_model.py checkpoints/synthetic-0.8m/long-dual runs/deep-start --layers 12

A copy has zeros where it writes into the residual stream (``o``, ``down``), so the deeper model
says what the one it grew from says, until it is trained on.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import einops
import jax
import numpy as np

from jaxrag.base.errors import ConfigError, JaxragError
from jaxrag.models.export import export_hf
from jaxrag.models.model import load_model
from jaxrag.models.spec import Params


def grow(params: Params, times: int) -> Params:
    """Params whose leaves [L, ...] have become [L * times, ...]; ``times`` >= 1."""
    layers = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf), times, axis=0), params.layers)
    num_layers = layers.o.shape[0]
    first = np.arange(num_layers) % times == 0

    def silent(leaf: np.ndarray) -> np.ndarray:
        axes = " ".join(["l"] + ["1"] * (leaf.ndim - 1))
        return np.where(einops.rearrange(first, f"l -> {axes}"), leaf, np.zeros_like(leaf))

    return params.replace(layers=layers.replace(o=silent(layers.o), down=silent(layers.down)))


def main() -> int:
    """Write the deeper model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a model directory")
    parser.add_argument("out", type=Path, help="the directory to write")
    parser.add_argument("--layers", type=int, default=12, help="a multiple of the model's layers")
    args = parser.parse_args()
    try:
        model = load_model(args.model)
        times, rest = divmod(args.layers, model.config.num_layers)
        if rest or times < 1:
            raise ConfigError(
                f"{args.layers} layers are not a multiple of the model's {model.config.num_layers}"
            )
        config = dataclasses.replace(model.config, num_layers=args.layers)
        params = grow(model.params, times)
        export_hf(args.out, params, config, args.model, reading=model.reading)
    except JaxragError as error:
        print(f"grow_model: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {config.num_layers} layers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
