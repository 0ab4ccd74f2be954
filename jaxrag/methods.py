"""Methods as settings of a few seams over one core; every paper's preset is one line."""

import dataclasses
from pathlib import Path

from jaxrag.config import ModelConfig, read_toml, strict_fields
from jaxrag.errors import RequestError
from jaxrag.segments import POSITION_SCHEMES, PositionScheme


@dataclasses.dataclass(frozen=True)
class Method:
    """How a prompt with chunks is prefilled.

    Attributes:
      name: for results. encoder: which stored form of a chunk is used (encode.ENCODERS); None
        computes the whole prompt with full attention and reuses nothing.
      positions: of reused chunks: "reordered" equals order, "composite" restarts at every chunk.
      template: the prompt format used where neither the caller nor the knowledge base names one.
    """

    name: str
    encoder: str | None
    positions: PositionScheme = "reordered"
    template: str = "turborag"

    def __post_init__(self) -> None:
        """Refuse combinations that are wrong by construction."""
        if self.positions not in POSITION_SCHEMES:
            raise RequestError(
                f"positions={self.positions!r}: expected one of {', '.join(POSITION_SCHEMES)}"
            )
        if self.positions == "composite" and self.encoder != "isolated":
            raise RequestError(
                f"method {self.name!r}: composite positions overlap and need the isolated encoder, "
                f"not {self.encoder!r}; use positions='reordered'"
            )

    def check(self, config: ModelConfig) -> None:
        """Refuse a model that this method cannot serve."""
        if self.positions == "composite" and config.sliding_window is not None:
            raise RequestError(
                f"method {self.name!r}: composite positions do not follow the order of the prompt, "
                f"and this model's sliding window ({config.sliding_window} tokens) is measured in "
                f"order; use positions='reordered'"
            )


METHODS: dict[str, Method] = {
    "full_attention": Method("full_attention", encoder=None),
    "full_reuse": Method("full_reuse", encoder="after_prefix"),
    "turborag": Method("turborag", encoder="isolated"),
    "turborag_composite": Method("turborag_composite", encoder="isolated", positions="composite"),
    "block_attention": Method("block_attention", encoder="isolated", template="block_attention"),
}


def method_named(method: str | Method) -> Method:
    """A preset by name, a Method from a TOML file by path, or the Method itself.

    Raises RequestError listing the presets, and ConfigError for a file with an unknown key.
    """
    if isinstance(method, Method):
        return method
    if method.endswith(".toml"):
        path = Path(method)
        values = {"name": path.stem, "encoder": None, **read_toml(path)}
        method = Method(**strict_fields(Method, values, str(path)))
        if method.template.endswith(".toml"):  # named from where the file stands
            method = dataclasses.replace(method, template=str(path.parent / method.template))
        return method
    if method not in METHODS:
        raise RequestError(
            f"method {method!r}: expected one of {', '.join(METHODS)}, or the path of a .toml file"
        )
    return METHODS[method]
