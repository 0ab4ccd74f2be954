"""Read and write the ``config.json`` keys that all families share.

Absent keys take the value the family's own configuration class in transformers gives them, which is
not the same as ``null``: a Mistral config without ``sliding_window`` has a window of 4096, with
``null`` it has none. A key that would change the arithmetic and is not supported is refused.

Rotary settings are ``rope_theta`` with ``rope_scaling``, or ``rope_parameters``. Supported
scalings are none ("default"), linear, llama3 and yarn. The others rotate by amounts that depend on
the length of the sequence, so a cached key could not be moved; they are refused.
"""

import dataclasses
import math
import re
import reprlib
import sys
from collections.abc import Collection, Mapping
from typing import Any, cast

from jaxrag.base.config import (
    DTYPES,
    MOST_LAYERS,
    DType,
    InParts,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NoRotation,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from jaxrag.base.errors import ConfigError

# Keys of Granite's arithmetic, and what leaves the result unchanged.
SCALES: dict[str, tuple[Any, ...]] = {
    "embedding_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
}
# Keys of other architectures' arithmetic, with the values that leave the result unchanged.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "logit_scale": (None, 1),
    **SCALES,
    "clip_qkv": (None,),
    "use_mrope": (None, False),
    "use_qk_norm": (None, False),
}


_QUANTISED = ("quantization_config", "compression_config")
_UNQUANTISED = "; take the weights that were quantised, in bfloat16, float16 or float32"
_LARGEST = sys.float_info.max
OF_OUTER = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype")
_SHARED_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_SCALING_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",  # provenance, not arithmetic
        }
    ),
}


# Keys that hold others or null, what they hold, and of which type each of it has to be.
_HOLDING: dict[str, tuple[type, str, type]] = {
    "layer_types": (list, "a list of names", str),
    "no_rope_layers": (list, "a list of 0 and 1", int),
    "rope_scaling": (Mapping, "an object", object),
    "rope_parameters": (Mapping, "an object", object),
    "per_layer_config": (Mapping, "an object of objects", Mapping),
}
_LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
# What ModelConfig calls otherwise.
_NAMES = {
    "num_layers": "num_hidden_layers",
    "model_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "score_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
}


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What a family assumes for a key that ``config.json`` leaves out."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None  # None: as many as query heads
    head_dim: int | None  # None: hidden_size / num_attention_heads
    max_position_embeddings: int
    rms_norm_eps: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    partial_rotary_factor: float = 1.0
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False


