"""The table of contents: a method is one entry of METHODS: encoder, selector, decode rule.

- TurboRAG, arXiv:2410.07590: ``turborag``, ``turborag_composite`` (encode.packed, models.segments).
- Block-Attention, arXiv:2409.15355: ``block_attention`` (as turborag, another prompt template).
- FusionRAG, arXiv:2601.12904: ``fusionrag`` (encode.neighbours, select.query_guided,
  pallas_kernels.sparse_attention), and its baselines ``full_attention`` and ``full_reuse``.
- CacheBlend, arXiv:2405.16444: ``cacheblend`` (select.kv_deviation).
- Cache-Craft, arXiv:2502.15734: ``cache_craft`` (select.cache_craft).
- EPIC, arXiv:2410.15332: ``epic`` (select.first_k).
- APE, arXiv:2502.05431: ``ape`` (models.segments, models.attention.attend_table).
- RetrievalAttention, arXiv:2409.10516: ``retrieval_attention`` (decode.retrieval, attention_index).
- KCache, arXiv:2404.18057: ``kcache`` (decode.topn, kv.cache.host, pallas_kernels.topn_attention).
- ``primed`` and ``primed_fusion`` are ours: every chunk behind one text, a primer
  (encode.primer), and over that FusionRAG's selection (select.query_guided).
- KV Packet, arXiv:2604.13226: ``packets`` (encode.packets), by the vectors of a file.

Decode rules of other papers (StreamingLLM, SnapKV, InfLLM, Quest) are lines of
decode.DECODE_RULES, and go with any of these methods.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, get_args

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.installed import config_names, config_path
from jaxrag.base.tables import build, read_toml
from jaxrag.kv.cache import ChunkAttention
from jaxrag.kv.placement import KVPlacement
from jaxrag.models import FAMILIES
from jaxrag.models.reading import Reading
from jaxrag.models.segments import POSITION_SCHEMES, PositionScheme
from jaxrag.reuse.decode import DecodeRule, Dense, Retrieval, TopN, rule_from
from jaxrag.reuse.names import Misses
from jaxrag.reuse.select import (
    CacheCraft,
    FirstK,
    KvDeviation,
    NoTokens,
    QueryGuided,
    Selector,
    selector_from,
)


@dataclasses.dataclass(frozen=True)
class Method:
    """How a prompt with chunks is prefilled, and how the answer attends to it.

    Attributes:
      encoder: what a chunk sees while it is encoded (encode.ENCODERS); None computes the whole
        prompt with full attention and reuses nothing.
      positions: of reused chunks: "reordered" equals order, "composite" restarts at every chunk,
        "parallel" has every chunk right behind the prefix.
      template: the prompt format used where neither the caller nor the knowledge base names one.
      selector: which chunk tokens are computed again at question time (select.SELECTORS).
      recompute_ratio: how many: ceil(ratio x chunk tokens), 0..1; None: the selector's own number.
        Nothing is selected at 0 (plain reuse); 1 is equal to full attention.
      first_encoder: the encoder of the prompt's first chunk, where it differs.
      misses: what becomes of a chunk that the store does not hold: "encode" makes its stored form,
        keeps it and reuses that; "in_place" computes it in its place, over all that precedes it,
        and keeps nothing, so that answers depend on what the store held.
      prefix_cache: keep the leading parts of a prompt, computed as under full attention, in the
        device pool for later prompts that begin alike. Exact, but
        under a method that reuses chunks answers depend on what the pool held.
      decode: how generated tokens attend (decode.DECODE_RULES).
      primer: what chunks are encoded behind, a name of configs/primers or a file, for encoders
        that see one; None: that of the knowledge base, else names.DEFAULT_PRIMER. Of ``packets``
        the file of the vectors, without which it answers nothing.
      attention_temperature: what scores of question and answer with chunk keys are divided by.
      scaling_factor: what the log-sum-exp of these scores is multiplied by, beside the temperature,
        before the chunks' part of the attention is merged with the rest (attention.attend_table).
        Both at 1: chunks are attended to as all else is.
    """

    name: str
    encoder: str | None
    positions: PositionScheme = "reordered"
    template: str = "turborag"
    selector: Selector = dataclasses.field(default_factory=NoTokens)
    recompute_ratio: float | None = None
    first_encoder: str | None = None
    misses: Misses = "encode"
    prefix_cache: bool = False
    decode: DecodeRule = dataclasses.field(default_factory=Dense)
    primer: str | None = None
    attention_temperature: float = 1.0
    scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.positions not in POSITION_SCHEMES:
            raise RequestError(
                f"positions={self.positions!r}: expected one of {', '.join(POSITION_SCHEMES)}"
            )
        if self.positions == "composite" and self.encoder != "isolated":
            raise RequestError(
                f"method {self.name!r}: composite positions overlap and need the isolated encoder, "
                f"not {self.encoder!r}; use positions='reordered'"
            )
        self.selector.check_ratio(self.recompute_ratio)
        if self.misses not in get_args(Misses):
            raise RequestError(
                f"misses={self.misses!r}: expected one of {', '.join(get_args(Misses))}"
            )
        if self.encoder is None and self.misses != "encode":
            raise RequestError(
                f"method {self.name!r} computes the whole prompt: no chunk is missed; leave "
                f"misses={self.misses!r} out, or choose a method that reuses chunks"
            )
        if self.overlapping and (self.misses != "encode" or self.prefix_cache):
            raise RequestError(
                f"method {self.name!r}: what is computed in place sees all that precedes it by "
                f"position, and {self.positions} positions overlap; use positions='reordered'"
            )
        if self.encoder is None and (self.recomputes or self.first_encoder is not None):
            raise RequestError(
                f"method {self.name!r} computes the whole prompt: there is nothing to select; "
                f"name an encoder, or leave selector, recompute_ratio and first_encoder out"
            )
        if self.primer is not None and not self.sees_primer:
            raise RequestError(
                f"method {self.name!r} reads no chunks that are encoded behind a primer: leave "
                f"primer={self.primer!r} out, or choose primed or primed_fusion"
            )
        if self.overlapping and self.decode.by_position:
            raise RequestError(
                f"method {self.name!r}: decode rule {self.decode.name!r} chooses keys by position, "
                f"and {self.positions} positions overlap; use positions='reordered' or "
                "decode='dense'"
            )
        if self.overlapping and self.recomputes:
            raise RequestError(
                f"method {self.name!r}: recomputed tokens see what stands before them by position, "
                f"and {self.positions} positions overlap; use positions='reordered'"
            )
        mixed = set(self.encoders) != {"packets"} or self.misses != "encode" or self.prefix_cache
        if self.wraps and (mixed or self.recomputes):
            raise RequestError(
                f"method {self.name!r}: only the encoder 'packets' reads vectors of packets: no "
                "other encoder, no selector, misses or prefix_cache goes with it"
            )
        self._check_attention()

    def _check_attention(self) -> None:
        """RequestError for constants out of range, or beside what does not attend by them."""
        for field in ("attention_temperature", "scaling_factor"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise RequestError(
                    f"method {self.name!r}: {field}={value}: expected a number above 0; 1 changes "
                    "nothing"
                )
        if self.chunk_attention is None:
            return
        for what, given in {
            f"decode={self.decode.name!r}, which weighs keys in a way of its own; use 'dense'": (
                self.decode.sparse
            ),
            f"selector={self.selector.name!r}: only the question attends so": self.recomputes,
            f"misses={self.misses!r}: only the question attends so": self.misses != "encode",
            "prefix_cache: what is kept would depend on them": self.prefix_cache,
            "encoder=None: no chunk is reused": self.encoder is None,
        }.items():
            if given:
                raise RequestError(
                    f"method {self.name!r}: attention_temperature={self.attention_temperature} and "
                    f"scaling_factor={self.scaling_factor} do not go with {what}"
                )

    def _check_recurrent(self) -> None:
        """RequestError for what a chunk's one map of the state does not give."""
        for what, given in {
            "computes some tokens of a chunk again": self.recomputes,
            "weighs attention to chunks in a way of its own": self.chunk_attention is not None,
            "has chunks that saw others": any(it.startswith("neighbours") for it in self.encoders),
            "holds vectors around chunks": self.wraps,
        }.items():
            if given:
                raise RequestError(
                    f"method {self.name!r} {what}, and layers of this model keep a state of all "
                    "tokens before them, which holds each chunk whole; use full_reuse or turborag"
                )

    @property
    def chunk_attention(self) -> ChunkAttention | None:
        """How question and answer attend to chunks; None: as to all else."""
        if self.attention_temperature == self.scaling_factor == 1:
            return None
        return ChunkAttention(self.attention_temperature, self.scaling_factor)

    @property
    def overlapping(self) -> bool:
        """May tokens of several chunks have the same position?"""
        return self.positions != "reordered"

    @property
    def settings(self) -> dict[str, Any]:
        """By name, as tables have them, without the constants of attention where they are 1."""
        values = dataclasses.asdict(self)
        if self.chunk_attention is None:
            del values["attention_temperature"], values["scaling_factor"]
        return values

    @property
    def recomputes(self) -> bool:
        """May any chunk token be computed again?"""
        return not isinstance(self.selector, NoTokens) and self.recompute_ratio != 0

    @property
    def as_stored(self) -> bool:
        """Are chunks that see no others read as they are stored, and attended to as all else is?"""
        others = any(name.startswith("neighbours") for name in self.encoders)
        alike = self.chunk_attention is None and not self.decode.sparse
        return alike and not (others or self.recomputes or self.overlapping or self.wraps)

    def encoder_of(self, chunk: int) -> str:
        """The encoder of the chunk at this place of the prompt."""
        name = self.first_encoder if chunk == 0 and self.first_encoder else self.encoder
        assert name is not None
        return name

    @property
    def encoders(self) -> tuple[str, ...]:
        """Those of its chunks, each once; none of full attention."""
        return tuple(dict.fromkeys(filter(None, (self.encoder, self.first_encoder))))

    @property
    def sees_primer(self) -> bool:
        """Is any chunk's KV such as it is behind a primer, or between its vectors?"""
        return "primed" in self.encoders or self.wraps

    def lacks_bos(self, config: ModelConfig) -> bool:
        """Is any chunk's KV without a BOS token before it, which the model's family needs?"""
        return "isolated" in self.encoders and FAMILIES[config.family].needs_bos

    @property
    def wraps(self) -> bool:
        """Do prompts hold trained vectors around chunks?"""
        return "packets" in self.encoders

    def exact(
        self, num_prefix: int, num_chunks: int, num_primer: int | None = None
    ) -> tuple[bool, ...]:
        """For each chunk: is its stored KV what full attention would compute?

        True of the first chunk where it was encoded behind the same prefix, and of no other. An
        empty primer is none.
        """
        if not num_chunks:
            return ()
        first = self.encoder_of(0)
        behind_prefix = first == "after_prefix" or (first == "primed" and num_primer == 0)
        alone = self.encoder_of(0) == "isolated" and num_prefix == 0
        return (behind_prefix or alone, *[False] * (num_chunks - 1))

    @property
    def rewrites(self) -> bool:
        """Does a request need pages of its own for all of its chunks?"""
        return self.recomputes and self.recompute_ratio != 1 and self.selector.rewrites

    def room(self, lengths: Sequence[int]) -> int:
        """Most slots of its own that a request needs for recomputed tokens of such chunks."""
        return self.selector.room(lengths, self.recompute_ratio) if self.recomputes else 0

    def with_ratio(self, ratio: float) -> "Method":
        """The same method at another recompute ratio; RequestError where it has no meaning."""
        if self.encoder is None:
            raise RequestError(
                f"recompute_ratio={ratio}: method {self.name!r} computes the whole prompt; leave "
                f"the ratio out, or choose fusionrag, cacheblend, cache_craft or epic"
            )
        return dataclasses.replace(self, recompute_ratio=ratio)

    def check_placement(
        self, config: ModelConfig, placement: KVPlacement, *, generates: bool = True
    ) -> None:
        """Refuse K and V where rule or selector do not read them; RequestError names which.

        Without ``generates`` a single token is asked for, which prefill gives.
        """
        if generates or not placement.away:
            self.decode.check_placement(config, placement)
        if self.chunk_attention is not None and not placement.on_device:
            raise RequestError(
                f"method {self.name!r} attends to chunks in a way of its own, over K and V on the "
                f"device, and this model was loaded with {placement}; load it without, or choose "
                "full_reuse"
            )
        if not self.recomputes:
            return
        if placement.value_layers is not None and self.selector.reads_values:
            raise RequestError(
                f"method {self.name!r}: selector {self.selector.name!r} reads V of every layer on "
                f"the device, and of this model only the first {placement.value_layers} have it "
                "there; load it without value_layers, or choose query_guided with over='question', "
                "which reads no V"
            )
        if placement.away and self.selector.reads_cache:
            raise RequestError(
                f"method {self.name!r}: selector {self.selector.name!r} reads cached KV on the "
                "device, and this model was loaded with kv='host'; load it without, or choose a "
                "selector that goes by position, such as epic's"
            )

    def check(self, config: ModelConfig) -> None:
        """Refuse a model that this method cannot serve."""
        self.decode.check(config)
        if config.recurrent is not None:
            self._check_recurrent()
        if self.recomputes:
            self.selector.check(config)
        if self.overlapping and config.sliding_window is not None:
            raise RequestError(
                f"method {self.name!r}: {self.positions} positions do not follow the order of the "
                f"prompt, and this model's sliding window ({config.sliding_window} tokens) is "
                "measured in order; use positions='reordered'"
            )


