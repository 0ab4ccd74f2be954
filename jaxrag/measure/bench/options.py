"""What each benchmark is told, as far as the command line says it; the benchmarks check it."""

import dataclasses
from typing import Literal

from jaxrag.base.config import DType
from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_count, parse_counts, parse_ratios

_DTYPE = "of weights, activations and KV"
_DRAWN = "of what is drawn"
_WARM = "after a warm-up"
_RANDOM_100M = "a random Llama of 100M parameters"
_TEMPORARY = "temporary files"


@dataclasses.dataclass(frozen=True)
class TtftOptions:
    """Of `jaxrag bench ttft`.

    Attributes:
      model: a directory; None makes a random Llama of 100M parameters.
      dtype: of weights, activations and KV.
      contexts: tokens of all chunks.
      question_tokens: of the final block.
      method: that reuses.
      ratios: recompute ratios, of methods that recompute; none stands for the method's own.
      repeats: timed rounds: of every context one number, or one for all of them.
      batches: sizes of batches, each request with ``batch_context`` tokens of chunks of its own.
      batch_context: see there.
      batch_repeats: timed rounds of every batch.
      peer_python: interpreter with torch and transformers; None measures no peer.
      seed: of what is drawn.
    """

    model: str | None = option(None, metavar="MODEL", unset=_RANDOM_100M)
    dtype: DType = option("float32", _DTYPE)
    contexts: tuple[int, ...] = option(
        (512, 1024, 2048, 4096, 8192),
        "tokens of all chunks, multiples of 512",
        "N,...",
        parse=parse_counts,
    )
    question_tokens: int = option(50, "of the question", "N", parse=parse_count)
    method: str = option("full_reuse", "a method that reuses", "NAME")
    ratios: tuple[float, ...] = option(
        (),
        "recompute ratios such as 0,0.05,0.15,0.30,1.0, of a method that recomputes",
        "R,...",
        parse=parse_ratios,
        flag="--recompute-ratios",
        unset="its own",
    )
    repeats: tuple[int, ...] = option(
        (5,), "after a warm-up, for all contexts or for each", "N[,N,...]"
    )
    batches: tuple[int, ...] = option(
        (),
        "also batches of so many requests at one moment, such as 1,2,4,8",
        "N,...",
        flag="--batch",
        unset="none",
    )
    batch_context: int = option(4096, "of each request", "N", parse=parse_count)
    batch_repeats: int = option(3, _WARM, "N")
    peer_python: str | None = None
    seed: int = option(0, _DRAWN, "N")


@dataclasses.dataclass(frozen=True)
class StoreOptions:
    """Of `jaxrag bench store`: sizes of the chunks ([L, 2, T, K, H] bfloat16), how often, where."""

    chunks: int = option(8, "of one request", "N")
    layers: int = option(32, "of the model", "N")
    tokens: int = option(512, "of a chunk", "N", parse=parse_count, flag="--chunk-tokens")
    kv_heads: int = option(8, "of a layer", "N")
    head_dim: int = option(128, "of a head", "N")
    rounds: int = option(7, _WARM, "N", flag="--repeats")
    cold: bool = option(True, "leave out reads from the disk")
    folder: str | None = option(None, "a disk to measure", "DIR", unset=_TEMPORARY)
    seed: int = option(0, _DRAWN, "N")


