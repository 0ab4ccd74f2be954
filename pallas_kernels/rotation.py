"""Rotary rotation of the leading dimensions of a head, in float32. Pure: norms are preserved."""

import jax
import jax.numpy as jnp

Array = jax.Array


def rotate(x: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
    """Rotate the first 2 * cos.shape[-1] dims of x [..., H] by the angles of cos, sin [..., R/2].

    Pairs are (0, 1), (2, 3), ... when interleaved, else (0, R/2), (1, R/2 + 1), ... Dimensions
    after R pass through. The angles may have axes that x is repeated over. Computed in float32,
    returned in x's dtype.
    """
    rotary_dim = 2 * cos.shape[-1]
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    turned = turned.astype(jnp.float32)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = jnp.split(turned, 2, axis=-1)
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        turned = jnp.stack((first, second), axis=-1).reshape(*first.shape[:-1], rotary_dim)
    else:
        turned = jnp.concatenate((first, second), axis=-1)
    turned = turned.astype(x.dtype)
    if not rest.shape[-1]:
        return turned
    rest = jnp.broadcast_to(rest, (*turned.shape[:-1], rest.shape[-1]))
    return jnp.concatenate((turned, rest), axis=-1)
