"""Which methods suit a model, by how it was trained to read, and what to type for them."""

import dataclasses

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.models.reading import Reading
from jaxrag.reuse.methods import METHODS, Method

_TUNED = ("turborag", "turborag_composite")
_UNTUNED = ("fusionrag", "cacheblend", "epic")


@dataclasses.dataclass(frozen=True)
class Choice:
    """One method for a model.

    Attributes:
      encoders: the variants that a knowledge base has to keep for it.
      refused: why this model cannot have it; None where it can.
    """

    method: Method
    encoders: tuple[str, ...]
    refused: str | None

    @property
    def flags(self) -> tuple[str, ...]:
        """The options of `jaxrag ingest` that it needs; none where the default will do."""
        default = self.encoders == ("isolated",)
        return () if default else tuple(f"--encoder {name}" for name in self.encoders)


def choices(config: ModelConfig, reading: Reading) -> tuple[Choice, ...]:
    """The presets that suit, the one to begin with first.

    Plain reuse where the weights were trained to read chunks block-wise; else methods that compute
    a part of the chunks again. ``block_attention`` is turborag under another template.
    """
    tuned = [name for name in _TUNED if METHODS[name].positions in reading.block_positions]
    return tuple(choice(METHODS[name], config) for name in tuned or _UNTUNED)


def choice(method: Method, config: ModelConfig) -> Choice:
    """A method and what it needs of a knowledge base."""
    refused = None
    try:
        method.check(config)
    except RequestError as error:
        refused = str(error)
    wanted = dict.fromkeys(filter(None, (method.first_encoder, method.encoder)))
    return Choice(method, tuple(wanted), refused)
