"""Rules that score every key and read the values of the best: Flat (exact top-k) and KCache."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxrag.config import ModelConfig
from jaxrag.decode.base import DecodeRule, View, highest, require, require_zero_or_more
from jaxrag.errors import RequestError
from jaxrag.models.attention import merge
from jaxrag.types import Array, Partial


@dataclasses.dataclass(frozen=True)
class Flat(DecodeRule):
    """The static pattern, and the ``k`` keys outside it with the highest scores, per query head.

    RetrievalAttention's "Flat" baseline: what an index with perfect recall would find (section 4.1;
    the two parts are merged by its equations 4 and 5).
    """

    k: int = 100
    sink: int = 128
    recent: int = 512
    name: str = dataclasses.field(default="flat", init=False)

    def __post_init__(self) -> None:
        """Refuse a window without the newest token, and k of zero."""
        require_zero_or_more(self.name, sink=self.sink)
        require(self.name, k=self.k, recent=self.recent)

    def tokens(self) -> dict[str, int]:
        """k and the window."""
        return {"k": self.k, "sink + recent": self.sink + self.recent}

    def attend(self, view: View, layer: Array, state: Any) -> tuple[Partial, Any]:
        """The window, and the best of the rest."""
        window = view.attend_at(*view.window(self.sink, self.recent))
        rest = view.outside_window(self.sink, self.recent)[:, None, None]
        scores, slots = highest(jnp.where(rest, view.scores(), -jnp.inf), self.k)
        return merge([window, view.mix(scores, slots)]), state


@dataclasses.dataclass(frozen=True)
class TopN(DecodeRule):
    """KCache: softmax over all keys, of which the ``n`` largest weights of a query head are used.

    The first ``device_layers`` layers, whose values stay on the device, attend to every key
    (section 3.1 and table 2). Prompt and generated tokens compete for the same ``n``.

    Attributes:
      renormalise: divide by the sum of the kept weights. The paper does not: the output shrinks by
        the weight of what is left out, and ``lse`` is over all visible keys. With it, ``lse`` is
        over the kept ones.
    """

    n: int = 128
    device_layers: int = 1
    renormalise: bool = False
    name: str = dataclasses.field(default="topn", init=False)

    def __post_init__(self) -> None:
        """Refuse n of zero and a negative number of layers."""
        require(self.name, n=self.n)
        if isinstance(self.device_layers, bool) or self.device_layers < 0:
            raise RequestError(
                f"decode rule 'topn': device_layers={self.device_layers}: expected 0 or more layers"
            )

    @property
    def by_position(self) -> bool:
        """It chooses by weight alone."""
        return False

    def check(self, config: ModelConfig) -> None:
        """Refuse a model with fewer layers than stay on the device."""
        super().check(config)
        if self.device_layers > config.num_layers:
            raise RequestError(
                f"decode rule 'topn': device_layers={self.device_layers}, the model has "
                f"{config.num_layers} layers; choose at most that many"
            )

    def check_values(self, value_layers: int | None) -> None:
        """Refuse a cache with V of other layers on the device than this rule reads there."""
        if value_layers not in (None, self.device_layers):
            raise RequestError(
                f"decode rule 'topn': device_layers={self.device_layers}, and the model was loaded "
                f"with value_layers={value_layers}; make them equal"
            )

    def tokens(self) -> dict[str, int]:
        """N."""
        return {"n": self.n}

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
