"""Text embedders: an encoder from a model directory, or any function from texts to vectors."""

import dataclasses
import functools
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import jax
import numpy as np

from jaxrag.base.errors import ConfigError, EmbedderError, RequestError
from jaxrag.base.types import Array, HostArray
from jaxrag.library.embed.bert import BertConfig, BertParams, Pooling, embed
from jaxrag.library.embed.hf import Prefixes, load_config, load_params, read_settings
from jaxrag.library.embed.text import EncoderTokenizer, fill, plan
from jaxrag.models.digest import weights_digest

_LOG = logging.getLogger("jaxrag")

Kind = Literal["passage", "query"]

_WINDOW = 4096  # texts that are tokenised while the device embeds the ones before
_CPU_BATCH_TOKENS = 4096
_DEVICE_BATCH_TOKENS = 65536
_VERSION = 1  # of what a digest stands for


@runtime_checkable
class Embedder(Protocol):
    """Texts to vectors whose inner product says how well a passage answers a question."""

    @property
    def dim(self) -> int:
        """E, the size of a vector."""

    @property
    def digest(self) -> str:
        """Identity: vectors of embedders with equal digests may be compared."""

    def __call__(self, texts: Sequence[str], kind: Kind) -> HostArray:
        """Vectors float32 [N, E] of N texts."""


@dataclasses.dataclass(eq=False)
class BertEmbedder:
    """A BERT encoder with its tokenizer, pooling and prefixes. Make one with ``load_embedder``.

    ``truncated`` counts the texts that were longer than ``tokenizer.max_tokens`` so far; the first
    time, a warning is logged.
    """

    config: BertConfig
    params: BertParams
    tokenizer: EncoderTokenizer
    pooling: Pooling
    normalize: bool
    prefixes: Prefixes
    lower_case: bool
    digest: str
    batch_tokens: int
    truncated: int = 0

    @property
    def dim(self) -> int:
        """E, the size of a vector."""
        return self.config.model_dim

    def __call__(self, texts: Sequence[str], kind: Kind) -> HostArray:
        """Embed texts.

        Args:
          texts: any number of them; long ones are cut at the end, and counted.
          kind: "passage" or "query"; each has its own prefix.

        Returns:
          float32 [N, E] in the order of the texts.

        Raises:
          RequestError: texts is not a list of str, or the kind is unknown.
        """
        _check_request(texts, kind)
        prefix = self.prefixes.query if kind == "query" else self.prefixes.passage
        out = np.empty((len(texts), self.dim), np.float32)
        running: list[tuple[HostArray, Array]] = []
        for start in range(0, len(texts), _WINDOW):
            launched = self._launch([prefix + text for text in texts[start : start + _WINDOW]])
            _collect(running, out)  # the window before, while this one runs
            running = [(members + start, vectors) for members, vectors in launched]
        _collect(running, out)
        return out

    def _launch(self, texts: Sequence[str]) -> list[tuple[HostArray, Array]]:
        """Start embedding texts; returns indices into them and their vectors to be."""
        stripped = [text.strip() for text in texts]
        if self.lower_case:
            stripped = [text.lower() for text in stripped]
        ids, cut = self.tokenizer.encode(stripped)
        self._report_cut(cut, len(texts))
        launched = []
        longest = self.tokenizer.max_tokens
        for batch in plan([len(row) for row in ids], self.batch_tokens, longest):
            rows = map(jax.device_put, fill(batch, ids))
            vectors = embed(self.params, self.config, self.pooling, self.normalize, *rows)
            launched.append((np.asarray(batch.members, np.int64), vectors))
        return launched

    def _report_cut(self, cut: int, of: int) -> None:
        if cut and not self.truncated:
            _LOG.warning(
                "%d of %d texts are longer than the embedder's %d tokens; what is beyond is not "
                "searched by meaning; choose smaller chunks (reported once)",
                cut, of, self.tokenizer.max_tokens,
            )  # fmt: skip
        self.truncated += cut


def _collect(running: Sequence[tuple[HostArray, Array]], out: HostArray) -> None:
    for members, vectors in running:
        out[members] = np.asarray(vectors)[: len(members)]


