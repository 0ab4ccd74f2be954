"""Rotary settings in ``config.json``: ``rope_theta`` with ``rope_scaling``, or ``rope_parameters``.

Supported scalings are none ("default"), linear, llama3 and yarn. The others rotate by amounts that
depend on the length of the sequence, so a cached key could not be moved; they are refused.
"""

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

from jaxrag.base.config import LinearScaling, Llama3Scaling, RopeConfig, RopeScaling, YarnScaling
from jaxrag.base.errors import ConfigError

_DEFAULT_THETA = 10_000.0
_LARGEST = sys.float_info.max
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


def read_rope(
    hf: Mapping[str, Any],
    *,
    head_dim: int,
    max_positions: int,
    partial_rotary_factor: float,
    interleaved: bool,
) -> RopeConfig:
    """Read the rotary settings of a ``config.json``.

    ``partial_rotary_factor`` is the family's own default; a family that rotates every dimension
    (1.0) refuses a config that says otherwise. Raises ConfigError for an unknown or malformed key.
    """
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"config.json: rope_scaling={given!r}: expected an object")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALING_KEYS:
        raise ConfigError(
            f"config.json: rope type {kind!r} is not supported; the types are "
            f"{', '.join(_SCALING_KEYS)}"
        )
    unknown = sorted(set(given) - _SHARED_KEYS - _SCALING_KEYS[kind])
    if unknown:
        raise ConfigError(
            f"config.json: {unknown[0]}={given[unknown[0]]!r} is not supported for rope type "
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
    theta = given.get("rope_theta", hf.get("rope_theta", _DEFAULT_THETA))
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
    original = hf.get("original_max_position_embeddings") or given.get(
        "original_max_position_embeddings", max_positions
    )
    original = int(_number("original_max_position_embeddings", original))
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
        beta_fast=_number("beta_fast", given.get("beta_fast") or 32),
        beta_slow=_number("beta_slow", given.get("beta_slow") or 1),
        attention_factor=_yarn_attention_factor(factor, given),
        truncate=bool(given.get("truncate", True)),
    )


def _yarn_attention_factor(factor: float, given: Mapping[str, Any]) -> float:
    """YaRN, section 3.4: 0.1 ln(factor) + 1, unless the config states it or a ratio of mscales."""

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    stated = given.get("attention_factor")
    if stated is not None:
        return _number("attention_factor", stated)
    mscale, mscale_all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        ratio = temperature(_number("mscale", mscale))
        return ratio / temperature(_number("mscale_all_dim", mscale_all_dim))
    return temperature(1.0)


def _required(given: Mapping[str, Any], key: str, kind: str) -> float:
    if given.get(key) is None:
        raise ConfigError(f"config.json: rope type {kind!r} needs the key {key!r}")
    return _number(key, given[key])


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
        raise ConfigError(f"config.json: {key}={value!r}: expected a finite positive number")
    return float(value)
