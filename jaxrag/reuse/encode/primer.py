"""Primers: texts, or trained vectors, that chunks are encoded behind and that stand in no prompt.

The first tokens of a text serve a model as attention sinks, whatever they say. Of a chunk that is
encoded alone they are the chunk's own; behind other text they are not.
"""

import base64
import binascii
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.errors import ConfigError
from jaxrag.base.installed import config_names, config_path
from jaxrag.base.tables import build, read_toml
from jaxrag.base.types import HostArray
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.reuse.names import DEFAULT_PRIMER

_VECTORS, _FORMAT = ".safetensors", "jaxrag.primer"
_TENSOR, _AROUND = "primer", ["header", "trailer"]  # of a file: one, or both of packets


@dataclasses.dataclass(frozen=True)
class PrimerPassage:
    """One passage of a primer, as a chunk of a document with this title."""

    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class PrimerVectors:
    """Embeddings in the place of a text's, trained for one model.

    Attributes:
      model: digest of its weights.
      width: D, of the model.
      values: [R, D] float32, little-endian, in base64.
      header: how many of them are in front of a chunk, the others behind it, and all in prompts:
        packets; None: all are in front, and in no prompt.
    """

    model: str
    width: int
    values: str
    header: int | None = None

    @classmethod
    def of(cls, model: str, vectors: HostArray, header: int | None = None) -> "PrimerVectors":
        """Vectors [R, D] of any float dtype."""
        values = base64.b64encode(np.ascontiguousarray(vectors, "<f4").tobytes()).decode()
        return cls(model, vectors.shape[1], values, header)

    def array(self) -> HostArray:
        """[R, D] float32. Raises ValueError for values that are no such vectors."""
        flat = np.frombuffer(base64.b64decode(self.values, validate=True), "<f4")
        vectors = flat.astype(np.float32).reshape(-1, self.width)
        if not vectors.size or not np.isfinite(vectors).all():
            raise ValueError("expected finite numbers")
        if self.header is not None and not 0 <= self.header <= len(vectors):
            raise ValueError(f"header={self.header} of {len(vectors)}")
        return vectors


@dataclasses.dataclass(frozen=True)
class Primer:
    """A text, or vectors, in front of every chunk while it is encoded.

    Attributes:
      name: how settings and results call it; what it holds alone decides KV.
      passages: each is put into the chunk template, in this order.
      vectors: in the place of passages.
    """

    name: str
    passages: tuple[PrimerPassage, ...] = ()
    vectors: PrimerVectors | None = None

    def __post_init__(self) -> None:
        """Refuse a primer that holds nothing, or both: ConfigError."""
        if self.vectors is not None:
            try:
                self.vectors.array()
            except (ValueError, binascii.Error) as error:
                raise ConfigError(
                    f"primer {self.name!r}: no vectors of a primer ({error})"
                ) from None
        if self.vectors is not None and not self.passages:
            return
        texts = bool(self.passages) and all(it.text.strip() for it in self.passages)
        if not texts or self.vectors is not None:
            raise ConfigError(
                f"primer {self.name!r}: expected [[passages]] with a title and a text each"
            )

    @property
    def around(self) -> tuple[int, int] | None:
        """Of packets, whose vectors stay around a chunk: how many are in front, and in all."""
        found = self.vectors
        if found is None or found.header is None:
            return None
        return found.header, len(found.array())

    @property
    def wraps(self) -> bool:
        """Are its vectors packets?"""
        return self.around is not None

    def same(self, other: "Primer") -> bool:
        """Do they hold the same, whatever they are called?"""
        return (self.passages, self.vectors) == (other.passages, other.vectors)

    def check_model(self, digest: str, width: int) -> None:
        """Refuse vectors of other weights than those of this digest and width D: ConfigError."""
        found = self.vectors
        if found is None or (found.model, found.width) == (digest, width):
            return
        raise ConfigError(
            f"primer {self.name!r}: its vectors, {found.width} wide, were trained for weights "
            f"{found.model[:12]}, and this model is {width} wide with {digest[:12]}; train one for "
            "it (`jaxrag train primer`), or name a text"
        )

    def tokens(self, template: PromptTemplate, tokenizer: Tokenizer) -> HostArray:
        """Token ids [R] int32 as a prompt of the template has its passages, or vectors [R, D].

        Raises TokenizerError for text that the tokenizer cannot encode.
        """
        if self.vectors is not None:
            return self.vectors.array()
        return np.concatenate(
            [
                template.chunk_ids(tokenizer, tokenizer.encode(it.text), it.title)
                for it in self.passages
            ]
        ).astype(np.int32)

    def to_dict(self) -> dict[str, Any]:
        """Plain form; ``primer_from_dict`` is its inverse."""
        values = dataclasses.asdict(self)
        del values["passages" if self.vectors is not None else "vectors"]
        if self.vectors is not None and not self.wraps:
            del values["vectors"]["header"]
        return values


def primer_from_dict(values: Mapping[str, Any], where: str) -> Primer:
    """A primer from plain values; ConfigError, naming ``where``, for what is none."""
    return build(Primer, values, where)


def primer_named(primer: str | Primer) -> Primer:
    """One of configs/primers by name, a .toml or .safetensors file by path, or the Primer itself.

    Raises ConfigError listing the names, and for a file that holds no primer.
    """
    if isinstance(primer, Primer):
        return primer
    if primer.endswith(_VECTORS):
        return _read_vectors(Path(primer))
    path = config_path(primer, "primers")
    if path is None:
        names = ", ".join(config_names("primers"))
        raise ConfigError(
            f"primer {primer!r}: expected one of {names}, or the path of a .toml or {_VECTORS} file"
        )
    return primer_from_dict({"name": path.stem, **read_toml(path)}, str(path))


def write_vectors(primer: Primer, path: Path) -> None:
    """Write a primer of vectors as a .safetensors file. Raises OSError where it cannot be."""
    from safetensors.numpy import save_file

    assert primer.vectors is not None
    about = {"format": _FORMAT, "model": primer.vectors.model}
    found, at = primer.vectors.array(), primer.vectors.header
    tensors = {_TENSOR: found} if at is None else {_AROUND[0]: found[:at], _AROUND[1]: found[at:]}
    save_file(tensors, str(path), metadata=about)


def _read_vectors(path: Path) -> Primer:
    """The primer of a file that ``write_vectors`` wrote; ConfigError for another."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "numpy") as file:
            about = file.metadata() or {}
            names = sorted(file.keys())
            if about.get("format") != _FORMAT or names not in ([_TENSOR], _AROUND):
                raise ConfigError(f"primer {path}: no vectors of `jaxrag train primer`")
            parts = [np.asarray(file.get_tensor(name)) for name in names]
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"primer {path}: cannot be read ({error})") from None
    for it in parts:
        if it.ndim != 2 or it.dtype != np.float32 or it.shape[1] != parts[0].shape[1]:
            raise ConfigError(f"primer {path}: {it.dtype} {it.shape}, expected float32 [R, D]")
    header = len(parts[0]) if len(parts) > 1 else None
    vectors = PrimerVectors.of(about.get("model", ""), np.concatenate(parts), header)
    return Primer(path.stem, vectors=vectors)


def default_primer() -> Primer:
    """What takes the place of one that is not named."""
    return primer_named(DEFAULT_PRIMER)
