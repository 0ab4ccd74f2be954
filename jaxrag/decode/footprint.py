"""What a decode rule keeps where, in bytes, by formula; and KCache's break-even (section 3.2)."""

import dataclasses

import numpy as np

from jaxrag.attention_index import Exact, Hnsw, Ivf, QueryLists, Spec
from jaxrag.attention_index.spec import STORAGE_BYTES
from jaxrag.cache import PAGE
from jaxrag.config import ModelConfig
from jaxrag.decode.base import DecodeRule
from jaxrag.decode.dense import StaticWindow
from jaxrag.decode.exact import Flat, TopN
from jaxrag.decode.infllm import InfLLM
from jaxrag.decode.quest import Quest
from jaxrag.decode.retrieval import Retrieval
from jaxrag.decode.snapkv import SnapKV

_FAISS_HEADER = 1024  # of a serialised index, at most


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Of one request, over all layers.

    Attributes:
      device: keys and values that have to lie on the device while tokens are generated, and what
        the rule keeps beside them. host: what may lie in host memory instead, and indexes.
      bus: that crosses between the two for every generated token.
    """

    device: int
    host: int
    bus: int


def bytes_of(rule: DecodeRule, config: ModelConfig, tokens: int) -> Bytes:
    """What the rule needs for a context of that many tokens.

    The formula says where things may lie as the papers place them. The cache of this program keeps
    them so for "topn", where the model is loaded with ``value_layers``; under every other rule keys
    and values stay on the device, and ``index_bytes`` is what is added on the host.
    """
    width = config.kv_bytes_per_token // (2 * config.num_layers)  # K or V of a token in a layer
    layers, every = config.num_layers, config.kv_bytes_per_token * tokens
    heads = config.num_heads * config.head_dim * (width // (config.num_kv_heads * config.head_dim))
    match rule:
        case StaticWindow():
            kept = min(tokens, rule.sink + rule.recent)
            return Bytes(kept * config.kv_bytes_per_token, 0, 0)
        case SnapKV():
            group = config.group_size  # query heads choose for themselves
            chosen = min(max(tokens - rule.window, 0), rule.capacity - rule.window) * group
            kept = min(tokens, rule.window) + chosen
            return Bytes(kept * config.kv_bytes_per_token, 0, 0)
        case TopN():
            away = max(layers - rule.device_layers, 0)
            host = away * width * tokens
            return Bytes(every - host, host, away * min(rule.n, tokens) * heads)
        case Retrieval() | Flat():
            window = min(tokens, rule.sink + rule.recent)
            rest = tokens - window
            host = rest * config.kv_bytes_per_token
            if isinstance(rule, Retrieval):
                host += index_bytes(rule.index, config, rest)
            scalars = 4 * layers * config.num_heads * (2 * config.head_dim + 1)  # q; out and lse
            return Bytes(window * config.kv_bytes_per_token, host, scalars)
        case InfLLM():
            window = min(tokens, rule.sink + rule.recent)
            rest = tokens - window
            blocks = -(-rest // rule.block)
            shown = blocks * rule.representatives * width * layers
            moved = min(rest, rule.blocks * rule.block) * config.kv_bytes_per_token
            host = rest * config.kv_bytes_per_token
            return Bytes(window * config.kv_bytes_per_token + shown, host, moved)
        case Quest():
            return Bytes(every + 2 * layers * width * -(-tokens // PAGE), 0, 0)
        case _:
            return Bytes(every, 0, 0)


def index_bytes(spec: Spec, config: ModelConfig, keys: int) -> int:
    """At most so many bytes do the indexes of that many keys take on the host, over all layers.

    Keys once per KV head in the spec's storage, twice where FAISS built the index; links and lists
    per query head or group.
    """
    per_key = config.head_dim * STORAGE_BYTES[spec.storage]
    each = 1 if getattr(spec, "share", "group") == "group" else config.group_size
    indexes = config.num_kv_heads * config.num_layers
    of_keys = keys * indexes
    match spec:
        case Exact():
            return of_keys * per_key
        case _ if keys < spec.exact_below:
            return of_keys * per_key
        case Ivf():
            clusters = spec.clusters or int(4 * np.sqrt(keys))
            lists = clusters * (4 * config.head_dim + 8) + _FAISS_HEADER
            return of_keys * (2 * per_key + 8) + lists * indexes
        case Hnsw():
            return of_keys * (2 * per_key + 2 * 4 * spec.links + 32) + _FAISS_HEADER * indexes
        case QueryLists():
            lists = spec.clusters * 4 * (spec.cap + config.head_dim) * each
            return of_keys * (per_key + 4) + lists * indexes
        case _:
            doubled = 2 if spec.share == "group" else 1
            links = 4 * spec.degree * doubled * each
            return of_keys * (per_key + 4 + links) + 4 * each * indexes


@dataclasses.dataclass(frozen=True)
class Device:
    """Of an accelerator: bytes a second of its memory and of the bus, floating-point operations."""

    name: str
    memory: float
    bus: float
    flops: float


A100 = Device("A100 80GB", memory=2039e9, bus=32e9, flops=312e12)  # KCache section 3.2


@dataclasses.dataclass(frozen=True)
class BreakEven:
    """KCache section 3.2: where values in host memory do not make generation slower.

    Attributes:
      tokens_per_n: s / N from which decoding is not slower (equation 4), for one query head a KV
        head. grouped: the same where G query heads fetch for themselves what one KV head saves.
      tokens, grouped_tokens: the contexts that means for the rule's N.
      prefill_hidden: does copying V to the host hide behind prefill at this context (equation 2)?
    """

    tokens_per_n: float
    grouped: float
    tokens: int
    grouped_tokens: int
    prefill_hidden: bool


def break_even(rule: TopN, config: ModelConfig, tokens: int, device: Device = A100) -> BreakEven:
    """The break-even of a rule on a device."""
    ratio = device.memory / device.bus
    grouped = ratio * config.group_size
    hidden = 11 * config.model_dim + 2 * tokens > device.flops / device.bus
    return BreakEven(
        ratio, grouped, int(np.ceil(ratio * rule.n)), int(np.ceil(grouped * rule.n)), hidden
    )