def text_part(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model that reads not only text what its text part's ``config.json`` would hold.

    Raises ConfigError for one that holds nothing, and for what is no list or object in it.
    """
    inner = hf.get("text_config")
    if not isinstance(inner, Mapping | None):
        raise ConfigError(f"config.json: text_config={inner!r:.200}: expected an object")
    outer = {key: hf[key] for key in OF_OUTER if hf.get(key) is not None}
    text = hf if inner is None else {**outer, **inner}
    for key, (kind, expected, held) in _HOLDING.items():
        value = text.get(key)
        if value is None:
            continue
        within = value.values() if isinstance(value, Mapping) else value
        if not (isinstance(value, kind) and all(isinstance(it, held) for it in within)):
            raise ConfigError(f"config.json: {key}={value!r:.200}: expected {expected}, or null")
    for layers in _LAYER_KINDS:
        value = (text.get("rope_parameters") or {}).get(layers)
        if not isinstance(value, Mapping | None):
            raise ConfigError(
                f"config.json: rope_parameters.{layers}={value!r:.200}: expected an object"
            )
    return text


def by_key(refusal: ConfigError) -> str:
    """What is refused, of ModelConfig or ``config.json``, with names of the latter."""
    return re.sub(r"\b(\w+)(?==)", lambda it: _NAMES.get(it[0], it[0]), str(refusal))


def read_int(hf: Mapping[str, Any], key: str, default: int) -> int:
    """An integer; absent means ``default``. Raises ConfigError for anything else, null included."""
    value = hf.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise ConfigError(f"config.json: {key}={value!r:.200}: expected an integer of 64 bits")
    return value


def read_num_layers(hf: Mapping[str, Any], default: int) -> int:
    """``num_hidden_layers``, before lists are made of so many. Raises ConfigError as read_int."""
    found = read_int(hf, "num_hidden_layers", default)
    if not 1 <= found <= MOST_LAYERS:
        raise ConfigError(f"config.json: num_hidden_layers={found}: expected 1 to {MOST_LAYERS}")
    return found


def read_optional_int(hf: Mapping[str, Any], key: str, default: int | None) -> int | None:
    """An integer or null; absent means ``default``."""
    return None if hf.get(key, default) is None else read_int(hf, key, default or 0)


def read_float(hf: Mapping[str, Any], key: str, default: float) -> float:
    """A number; absent means ``default``."""
    value = hf.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _LARGEST:
        raise ConfigError(f"config.json: {key}={value!r:.200}: expected a finite number")
    return float(value)


def read_positive(hf: Mapping[str, Any], key: str, default: float) -> float:
    """A finite number above 0; absent means ``default``."""
    return _number(key, hf.get(key, default))


def read_bool(hf: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or false; absent means ``default``."""
    value = hf.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {key}={value!r:.200}: expected true or false")
    return value


def read_token_ids(hf: Mapping[str, Any], key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """A token id, a list of them or null (none); absent means ``default``."""
    value = hf.get(key, default)
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31 for i in ids):
        raise ConfigError(
            f"config.json: {key}={value!r:.200}: expected a token id, a list of them, or null"
        )
    return ids


def read_decoder(
    hf: Mapping[str, Any],
    family: str,
    defaults: Defaults,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    post_norms: bool = False,
    interleaved: bool = False,
    sliding_window: int | None = None,
    window_layers: tuple[bool, ...] | None = None,
    understood: Collection[str] = (),
) -> ModelConfig:
    """Read everything but the traits a family decides itself, which are the keyword arguments.

    ``understood`` are keys of another arithmetic that the family reads.
    Raises ConfigError naming the key and its value when it is malformed or not supported.
    """
    for key, neutral in _UNSUPPORTED.items():
        if key not in understood and hf.get(key) not in neutral:
            raise ConfigError(
                f"config.json: {key}={reprlib.repr(hf[key])} is not supported for {family} models"
                + (_UNQUANTISED if key in _QUANTISED else "")
            )
    activation = hf.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act={activation!r:.200}: only 'silu' is supported")

    model_dim = read_int(hf, "hidden_size", defaults.hidden_size)
    num_heads = read_int(hf, "num_attention_heads", defaults.num_attention_heads)
    num_kv_heads = read_optional_int(hf, "num_key_value_heads", defaults.num_key_value_heads)
    head_dim = read_optional_int(hf, "head_dim", defaults.head_dim)
    if head_dim is None:
        if num_heads < 1 or model_dim % num_heads:
            raise ConfigError(
                f"config.json: hidden_size={model_dim} is not a multiple of num_attention_heads="
                f"{num_heads}, and there is no head_dim"
            )
        head_dim = model_dim // num_heads
    max_positions = read_int(hf, "max_position_embeddings", defaults.max_position_embeddings)
    bos_ids = read_token_ids(
        hf, "bos_token_id", () if defaults.bos_token_id is None else (defaults.bos_token_id,)
    )
    return ModelConfig(
        family=family,
        vocab_size=read_int(hf, "vocab_size", defaults.vocab_size),
        num_layers=read_int(hf, "num_hidden_layers", defaults.num_hidden_layers),
        model_dim=model_dim,
        mlp_dim=read_int(hf, "intermediate_size", defaults.intermediate_size),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        norm_eps=read_float(hf, "rms_norm_eps", defaults.rms_norm_eps),
        rope=read_rope(
            hf,
            head_dim=head_dim,
            max_positions=max_positions,
            partial_rotary_factor=defaults.partial_rotary_factor,
            interleaved=interleaved,
            default_theta=defaults.rope_theta,
        ),
        max_positions=max_positions,
        sliding_window=sliding_window,
        window_layers=window_layers,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        post_norms=post_norms,
        tie_embeddings=read_bool(hf, "tie_word_embeddings", defaults.tie_word_embeddings),
        dtype=_read_dtype(hf),
        bos_id=bos_ids[0] if bos_ids else None,
        eos_ids=read_token_ids(hf, "eos_token_id", defaults.eos_token_ids),
    )


def write_decoder(config: ModelConfig, architecture: str, model_type: str) -> dict[str, Any]:
    """The keys ``read_decoder`` reads, in the form transformers 5 writes; families add theirs."""
    eos = config.eos_ids
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": write_rope(config.rope, config.head_dim),
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": config.dtype,
        "bos_token_id": config.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "pad_token_id": None,
    }


def refuse_windows(hf: Mapping[str, Any], family: str) -> None:
    """Refuse a window or mixed layers in a family whose attention is global in every layer."""
    window = hf.get("sliding_window")
    if window is not None and hf.get("use_sliding_window", True):
        raise ConfigError(
            f"config.json: sliding_window={window!r:.200}: {family} layers attend globally"
        )
    require_layer_types(hf, "full_attention", family)


def require_layer_types(hf: Mapping[str, Any], kind: str, family: str) -> None:
    """Refuse ``layer_types`` other than ``kind`` in a family whose layers are all alike."""
    others = sorted({str(name) for name in hf.get("layer_types") or ()} - {kind})
    if others:
        raise ConfigError(
            f"config.json: layer_types contains {others[0]!r}: every layer of this {family} model "
            f"is {kind!r}"
        )


def _read_dtype(hf: Mapping[str, Any]) -> DType:
    stated = (hf.get(key) for key in ("dtype", "torch_dtype"))
    name = next((it for it in stated if it is not None), "float32")
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype={name!r:.200}: expected one of {', '.join(DTYPES)}")
    return cast(DType, name)


