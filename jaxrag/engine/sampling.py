"""How the next token is chosen from logits: greedy, or temperature with top-k and top-p.

The key of a draw is folded from the request's seed and the index of the token in its answer, and
from nothing else, so a request gets the same tokens in any batch slot and any batch size.
"""

import jax
import jax.numpy as jnp

from jaxrag.base.types import Array
from jaxrag.engine.sampling_params import SamplingParams

Sampling = SamplingParams  # its first public name


def sample(
    logits: Array,  # [B, V] float32
    temperature: Array,  # [B] float32; 0 = greedy
    top_k: Array,  # [B] int32; 0 = all
    top_p: Array,  # [B] float32 in (0, 1]; 1 = all
    seeds: Array,  # [B] uint32
    token_index: Array,  # [B] int32; index of the token to draw within the answer
) -> Array:
    """Choose one token id per row: int32 [B].

    A row of temperature 0 takes the argmax, the lowest id among equals. Any other draws from
    softmax(logits / temperature) restricted to the top_k most likely tokens and then, after
    renormalising, to the shortest run of most likely tokens whose probability reaches top_p (at
    least one token). Equal logits rank by id, so exactly top_k tokens are kept. Pure and
    jittable; the vocabulary is sorted only when some row asks for top-k or top-p, and no random
    number is drawn when every row is greedy.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Array:
        # Greedy rows pass through with temperature 1 and are replaced below.
        divisor = jnp.where(temperature > 0, temperature, 1.0)[:, None]
        scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / divisor
        restricted = (temperature > 0) & ((top_k > 0) | (top_p < 1))
        kept = jax.lax.cond(
            jnp.any(restricted),
            lambda: _most_likely(scaled, top_k, top_p),
            lambda: jnp.ones(logits.shape, bool),
        )
        noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(seeds, token_index, logits.shape[-1])
        drawn = jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=-1)
        return jnp.where(temperature > 0, drawn.astype(jnp.int32), greedy)

    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)


def _most_likely(scaled: Array, top_k: Array, top_p: Array) -> Array:
    """Which tokens top-k and then top-p keep: bool [B, V]."""
    order = jnp.argsort(scaled, axis=-1, descending=True, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    limit = jnp.where(top_k > 0, top_k, scaled.shape[-1])
    in_top_k = jnp.arange(scaled.shape[-1]) < limit[:, None]
    probabilities = jax.nn.softmax(jnp.where(in_top_k, ranked, -jnp.inf), axis=-1)
    reached = jnp.cumsum(probabilities, axis=-1)
    before = jnp.pad(reached[:, :-1], ((0, 0), (1, 0)))
    # A rounded sum can pass 1 before the last token; p = 1 keeps all the same.
    in_top_p = (before < top_p[:, None]) | (top_p[:, None] >= 1)
    rows = jnp.arange(scaled.shape[0])[:, None]
    return jnp.zeros(scaled.shape, bool).at[rows, order].set(in_top_k & in_top_p)


def _gumbel(seed: Array, token_index: Array, vocab_size: int) -> Array:
    """Gumbel noise of one row: float32 [V], from its own key."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), token_index)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="high")