@dataclasses.dataclass(frozen=True)
class IngestOptions:
    """Of `jaxrag bench ingest`. ``model`` None makes a random Llama of 100M parameters."""

    model: str | None = option(None, metavar="MODEL", unset=_RANDOM_100M)
    dtype: DType = option("float32", _DTYPE)
    tokens: int = option(16_384, "of all documents", "N", parse=parse_count)
    chunk_tokens: int = option(512, "of a chunk", "N", parse=parse_count)
    repeats: int = option(5, _WARM, "N")
    folder: str | None = option(None, "a disk to measure", "DIR", unset=_TEMPORARY)
    seed: int = option(0, _DRAWN, "N")
    encoder: str = option(
        "isolated",
        "also encode every chunk behind similar ones",
        choices=("isolated", "neighbours", "neighbours_joint"),
    )
    neighbours: int = option(10, "how many", "N")  # read by encoders that see them


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """Of `jaxrag bench decode`.

    Attributes:
      contexts: tokens in the cache.
      rules: names or texts that decode.rule_from reads, settings after a colon.
      dtype: of weights, activations and KV.
      kv: where K and V are, for rules that can have them there; None: where the rule is meant to.
      layers: of the model.
      question_tokens: of the final block, which is run; an index trains on its queries.
      steps: tokens that are timed, after ``warm`` others.
      warm: see there.
      measure: also count what indexes scan and find in so many steps, in a pass of its own.
      seed: of what is drawn.
    """

    contexts: tuple[int, ...] = option(
        (4096, 16_384, 65_536, 131_072), "tokens in the cache", "N,...", parse=parse_counts
    )
    rules: tuple[str, ...] = option(
        ("dense", "static_window", "flat", "ivf", "retrieval", "topn"),
        "how generated tokens attend; settings follow a colon, as in topn:n=64; repeatable",
        "RULE",
        flag="--decode",
        repeatable=True,
    )
    dtype: DType = option("float32", _DTYPE)
    kv: Literal["device", "host"] | None = option(
        None, "where K and V are", unset="where each rule is meant to have them"
    )
    layers: int = option(4, "of the model", "N")
    question_tokens: int = option(2048, "run, not reused", "N", parse=parse_count)
    steps: int = option(16, "tokens timed, and counted", "N")
    warm: int = option(3, "tokens before them", "N")
    measure: bool = option(True, "leave recall and the share scanned out")
    seed: int = option(0, _DRAWN, "N")


def rules_of(text: str) -> tuple[str, ...]:
    """Decode rules, split at semicolons, or at commas where no rule has settings."""
    rules = tuple(filter(None, text.split(";" if ";" in text or ":" in text else ",")))
    if not rules:
        raise RequestError(f"--rules {text!r}: expected names such as dense or topn:n=64")
    return rules


@dataclasses.dataclass(frozen=True)
class TrafficOptions:
    """What requests `jaxrag bench serve` draws.

    Attributes:
      requests: how many come.
      documents: there are, of one chunk each.
      chunk_tokens: of each.
      chunks: that a request asks for, none twice.
      question: tokens of its final block.
      answers: lengths; each request gets one of them, all equally likely.
      zipf: the n-th document is asked for n ** -zipf as often as the first.
      topics: document n is of topic n modulo so many.
      tenants: that requests are of, all equally likely.
      seed: of everything.
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
    tenants: int = option(4, "that requests are of", "N")
    seed: int = option(0, _DRAWN, "N")


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """How `jaxrag bench serve` measures.

    Attributes:
      model: a directory; None makes random weights of SMALL_LLAMA.
      rows: that decode together.
      watched: each token is read as it comes; else an engine may run several at once.
      pool_chunks: size of the page pool, in chunks of the traffic's size.
      highest_rate: also look for the highest rate that each arm sustains.
      http: also measure a server of this package, and an engine beside it.
      peer: the URL of a peer; None measures none, unless ``peer_python`` is given.
      peer_python: interpreter with vLLM, which is started on a copy of the model.
      folder: where the store goes; None is the system's temporary folder.
    """

    model: str | None = option(None, metavar="MODEL", unset="a random Llama of 6 layers, width 256")
    rows: int = option(8, "answers decoded together", "N")
    watched: bool = option(
        True,
        "nobody reads tokens as they come: the engine may run several at once",
        flag="--unwatched",
    )
    pool_chunks: int = option(64, "that the page pool holds", "N")
    highest_rate: bool = option(False, "also the highest rate with 95 % good, by arm")
    http: bool = option(False, "also `jaxrag serve`, and the same engine beside it")
    peer: str | None = option(
        None, "a server that answers /v1/completions", "URL", flag="--peer-url"
    )
    peer_python: str | None = option(
        None, "interpreter with vLLM, started on the same weights", "FILE"
    )
    folder: str | None = option(None, "where the store goes", "DIR", unset=_TEMPORARY)