def load_embedder(directory: str | Path) -> BertEmbedder:
    """Load a BERT, RoBERTa or XLM-RoBERTa embedding model (MiniLM, BGE, GTE, E5, Contriever).

    Args:
      directory: a Hugging Face or sentence-transformers directory with safetensors. Its files say
        how texts become vectors; where they say nothing, it is the mean of all tokens, not
        normalised, of as many as have a position, and behind the prefixes that the model's name is
        known for (``hf.KNOWN_PREFIXES``).

    Raises:
      ModelError, ConfigError: a missing, malformed or unsupported directory.
      TokenizerError: a tokenizer that is missing or does not fit.
    """
    directory = Path(directory)
    settings = read_settings(directory)
    family, config = load_config(settings.encoder)
    limit = min(settings.max_tokens or config.max_tokens, config.max_tokens)
    tokenizer = EncoderTokenizer.load(settings.encoder, limit, config.vocab_size)
    params = load_params(settings.encoder, family, config)
    on_cpu = params.norm.devices().pop().platform == "cpu"
    identity = {
        "version": _VERSION,
        "weights": weights_digest(settings.encoder),
        "tokenizer": tokenizer.digest,
        "config": dataclasses.asdict(config),
        "pooling": settings.pooling,
        "normalize": settings.normalize,
        "prefixes": dataclasses.asdict(settings.prefixes),
        "max_tokens": limit,
        "lower_case": settings.lower_case,
    }
    return BertEmbedder(
        config=config,
        params=params,
        tokenizer=tokenizer,
        pooling=settings.pooling,
        normalize=settings.normalize,
        prefixes=settings.prefixes,
        lower_case=settings.lower_case,
        digest=_digest(identity),
        batch_tokens=_CPU_BATCH_TOKENS if on_cpu else _DEVICE_BATCH_TOKENS,
    )


@dataclasses.dataclass(frozen=True)
class FunctionEmbedder:
    """Any function from a list of texts to an array [N, E]. Make one with ``as_embedder``."""

    function: Callable[[list[str]], Any]
    name: str
    dim: int

    @functools.cached_property
    def digest(self) -> str:
        """Identity: the name and the size of a vector."""
        return _digest({"version": _VERSION, "function": self.name, "dim": self.dim})

    def __call__(self, texts: Sequence[str], kind: Kind) -> HostArray:
        """Vectors float32 [N, E]; the function does not get the kind.

        Raises RequestError as ``BertEmbedder`` does, EmbedderError when what the function returns
        is not N finite vectors of E numbers.
        """
        _check_request(texts, kind)
        if not len(texts):
            return np.empty((0, self.dim), np.float32)
        return _check_vectors(self.function(list(texts)), len(texts), self.dim, self.name)


def as_embedder(
    embedder: str | Path | Embedder | Callable[[list[str]], Any],
    *,
    name: str | None = None,
) -> Embedder:
    """An Embedder from a model directory, from any function, or as it is.

    A function is called once with one text to learn the size of its vectors. ``name`` is its
    identity, and must change when its vectors do; a plain ``def`` may go by its qualified name.

    Raises ConfigError for anything else or a function without a name, EmbedderError when the
    function does not return vectors; a directory raises as ``load_embedder`` does.
    """
    if isinstance(embedder, str | Path):
        return load_embedder(embedder)
    if isinstance(embedder, Embedder):
        return embedder
    if not callable(embedder):
        raise ConfigError(
            f"embedder is a {type(embedder).__name__}: expected a model directory, an Embedder or "
            "a function from a list of texts to an array [N, E]"
        )
    name = name or _function_name(embedder)
    first = _check_vectors(embedder(["text"]), 1, None, name)
    return FunctionEmbedder(embedder, name, first.shape[1])


def _function_name(function: Callable[..., Any]) -> str:
    if not inspect.isfunction(function) or "<lambda>" in function.__qualname__:
        raise ConfigError(
            f"embedder {function!r} has no name of its own; pass name=, which a knowledge base "
            "remembers it by"
        )
    return f"{function.__module__}.{function.__qualname__}"


def _check_request(texts: Sequence[str], kind: str) -> None:
    if kind not in get_args(Kind):
        raise RequestError(f"kind={kind!r}: expected one of {', '.join(get_args(Kind))}")
    if isinstance(texts, str):
        raise RequestError("texts is one str: expected a list of them")
    wrong = next((text for text in texts if not isinstance(text, str)), None)
    if wrong is not None:
        raise RequestError(f"texts holds a {type(wrong).__name__}: expected str only")


def _check_vectors(vectors: Any, count: int, dim: int | None, name: str) -> HostArray:
    try:
        array = np.asarray(vectors, np.float32)
    except (TypeError, ValueError):
        raise EmbedderError(
            f"embedder {name} returned {type(vectors).__name__}: expected numbers [N, E]"
        ) from None
    expected = f"[{count}, {dim or 'E'}]"
    if array.ndim != 2 or array.shape[0] != count or not array.shape[1]:
        raise EmbedderError(f"embedder {name} returned {list(array.shape)}: expected {expected}")
    if dim is not None and array.shape[1] != dim:
        raise EmbedderError(f"embedder {name} returned {list(array.shape)}: expected {expected}")
    finite = np.isfinite(array).all(axis=1)
    if not finite.all():
        raise EmbedderError(
            f"embedder {name} returned a vector for text {int(finite.argmin())} that is not finite"
        )
    return array


def _digest(identity: dict[str, Any]) -> str:
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=32).hexdigest()
