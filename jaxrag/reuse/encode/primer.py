"""Primers: texts that chunks are encoded behind and that stand in no prompt.

The first tokens of a text serve a model as attention sinks, whatever they say. Of a chunk that is
encoded alone they are the chunk's own; behind other text they are not.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrag.base.errors import ConfigError
from jaxrag.base.installed import config_names, config_path
from jaxrag.base.tables import build, read_toml
from jaxrag.base.types import HostArray
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.reuse.names import DEFAULT_PRIMER


@dataclasses.dataclass(frozen=True)
class PrimerPassage:
    """One passage of a primer, as a chunk of a document with this title."""

    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class Primer:
    """A text in front of every chunk while it is encoded.

    Attributes:
      name: how settings and results call it; its text alone decides KV.
      passages: each is put into the chunk template, in this order.
    """

    name: str
    passages: tuple[PrimerPassage, ...]

    def __post_init__(self) -> None:
        """Refuse a primer without text: ConfigError."""
        if not self.passages or not all(it.text.strip() for it in self.passages):
            raise ConfigError(
                f"primer {self.name!r}: expected [[passages]] with a title and a text each"
            )

    def ids(self, template: PromptTemplate, tokenizer: Tokenizer) -> HostArray:
        """Its token ids as a prompt of the template would have its passages for chunks: int32 [R].

        Raises TokenizerError for text that the tokenizer cannot encode.
        """
        return np.concatenate(
            [
                template.chunk_ids(tokenizer, tokenizer.encode(it.text), it.title)
                for it in self.passages
            ]
        ).astype(np.int32)

    def to_dict(self) -> dict[str, Any]:
        """Plain form; ``primer_from_dict`` is its inverse."""
        return dataclasses.asdict(self)


def primer_from_dict(values: Mapping[str, Any], where: str) -> Primer:
    """A primer from plain values; ConfigError, naming ``where``, for what is none."""
    return build(Primer, values, where)


def primer_named(primer: str | Primer) -> Primer:
    """One of configs/primers by name, a TOML file by path, or the Primer itself.

    Raises ConfigError listing the names, and for a file that holds no primer.
    """
    if isinstance(primer, Primer):
        return primer
    path = config_path(primer, "primers")
    if path is None:
        names = ", ".join(config_names("primers"))
        raise ConfigError(
            f"primer {primer!r}: expected one of {names}, or the path of a .toml file"
        )
    return primer_from_dict({"name": path.stem, **read_toml(path)}, str(path))


def default_primer() -> Primer:
    """What takes the place of one that is not named."""
    return primer_named(DEFAULT_PRIMER)
