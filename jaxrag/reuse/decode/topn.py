"""KCache (section 3.1, arXiv:2404.18057): every key is scored, the values of the best are read.

Efficient LLM Inference with KCache.
"""

import dataclasses
from typing import Any, ClassVar, override

import jax.numpy as jnp
from jax import lax

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.types import Array, Partial
from jaxrag.kv.placement import KVPlacement
from jaxrag.reuse.decode.footprint import Bytes
from jaxrag.reuse.decode.rule import DecodeRule, highest, require
from jaxrag.reuse.decode.view import View


@dataclasses.dataclass(frozen=True)
class TopN(DecodeRule):
    """Softmax over all keys, of which the ``n`` largest weights of a query head are used.

    Prompt and generated tokens compete for the same ``n``.

    Attributes:
      n: weights of a query head that are used.
      device_layers: the first layers, whose values stay on the device, attend to every key (section
        3.1 and table 2).
      renormalise: divide by the sum of the kept weights. The paper does not: the output shrinks by
        the weight of what is left out, and ``lse`` is over all visible keys. With it, ``lse`` is
        over the kept ones.
    """

    n: int = 128
    device_layers: int = 1
    renormalise: bool = False
    name: str = dataclasses.field(default="topn", init=False)
    by_position: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.name, n=self.n)
        if isinstance(self.device_layers, bool) or self.device_layers < 0:
            raise RequestError(
                f"decode rule 'topn': device_layers={self.device_layers}: expected 0 or more layers"
            )

    @property
    @override
    def placement(self) -> KVPlacement:
        return KVPlacement(value_layers=self.device_layers)

    @override
    def check(self, config: ModelConfig) -> None:
        """Refuse a model with fewer layers than stay on the device."""
        super().check(config)
        if self.device_layers > config.num_layers:
            raise RequestError(
                f"decode rule 'topn': device_layers={self.device_layers}, the model has "
                f"{config.num_layers} layers; choose at most that many"
            )

    @override
    def check_placement(self, config: ModelConfig, placement: KVPlacement) -> None:
        """Refuse V of other layers on the device than this rule reads there, and K elsewhere."""
        if placement.value_layers is None:
            super().check_placement(config, placement)
        elif placement.value_layers != self.device_layers:
            raise RequestError(
                f"decode rule 'topn': device_layers={self.device_layers}, and the model was loaded "
                f"with {placement}; make them equal"
            )

    @override
    def tokens(self) -> dict[str, int]:
        return {"n": self.n}

    @override
    def beside(self, config: ModelConfig, tokens: int, placement: KVPlacement) -> Bytes:
        """Nothing is kept; rows of V come from host memory, and the newest goes there."""
        rows = min(self.n, tokens) * config.group_size + 1
        return Bytes(bus=placement.host_bytes(config, rows))

    @override
    def attend(self, view: View, layer: Array, state: Any) -> tuple[Partial, Any]:
        """Dense in the first layers, then the top N of the softmax."""
        if self.device_layers == 0:  # there may be no V on the device at all
            return self._top(view), state
        return lax.cond(layer < self.device_layers, view.dense, lambda: self._top(view)), state

    def _top(self, view: View) -> Partial:
        if view.far is None:
            return view.top(self.n, self.renormalise)
        everything = view.scores()
        scores, slots = highest(everything, self.n)
        kept = view.mix_far(scores, slots)
        if self.renormalise:
            return kept
        top = everything.max(-1, keepdims=True)
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        total = jnp.exp(everything - top).sum(-1)
        lse = (jnp.log(total) + top[..., 0]).reshape(kept.lse.shape)  # -inf: nothing is seen
        share = jnp.exp(kept.lse - jnp.where(jnp.isfinite(lse), lse, 0.0))
        return Partial(out=kept.out * share[..., None], lse=lse)
