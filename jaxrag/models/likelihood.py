"""How likely a model finds a text: the log-probability of every token after those before it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import EngineError, RequestError
from jaxrag.base.shapes import bucket
from jaxrag.base.types import FINAL, Array, HostArray, Tokens
from jaxrag.models.attention import PackedAttend
from jaxrag.models.decoder import forward, unembed
from jaxrag.models.model import Model, as_token_ids
from jaxrag.models.rope import RopeTable
from jaxrag.models.spec import Params

_NARROWEST = 64  # a program for this width, and for every power of two above
_PIECE = 256  # tokens whose [V] logits exist at once


@dataclasses.dataclass(frozen=True)
class Likelihoods:
    """Natural logarithms of probabilities, of float32 logits without a temperature.

    Attributes:
      chosen: [T - 1] float32 of every token but the first, after those before it.
      top: [T, n] float32 of the most likely tokens after each, the most likely first; the smallest
        id first among equals.
      top_ids: [T, n] int32 which these are.
    """

    chosen: HostArray
    top: HostArray
    top_ids: HostArray


def likelihoods(model: Model, ids: HostArray, count: int = 5) -> Likelihoods:
    """Of one text by a plain causal forward, no chunk of it reused.

    It runs alone and in a width that depends on its length alone, so that the result depends on
    nothing else.

    Args:
      ids: [T] integers, at least one.
      count: most likely tokens to name.

    Raises:
      RequestError: no ids, ids outside the vocabulary, or more than the model's context holds.
      EngineError: logits that hold a NaN.
    """
    ids = as_token_ids(ids, model.config, "prompt")
    length, limit = len(ids), model.config.max_positions
    if not 1 <= length <= limit:
        raise RequestError(
            f"a text of {length} tokens: expected 1 to {limit}, the model's context; score it in "
            "pieces"
        )
    width = bucket(length, _NARROWEST)
    order = np.arange(width, dtype=np.int32)[None]
    padded = np.zeros((1, width), np.int32)
    padded[0, :length] = ids
    tokens = Tokens(
        ids=model.put_batch(padded, 1),
        positions=model.put_batch(order, 1),
        segments=model.put_batch(np.full((1, width), FINAL, np.int32), 1),
    )
    table = model.rope(width)
    named = min(count, model.config.vocab_size)
    found = _likelihoods(model.params, model.config, tokens, table, named)
    chosen, top, top_ids = (np.asarray(it)[:length] for it in found)
    if np.isnan(chosen).any() or np.isnan(top).any():
        raise EngineError(
            f"the logits of a text of {length} tokens hold a NaN; check the model's weights"
        )
    return Likelihoods(chosen[:-1], top, top_ids)


@functools.partial(jax.jit, static_argnames=("config", "count"))
def _likelihoods(
    params: Params, config: ModelConfig, tokens: Tokens, table: RopeTable, count: int
) -> tuple[Array, Array, Array]:
    """[T] of the token that follows each, and the most likely ones, [T, count] with their ids."""
    hidden, _, _ = forward(params, config, tokens, None, PackedAttend(config, table, False))
    width, dim = hidden.shape[1:]
    piece = min(width, _PIECE)

    def of_piece(scanned: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        states, following = scanned
        logs = jax.nn.log_softmax(unembed(params, config, states))
        top, top_ids = lax.top_k(logs, count)
        return jnp.take_along_axis(logs, following[:, None], axis=-1)[:, 0], top, top_ids

    following = jnp.roll(tokens.ids[0], -1)
    pieces = (hidden[0].reshape(-1, piece, dim), following.reshape(-1, piece))
    chosen, top, top_ids = lax.map(of_piece, pieces)
    return chosen.reshape(-1), top.reshape(width, count), top_ids.reshape(width, count)
