"""A generator of attention heads whose queries are distributed otherwise than their keys.

Real heads are not at hand at every length, so this draws what makes them hard to search. A token
stream (Zipf words, half of them from the topic of its segment) gives hidden states: word, topic,
segment, a slowly moving context and noise, each with a power-law spectrum. Keys and queries are
linear maps of the same hidden states. Their channels follow power laws, the queries' mostly in
reverse; the maps agree in part; a few channels have a large constant; and both are rotated (RoPE).
On such heads an index that learns from keys alone scans many times more for queries than it does
for keys, as figure 2b of RetrievalAttention shows for real ones.

The same ``seed`` gives the same head at every length.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxrag.base.config import RopeConfig
from jaxrag.base.errors import ConfigError
from jaxrag.base.types import HostArray
from jaxrag.reuse.attention_index import QueryBank, rotated

_BLOCK = 16384  # tokens drawn at a time
_LOGIT_STD = 2.5  # of q.k / sqrt(H) over the keys


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """One KV head and the query heads that share it.

    Attributes:
      seed: of the head's maps; token streams have one of their own.
      key_power: exponent of the keys' power law over channels.
      query_power: of the queries'.
      mismatch: 0 orders the queries' channels as the keys', 1 in reverse.
      agreement: cosine between the queries' map and the keys'.
      key_bias: of the keys' large channels, in units of the largest channel.
      query_bias: of the queries' large channels, likewise.
      large_channels: how many of those.
      group: query heads of the KV head.
      head_dim: dimensions of the head.
      model_dim: channels of the hidden states that the maps read.
      words: of the vocabulary.
      topics: that a segment of the text may be about.
      theta: RoPE's.
    """

    seed: int
    key_power: float = 0.4
    query_power: float = 0.7
    mismatch: float = 0.9
    agreement: float = 0.5
    key_bias: float = 3.0
    query_bias: float = 2.0
    large_channels: int = 6
    group: int = 4
    head_dim: int = 128
    model_dim: int = 512
    words: int = 4096
    topics: int = 96
    theta: float = 500000.0

    @property
    def rope(self) -> RopeConfig:
        """Rotation of all H dimensions, halves paired."""
        return RopeConfig(self.theta, self.head_dim, False, None)


@dataclasses.dataclass(frozen=True, eq=False)
class Heads:
    """Keys of a context, training queries from it, and queries asked behind it.

    Attributes:
      rope: how keys and queries are rotated.
      keys: [S, H] float32, before RoPE, of positions ``first`` .. ``first`` + S - 1.
      first: the position of the first key.
      bank: training queries, strided over the context, before RoPE.
      asked: [G, n, H] float32, before RoPE, of the n tokens behind the context.
      context: tokens of the context, which is the position of the first of those.
    """

    rope: RopeConfig
    keys: HostArray
    first: int
    bank: QueryBank
    asked: HostArray
    context: int

    def placed_keys(self) -> HostArray:
        """The keys at their positions: [S, H] float32."""
        return rotated(self.keys, np.arange(self.first, self.first + len(self.keys)), self.rope)

    def placed_queries(self, distance: int = 0) -> HostArray:
        """What is asked, ``distance`` tokens further behind the context: [G, n, H] float32."""
        positions = self.context + distance + np.arange(self.asked.shape[1])
        return rotated(self.asked, positions, self.rope)


def draw(
    spec: HeadSpec,
    context: int,
    *,
    train: int,
    ask: int,
    sink: int = 128,
    recent: int = 512,
    stream: int = 0,
) -> Heads:
    """Draw a context and what is asked behind it.

    Args:
        spec: the head.
        context: tokens of the context; keys are those between ``sink`` and ``recent``.
        train: training queries kept of it.
        ask: tokens behind it.
        sink: first tokens, whose keys no index needs.
        recent: last tokens of the context, likewise.
        stream: seed of the tokens.

    Raises:
        ConfigError: the static pattern leaves no key, or there is nothing to ask or to learn from.
    """
    if sink + recent >= context or min(train, ask, sink + 1, recent + 1) < 1:
        raise ConfigError(
            f"context={context}, sink={sink}, recent={recent}, train={train}, ask={ask}: expected "
            "a context longer than sink and recent, and something to learn from and to ask"
        )
    maps = _Maps.of(spec)
    words = _Words(spec, context, ask, np.random.default_rng([spec.seed, stream, context]))
    strided = np.unique(np.linspace(sink, context - 1, train).astype(np.int64))
    keys, kept, asked = [], [], []
    for start, hidden in words.blocks():
        end = start + len(hidden)
        inside = slice(max(sink - start, 0), max(context - recent - start, 0))
        keys.append(hidden[inside] @ maps.key.T + maps.key_bias)
        local = strided[(strided >= start) & (strided < end)] - start
        kept.append(maps.queries(hidden[local]))
        asked.append(maps.queries(hidden[max(context - start, 0) :]))
    made = Heads(
        spec.rope,
        np.concatenate(keys).astype(np.float32),
        sink,
        QueryBank(np.concatenate(kept, 1).astype(np.float32), strided.astype(np.int32)),
        np.concatenate(asked, 1).astype(np.float32),
        context,
    )
    every = max(1, len(made.keys) // 4096)
    sample = made.placed_keys()[::every]
    spread = (made.placed_queries() @ sample.T).std(axis=2).mean(axis=1) / spec.head_dim**0.5
    scale = (_LOGIT_STD / spread)[:, None, None].astype(np.float32)
    return dataclasses.replace(
        made,
        bank=QueryBank(made.bank.queries * scale, made.bank.positions),
        asked=made.asked * scale,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Maps:
    """What makes keys and queries of hidden states; the head itself."""

    key: HostArray  # [H, D]
    key_bias: HostArray  # [H]
    query: HostArray  # [G, H, D]
    query_bias: HostArray  # [G, H]

    @classmethod
    def of(cls, spec: HeadSpec) -> "_Maps":
        rng = np.random.default_rng([spec.seed, 1])
        size = spec.head_dim

        def frame() -> HostArray:
            made: HostArray = np.linalg.qr(rng.standard_normal((spec.model_dim, size)))[0].T
            return made

        def bias(times: float, scale: HostArray) -> HostArray:
            made = np.zeros(size)
            large = rng.permutation(size)[: spec.large_channels]
            heights = rng.uniform(0.3, 1.0, len(large)) * rng.choice([-1.0, 1.0], len(large))
            made[large] = times * scale.max() * heights
            return made

        rank = rng.permutation(size)  # of every channel among the keys'
        key_scale = (1.0 + rank) ** -spec.key_power
        shared = frame()
        key_bias = bias(spec.key_bias, key_scale)
        query, query_bias = [], []
        for _ in range(spec.group):
            wish = (1 - spec.mismatch) * rank + spec.mismatch * (size - 1 - rank)
            order = np.argsort(np.argsort(wish + 0.1 * size * rng.standard_normal(size)))
            scale = (1.0 + order) ** -spec.query_power
            own = (1 - spec.agreement**2) ** 0.5
            query.append(scale[:, None] * (spec.agreement * shared + own * frame()))
            query_bias.append(bias(spec.query_bias, scale))
        return cls(key_scale[:, None] * shared, key_bias, np.stack(query), np.stack(query_bias))

    def queries(self, hidden: HostArray) -> HostArray:
        """[G, n, H] of hidden states [n, D]."""
        return (
            np.einsum("nd,ghd->gnh", hidden, self.query, optimize=True) + self.query_bias[:, None]
        )


class _Words:
    """Tokens: segments of some 400 tokens with a topic each, of some 20 behind the context."""

    def __init__(self, spec: HeadSpec, context: int, ask: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self._total = context + ask
        size = spec.model_dim
        spectrum = np.arange(1, size + 1) ** -0.5
        self._spectrum = spectrum / np.sqrt(np.mean(spectrum**2))
        world = np.random.default_rng([spec.seed, 2])  # what words and topics mean to this head
        self._basis = np.linalg.qr(world.standard_normal((size, size)))[0]
        self._word = self._states(spec.words, world)
        self._topic = self._states(spec.topics, world)
        subsets = world.integers(spec.words // 64, spec.words, (spec.topics, 200))
        lengths = self._lengths(context, ask)
        self._segment_of = np.repeat(np.arange(len(lengths)), lengths)[: self._total]
        topic_of = rng.integers(spec.topics, size=len(lengths))
        self._topics = topic_of[self._segment_of]
        zipf = 1.0 / np.arange(1, spec.words + 1)
        common = rng.choice(spec.words, self._total, p=zipf / zipf.sum())
        special = subsets[self._topics, rng.integers(200, size=self._total)]
        self._words = np.where(rng.random(self._total) < 0.5, special, common)
        self._segment = self._states(len(lengths), rng)

    def _lengths(self, context: int, ask: int) -> list[int]:
        lengths, total = [], 0
        while total < context + ask:
            mean, least = (400, 20) if total < context else (20, 4)
            length = int(self._rng.geometric(1 / mean)) + least
            if total < context:
                length = min(length, context - total)
            lengths.append(length)
            total += length
        return lengths

    def _states(self, count: int, rng: np.random.Generator) -> HostArray:
        drawn = rng.standard_normal((count, len(self._spectrum))) * self._spectrum
        return (drawn @ self._basis).astype(np.float32)

    def blocks(self) -> Iterator[tuple[int, HostArray]]:
        """The hidden states [n, D] float32 of all tokens in order, block by block."""
        keep = 0.9  # of the context from one token to the next
        state = self._states(1, self._rng)[0]
        for start in range(0, self._total, _BLOCK):
            part = slice(start, min(start + _BLOCK, self._total))
            count = part.stop - start
            fresh = np.sqrt(1 - keep**2) * self._states(count, self._rng)
            moving = np.empty_like(fresh)
            for row in range(count):
                state = keep * state + fresh[row]
                moving[row] = state
            hidden = self._word[self._words[part]] + 0.6 * (
                self._topic[self._topics[part]] + self._segment[self._segment_of[part]] + moving
            )
            hidden += 0.3 * self._states(count, self._rng)
            hidden /= np.sqrt(np.mean(hidden**2, axis=1, keepdims=True))
            yield start, hidden
