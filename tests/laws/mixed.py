"""Attention over K and V of which some are stored and some are computed, without pages."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrag.models.rope import place


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Attention of whole prompts over dense K, V: fresh where ``fresh`` [L, B, T], else stored.

    ``stored`` [L, B, 2, T, K, H] is K before rotation and V. A token sees those before it in order.
    Collects q, k and v as they come.
    """

    config: Any
    rope: Any
    stored: jax.Array
    fresh: jax.Array

    def __call__(self, layer, window, q, k, v, tokens, cache):
        keep, stored, seen = self.fresh[layer][..., None, None], self.stored[layer], (q, k, v)
        k, v = jnp.where(keep, k, stored[:, 0]), jnp.where(keep, v, stored[:, 1])
        order = jnp.arange(q.shape[1])
        see = order <= order[:, None]
        if window is not None:
            see &= order[:, None] - order < window
        group = q.shape[2] // k.shape[2]
        q, k = (place(x, tokens.positions, self.rope, self.config.rope) for x in (q, k))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k.repeat(group, 2)) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(see, scores, -jnp.inf), -1)
        return jnp.einsum("bnts,bsnh->btnh", weights, v.repeat(group, 2)), cache, seen
