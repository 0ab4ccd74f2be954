"""Model configuration: one frozen, hashable description of a decoder, the same for every family.

A value is read once, from a Hugging Face ``config.json`` or a TOML file, and never defaulted again
further down: no function of the model core repeats a constant of this module.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from jaxrag.base.errors import ConfigError
from jaxrag.base.options import option, parse_bytes, parse_count
from jaxrag.base.recurrent import RecurrentConfig
from jaxrag.base.tables import build, build_named

if TYPE_CHECKING:
    from jax.sharding import Mesh

DType = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = get_args(DType)
DecodeWeights = Literal["int8"]
Activation = Literal["silu", "gelu_tanh"]
Kernels = Literal["measured", "xla", "pallas_triton", "pallas_interpret"]
KERNELS: tuple[str, ...] = get_args(Kernels)


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """How a model is loaded, beside which one.

    Attributes:
      dtype: of weights, activations and KV; None: as it is stored.
      mesh: devices along the data, fsdp and tensor axes, such as "1,1,8"; None: one device.
      cache_tokens: tokens of KV that the device pool holds; None: by memory.
      kernels: body of the attention ops.
      value_layers: layers whose V stays on the device; None: all, but under a decode rule that is
        meant to have fewer there.
      max_host_bytes: ceiling of KV in host memory.
      kv: "device" or "host", where K and V are; None: where the method's decode rule is meant to
        have them.
      engine: as of ``load_model``; None: what the knowledge base was made with, else "jax".
      decode_weights: "int8": decode steps on a CPU read the weights as int8; None: as they are.
    """

    dtype: str | None = option(
        None, "of weights, activations and KV", choices=DTYPES, unset="as the model is stored"
    )
    mesh: str | None = option(
        None,
        "devices along the data, fsdp and tensor axes, such as 1,1,8",
        "D,F,T",
        unset="one device",
    )
    cache_tokens: int | None = option(
        None,
        "tokens of KV that the device pool holds",
        "N",
        parse=parse_count,
        unset="by memory, at most 8 contexts",
    )
    kernels: Kernels = option(
        "measured",
        "body of the attention ops; pallas_triton needs NVIDIA GPUs",
        choices=("measured", "xla", "pallas_triton"),
        unset="measured: of each the fastest that was right on such a device",
    )
    value_layers: int | None = option(
        None,
        "keep V of N layers on the device, of the others in host memory",
        "N",
        unset="under --decode topn its device_layers, else all",
    )
    max_host_bytes: int | None = option(
        None, "ceiling of that host memory", "SIZE", parse=parse_bytes
    )
    kv: Literal["device", "host"] | None = option(
        None,
        "where K and V are",
        unset="where the method's decode rule is meant to have them",
    )
    engine: str | None = option(
        None,
        "what reads and decodes: jax, or llama_cpp with a GGUF file; after a colon the type of KV "
        "that it keeps, such as llama_cpp:q8_0, or of maps of recurrent layers, such as jax:int8",
        "NAME",
        unset="what the knowledge base was made with, else jax",
    )
    decode_weights: DecodeWeights | None = option(
        None,
        "what decode steps on a CPU read: int8 is faster, and rounds",
        choices=get_args(DecodeWeights),
        unset="the weights as prefill reads them",
    )


MOST_LAYERS = 1 << 12
# Of every size, far above any model's: beyond it a name list or a table would take all memory.
_LARGEST = {
    "vocab_size": 1 << 24,
    "num_layers": MOST_LAYERS,
    "model_dim": 1 << 20,
    "mlp_dim": 1 << 22,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_positions": 1 << 28,
}
_LARGEST_SCALE = 1e6
MOST_EXPERTS = 1 << 12


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every angle divided by ``factor``."""

    factor: float


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's frequency-dependent interpolation."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (NTK by parts). ``attention_factor`` multiplies the rotary dims of q and k once each."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclasses.dataclass(frozen=True)
class NoRotation:
    """No position embedding at all (NoPE): every angle is 0."""


