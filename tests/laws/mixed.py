"""Attention over K and V of which some are stored and some are computed, without pages."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrag.base.types import Partial
from jaxrag.models.rope import place


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Attention of whole prompts over dense K, V: fresh where ``fresh`` [L, B, T], else stored.

    L counts the layers that have K and V.

    ``stored`` [L, B, 2, T, K, H] is K before rotation and V. A token sees those before it in order.
    ``apart``: to the tokens of ``chunks`` [B, T] in this way. Collects q, k and v as they come.
    """

    config: Any
    rope: Any
    stored: jax.Array
    fresh: jax.Array
    chunks: jax.Array | None = None
    apart: Any = None

    def __call__(self, layer, window, q, k, v, tokens, cache):
        if (sources := self.config.kv_sources) is not None:
            layer = jnp.array(sources)[layer]  # of its kind: rotated and windowed alike
        keep, stored, seen = self.fresh[layer][..., None, None], self.stored[layer], (q, k, v)
        k, v = jnp.where(keep, k, stored[:, 0]), jnp.where(keep, v, stored[:, 1])
        order = jnp.arange(q.shape[1])
        see = order <= order[:, None]
        if window is not None:
            see &= order[:, None] - order < window
        group = q.shape[2] // k.shape[2]
        rope = self.rope.of_layer(layer)
        q, k = (place(x, tokens.positions, rope, self.config.rope) for x in (q, k))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k.repeat(group, 2)) * (
            self.config.attention_scale or q.shape[-1] ** -0.5
        )
        if (cap := self.config.score_cap) is not None:
            scores = cap * jnp.tanh(scores / cap)
        weights, lse = self.weights(jnp.where(see, scores, -jnp.inf))
        out = jnp.einsum("bnts,bsnh->btnh", weights, v.repeat(group, 2))
        return Partial(out, lse.swapaxes(1, 2)), cache, seen

    def weights(self, scores):
        """Softmax of scores [B, N, T, T], in which those of chunks may weigh otherwise; its lse.

        With T and S each e^(score / T) x (their sum)^(T S - 1), instead of e^score.
        """
        if self.apart is None:
            return jax.nn.softmax(scores, -1), jax.nn.logsumexp(scores, -1)
        chunks, t = self.chunks[:, None, None], self.apart.temperature
        own = jnp.where(chunks, jnp.exp(scores / t), 0)
        total = own.sum(-1, keepdims=True)
        own *= jnp.where(total > 0, total, 1) ** (t * self.apart.scale - 1)
        weights = jnp.where(chunks, own, jnp.exp(scores))
        return weights / weights.sum(-1, keepdims=True), jnp.log(weights.sum(-1))
