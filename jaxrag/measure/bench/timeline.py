"""A timeline of one request: from the text that a client sends to the first byte of its answer.

`jaxrag serve` runs in a process of its own over a knowledge base on disk. Every round asks for
documents that have left the pool (a store hit), then for the same in another order (a pool hit);
one request at a time. Server and client read the same clock, so that every phase begins where the
one before it ended. Shown are the requests of the middle half, by how long they took in all.
"""

import http.client
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from jaxrag.base.config import DType
from jaxrag.base.errors import RequestError
from jaxrag.engine.progress import MOMENTS
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.bench.options import TimelineOptions
from jaxrag.measure.bench.serve_http import serving
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import SMALL_LLAMA, random_named, write_random
from jaxrag.models.model import Model, load_model
from jaxrag.models.text import byte_level
from jaxrag.models.text.progress import progress_bar

STORE, POOL = "store hit", "pool hit"
_WARM = 3  # requests of each kind
_POOL_QUESTIONS = 3  # whose chunks the pool holds
_LIBRARY_QUESTIONS = 8  # whose chunks the knowledge base holds
_ANSWER_TOKENS = 4
_QUESTION_WORDS = 24  # beside the names of the documents
_DTYPE: DType = "float32"
_ASKED_WORDS = 100  # of questions, and of no document: names alone decide what is found
_LOG_SECONDS = 10.0

# Name of a phase, and the moment that it ends with; the first begins when the request is sent.
PHASES = (
    ("HTTP in", "arrived"),
    ("checks, wait for a thread", "preparing"),
    ("retrieve", "retrieved"),
    ("tokenise, lay out", "prepared"),
    ("plan, keys", MOMENTS[0]),
    ("admit", MOMENTS[1]),
    ("read, dequantise", MOMENTS[2]),
    ("copy to the device", MOMENTS[3]),
    ("place in the pool", MOMENTS[4]),
    ("map, select", MOMENTS[5]),
    ("hand over the prefill", MOMENTS[6]),
    ("hand over the next step", MOMENTS[7]),
    ("compute the prefill", MOMENTS[8]),
    ("detokenise, deliver", "told"),
    ("HTTP out", "received"),
)


def run(options: TimelineOptions) -> dict[str, Any]:
    """Ask and measure; JSON-able."""
    rng = np.random.default_rng(0)
    count = _LIBRARY_QUESTIONS * options.chunks
    with tempfile.TemporaryDirectory(prefix="jaxrag-bench-") as name:
        work = Path(name)
        words = _words(rng)
        path = options.model or _written(work / "model", words)
        model = load_model(path, dtype=_DTYPE)
        names = [f"q{words[number]}x{words[-1 - number]}" for number in range(count)]
        said, asked_words = words[:-_ASKED_WORDS], words[-_ASKED_WORDS:]
        documents = [_document(model, rng, said, it, options.chunk_tokens) for it in names]
        with KnowledgeBase.open(
            work / "kb", model, template="plain", chunk_tokens=options.chunk_tokens, overlap=0,
            chunk_by="tokens", encoders=["isolated"],
        ) as kb:  # fmt: skip
            kb.add(documents)
        with serving(_settings(work, path, model, options), work) as (url, _):
            asked = _Client(url, work / "messages.txt", options)
            hits = _ask_all(asked, names, asked_words, rng, options)
        result = {
            "benchmark": "timeline",
            "model": options.model or random_named(model.config, shape=True),
            "dtype": _DTYPE,
            "method": options.method,
            "chunks": options.chunks,
            "chunk_tokens": options.chunk_tokens,
            "requests": options.requests,
            "hits": hits,
            "machine": describe(),
        }
    return result


