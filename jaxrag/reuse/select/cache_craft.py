"""Cache-Craft: how much each chunk depends on what precedes it decides how much is redone.

Cache-Craft: Managing Chunk-Caches for Efficient Retrieval-Augmented Generation, section 3,
arXiv:2502.15734.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.shapes import bucket
from jaxrag.base.sharding import to_host
from jaxrag.base.types import Array, HostArray
from jaxrag.kv.cache import PagedCache
from jaxrag.models.decoder import Decoder, run_layers
from jaxrag.models.flops import score_flops, turborag_flops
from jaxrag.models.model import Model
from jaxrag.models.taps import ChunkMassAttend
from jaxrag.reuse.select.base import SelectionInput, Selector, check_range, in_order, put_row


@dataclasses.dataclass(frozen=True)
class CacheCraft(Selector):
    """Cache-Craft's cache fix overhead (CFO) per chunk, and the tokens that look back the most.

    With attention averaged over heads and layers, inter(i, j) the sum from tokens of chunk i to
    tokens of the earlier chunk j, and intra(i) the sum inside chunk i:

        a(i)    = sum_j inter(i, j) / (|C_i| |C_j|)      b(i) = intra(i) / |C_i|^2
        CCI(i)  = sigmoid(a(i) / b(i))                   how much the context matters to the chunk
        beta(i) = sum_{j seen} inter(i, j) / sum_j inter(i, j)
        gamma(i)  normalised Kendall distance between the order seen and the order now
        CFO(i)  = alpha CCI(i) (1 - beta(i) (1 - gamma(i)))

    ceil(CFO(i) |C_i|) tokens of chunk i are chosen, those with the highest attention to the earlier
    chunks. A ratio scales these numbers to its budget, no chunk beyond its length.

    Cache-Craft measures attention in the request that first made a chunk's KV, all layers of it. A
    knowledge base makes KV before any request, so here the attention is that of the prompt at hand,
    in the first ``layers`` layers run with full attention; "seen" are the chunks of this prompt
    that the stored KV saw when it was encoded, and the sums run over what precedes the chunk now. A
    chunk with nothing before it, or whose KV is exact, has CFO 0.
    """

    alpha: float = 1.0
    layers: int = 2
    name: str = dataclasses.field(default="cache_craft", init=False)

    def __post_init__(self) -> None:
        if not self.alpha > 0 or self.layers < 1:
            raise RequestError(
                f"cache_craft: alpha={self.alpha}, layers={self.layers}: expected a positive "
                f"factor and at least one layer"
            )

    def check_ratio(self, ratio: float | None) -> None:
        """Any ratio, or none for the CFO itself."""
        check_range(ratio)

    def check(self, config: ModelConfig) -> None:
        """The model must have the layers that are measured."""
        if self.layers > config.num_layers:
            raise RequestError(
                f"cache_craft: attention of {self.layers} layers is measured and the model has "
                f"{config.num_layers}; choose fewer layers"
            )

    def observe(self, model: Model, cache: PagedCache, scene: SelectionInput) -> HostArray:
        """Share of every chunk token's attention that falls on every chunk: [C, chunks]."""
        self.check(model.config)
        rows = put_row(model, *scene.causal, scene.spread(scene.chunk_of, -1))
        decoder = model.decoder(rows[0].shape[1])
        out = _mean_shares(decoder, *rows, bucket(len(scene.chunks), 8), self.layers)
        return scene.gather(to_host(out))[:, : len(scene.chunks)]

    def score(self, scene: SelectionInput) -> HostArray:
        """Attention to earlier chunks."""
        earlier = np.arange(len(scene.chunks)) < scene.chunk_of[:, None]
        total: HostArray = np.where(earlier, scene.observed, 0.0).sum(1)
        return total

    def count(self, scene: SelectionInput) -> HostArray:
        """Of every chunk by its CFO."""
        lengths = np.array(scene.lengths)
        overhead = cache_fix_overhead(scene.observed, lengths, scene.seen, self.alpha)
        overhead[list(scene.settled)] = 0.0
        if scene.ratio is not None:
            free = np.where(scene.settled, 0, lengths)
            return scaled_counts(overhead * lengths, free, scene.budget)
        return np.minimum(np.ceil(overhead * lengths).astype(int), lengths)

    def flops(self, model: Model, scene: SelectionInput) -> int:
        """The first layers over the prompt, and the shares of their attention."""
        config, tokens = model.config, len(scene.prefix) + scene.num_chunk_tokens
        passes = turborag_flops(config, tokens, tokens) * self.layers // config.num_layers
        return passes + self.layers * score_flops(config, tokens, tokens)


def cache_fix_overhead(
    shares: HostArray,
    lengths: HostArray,
    seen: Sequence[Sequence[int]],
    alpha: float,
) -> HostArray:
    """CFO of every chunk, [chunks] float64; 0 where no chunk precedes.

    Args:
      shares: [C, chunks] share of each chunk token's attention that falls on each chunk.
      lengths: [chunks] tokens of each chunk.
      seen: chunks each chunk's KV saw, in that order.
    """
    starts = np.concatenate(([0], np.cumsum(lengths)))
    out = np.zeros(len(lengths))
    for i in range(1, len(lengths)):
        inter = shares[starts[i] : starts[i + 1]].astype(np.float64).sum(0)  # [chunks]
        a = (inter[:i] / (lengths[i] * lengths[:i])).sum()
        b = inter[i] / lengths[i] ** 2
        impact = 1.0 / (1.0 + np.exp(-a / b)) if b > 0 else 1.0
        before = [j for j in seen[i] if j < i]
        overlap = inter[before].sum() / inter[:i].sum() if inter[:i].sum() > 0 else 1.0
        out[i] = alpha * impact * (1.0 - overlap * (1.0 - order_penalty(before)))
    return out


def order_penalty(order: Sequence[int]) -> float:
    """Normalised Kendall distance of an order from the ascending one: share of inverted pairs."""
    pairs = list(itertools.combinations(order, 2))
    return sum(first > second for first, second in pairs) / len(pairs) if pairs else 0.0


def scaled_counts(weights: HostArray, limits: HostArray, total: int) -> HostArray:
    """Whole numbers in proportion to ``weights``, none beyond its limit, that add up to ``total``.

    What a full chunk cannot take goes to the others; chunks of weight 0 take only what is left over
    then, by their limits. ``total`` must not exceed the sum of the limits.
    """
    exact = np.zeros(len(limits))
    for share in (weights, limits):
        while True:
            open_ = (share > 0) & (exact < limits)
            left = total - exact.sum()
            if left <= 1e-9 or not open_.any():
                break
            step = np.where(open_, share, 0) * (left / share[open_].sum())
            exact = np.minimum(exact + step, limits)
    counts = np.floor(exact + 1e-9).astype(int)
    behind = np.where(counts < limits, exact - counts, -1.0)
    for i in np.argsort(-behind, kind="stable")[: total - counts.sum()]:
        counts[i] += 1
    return counts


@functools.partial(jax.jit, static_argnames=("columns", "layers"))
def _mean_shares(
    decoder: Decoder, ids: Array, segments: Array, column: Array, columns: int, layers: int
) -> Array:
    """Attention of prompts [B, T] to each column, mean over heads and layers: [B, T, columns]."""
    config = decoder.config
    sums = jnp.zeros((*ids.shape, columns), jnp.float32)
    attend = ChunkMassAttend(config, decoder.rope, column, decoder.params.layers.sink_logits)
    tokens = in_order(ids, segments)
    _, sums, _ = run_layers(decoder.params, config, tokens, sums, attend, layers)
    return sums / layers
