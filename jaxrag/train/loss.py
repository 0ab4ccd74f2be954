"""Cross-entropy over a large vocabulary without the logits of a whole batch.

Logits exist for a slice of every row at a time. The gradient of a cross-entropy is known as soon as
its logits are, so it is computed in the same pass and nothing is computed twice.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxrag.base.types import Array
from jaxrag.models.decoder import capped
from jaxrag.models.linear import over_rows

_CACHED_LOGITS = 2**22  # measured: 16 MiB of float32 logits; more are written to memory
_FEWEST_TOKENS = 512  # measured: of fewer, adding up the gradient of the head takes longer


class TokenLoss(struct.PyTreeNode):
    """What was predicted of each token; float32 [B, T]."""

    loss: Array  # -log p(target), or KL divergence from what was wanted
    correct: Array  # bool: is the target the most likely token (the first of equals)?


def token_loss(
    hidden: Array,
    head: Array,
    targets: Array,
    tied: bool,
    tokens: int,
    wanted: Array | None = None,
    cap: float | None = None,
) -> TokenLoss:
    """Loss of every token, no gradient: hidden [B, T, D], targets [B, T].

    ``head`` is [V, D] when ``tied``, else [D, V]; ``tokens`` at most have their logits at once.
    ``wanted`` [B, T, D] is as in ``weighted_loss``; ``cap`` is the model's ``logit_cap``.
    """
    slices, length = _slices((hidden, targets, wanted), tokens, head.shape[0 if tied else 1])

    def one(_: None, part: tuple[Array, Array, Array | None]) -> tuple[None, TokenLoss]:
        return None, _found(part, head, tied, cap)[0]

    _, found = lax.scan(one, None, slices)
    return jax.tree.map(lambda x: _joined(x, length), found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def weighted_loss(
    hidden: Array,
    head: Array,
    targets: Array,
    weights: Array,
    wanted: Array | None,
    tied: bool,
    tokens: int,
    cap: float | None = None,
) -> tuple[Array, TokenLoss]:
    """Sum of weights x token loss, float32 [], and what it is made of (which has no gradient).

    Args:
      hidden: [B, T, D].
      head: [V, D] when ``tied``, else [D, V], of the same dtype.
      targets: [B, T] int32.
      weights: [B, T] float32, 0 where nothing is predicted.
      wanted: None, or hidden [B, T, D] of which the distribution is wanted instead of the target.
      tokens: at most so many tokens have their logits at once, but one of each row.
      cap: the model's ``logit_cap``.
    """
    found = token_loss(hidden, head, targets, tied, tokens, wanted, cap)
    return (found.loss * weights).sum(), found


_Gradients = tuple[Array, Array]  # of hidden and head, for a cotangent of 1


def _forward(
    hidden: Array,
    head: Array,
    targets: Array,
    weights: Array,
    wanted: Array | None,
    tied: bool,
    tokens: int,
    cap: float | None,
) -> tuple[tuple[Array, TokenLoss], _Gradients]:
    inputs = (hidden, targets, wanted, weights)
    slices, length = _slices(inputs, tokens, head.shape[0 if tied else 1])

    def one(d_head: Array, part: tuple[Any, ...]) -> tuple[Array, tuple[TokenLoss, Array]]:
        *asked, weights = part
        hidden = asked[0]
        found, too_much = _found(tuple(asked), head, tied, cap)
        d_logits = (too_much * weights[..., None]).astype(hidden.dtype)
        rows = hidden.reshape(-1, hidden.shape[-1]), d_logits.reshape(-1, d_logits.shape[-1])
        d_head += over_rows(*(rows[::-1] if tied else rows), jnp.float32)
        terms = "bcv,vd->bcd" if tied else "bcv,dv->bcd"
        d_hidden = jnp.einsum(terms, d_logits, head).astype(hidden.dtype)
        return d_head, (found, d_hidden)

    start = jnp.zeros(head.shape, jnp.float32)
    d_head, (found, d_hidden) = lax.scan(one, start, slices)
    found, d_hidden = jax.tree.map(lambda x: _joined(x, length), (found, d_hidden))
    loss = (found.loss * weights).sum()
    return (loss, found), (d_hidden, d_head)


def _backward(
    tied: bool,
    tokens: int,
    cap: float | None,
    gradients: _Gradients,
    cotangents: tuple[Array, TokenLoss],
) -> tuple[Array, Array, None, None, None]:
    d_hidden, d_head = gradients
    scale, _ = cotangents
    d_head = (d_head * scale).astype(d_hidden.dtype)
    return (d_hidden * scale).astype(d_hidden.dtype), d_head, None, None, None


weighted_loss.defvjp(_forward, _backward)


def _logits(hidden: Array, head: Array, tied: bool, cap: float | None) -> Array:
    """As decoder.unembed: float32."""
    terms = "bcd,vd->bcv" if tied else "bcd,dv->bcv"
    return capped(jnp.einsum(terms, hidden, head, preferred_element_type=jnp.float32), cap)


def _found(
    part: tuple[Array, Array, Array | None], head: Array, tied: bool, cap: float | None
) -> tuple[TokenLoss, Array]:
    """What was predicted of hidden, targets and wanted; the loss's gradient by logits [..., V].

    By those before the cap.

    Comparisons and no index, so V may be split over devices; and no argmax, which the CPU computes
    entry by entry.
    """
    hidden, targets, wanted = part
    logits = _logits(hidden, head, tied, cap)
    order = jnp.arange(logits.shape[-1], dtype=targets.dtype)
    hits = targets[..., None] == order
    at = jnp.where(hits, logits, 0.0).sum(-1)
    before = jnp.where(order < targets[..., None], logits, -jnp.inf).max(-1)
    total = jax.nn.logsumexp(logits, axis=-1)
    p, correct = jnp.exp(logits - total[..., None]), (at > before) & (at >= logits.max(-1))
    if wanted is None:
        loss, too_much = total - at, p - hits
    else:
        aim = jax.nn.log_softmax(_logits(wanted, head, tied, cap))
        loss = (jnp.exp(aim) * (aim - logits)).sum(-1) + total
        too_much = p - jnp.exp(aim)
    if cap is not None:
        too_much *= 1 - (logits / cap) ** 2
    return TokenLoss(loss, correct), too_much


def _at_once(tokens: int, vocabulary: int) -> int:
    """How many of at most ``tokens`` tokens have their logits at once.

    On the CPU as many as its cache holds, where that is enough for fast products.
    """
    if jax.default_backend() != "cpu":
        return tokens
    return min(tokens, max(_CACHED_LOGITS // vocabulary, _FEWEST_TOKENS))


def _slices[T](tree: T, tokens: int, vocabulary: int) -> tuple[T, int]:
    """Arrays [B, T, ...] as slices [n, B, c, ...] with B * c <= tokens, and T."""
    first = jax.tree.leaves(tree)[0]
    batch, length = first.shape[:2]
    count = -(-length // max(1, _at_once(tokens, vocabulary) // batch))
    width = -(-length // count)

    def cut(x: Array) -> Array:
        short = count * width - length
        x = jnp.pad(x, [(0, 0), (0, short), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(batch, count, width, *x.shape[2:]), 1, 0)

    return jax.tree.map(cut, tree), length


def _joined(x: Array, length: int) -> Array:
    """Inverse of ``_slices`` for one array."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]
