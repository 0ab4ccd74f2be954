"""The sums of a plan: pure functions of the settings and the model's config.

Bytes are of 8 bits, times are seconds.
"""

import dataclasses
import math

from jaxrag.base.config import ModelConfig
from jaxrag.measure.plan.settings import PlanSettings, StorageTier
from jaxrag.models.backend import ROWS
from jaxrag.models.flops import forward_flops, score_flops
from jaxrag.models.maps import map_layout
from jaxrag.models.spec import num_params, num_table_params
from jaxrag.reuse.methods import METHODS, Method
from jaxrag.reuse.select import CacheCraft, KvDeviation, QueryGuided

_EXACT_TERMS = 1000  # of a harmonic sum, before the integral takes over


def kv_token_bytes(config: ModelConfig, stored: str) -> int:
    """Of K and V of one token over all layers, in the store."""
    if stored == "int8":
        return 2 * config.num_kv_layers * config.num_kv_heads * (config.head_dim + 4)
    return config.kv_bytes_per_token


def map_bytes(settings: PlanSettings, config: ModelConfig) -> int:
    """Of a chunk's maps of recurrent layers, however long it is; 0 of a model without."""
    return 0 if config.recurrent is None else map_layout(config, settings.maps).nbytes(0)


def chunk_bytes(settings: PlanSettings, config: ModelConfig) -> int:
    """Of one stored form of a chunk: KV of its tokens, and its maps."""
    kv = settings.corpus.chunk_tokens * kv_token_bytes(config, settings.stored)
    return kv + map_bytes(settings, config)


def state_bytes(config: ModelConfig) -> int:
    """Of the states of one row; a token reads and writes them."""
    if (r := config.recurrent) is None:
        return 0
    return 4 * sum(r.layers) * r.value_heads * r.key_dim * r.value_dim


def variants(method: Method) -> int:
    """How many stored forms of a chunk a method needs: one for each of its encoders."""
    return len({method.encoder, method.first_encoder} - {None})


def harmonic(n: float, exponent: float) -> float:
    """Sum of r ** -exponent over r = 1..n: exact up to 1,000, then by Euler and Maclaurin."""
    whole = int(min(n, _EXACT_TERMS))
    total = math.fsum(r**-exponent for r in range(1, whole + 1))
    if n <= whole:
        return total
    area = (
        math.log(n / whole)
        if exponent == 1
        else (n ** (1 - exponent) - whole ** (1 - exponent)) / (1 - exponent)
    )
    return total + area + (n**-exponent - whole**-exponent) / 2


def popular_share(held: float, chunks: int, exponent: float) -> float:
    """Of all finds, those of the ``held`` most popular of the chunks, 0 to 1 (Zipf's law)."""
    if held >= chunks:
        return 1.0
    return harmonic(max(held, 0), exponent) / harmonic(chunks, exponent) if held >= 1 else 0.0


def pool_tokens(settings: PlanSettings, config: ModelConfig) -> int:
    """Tokens of KV that one engine has on its devices; 0 where the weights leave no room."""
    engine = settings.engine
    left = engine.memory * engine.devices - weight_bytes(config) - ROWS * state_bytes(config)
    return max(int(left * engine.pool_share / config.kv_bytes_per_token), 0)


def seen_tokens(config: ModelConfig, tokens: int) -> int:
    """How many tokens' KV the next one reads as much as: layers with a window read its end."""
    windowed = config.num_kv_layers - len(config.global_layers)
    unseen = max(tokens - (config.sliding_window or tokens), 0)
    return tokens - unseen * windowed // config.num_kv_layers


def kept_tokens(method: Method, config: ModelConfig, tokens: int) -> int:
    """The same of what a prompt loads and keeps; all where tokens of chunks are computed again."""
    whole = method.recomputes or method.encoder is None
    return tokens if whole else seen_tokens(config, tokens)


def weight_bytes(config: ModelConfig) -> int:
    """Of the weights, in the dtype that they are served in."""
    return num_params(config) * (4 if config.dtype == "float32" else 2)