def read_rope(
    hf: Mapping[str, Any],
    *,
    head_dim: int,
    max_positions: int,
    partial_rotary_factor: float = 1.0,
    interleaved: bool = False,
    default_theta: float = 10_000.0,
) -> RopeConfig:
    """Read the rotary settings of a ``config.json``.

    ``partial_rotary_factor`` is the family's own default; a family that rotates every dimension
    (1.0) refuses a config that says otherwise. Raises ConfigError for an unknown or malformed key.
    """
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALING_KEYS:
        raise ConfigError(
            f"config.json: rope_type={kind!r:.200} is not supported; the types are "
            f"{', '.join(_SCALING_KEYS)}"
        )
    unknown = sorted(set(given) - _SHARED_KEYS - _SCALING_KEYS[kind])
    if unknown:
        raise ConfigError(
            f"config.json: {unknown[0]}={given[unknown[0]]!r:.200} is not supported for rope type "
            f"{kind!r}; its keys are {', '.join(sorted(_SHARED_KEYS | _SCALING_KEYS[kind]))}"
        )
    fraction = given.get(
        "partial_rotary_factor", hf.get("partial_rotary_factor", partial_rotary_factor)
    )
    fraction = _number("partial_rotary_factor", fraction)
    if partial_rotary_factor == 1.0 and fraction != 1.0:
        raise ConfigError(
            f"config.json: partial_rotary_factor={fraction}: this family rotates every dimension"
        )
    theta = given.get("rope_theta", hf.get("rope_theta", default_theta))
    return RopeConfig(
        theta=_number("rope_theta", theta),
        rotary_dim=int(head_dim * fraction),
        interleaved=interleaved,
        scaling=_read_scaling(kind, given, hf, max_positions),
    )


def write_rope(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """The ``rope_parameters`` object from which ``read_rope`` gives ``rope`` back."""
    values: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.rotary_dim != head_dim:
        fraction = rope.rotary_dim / head_dim
        if int(head_dim * fraction) != rope.rotary_dim:  # the quotient was rounded down
            fraction = math.nextafter(fraction, 1.0)
        values["partial_rotary_factor"] = fraction
    match rope.scaling:
        case None:
            return {"rope_type": "default", **values}
        case LinearScaling(factor):
            return {"rope_type": "linear", **values, "factor": factor}
        case NoRotation() | InParts():
            return {"rope_type": "none", **values}  # which nothing reads: export refuses it
        case Llama3Scaling() | YarnScaling() as scaling:
            kind = "yarn" if isinstance(scaling, YarnScaling) else "llama3"
            fields = dataclasses.asdict(scaling)
            fields["original_max_position_embeddings"] = fields.pop("original_max_positions")
            return {"rope_type": kind, **values, **fields}


def _read_scaling(
    kind: str, given: Mapping[str, Any], hf: Mapping[str, Any], max_positions: int
) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_required(given, "factor", kind))
    # A value beside the rope settings wins over one inside them, as transformers has it.
    name = "original_max_position_embeddings"
    stated = given.get(name, max_positions) if hf.get(name) in (None, 0) else hf[name]
    original = int(_number(name, stated))
    if original < 1:
        raise ConfigError(f"config.json: {name}={stated!r}: expected an integer from 1")
    if kind == "llama3":
        return Llama3Scaling(
            factor=_required(given, "factor", kind),
            low_freq_factor=_required(given, "low_freq_factor", kind),
            high_freq_factor=_required(given, "high_freq_factor", kind),
            original_max_positions=original,
        )
    factor = given.get("factor")
    factor = max_positions / original if factor is None else _number("factor", factor)
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        beta_fast=_number("beta_fast", _given(given, "beta_fast", 32)),
        beta_slow=_number("beta_slow", _given(given, "beta_slow", 1)),
        attention_factor=_yarn_attention_factor(factor, given),
        truncate=read_bool(given, "truncate", True),
    )


def _yarn_attention_factor(factor: float, given: Mapping[str, Any]) -> float:
    """YaRN, section 3.4: 0.1 ln(factor) + 1, unless the config states it or a ratio of mscales."""

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    stated = given.get("attention_factor")
    if stated is not None:
        return _number("attention_factor", stated)
    scales = {key: _given(given, key, None) for key in ("mscale", "mscale_all_dim")}
    known = [temperature(_number(key, scale)) for key, scale in scales.items() if scale is not None]
    return known[0] / known[1] if len(known) == 2 else temperature(1.0)


def _given(given: Mapping[str, Any], key: str, default: Any) -> Any:
    """A setting; as transformers has it, null and 0 are none."""
    return default if given.get(key) in (None, 0) else given[key]


def _required(given: Mapping[str, Any], key: str, kind: str) -> float:
    if given.get(key) is None:
        raise ConfigError(f"config.json: rope type {kind!r} needs the key {key!r}")
    return _number(key, given[key])


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
        raise ConfigError(f"config.json: {key}={value!r:.200}: expected a finite positive number")
    return float(value)