@dataclasses.dataclass(frozen=True)
class InParts:
    """Gemma 4: a head is ``parts`` equal ones, in each of which the first ``turning`` pairs turn.

    Every part has the angles of a head of its own size; halves of all parts lie together.
    """

    parts: int
    turning: int


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | NoRotation | InParts


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the first ``rotary_dim`` of the H head dimensions.

    ``interleaved`` pairs dimensions (0,1), (2,3), ... (GLM); otherwise (0, r/2), (1, r/2+1), ...
    """

    theta: float
    rotary_dim: int
    interleaved: bool
    scaling: RopeScaling | None


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """An MLP of many experts, each as wide as ``mlp_dim``; a token goes through some of them.

    Where ``beside`` is there they are that wide, and stand beside an MLP of ``mlp_dim`` (Gemma 4).

    Their weights are a softmax over all of ``count``; ``normalise`` divides those of the chosen
    ones by their sum.
    """

    count: int  # E
    active: int  # experts of a token, those of the largest weights
    normalise: bool
    router_bias: bool = False
    # gpt-oss (alpha, limit): gate up to limit, up within +-limit, then
    # gate * sigmoid(alpha * gate) * (up + 1); None: SiLU.
    clamp: tuple[float, float] | None = None
    beside: int | None = None
    shared: int | None = None  # width of one more that every token goes through, by its own share

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST_EXPERTS:
            raise ConfigError(f"experts={self.count}: expected 1 to {MOST_EXPERTS}")
        if not 1 <= self.active <= self.count:
            raise ConfigError(f"active experts={self.active}: expected 1 to {self.count}, all")
        if self.beside is not None and not 1 <= self.beside <= _LARGEST["mlp_dim"]:
            raise ConfigError(f"experts of {self.beside} beside an MLP: expected at least 1")
        if self.shared is not None and not 1 <= self.shared <= _LARGEST["mlp_dim"]:
            raise ConfigError(f"shared expert of {self.shared}: expected at least 1")
        if self.clamp is not None and not all(0 < x < math.inf for x in self.clamp):
            raise ConfigError(f"clamp={self.clamp}: expected two finite positive numbers")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary GQA attention, gated MLP or experts.

    Shape letters as in GLOSSARY.md: L layers, D model, F MLP, N query heads, K KV heads,
    H head dim, V vocabulary.
    """

    family: str  # a key of jaxrag.models.FAMILIES
    vocab_size: int  # V
    num_layers: int  # L
    model_dim: int  # D
    mlp_dim: int  # F, of an expert where there are experts and nothing beside them
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    norm_eps: float
    rope: RopeConfig  # of every layer, or of those whose kind is 0
    max_positions: int
    sliding_window: int | None  # tokens, the query included; None = every layer attends globally
    window_layers: tuple[bool, ...] | None  # [L] which layers use the window; None = all of them
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # Qwen3: RMSNorm over H on q and k before rotation
    post_norms: bool  # GLM-4-0414: RMSNorm after attention and after the MLP, before the residual
    tie_embeddings: bool
    dtype: DType  # of parameters, activations and cached KV
    bos_id: int | None
    eos_ids: tuple[int, ...]
    more_ropes: tuple[RopeConfig, ...] = ()  # of layers of the kinds 1, 2, ...
    rope_layers: tuple[int, ...] | None = None  # [L] the kind of every layer; None = all are 0
    embedding_scale: float = 1.0  # of embeddings, before the first layer
    attention_scale: float | None = None  # of scores; None = 1/sqrt(H)
    residual_scale: float = 1.0  # of what attention and MLP add to the residual
    logit_scale: float = 1.0
    score_cap: float | None = None  # Gemma 2: scores s become cap * tanh(s / cap)
    logit_cap: float | None = None  # so do logits
    pre_norms: bool = True  # RMSNorm before attention and before the MLP; OLMo 2 has none
    joint_qk_norm: bool = False  # OLMo 2: that of q and k is over all their heads together
    activation: Activation = "silu"  # of the gate of the MLP
    # Gemma: norms multiply by 1 + weight, in float32; embedding_scale is rounded to dtype.
    unit_norms: bool = False
    # Which body of the attention ops runs (pallas_kernels/README.md), and over which mesh where it
    # is not XLA that spreads it. No properties of the model: they are in no file and in no key.
    kernels: Kernels = "xla"
    kernel_mesh: "Mesh | None" = None
    experts: ExpertsConfig | None = None
    sink_logits: bool = False  # gpt-oss: a logit of each head in the softmax's denominator
    wide_norms: bool = False  # Gemma 4: norms multiply in float32; embedding_scale is rounded
    value_norm: bool = False  # Gemma 4: RMSNorm over H on v, without a weight
    layer_scales: bool = False  # Gemma 4: a number by which a layer multiplies the residual stream
    # Gemma 4: [L] KV heads of the checkpoint, each ``head_parts`` of ours or that many of its own.
    own_kv_heads: tuple[int, ...] | None = None
    keys_as_values: bool = False  # Gemma 4: layers without a window have no projection of V
    # Gemma 4 E2B and E4B: so many last layers have no K and V, but take those of the last layer of
    # their kind that has some; their MLP may have a width of its own. Inputs of each layer.
    shared_layers: int = 0
    shared_mlp_dim: int | None = None
    input_dim: int | None = None  # P
    recurrent: RecurrentConfig | None = None
    output_gate: bool = False  # what attention gives is multiplied by a sigmoid of its input

    def __post_init__(self) -> None:
        for name in _LARGEST:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected a positive integer")
        for name, most in _LARGEST.items():
            if getattr(self, name) > most:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at most {most}")
        window = self.sliding_window
        if window is not None and not 0 < window <= _LARGEST["max_positions"]:
            raise ConfigError(
                f"sliding_window={window}: expected 1 token or more, or null for none"
            )
        if not 0 < self.norm_eps < 1:
            raise ConfigError(f"norm_eps={self.norm_eps}: expected a number above 0 and below 1")
        for rope in self.ropes:
            self._check_rope(rope)
        scales = ("embedding_scale", "attention_scale", "residual_scale", "logit_scale")
        for name in (*scales, "score_cap", "logit_cap"):
            value = getattr(self, name)
            if value is not None and not 1 / _LARGEST_SCALE <= value <= _LARGEST_SCALE:
                raise ConfigError(f"{name}={value}: expected a number from 1e-6 to 1e6")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: expected one of {', '.join(DTYPES)}")
        if self.kernels not in KERNELS:
            raise ConfigError(f"kernels={self.kernels!r}: expected one of {', '.join(KERNELS)}")
        if self.score_cap is not None and self.kernels not in ("measured", "xla"):
            raise ConfigError(
                f"kernels={self.kernels!r}: no kernel holds scores within score_cap="
                f"{self.score_cap:g}; leave kernels at 'measured'"
            )
        if self.experts is not None and self.experts.clamp and self.activation != "silu":
            raise ConfigError(f"activation={self.activation!r}: experts with a clamp have 'silu'")
        if self.window_layers is not None and len(self.window_layers) != self.num_layers:
            raise ConfigError(
                f"window_layers has {len(self.window_layers)} entries for {self.num_layers} layers"
            )
        for name in ("rope_layers", "own_kv_heads"):
            if len(getattr(self, name) or ()) not in (0, self.num_layers):
                raise ConfigError(f"{name}: expected one for each of {self.num_layers} layers")
        if not 0 <= self.shared_layers < self.num_layers or min(self.kv_sources or (0,)) < 0:
            raise ConfigError(
                f"shared_layers={self.shared_layers}: expected fewer than {self.num_layers}, and "
                "before them a layer of each of their kinds"
            )
        for name in ("shared_mlp_dim", "input_dim"):
            if not 1 <= (getattr(self, name) or 1) <= _LARGEST["mlp_dim"]:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.recurrent is not None:
            self.recurrent.check_layers(self.num_layers)
            if self.sliding_window or self.shared_layers or self.input_dim or self.more_ropes:
                raise ConfigError("recurrent layers beside a window or layers of other kinds")
        kinds = (0,) * self.num_layers if self.rope_layers is None else self.rope_layers
        if len(kinds) != self.num_layers or set(kinds) != set(range(len(self.ropes))):
            raise ConfigError(
                f"rope_layers={self.rope_layers}: expected for each of {self.num_layers} layers "
                f"one of the kinds 0..{len(self.ropes) - 1}, and each kind somewhere"
            )

    def _check_rope(self, rope: RopeConfig) -> None:
        if not 0 < rope.theta < math.inf:
            raise ConfigError(f"rope theta={rope.theta}: expected a finite positive number")
        scaling = {} if rope.scaling is None else dataclasses.asdict(rope.scaling)
        for name, value in scaling.items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"rope scaling {name}={value}: expected a finite number from 0")
        if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"rotary_dim={rope.rotary_dim}: expected an even number up to head_dim="
                f"{self.head_dim}"
            )
        if isinstance(rope.scaling, InParts) and (
            rope.scaling.parts < 1 or rope.rotary_dim % (2 * rope.scaling.parts)
        ):
            raise ConfigError(f"rope of {rope.scaling}: expected parts of an even size")
        alike = (self.rope.rotary_dim, self.rope.interleaved)
        if (rope.rotary_dim, rope.interleaved) != alike:
            raise ConfigError(
                f"more_ropes={rope}: rotary_dim and interleaved have to be those of every layer, "
                f"as in rope={self.rope}"
            )

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Of every kind of layers."""
        return self.rope, *self.more_ropes

    def rope_of(self, layer: int) -> RopeConfig:
        """Of one layer."""
        return self.rope if self.rope_layers is None else self.ropes[self.rope_layers[layer]]

    def of_layer(self, layer: int) -> "ModelConfig":
        """The same with the rotation of one layer as that of all."""
        if self.rope_layers is None:
            return self
        rope = self.rope_of(layer)
        return dataclasses.replace(self, rope=rope, more_ropes=(), rope_layers=None)

    @property
    def head_parts(self) -> tuple[int, ...]:
        """[L] of how many equal heads a head of each layer is made."""
        scalings = [self.rope_of(layer).scaling for layer in range(self.num_layers)]
        return tuple(it.parts if isinstance(it, InParts) else 1 for it in scalings)

    @property
    def own_kv_share(self) -> float:
        """How much of K and V the model's own heads would be, 0..1; the rest are copies."""
        if self.own_kv_heads is None:
            return 1.0
        heads = list(zip(self.own_kv_heads, self.head_parts, strict=True))[: self.num_kv_layers]
        return sum(own / parts for own, parts in heads) / (len(heads) * self.num_kv_heads)

    @property
    def num_kv_layers(self) -> int:
        """How many layers have K and V of their own; those that share come behind all of them."""
        return len(self.stacks["layers"])

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """Which layers lie in each of the stacks of ``Params``."""
        whole = range(self.num_layers)
        if self.recurrent is not None:
            kinds = self.recurrent.layers
            return {
                "layers": tuple(i for i in whole if not kinds[i]),
                "recurrent": tuple(i for i in whole if kinds[i]),
            }
        own = self.num_layers - self.shared_layers
        found = {"layers": tuple(whole[:own]), "sharing": tuple(whole[own:])}
        return {name: layers for name, layers in found.items() if layers}

    @property
    def kv_sources(self) -> tuple[int, ...] | None:
        """[L] whose K and V each layer attends to, -1: no layer has any; None: each to its own."""
        if not self.shared_layers:
            return None
        windows = self.window_layers or (True,) * self.num_layers
        kinds = list(zip(windows, self.rope_layers or (0,) * self.num_layers, strict=True))
        last = {kind: layer for layer, kind in enumerate(kinds[: self.num_kv_layers])}
        shared = [last.get(kind, -1) for kind in kinds[self.num_kv_layers :]]
        return (*range(self.num_kv_layers), *shared)

    def mlp_dim_of(self, layer: int) -> int:
        """F of one layer."""
        wide = self.shared_mlp_dim if layer in self.stacks.get("sharing", ()) else None
        return wide or self.mlp_dim

    @property
    def global_layers(self) -> tuple[int, ...]:
        """Those with KV that attend to the whole prompt, whatever the window of the others."""
        windowed = (self.window_layers or (True,) * self.num_layers)[: self.num_kv_layers]
        none = self.sliding_window is None
        return tuple(i for i, it in enumerate(windowed) if none or not it)

    @property
    def page_parts(self) -> int:
        """How many pages of ``global_layers`` alone lie where one of all layers does."""
        count = len(self.global_layers)
        return self.num_kv_layers // count if count else 1

    @property
    def group_size(self) -> int:
        """G = N / K, the query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def score_scale(self) -> float:
        """What products of queries and keys are multiplied with."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, in ``dtype``."""
        width = 4 if self.dtype == "float32" else 2
        return 2 * self.num_kv_layers * self.num_kv_heads * self.head_dim * width

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of K, or of V, of one token in one layer."""
        return self.kv_bytes_per_token // (2 * self.num_kv_layers)


_SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "none": NoRotation,
    "in_parts": InParts,
}


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """Plain JSON-able form of a config, without its kernels; inverse of ``config_from_dict``.

    What has a default and holds it is left out: a trait that came later is in no older key.
    """
    plain = dataclasses.replace(config, kernels="xla", kernel_mesh=None)
    values = dataclasses.asdict(plain)
    for field in dataclasses.fields(plain):
        if getattr(plain, field.name) == field.default:
            del values[field.name]
    if config.experts is not None:
        for name in ("beside", "shared"):  # they came later
            if getattr(config.experts, name) is None:
                del values["experts"][name]
    values["rope"] = rope_to_dict(config.rope)
    if config.more_ropes:
        values["more_ropes"] = tuple(map(rope_to_dict, config.more_ropes))
    return values


def config_from_dict(values: Mapping[str, Any], where: str = "model config") -> ModelConfig:
    """Inverse of ``config_to_dict``; also reads a parsed TOML file.

    Unknown and missing keys raise ConfigError, but a key that may be None may be left out.
    """
    for name in ("kernels", "kernel_mesh"):
        if name in values:
            raise ConfigError(
                f"{where}: unknown key {name!r}; kernels are chosen where a model is loaded"
            )
    if isinstance(values.get("rope"), Mapping):
        values = {**values, "rope": rope_from_dict(values["rope"], f"{where}.rope")}
    if isinstance(more := values.get("more_ropes"), Sequence):
        at = f"{where}.more_ropes"
        kinds = [rope_from_dict(it, at) if isinstance(it, Mapping) else it for it in more]
        values = {**values, "more_ropes": kinds}
    return build(ModelConfig, values, where, keep_ints=True)


def rope_to_dict(rope: RopeConfig) -> dict[str, Any]:
    """Plain JSON-able form; ``rope_from_dict`` is its inverse."""
    values = dataclasses.asdict(rope)
    if rope.scaling is not None:
        kind = next(name for name, cls in _SCALINGS.items() if isinstance(rope.scaling, cls))
        values["scaling"] = {"type": kind, **dataclasses.asdict(rope.scaling)}
    return values


def rope_from_dict(values: Mapping[str, Any], where: str) -> RopeConfig:
    """Inverse of ``rope_to_dict``. Raises ConfigError for unknown and missing keys."""
    if isinstance(values.get("scaling"), Mapping):
        given = values["scaling"]
        scaling = build_named(_SCALINGS, given, f"{where}.scaling", "type", keep_ints=True)
        values = {**values, "scaling": scaling}
    return build(RopeConfig, values, where, keep_ints=True)