def read_bytes(config: ModelConfig) -> int:
    """Of the weights that a pass reads: of the table of every layer's inputs it is some rows."""
    met = num_params(config) - num_table_params(config)
    return weight_bytes(config) // num_params(config) * met


def prompt_tokens(settings: PlanSettings) -> int:
    """Prefix, chunks and question."""
    queries = settings.queries
    return (
        queries.prefix_tokens + queries.k * settings.corpus.chunk_tokens + queries.question_tokens
    )


def encode_flops(settings: PlanSettings, config: ModelConfig) -> int:
    """Of the encoding of one chunk."""
    return forward_flops(config, [(settings.corpus.chunk_tokens, 0)], 0)


def prefill_flops(method: Method, settings: PlanSettings, config: ModelConfig) -> int:
    """From the prompt to the first token, all chunks found in the pool.

    Recomputed tokens are taken to stand evenly in the chunks; what a selector runs to choose them
    is counted.
    """
    queries, tokens = settings.queries, prompt_tokens(settings)
    if method.encoder is None:
        return forward_flops(config, [(tokens, 0)], 1)
    final = queries.question_tokens
    total = forward_flops(config, [(final, tokens - final)], 1)
    lengths = [settings.corpus.chunk_tokens] * queries.k
    middle = queries.prefix_tokens + sum(lengths) // 2
    total += method.room(lengths) * forward_flops(config, [(1, middle)], 0)
    return total + (_selector_flops(method, settings, config) if method.recomputes else 0)


def _selector_flops(method: Method, settings: PlanSettings, config: ModelConfig) -> int:
    selector, queries = method.selector, settings.queries
    context = prompt_tokens(settings) - queries.question_tokens

    def first_layers(count: int) -> int:
        return forward_flops(config, [(context, 0)], 0) * count // config.num_layers

    if isinstance(selector, KvDeviation):
        return first_layers(selector.layers[0])
    if isinstance(selector, CacheCraft):
        return first_layers(selector.layers) + selector.layers * score_flops(
            config, context, context
        )
    if isinstance(selector, QueryGuided):
        before = 0 if selector.over == "question" else context
        final = queries.question_tokens
        return forward_flops(config, [(final, before)], 0) + score_flops(config, final, context)
    return 0


def compute_seconds(flops: float, settings: PlanSettings) -> float:
    """On all devices of an engine."""
    engine = settings.engine
    return flops / (engine.devices * engine.flops * engine.utilisation)


def prefill_seconds(method: Method, settings: PlanSettings, config: ModelConfig) -> float:
    """From the prompt to the first token, all chunks in the pool.

    The products, or the reading of weights and cached KV where that takes longer.
    """
    engine = settings.engine
    tokens = prompt_tokens(settings)
    cached = 0 if method.encoder is None else kept_tokens(method, config, tokens)
    moved = read_bytes(config) + cached * config.kv_bytes_per_token
    memory = moved / (engine.devices * engine.bandwidth * engine.bandwidth_share)
    products = compute_seconds(prefill_flops(method, settings, config), settings)
    return max(products, memory)


def load_seconds(num_bytes: float, tier: StorageTier) -> float:
    """From a tier to the pool; reads of one request are in flight together."""
    return tier.latency + num_bytes / tier.bandwidth if num_bytes else 0.0


def step_seconds(rows: int, settings: PlanSettings, config: ModelConfig) -> float:
    """Of one decode step: weights once and every row's KV, or the products if they take longer."""
    engine, tokens = settings.engine, prompt_tokens(settings)
    row = seen_tokens(config, tokens) * config.kv_bytes_per_token + 2 * state_bytes(config)
    moved = read_bytes(config) + rows * row
    memory = moved / (engine.devices * engine.bandwidth * engine.bandwidth_share)
    computed = rows * forward_flops(config, [(1, tokens)], 1)
    return max(memory, compute_seconds(computed, settings))