METHODS: dict[str, Method] = {
    "full_attention": Method("full_attention", encoder=None),
    "full_reuse": Method("full_reuse", encoder="after_prefix"),
    "turborag": Method("turborag", encoder="isolated"),
    "turborag_composite": Method("turborag_composite", encoder="isolated", positions="composite"),
    "block_attention": Method("block_attention", encoder="isolated", template="block_attention"),
    "cacheblend": Method(
        "cacheblend", encoder="after_prefix", selector=KvDeviation(), recompute_ratio=0.15
    ),
    "cache_craft": Method("cache_craft", encoder="after_prefix", selector=CacheCraft()),
    "epic": Method("epic", encoder="isolated", selector=FirstK()),
    "ape": Method(
        "ape",
        encoder="after_prefix",
        positions="parallel",
        attention_temperature=0.8,
        scaling_factor=0.95,
    ),
    "fusionrag": Method(
        "fusionrag",
        encoder="neighbours",
        first_encoder="after_prefix",
        selector=QueryGuided(),
        recompute_ratio=0.15,
    ),
    "primed": Method("primed", encoder="primed"),
    "primed_fusion": Method(
        "primed_fusion", encoder="primed", selector=QueryGuided(), recompute_ratio=0.15
    ),
    "packets": Method("packets", encoder="packets"),
    "retrieval_attention": Method("retrieval_attention", encoder=None, decode=Retrieval()),
    "kcache": Method("kcache", encoder=None, decode=TopN()),
}


