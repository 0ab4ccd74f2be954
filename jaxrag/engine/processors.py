"""What is done to logits before a token is drawn, where a request asks for it.

Penalties, biases, what is kept and the least length of an answer, and the likeliest tokens beside
the drawn one.
A batch holds this state only while somebody in it asks, and its program is another one then. Rows
that ask for nothing have values that leave every logit as it is.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrag.base import struct
from jaxrag.base.types import Array, HostArray, on_host
from jaxrag.engine.sampling_params import MOST_OF_WORDS, MOST_TOP, SamplingParams
from jaxrag.models.text.guidance import Matcher


class ProcessorRows(struct.PyTreeNode):
    """Of every row of a batch, [B] or [B, V] each.

    Attributes:
      presence: penalty of tokens that are in the answer, float32.
      frequency: penalty of these by how often they are there, float32.
      repetition: what divides the logits of those in prompt and answer, float32.
      floor: how far below the largest a logit may be, at most 0, float32.
      least: tokens before which the answer may not end.
      top: how many of the likeliest tokens are wanted.
      bias: added to the logits, float32; -inf for what may never come.
      ends: tokens that end the answer, bool.
      prompt: tokens of the prompt, bool.
      counts: of tokens in the answer so far.
      allowed: a bit for each token that may come next, uint32 [B, ceil(V / 32)].
      words: tokens [B, W, N] of which the last may not come behind the others; right-aligned, -1
        before them.
      recent: the newest of the answer, [B, N - 1], right-aligned, -2 before them.
    """

    presence: Array
    frequency: Array
    repetition: Array
    floor: Array
    least: Array
    top: Array
    bias: Array
    ends: Array
    prompt: Array
    counts: Array
    allowed: Array
    words: Array
    recent: Array

    @classmethod
    def of(
        cls,
        asked: Sequence[tuple[SamplingParams, HostArray, frozenset[int], Matcher | None]],
        count: int,
        vocab_size: int,
    ) -> "ProcessorRows":
        """Before the first tokens, on the host: ``count`` rows, of which the last ask nothing.

        ``asked`` holds of each the settings, the prompt, the tokens that end the answer, and what
        of its form is still to come.
        """
        shape = (count, vocab_size)
        bias, ends = np.zeros(shape, np.float32), np.zeros(shape, bool)
        prompt = np.zeros(shape, bool)
        allowed = all_allowed(count, vocab_size)
        words = np.full((count, *MOST_OF_WORDS), -1, np.int32)
        for row, (sampling, ids, eos_ids, matcher) in enumerate(asked):
            for token_id, value in sampling.logit_bias:
                bias[row, token_id] = value
            if sampling.allowed_token_ids is not None:
                kept = np.isin(np.arange(vocab_size), sampling.allowed_token_ids)
                bias[row, ~kept] = -np.inf
            for place, word in enumerate(sampling.bad_words):
                words[row, place, -len(word) :] = word
            ends[row, [eos_id for eos_id in eos_ids if eos_id < vocab_size]] = True
            prompt[row, ids[ids < vocab_size]] = True  # packets hold others
            if matcher is not None:
                allowed[row] = matcher.allowed()

        def column(name: str, default: float, dtype: type) -> Array:
            values = [getattr(params, name) for params, *_ in asked]
            return np.array([*values, *[default] * (count - len(asked))], dtype)  # type: ignore[return-value]

        return on_host(
            cls,
            column("presence_penalty", 0.0, np.float32),
            column("frequency_penalty", 0.0, np.float32),
            column("repetition_penalty", 1.0, np.float32),
            column("floor", -np.inf, np.float32),
            column("min_tokens", 0, np.int32),
            column("top_logprobs", 0, np.int32),
            bias,
            ends,
            prompt,
            np.zeros(shape, np.int32),
            allowed,
            words,
            np.full((count, MOST_OF_WORDS[1] - 1), -2, np.int32),
        )

    def applied(self, logits: Array, token_index: Array) -> Array:
        """The logits [B, V] of the token at this index of each answer, [B].

        First the bias; then what was seen in prompt or answer is divided by the repetition penalty,
        or multiplied where it is negative; then the other penalties, by the answer alone; and what
        would end the answer too early is -inf, as is what is not allowed, what would complete one
        of the words, where that leaves something, and what is then below the floor.
        """
        there = self.counts > 0
        logits = logits + self.bias
        factor = self.repetition[:, None]
        less = jnp.where(logits > 0, logits / factor, logits * factor)
        logits = jnp.where(self.prompt | there, less, logits)
        logits -= self.frequency[:, None] * self.counts + self.presence[:, None] * there
        early = (token_index < self.least)[:, None]
        bits = (self.allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        allowed = bits.reshape(len(logits), -1)[:, : logits.shape[1]] == 1
        allowed &= ~(self.ends & early)
        unsaid = allowed & ~self._completing(logits.shape[1])
        kept = jnp.where(unsaid.any(-1, keepdims=True), unsaid, allowed)  # a form comes first
        logits = jnp.where(kept, logits, -jnp.inf)
        least = logits.max(-1, keepdims=True) + self.floor[:, None]
        return jnp.where(logits < least, -jnp.inf, logits)

    def _completing(self, vocab_size: int) -> Array:
        """Which tokens would complete one of the words: bool [B, V]."""
        before, last = self.words[..., :-1], self.words[..., -1]
        met = ((before == self.recent[:, None]) | (before < 0)).all(-1) & (last >= 0)
        rows = jnp.arange(len(last))[:, None]
        nowhere = jnp.zeros((len(last), vocab_size), bool)
        return nowhere.at[rows, jnp.where(met, last, vocab_size)].set(True, mode="drop")

    def likeliest(self, logits: Array) -> tuple[Array, Array]:
        """The MOST_TOP largest of each row and their ids, [B, MOST_TOP]; 0 where nobody asks."""
        shape = (len(logits), min(MOST_TOP, logits.shape[-1]))

        def found() -> tuple[Array, Array]:
            values, ids = lax.top_k(logits, shape[1])
            return ids, values

        none = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, logits.dtype))
        return lax.cond(jnp.any(self.top > 0), found, lambda: none)

    def counted(self, ids: Array) -> "ProcessorRows":
        """After these tokens [B] were drawn."""
        rows = jnp.arange(len(ids))
        return self.replace(
            counts=self.counts.at[rows, jnp.maximum(ids, 0)].add(1),
            recent=jnp.concatenate([self.recent[:, 1:], ids[:, None]], axis=1),
        )


def all_allowed(count: int, vocab_size: int) -> HostArray:
    """``ProcessorRows.allowed`` of rows that follow no grammar."""
    return np.full((count, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