def decode_rows(method: Method, settings: PlanSettings, config: ModelConfig) -> int:
    """Requests that fit the pool together, at most those of the settings; 0: not even one."""
    need = kept_tokens(method, config, prompt_tokens(settings)) + settings.queries.answer_tokens
    most = settings.engine.rows if config.recurrent is None else min(settings.engine.rows, ROWS)
    return min(most, pool_tokens(settings, config) // need)


@dataclasses.dataclass(frozen=True)
class FoundIn:
    """Of a tier: what share of the chunks that questions find it has, and the first token from it.

    Attributes:
      name: "pool", a tier's name, "computed" (nothing stored: the chunks are encoded first).
      chunks: how many it holds.
      share: of all chunks found, those that are here and not in a faster tier.
      first_token: seconds, all chunks of a question from here.
    """

    name: str
    chunks: float
    share: float
    first_token: float


@dataclasses.dataclass(frozen=True)
class MethodPlan:
    """One method's line.

    Attributes:
      corpus_bytes: of all chunks, in every form that the method needs.
      grown_bytes: of those after a year of growth.
      flops: from a prompt whose chunks are in the pool to the first token.
      tiers: the fastest first; ``full attention`` has the pool alone, with nothing in it.
      first_token: seconds, expected over all tiers.
      token: seconds of a further token, in a full batch.
      engines: that the busiest hour needs; None where the pool holds no single prompt.
    """

    method: str
    corpus_bytes: int
    grown_bytes: int
    flops: int
    tiers: tuple[FoundIn, ...]
    first_token: float
    token: float
    engines: int | None


def plan_method(name: str, settings: PlanSettings, config: ModelConfig) -> MethodPlan:
    """All sums of one method."""
    method, corpus, queries = METHODS[name], settings.corpus, settings.queries
    forms = variants(method)
    stored = forms * corpus.chunks * chunk_bytes(settings, config)
    flops = prefill_flops(method, settings, config)
    computed = prefill_seconds(method, settings, config)
    tiers = _tiers(method, settings, config, computed + settings.engine.overhead)
    encoded = queries.k * compute_seconds(encode_flops(settings, config), settings)
    if forms:
        slowest = computed + settings.engine.overhead + encoded
        tiers = (*tiers, FoundIn("computed", 0, 0.0, slowest))
    rows = decode_rows(method, settings, config)
    token = step_seconds(max(rows, 1), settings, config)
    busy = computed + queries.answer_tokens * token / max(rows, 1)
    return MethodPlan(
        method=name,
        corpus_bytes=stored,
        grown_bytes=int(stored * (1 + corpus.growth) ** 12),
        flops=flops,
        tiers=tiers,
        first_token=sum(tier.share * tier.first_token for tier in tiers),
        token=token,
        engines=math.ceil(queries.rate * busy / settings.engine.load) if rows else None,
    )


def _tiers(
    method: Method, settings: PlanSettings, config: ModelConfig, computed: float
) -> tuple[FoundIn, ...]:
    """Pool and stored tiers, each with the chunks that no faster one has.

    Rows of a model with recurrent layers share nothing, so it has no pool of chunks.
    """
    corpus, queries = settings.corpus, settings.queries
    if method.encoder is None:
        return (FoundIn("full attention", 0, 1.0, computed),)
    rows = decode_rows(method, settings, config)
    own = rows * (queries.prefix_tokens + queries.question_tokens + queries.answer_tokens)
    pool = max(pool_tokens(settings, config) - own, 0) / corpus.chunk_tokens
    places: list[tuple[str, float, StorageTier | None]] = []
    if config.recurrent is None:
        places.append(("pool", pool / variants(method), None))
    chunk = chunk_bytes(settings, config)
    for tier in settings.tiers:
        held = math.inf if tier.bytes is None else tier.bytes / (chunk * variants(method))
        places.append((tier.name, held, tier))
    tokens = prompt_tokens(settings)
    loaded = queries.k * chunk * kept_tokens(method, config, tokens) // tokens
    found, before = [], 0.0
    for name, held, place in places:
        held = min(held, corpus.chunks)
        upto = max(popular_share(held, corpus.chunks, queries.popularity), before)
        wait = 0.0 if place is None else load_seconds(loaded, place)
        found.append(FoundIn(name, held, upto - before, computed + wait))
        before = upto
    return tuple(found)