_TUNED = ("turborag", "turborag_composite")
_UNTUNED = ("primed", "primed_fusion", "cacheblend", "fusionrag", "epic")
_VOCABULARY, _CONTEXT = 8192, 2048  # tokens; less is too little for the text of a primer


@dataclasses.dataclass(frozen=True)
class Choice:
    """One method for a model.

    Attributes:
      encoders: the variants that a knowledge base has to keep for it.
      refused: why this model cannot have it; None where it can.
      default: whether a new knowledge base keeps these, and is asked by it, where none is named.
    """

    method: Method
    encoders: tuple[str, ...]
    refused: str | None
    default: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """The options of `jaxrag ingest` that it needs; none where the default will do."""
        return () if self.default else tuple(f"--encoder {name}" for name in self.encoders)


def choices(config: ModelConfig, reading: Reading) -> tuple[Choice, ...]:
    """The presets that suit, the one to begin with first.

    Plain reuse where the weights were trained to read chunks block-wise; else chunks behind a
    primer, if its text takes few tokens, and methods that compute a part of the chunks again.
    ``block_attention`` is turborag under another template.
    """
    tuned = [name for name in _TUNED if METHODS[name].positions in reading.block_positions]
    roomy = config.vocab_size >= _VOCABULARY and config.max_positions >= _CONTEXT
    fit = [name for name in _UNTUNED if not METHODS[name].lacks_bos(config)]
    untuned = [name for name in fit if roomy or not METHODS[name].sees_primer]
    found = [_choice(METHODS[name], config) for name in tuned or untuned]
    first = next((choice for choice in found if choice.refused is None), None)
    return tuple(dataclasses.replace(choice, default=choice is first) for choice in found)


