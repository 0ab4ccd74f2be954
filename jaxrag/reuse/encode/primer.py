"""Primers: texts, trained vectors or trained KV, that chunks are encoded behind, in no prompt.

The first tokens of a text serve a model as attention sinks, whatever they say. Of a chunk that is
encoded alone they are the chunk's own; behind other text they are not.
"""

import base64
import binascii
import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import ConfigError
from jaxrag.base.installed import config_names, config_path
from jaxrag.base.tables import build, read_toml
from jaxrag.base.types import HostArray
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.reuse.names import DEFAULT_PRIMER

_VECTORS, _FORMAT = ".safetensors", "jaxrag.primer"
# The tensors of a file: vectors, those of packets, or K and V [L, R, K, H] of every layer.
_FRONT, _AROUND, _LAYERS = ["primer"], ["header", "trailer"], ["keys", "values"]


@dataclasses.dataclass(frozen=True)
class PrimerPassage:
    """One passage of a primer, as a chunk of a document with this title."""

    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class PrimerVectors:
    """Embeddings in the place of a text's, or K and V of every layer, trained for one model.

    Attributes:
      model: digest of its weights.
      width: D of the model, or how many numbers K and V are.
      values: [R, width] float32, little-endian, in base64.
      header: how many of them are in front of a chunk, the others behind it, and all in prompts:
        packets; None: all are in front, and in no prompt.
      layers: (L, 2, K, H) of K before rotation and V; None: they are embeddings.
    """

    model: str
    width: int
    values: str
    header: int | None = None
    layers: tuple[int, int, int, int] | None = None

    @classmethod
    def of(cls, model: str, vectors: HostArray, header: int | None = None) -> "PrimerVectors":
        """Vectors [R, D] of any float dtype, or K and V [R, L, 2, K, H]."""
        values = base64.b64encode(np.ascontiguousarray(vectors, "<f4").tobytes()).decode()
        each = vectors.shape[1:]
        return cls(model, math.prod(each), values, header, each if len(each) == 4 else None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one of them: (D,), or (L, 2, K, H)."""
        return self.layers or (self.width,)

    def array(self) -> HostArray:
        """[R, D] float32, or [R, L, 2, K, H]; ValueError for values that are no such vectors."""
        return self._array

    @functools.cached_property
    def _array(self) -> HostArray:
        flat = np.frombuffer(base64.b64decode(self.values, validate=True), "<f4")
        vectors = flat.astype(np.float32).reshape(-1, self.width)
        if not vectors.size or not np.isfinite(vectors).all():
            raise ValueError("expected finite numbers")
        most = len(vectors) if self.layers is None else -1
        if self.header is not None and not 0 <= self.header <= most:
            raise ValueError(f"header={self.header} of {len(vectors)}")
        vectors = vectors.reshape(len(vectors), *self.shape)
        vectors.flags.writeable = False
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
        texts = bool(self.passages) and all(passage.text.strip() for passage in self.passages)
        if not texts or self.vectors is not None:
            raise ConfigError(
                f"primer {self.name!r}: expected [[passages]] with a title and a text each"
            )

    @property
    def around(self) -> tuple[int, int] | None:
        """Of packets, whose vectors stay around a chunk: how many are in front, and in all."""
        vectors = self.vectors
        if vectors is None or vectors.header is None:
            return None
        return vectors.header, len(vectors.array())

    @property
    def wraps(self) -> bool:
        """Are its vectors packets?"""
        return self.around is not None

    def same(self, other: "Primer") -> bool:
        """Do they hold the same, whatever they are called?"""
        return (self.passages, self.vectors) == (other.passages, other.vectors)

    def check_model(self, digest: str, config: ModelConfig) -> None:
        """Refuse vectors of other weights than those of this digest and config: ConfigError."""
        found, c = self.vectors, config
        if found is None:
            return
        shape = (c.num_kv_layers, 2, c.num_kv_heads, c.head_dim) if found.layers else (c.model_dim,)
        if (found.model, found.shape) == (digest, shape):
            return
        own, other = (" x ".join(map(str, it)) for it in (found.shape, shape))
        raise ConfigError(
            f"primer {self.name!r}: its vectors, {own} wide, were trained for weights "
            f"{found.model[:12]}, and this model is {other} wide with {digest[:12]}; train one for "
            "it (`jaxrag train primer`), or name a text"
        )

    def tokens(self, template: PromptTemplate, tokenizer: Tokenizer) -> HostArray:
        """Token ids [R] int32 as a prompt of the template has its passages.

        Or vectors [R, D] float32, or K before rotation and V of every layer, [R, L, 2, K, H].

        Raises TokenizerError for text that the tokenizer cannot encode.
        """
        if self.vectors is not None:
            return self.vectors.array()
        return np.concatenate(
            [
                template.chunk_ids(tokenizer, tokenizer.encode(passage.text), passage.title)
                for passage in self.passages
            ]
        ).astype(np.int32)

    def to_dict(self) -> dict[str, Any]:
        """Plain form; ``primer_from_dict`` is its inverse."""
        values = dataclasses.asdict(self)
        del values["passages" if self.vectors is not None else "vectors"]
        for key in ("header", "layers"):
            if self.vectors is not None and values["vectors"][key] is None:
                del values["vectors"][key]
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
    values, at = primer.vectors.array(), primer.vectors.header
    names, parts = _FRONT, [values]
    if at is not None:
        names, parts = _AROUND, [values[:at], values[at:]]
    elif primer.vectors.layers is not None:
        names, parts = _LAYERS, list(np.ascontiguousarray(values.transpose(2, 1, 0, 3, 4)))
    save_file(dict(zip(names, parts, strict=True)), str(path), metadata=about)


def _read_vectors(path: Path) -> Primer:
    """The primer of a file that ``write_vectors`` wrote; ConfigError for another."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "numpy") as file:
            about = file.metadata() or {}
            names = sorted(file.keys())
            if about.get("format") != _FORMAT or names not in (_FRONT, _AROUND, _LAYERS):
                raise ConfigError(f"primer {path}: no vectors of `jaxrag train primer`")
            parts = [np.asarray(file.get_tensor(name)) for name in names]
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"primer {path}: cannot be read ({error})") from None
    deep = names == _LAYERS
    ndim, said, same = (4, "[L, R, K, H]", 0) if deep else (2, "[R, D]", 1)
    for part in parts:
        alike = part.shape[same:] == parts[0].shape[same:]
        if part.ndim != ndim or part.dtype != np.float32 or not alike:
            raise ConfigError(f"primer {path}: {part.dtype} {part.shape}, expected float32 {said}")
    header = len(parts[0]) if names == _AROUND else None
    found = np.stack(parts).transpose(2, 1, 0, 3, 4) if deep else np.concatenate(parts)
    vectors = PrimerVectors.of(about.get("model", ""), found, header)
    return Primer(path.stem, vectors=vectors)


def default_primer() -> Primer:
    """What takes the place of one that is not named."""
    return primer_named(DEFAULT_PRIMER)
