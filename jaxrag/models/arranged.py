"""Heads of several sizes in one shape: the weights are arranged, and nothing else knows of it.

Layers have heads of H dimensions, or of H / P. P KV heads of the latter lie in one of ours: where a
query has its numbers at one of them and zeros at the others, its scores are those of that head, and
of the values that come out all but that head's part meet zeros in ``o``. Fewer KV heads than ours
are copied. The first halves of all parts lie before the second ones, so that the pairs that turn
together are where they are in a head of H (``InParts``).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping

import numpy as np

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ModelError
from jaxrag.base.types import HostArray
from jaxrag.models.tensor_files import StoredTensor, require_weight

_Made = Callable[[HostArray], HostArray]


@dataclasses.dataclass(frozen=True)
class ArrangedTensor(StoredTensor):
    """What is made of another tensor as it is read; all but ``shape`` is the other's."""

    source: StoredTensor
    made: _Made

    @property
    def num_bytes(self) -> int:
        """Of the other, in its file."""
        return self.source.num_bytes

    @property
    def identity(self) -> tuple[str, str]:
        """As the other."""
        return self.source.identity

    def view(self) -> HostArray:
        """The values in their places."""
        return self.made(self.source.view()).reshape(self.shape)


def arranged(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint with those of heads in the shapes of ``config``.

    Where keys are values, ``v_proj`` is ``k_proj``. Raises ModelError for a tensor that
    the checkpoint should have in another shape; what is missing is found later.
    """
    assert config.own_kv_heads is not None
    ours = dict(tensors)
    dim, size, heads = config.model_dim, config.head_dim, config.num_heads
    uses = config.window_layers or (config.sliding_window is not None,) * config.num_layers
    for layer, (own, parts) in enumerate(zip(config.own_kv_heads, config.head_parts, strict=True)):
        stem, each = f"model.layers.{layer}.self_attn.", size // parts
        queries, keys = _places(config, own, parts)
        if config.keys_as_values and not uses[layer] and stem + "k_proj.weight" in ours:
            extra = ours.pop(stem + "v_proj.weight", None)
            if extra is not None:
                raise ModelError(
                    f"{extra.path}: has {extra.name!r}, where attention_k_eq_v=True takes the keys"
                )
            ours[stem + "v_proj.weight"] = ours[stem + "k_proj.weight"]
        if layer >= config.num_kv_layers:  # published with what nothing reads
            for name in ("k_proj", "v_proj", "k_norm"):
                ours.pop(f"{stem}{name}.weight", None)
        of_keys = (own * each, dim), (config.num_kv_heads * size, dim), _rows(keys, each)
        tables: dict[str, tuple[tuple[int, ...], tuple[int, ...], _Made]] = {
            "q_proj": ((heads * each, dim), (heads * size, dim), _rows(queries, each)),
            "k_proj": of_keys,
            "v_proj": of_keys,
            "o_proj": ((dim, heads * each), (dim, heads * size), _columns(queries, each)),
            "q_norm": ((each,), (size,), _rows(np.zeros((1, parts), int), each)),
            "k_norm": ((each,), (size,), _rows(np.zeros((1, parts), int), each)),
        }
        for name, (before, shape, made) in tables.items():
            key = f"{stem}{name}.weight"
            if key in ours:
                source = ours[key]
                require_weight(source, before, source.path)
                ours[key] = ArrangedTensor(
                    source.name, source.path, source.dtype, shape, source.start, source, made
                )
        if config.experts is not None:
            _fold_experts(ours, config, f"model.layers.{layer}.")
    return ours


def experts_apart(
    tensors: Mapping[str, StoredTensor], config: ModelConfig
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint with a tensor of each expert where one holds those of a layer.

    Raises ModelError for one of another shape.
    """
    assert config.experts is not None
    ours, dim, width = dict(tensors), config.model_dim, config.mlp_dim
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    for key in tensors:
        stem, _, name = key.rpartition(".")
        if not stem.endswith(".mlp.experts") or name not in names:
            continue
        source, parts = ours.pop(key), names[name]
        shape = (dim, width) if name == "down_proj" else (width, dim)
        whole = (config.experts.count, len(parts) * shape[0], shape[1])
        require_weight(source, whole, source.path)
        for expert, (part, its) in itertools.product(range(whole[0]), enumerate(parts)):
            ours[f"{stem}.{expert}.{its}.weight"] = ArrangedTensor(
                source.name, source.path, source.dtype, shape, source.start, source,
                functools.partial(_expert, expert, part, shape[0]),
            )  # fmt: skip
    return ours


def _expert(expert: int, part: int, rows: int, values: HostArray) -> HostArray:
    return values[expert, part * rows : (part + 1) * rows]


def _fold_experts(tensors: dict[str, StoredTensor], config: ModelConfig, stem: str) -> None:
    """Put vectors before and behind experts and their choice into the matrices."""
    assert config.experts is not None
    dim, count, width = config.model_dim, config.experts.count, config.experts.beside or 0
    for vector, size, matrix, shape, behind in (
        ("pre_feedforward_layernorm_2.weight", dim, "experts.gate_up_proj", (2 * width, dim), 1.0),
        ("router.scale", dim, "router.proj.weight", (dim,), dim**-0.5),
        ("router.per_expert_scale", count, "experts.down_proj", (dim, width), None),
    ):
        by, source = tensors.pop(stem + vector, None), tensors.get(stem + matrix)
        if by is None or source is None:
            raise ModelError(
                f"tensor {stem + (vector if by is None else matrix)!r} is missing; the gemma4 "
                "config asks for it"
            )
        require_weight(by, (size,), by.path)
        require_weight(source, (count, *shape), source.path)
        tensors[stem + matrix] = ArrangedTensor(
            source.name, source.path, source.dtype, source.shape, source.start, source,
            functools.partial(_times, by, behind),
        )  # fmt: skip


def _times(by: StoredTensor, scale: float | None, values: HostArray) -> HostArray:
    """Values times a vector over their last axis, and a number; without one, over their first."""
    vector = by.view().astype(np.float32)
    if scale is None:
        vector = vector.reshape(-1, *(1,) * (values.ndim - 1))
    return values.astype(np.float32) * vector * np.float32(1.0 if scale is None else scale)


def _places(config: ModelConfig, own: int, parts: int) -> tuple[HostArray, HostArray]:
    """Which head of the checkpoint lies in each part of ours, -1 for none: [N, P] and [K, P]."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    keys = np.arange(kv_heads * parts).reshape(kv_heads, parts) // (kv_heads * parts // own)
    queries = np.full((heads, parts), -1)
    for head in range(heads):
        there = np.flatnonzero(keys[head * kv_heads // heads] == head * own // heads)
        queries[head, there[0]] = head
    return queries, keys


def _rows(places: HostArray, each: int) -> _Made:
    """Of rows [heads * each, ...] those of ``places`` [ours, P], a head's halves apart."""

    def made(values: HostArray) -> HostArray:
        rows = values.reshape(-1, 2, each // 2, *values.shape[1:])
        rows = np.concatenate((rows, np.zeros_like(rows[:1])))  # of no head
        return rows[places].swapaxes(1, 2)  # [ours, 2, P, each / 2, ...]

    return made


def _columns(places: HostArray, each: int) -> _Made:
    """As ``_rows``, of columns."""
    rows = _rows(places, each)
    return lambda values: rows(values.T).reshape(-1, len(values)).T


__all__ = ["ArrangedTensor", "arranged", "experts_apart"]