def refused_methods(config: ModelConfig) -> tuple[str, ...]:
    """Names of the presets that cannot serve the model."""
    return tuple(name for name, it in METHODS.items() if _choice(it, config).refused)


def default_choice(config: ModelConfig, reading: Reading) -> Choice:
    """What a new knowledge base keeps and is asked by, where no encoder and no method is named.

    turborag where no method that suits can serve the model.
    """
    found = (one for one in choices(config, reading) if one.default)
    return next(found, _choice(METHODS["turborag"], config))


def _choice(method: Method, config: ModelConfig) -> Choice:
    """A method and what it needs of a knowledge base."""
    refused = None
    try:
        method.check(config)
    except RequestError as error:
        refused = str(error)
    encoders = dict.fromkeys(filter(None, (method.first_encoder, method.encoder)))
    return Choice(method, tuple(encoders), refused)


def method_named(method: str | Method) -> Method:
    """A preset or one of configs/methods by name, a TOML file by path, or the Method itself.

    Raises RequestError listing the names, and ConfigError for a file with an unknown key.
    """
    if isinstance(method, Method):
        return method
    if method in METHODS:
        return METHODS[method]
    path = config_path(method, "methods")
    if path is None:
        names = (*METHODS, *config_names("methods"))
        raise RequestError(
            f"method {method!r}: expected one of {', '.join(names)}, or the path of a .toml file"
        )
    values = {"name": path.stem, **read_toml(path)}
    if "selector" in values:
        values["selector"] = selector_from(values["selector"], f"{path}: selector")
    if "decode" in values:
        values["decode"] = rule_from(values["decode"], f"{path}: decode")
    read = build(Method, values, str(path))
    if read.template.endswith(".toml"):  # named relative to the file
        read = dataclasses.replace(read, template=str(path.parent / read.template))
    if read.primer is not None and read.primer.endswith((".toml", ".safetensors")):
        read = dataclasses.replace(read, primer=str(path.parent / read.primer))
    return read
