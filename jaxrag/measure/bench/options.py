"""What each benchmark measures: its settings, which the command line fills, and their checks."""

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrag.base.config import DType
from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_bytes, parse_count, parse_counts

if TYPE_CHECKING:
    from jaxrag.measure.bench.serve_arms import Arm

CHUNK_TOKENS = 512  # tokens, of which contexts are multiples
DTYPE = "of weights, activations and KV"
DRAWN = "of what is drawn"
WARM = "after a warm-up"
RANDOM_100M = "a random Llama of 100M parameters"
TEMPORARY = "temporary files"


def check_positive(options: Any, *names: str) -> None:
    """RequestError unless each of these options is above 0."""
    for name in names:
        if getattr(options, name) <= 0:
            raise RequestError(f"{name}={getattr(options, name)}: expected more than 0")


def check_folder(folder: str | None) -> None:
    """RequestError for a folder that is not there."""
    if folder is not None and not Path(folder).is_dir():
        raise RequestError(f"folder {folder}: does not exist; make it first")


@dataclasses.dataclass(frozen=True)
class TtftOptions:
    """Of `jaxrag bench ttft`.

    Attributes:
      peer_python: interpreter with torch and transformers; None measures no peer.
    """

    model: str | None = option(None, metavar="MODEL", unset=RANDOM_100M)
    dtype: DType = option("float32", DTYPE)
    contexts: tuple[int, ...] = option(
        (512, 1024, 2048, 4096, 8192),
        "tokens of all chunks, multiples of 512",
        "N,...",
        parse=parse_counts,
    )
    question_tokens: int = option(50, "of the question", "N", parse=parse_count)
    method: str = option("full_reuse", "a method that reuses", "NAME")
    repeats: tuple[int, ...] = option(
        (5,), "after a warm-up, for all contexts or for each", "N[,N,...]"
    )
    peer_python: str | None = None
    seed: int = option(0, DRAWN, "N")

    def __post_init__(self) -> None:
        from jaxrag.reuse.methods import METHODS

        reusing = [name for name, m in METHODS.items() if m.encoder and not m.wraps]
        if self.method not in reusing:
            names = ", ".join(reusing)
            raise RequestError(f"method {self.method!r}: expected one that reuses: {names}")
        if min(self.contexts) < CHUNK_TOKENS or any(n % CHUNK_TOKENS for n in self.contexts):
            raise RequestError(f"contexts {self.contexts}: expected multiples of {CHUNK_TOKENS}")
        if min(*self.repeats, self.question_tokens) < 1:
            raise RequestError("repeats and question tokens must be positive")
        if len(self.repeats) not in (1, len(self.contexts)):
            raise RequestError(
                f"repeats {self.repeats}: expected one number, or one for each of the "
                f"{len(self.contexts)} contexts"
            )


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What requests `jaxrag bench serve` draws.

    Attributes:
      zipf: the n-th document is asked for n ** -zipf as often as the first.
      topics: document n is of topic n modulo so many.
      focus: the probability that a chunk is of the request's topic, and not any.
      neighbours: chunks in front of which a chunk is encoded, for encoders that see some: the most
        popular others of its topic.
    """

    requests: int = option(60, "at every rate", "N")
    documents: int = option(160, "of one chunk each", "N", flag="--num-documents")
    chunk_tokens: int = option(256, "of each", "N", parse=parse_count)
    chunks: int = option(4, "of a request", "N")
    question: int = option(24, "of a request", "N", parse=parse_count, flag="--question-tokens")
    answers: tuple[int, ...] = option(
        (8, 8, 8, 8, 16, 16, 16, 32, 32, 64),
        "tokens, all equally likely",
        "N,...",
        flag="--answer-lengths",
    )
    zipf: float = option(1.0, "exponent", "S")
    topics: int = option(8, "that the chunks of a request mostly share", "N")
    seed: int = option(0, DRAWN, "N")
    focus: float = 0.8
    neighbours: int = 2

    def __post_init__(self) -> None:
        check_positive(
            self, "requests", "documents", "chunk_tokens", "chunks", "question", "topics",
        )  # fmt: skip
        if self.chunks > self.documents:
            raise RequestError(
                f"chunks={self.chunks}: there are {self.documents} documents, and a request asks "
                "for none twice"
            )
        if self.neighbours < 0 or self.neighbours >= self.documents:
            raise RequestError(
                f"neighbours={self.neighbours}: expected 0 to {self.documents - 1}, the others"
            )
        if not self.answers or min(self.answers) < 1:
            raise RequestError(f"answers={self.answers}: expected lengths of 1 or more")
        if not 0 <= self.focus <= 1 or self.zipf < 0:
            raise RequestError(
                f"focus={self.focus}, zipf={self.zipf}: expected 0 to 1, and 0 or more"
            )


@dataclasses.dataclass(frozen=True)
class Slo:
    """What a request must meet to be good."""

    first: float = option(1.0, "of a good request", "S", flag="--first-within")
    per_token: float = option(0.1, "of a good one", "S", flag="--per-token-within")


def rates_of(text: str) -> tuple[float, ...]:
    """Requests a second such as 2,4 or inf, all above 0."""
    try:
        rates = tuple(map(float, text.split(",")))
    except ValueError:
        rates = ()
    if not rates or not all(rate > 0 for rate in rates):
        raise ValueError(f"{text!r}: expected numbers above 0 such as 2,4, or inf")
    return rates


def link_of(text: str) -> float:
    """Bytes a second of a text such as 40MB/s."""
    with contextlib.suppress(ValueError):
        if text.endswith("/s") and (number := parse_bytes(text.removesuffix("/s"))) > 0:
            return float(number)
    raise ValueError(f"{text!r}: expected a speed such as 40MB/s")


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """How `jaxrag bench serve` measures.

    Attributes:
      watched: each token is read as it comes; else an engine may run several at once.
      slo: what a good request meets.
      patience: seconds after the last request was due in which all answers must come.
    """

    model: str | None = option(None, metavar="MODEL", unset="a random Llama of 6 layers, width 256")
    rows: int = option(8, "answers decoded together", "N")
    watched: bool = option(
        True,
        "nobody reads tokens as they come: the engine may run several at once",
        flag="--unwatched",
    )
    pool_chunks: int = option(64, "that the page pool holds", "N")
    peer: str | None = option(
        None, "a server that answers /v1/completions", "URL", flag="--peer-url"
    )
    peer_python: str | None = option(
        None, "interpreter with vLLM, started on the same weights", "FILE"
    )
    folder: str | None = option(None, "where the store goes", "DIR", unset=TEMPORARY)
    arms: str = option(
        "static;inline;asynchronous;full",
        "of static, static_full, inline, asynchronous, full, fusionrag, fusionrag_inline; settings "
        "follow a colon, as in asynchronous:engine.load_threads=4,method=cacheblend",
        "ARM;...",
    )
    rates: tuple[float, ...] = option(
        (2.0, 4.0), "requests a second; inf: at once", "N,N,...", parse=rates_of
    )
    link: float | None = option(
        None, "speed of the store, such as 40MB/s", "BYTES/s", parse=link_of, unset="what it is"
    )
    traffic: Traffic = dataclasses.field(default_factory=Traffic)
    slo: Slo = dataclasses.field(default_factory=Slo)
    patience: float = 120.0

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) <= 0 or len(set(self.rates)) < len(self.rates):
            raise RequestError(f"rates {self.rates}: expected numbers above 0, each once")
        check_positive(self, "rows", "pool_chunks", "patience")
        if self.peer is not None and self.peer_python is not None:
            raise RequestError("a peer by URL or by its interpreter, not both; leave one out")
        check_folder(self.folder)
        _ = self.compared

    @property
    def compared(self) -> "tuple[Arm, ...]":
        """The arms."""
        from jaxrag.measure.bench.serve_arms import arms_of

        return arms_of(self.arms)
