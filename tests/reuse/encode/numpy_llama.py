"""A llama in numpy, by which methods are checked, and what the engine says in its place."""

import dataclasses

import numpy as np

from jaxrag.engine.engine import engine_of
from jaxrag.engine.prompt_inspection import inspect_prompts

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Llama:
    """The model in numpy, float64, a row at a time."""

    def __init__(self, model):
        self.config = model.config
        self.params = {
            name: np.asarray(value, np.float64)
            for name, value in dataclasses.asdict(model.params).items()
            if name != "layers" and value is not None
        }
        layers = model.params.layers
        self.layers = [
            {
                field.name: np.asarray(getattr(layers, field.name)[at], np.float64)
                for field in dataclasses.fields(layers)
                if getattr(layers, field.name) is not None
            }
            for at in range(self.config.num_layers)
        ]

    def norm(self, x, weight):
        return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.norm_eps)

    def turn(self, x, positions):
        """x [T, heads, H] rotated to positions [T]."""
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.config.rope.theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        one, two = x[..., :half], x[..., half:]
        return np.concatenate((one * cos - two * sin, two * cos + one * sin), -1)

    def run(self, ids, given=None, start=0):
        """Logits [T, V] and KV [L, 2, T, K, H] of a causal row.

        ``given``: KV that takes the place of its tokens' own from ``start`` on.
        """
        positions = np.arange(len(ids))
        sees = positions <= positions[:, None]
        x, kept = self.params["embed"][ids], []
        for at, p in enumerate(self.layers):
            h = self.norm(x, p["attn_norm"])
            q, k, v = (np.einsum("td,dnh->tnh", h, p[name]) for name in "qkv")
            if given is not None:
                here = slice(start, start + given.shape[2])
                k[here], v[here] = given[at]
            kept.append((k, v))
            group = self.config.num_heads // self.config.num_kv_heads
            keys, values = self.turn(k, positions).repeat(group, 1), v.repeat(group, 1)
            scores = np.einsum("tnh,snh->nts", self.turn(q, positions), keys)
            scores = np.where(sees, scores * self.config.head_dim**-0.5, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out = np.einsum("nts,snh->tnh", weights, values)
            x = x + np.einsum("tnh,nhd->td", out, p["o"])
            h = self.norm(x, p["mlp_norm"])
            gate, up = h @ p["gate"], h @ p["up"]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ p["down"]
        head = self.params.get("lm_head", self.params["embed"].T)
        return self.norm(x, self.params["final_norm"]) @ head, np.array(kept)


def logits_of(model, request):
    """[V] after the prompt."""
    [found] = inspect_prompts(
        engine_of(model), [request], lambda runner, state, there: np.asarray(there.logits)[0]
    )
    return found