def _words(rng: np.random.Generator) -> list[str]:
    """A thousand words without the letters that names of documents have."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words: dict[str, None] = {}
    while len(words) < 1000:
        words["".join(rng.choice(syllables, 3))] = None
    return list(words)


def _written(directory: Path, words: Sequence[str]) -> str:
    """The random model, with a tokenizer that was trained on the words."""
    write_random(directory, SMALL_LLAMA, _DTYPE, 0)
    byte_level.save(byte_level.train([" ".join(words)], SMALL_LLAMA.vocab_size), directory)
    return str(directory)


def _document(
    model: Model, rng: np.random.Generator, words: Sequence[str], name: str, tokens: int
) -> Document:
    """A document of one chunk that is nearly full; its name is in it and in no other."""
    tokenizer = model.text_tokenizer()
    parts, used = [name], len(tokenizer.encode(name))
    while True:
        word = f" {rng.choice(words)}"
        used += len(tokenizer.encode(word))
        if used > tokens - 4:
            return Document(name, "".join(parts))
        parts.append(word)


def _settings(work: Path, path: str, model: Model, options: TimelineOptions) -> str:
    """The server's: a pool, and a copy in host memory, of a few questions' chunks."""
    held = options.chunks * (options.chunk_tokens + 128)
    nbytes = 2 * options.chunks * model.kv_layout.nbytes(options.chunk_tokens)
    return (
        f"method = {json.dumps(options.method)}\nk = {options.chunks}\nwarm_up = false\n"
        f"[model]\npath = {json.dumps(path)}\ncache_tokens = {_POOL_QUESTIONS * held}\n"
        f"dtype = {json.dumps(_DTYPE)}\n"
        f"[knowledge_bases]\ntimed = {json.dumps(str(work / 'kb'))}\n"
        f"[engine]\narena_bytes = {nbytes}\n"
    )


class Timed(NamedTuple):
    """One request.

    Attributes:
      phases: seconds of each.
      whole: seconds from the request to the first byte of its answer.
      tokens_from: of its prompt, by where their KV came from.
    """

    phases: dict[str, float]
    whole: float
    tokens_from: Mapping[str, int]


class _Client:
    """Asks the server, and finds in its log what it says of the request."""

    def __init__(self, url: str, log: Path, options: TimelineOptions) -> None:
        self._url, self._log, self._options = urlsplit(url), log, options
        self._number = self._read = 0

    def ask(self, text: str) -> Timed:
        """One question; returns when its answer is complete."""
        self._number += 1
        name = f"timeline-{self._number}"
        body = json.dumps({
            "model": "model" if self._options.model is None else Path(self._options.model).name,
            "prompt": text, "knowledge_base": "timed", "max_tokens": _ANSWER_TOKENS,
            "ignore_eos": True, "temperature": 0, "stream": True,
        })  # fmt: skip
        headers = {"Content-Type": "application/json", "X-Request-Id": name}
        where = self._url.hostname or "", self._url.port or 80
        connection = http.client.HTTPConnection(*where, timeout=300)
        sent = time.monotonic()
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        first = answer.read(1)
        received = time.monotonic()
        rest = first + answer.read()
        connection.close()
        if answer.status != 200 or b"[DONE]" not in rest:
            raise RequestError(f"the server answered {answer.status}: {rest[-300:]!r}")
        reported = self._logged(name)
        moments = reported["moments"] | {"received": received}
        return Timed(phases(sent, moments), received - sent, reported["tokens_from"])

    def _logged(self, name: str) -> dict[str, Any]:
        """What the server logged of a request, once it has."""
        until = time.monotonic() + _LOG_SECONDS
        while time.monotonic() < until:
            with open(self._log, encoding="utf-8") as lines:
                lines.seek(self._read)
                text = lines.read()
            for line in text.splitlines():
                if '"answered"' in line and f'"{name}"' in line and line.endswith("}"):
                    self._read += len(text.encode())
                    found: dict[str, Any] = json.loads(line)
                    return found
            time.sleep(0.02)
        raise RequestError(f"the server logged nothing of {name} in {_LOG_SECONDS:g} s")


def phases(sent: float, moments: Mapping[str, float]) -> dict[str, float]:
    """Seconds of every phase; a moment that was not, or came early, ends a phase of none."""
    seconds, now = {}, sent
    for name, end in PHASES:
        seconds[name] = max(moments.get(end, now) - now, 0.0)
        now += seconds[name]
    return seconds


def _ask_all(
    client: _Client,
    names: Sequence[str],
    words: Sequence[str],
    rng: np.random.Generator,
    options: TimelineOptions,
) -> dict[str, Any]:
    """Rounds of a store hit and a pool hit; the first few, which compile, do not count."""
    timed: dict[str, list[Timed]] = {STORE: [], POOL: []}
    with progress_bar(options.requests + _WARM, "timeline", "round") as bar:
        for number in range(options.requests + _WARM):
            start = number * options.chunks % len(names)
            chosen = list(names[start : start + options.chunks])
            for hit, tier in ((STORE, "store"), (POOL, "pool")):
                asked = [chosen[it] for it in rng.permutation(len(chosen))]
                more = rng.choice(words, _QUESTION_WORDS)
                trace = client.ask(" ".join([*asked, *more]))
                least = options.chunks * (options.chunk_tokens - 64)
                if number < _WARM:
                    continue
                if trace.tokens_from[tier] < least:
                    raise RequestError(f"{hit}: expected {least} tokens of it, {trace.tokens_from}")
                timed[hit].append(trace)
            bar.update()
    return {hit: _summary(them) for hit, them in timed.items()}


def _summary(timed: Sequence[Timed]) -> dict[str, Any]:
    """Means over the middle half by the whole, and what the phases come to beside it."""
    ordered = sorted(timed, key=lambda trace: trace.whole)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    whole = statistics.fmean(trace.whole for trace in middle)
    means = {name: statistics.fmean(trace.phases[name] for trace in middle) for name, _ in PHASES}
    return {
        "seconds": whole,
        "p50_seconds": statistics.median(trace.whole for trace in timed),
        "least_seconds": ordered[0].whole,
        "phases": means,
        "sum_over_whole": sum(means.values()) / whole,
        "tokens_from": dict(timed[-1].tokens_from),
    }


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    yield (
        f"{result['model']}, {result['dtype']}, {result['method']}, {result['chunks']} chunks of "
        f"{result['chunk_tokens']} tokens; milliseconds, means of the middle half of "
        f"{result['requests']} requests"
    )
    hits = result["hits"]
    yield f"{'phase':<26}" + "".join(f"{name:>12}" for name in hits)
    for name, _ in PHASES:
        yield f"{name:<26}" + "".join(f"{1e3 * it['phases'][name]:>12.2f}" for it in hits.values())
    yield f"{'text to first byte':<26}" + "".join(
        f"{1e3 * hit['seconds']:>12.2f}" for hit in hits.values()
    )
    yield f"{'phases / whole':<26}" + "".join(
        f"{hit['sum_over_whole']:>12.3f}" for hit in hits.values()
    )
