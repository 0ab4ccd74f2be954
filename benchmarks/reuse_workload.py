"""The queries of FusionRAG section 5.3.3 over real passages, and what caches without limits hold.

A query asks for a few chunks. Each is one of the knowledge base, one that several users upload, or
one that nobody else has. Within the first two kinds chunks are asked for by a Zipf law: the passage
of rank r in proportion to ``r ** -popularity``. Passages not needed as unique ones are divided
between these two kinds as the accesses are.

``chunk_store`` and ``prefix_cache`` count what the definitions say, for settings that nobody has
the time to run; ``benchmarks/reuse.py`` shows that the program comes to the same numbers.
"""

import collections
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray

Kind = Literal["kb", "shared", "unique"]

SEEDS = 5  # of the sensitivity table

# One parameter is changed at a time.
_VARIED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("chunks_per_query", (3, 5, 10, 20)),
    ("popularity", (0.0, 0.5, 1.0, 1.5)),
    ("shuffle", (True, False)),
    ("queries", (250, 1000, 4000)),
    ("passages", (0.03, 0.06, 0.1, 0.25, 0.5, 1.0)),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What is asked.

    Attributes:
      queries: how many are asked.
      chunks_per_query: how many chunks each asks for.
      kb_share: of the chunks asked for, those of the knowledge base.
      shared_share: those that several users upload; the rest is unique.
      popularity: exponent of the Zipf law; 0 asks for all alike.
      shuffle: chunks stand in random order in a prompt; else the most popular first.
      passages: share of them that the knowledge base and shared chunks are taken from.
      seed: of what is drawn.
    """

    queries: int = 1000
    chunks_per_query: int = 5
    kb_share: float = 0.6
    shared_share: float = 0.3
    popularity: float = 1.0
    shuffle: bool = True
    passages: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a workload that cannot be."""
        if self.queries < 1 or self.chunks_per_query < 1:
            raise RequestError(
                f"queries={self.queries} chunks_per_query={self.chunks_per_query}: expected at "
                "least 1 of each"
            )
        shares = (self.kb_share, self.shared_share)
        if min(shares) < 0 or not 0 < sum(shares) <= 1:
            raise RequestError(
                f"kb_share={self.kb_share} shared_share={self.shared_share}: expected shares of "
                "one whole, and one of them above 0"
            )
        if self.popularity < 0 or not 0 < self.passages <= 1:
            raise RequestError(
                f"popularity={self.popularity} passages={self.passages}: expected 0 or more, and a "
                "share above 0"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """What is asked for: chunks are numbers into ``tokens``."""

    tokens: HostArray  # [C] int64, of every chunk
    kb: frozenset[int]
    shared: frozenset[int]
    queries: tuple[tuple[int, ...], ...]

    def kind(self, chunk: int) -> Kind:
        """Where a chunk comes from."""
        return "kb" if chunk in self.kb else "shared" if chunk in self.shared else "unique"

    @property
    def kb_unused(self) -> int:
        """Tokens of the chunks of the knowledge base that nobody asks for."""
        asked = {chunk for query in self.queries for chunk in query}
        return int(sum(self.tokens[list(self.kb - asked)]))


@dataclasses.dataclass
class Served:
    """What one way to serve the queries has come to; of these chunks and tokens alone.

    Attributes:
      stored_tokens: of KV that is kept at the end.
      hits: chunks whose KV was there when asked for.
      computed: chunks that were not.
      computed_tokens: of those.
      redundant: of those, chunks whose KV had been computed before, offline or online.
    """

    stored_tokens: int = 0
    hits: int = 0
    computed: int = 0
    computed_tokens: int = 0
    redundant: int = 0


class TooFewPassages(RequestError):
    """The data has fewer passages than the workload asks for."""


def make_workload(options: Options, lengths: HostArray) -> Workload:
    """Draw the queries; no query asks for a chunk twice.

    Raises TooFewPassages when the unique chunks, or those of one query, are not there.
    """
    rng = np.random.default_rng(options.seed)
    shape = (options.queries, options.chunks_per_query)
    shares = (options.kb_share, options.shared_share)
    kinds = rng.choice(3, shape, p=[*shares, max(0.0, 1 - sum(shares))])
    order = rng.permutation(len(lengths))
    num_unique = int((kinds == 2).sum())
    unique, rest = iter(order[:num_unique].tolist()), order[num_unique:]
    rest = rest[: round(len(rest) * options.passages)]
    num_kb = round(len(rest) * shares[0] / sum(shares))
    pools = (rest[:num_kb], rest[num_kb:])
    most = [int((kinds == kind).sum(axis=1).max()) for kind in (0, 1)]
    if len(order) < num_unique or any(len(p) < n for p, n in zip(pools, most, strict=True)):
        raise TooFewPassages(
            f"{len(lengths)} passages for {options.queries} queries of {options.chunks_per_query} "
            "chunks; ask fewer, or add data"
        )
    weights = []
    for pool in pools:
        weight = np.arange(1, len(pool) + 1, dtype=np.float64) ** -options.popularity
        weights.append(weight / weight.sum() if len(pool) else weight)
    queries = []
    for row in kinds:
        ranked: list[tuple[int, int, int]] = []  # kind, rank, chunk
        for kind, pool in enumerate(pools):
            count = int((row == kind).sum())
            if count:
                ranks = rng.choice(len(pool), count, replace=False, p=weights[kind])
                ranked += [(kind, int(rank), int(pool[rank])) for rank in ranks]
        ranked += [(2, 0, next(unique)) for _ in range(int((row == 2).sum()))]
        chunks = [chunk for _, _, chunk in sorted(ranked)]
        if options.shuffle:
            chunks = [chunks[i] for i in rng.permutation(len(chunks))]
        queries.append(tuple(chunks))
    kb, shared = (frozenset(pool.tolist()) for pool in pools)
    return Workload(lengths, kb, shared, tuple(queries))


def chunk_store(work: Workload) -> Served:
    """Serve from one copy a chunk, the knowledge base's made offline."""
    served = Served(stored_tokens=int(work.tokens[list(work.kb)].sum()))
    held = set(work.kb)
    for query in work.queries:
        for chunk in query:
            _serve(served, int(work.tokens[chunk]), hit=chunk in held, known=chunk in held)
            held.add(chunk)
    return served


def prefix_cache(work: Workload) -> Served:
    """Serve from a prefix cache: a chunk is found behind the same chunks in the same order only."""
    served = Served()
    nodes: dict[tuple[int, int], int] = {}  # (node of what stands before, chunk) -> its node
    known: set[int] = set()
    for query in work.queries:
        node = 0
        for chunk in query:
            step = (node, chunk)
            _serve(served, int(work.tokens[chunk]), hit=step in nodes, known=chunk in known)
            node = nodes.setdefault(step, len(nodes) + 1)
            known.add(chunk)
    return served


def _serve(served: Served, tokens: int, *, hit: bool, known: bool) -> None:
    """Count one chunk; what is not found is computed and kept."""
    if hit:
        served.hits += 1
        return
    served.computed += 1
    served.computed_tokens += tokens
    served.stored_tokens += tokens
    served.redundant += known


def sensitivity(options: Options, lengths: HostArray) -> list[dict[str, Any]]:
    """Store beside prefix cache with one parameter changed: mean and deviation over seeds.

    A setting for which there are too few passages is left out.
    """
    rows = []
    for name, values in tqdm(_VARIED, desc="sensitivity", disable=None):
        for value in values:
            found: dict[str, list[float]] = collections.defaultdict(list)
            try:
                for seed in range(SEEDS):
                    changed = dataclasses.replace(options, seed=seed, **{name: value})
                    work = make_workload(changed, lengths)
                    store, cache = chunk_store(work), prefix_cache(work)
                    used = store.stored_tokens - work.kb_unused
                    found["storage_reduction"].append(1 - store.stored_tokens / cache.stored_tokens)
                    found["storage_reduction_used"].append(1 - used / cache.stored_tokens)
                    found["hit_rate"].append(store.hits / (store.hits + store.computed))
                    found["avoided"].append(1 - store.computed / cache.computed)
            except TooFewPassages:
                continue
            row = {"parameter": name, "value": value, "seeds": SEEDS}
            for figure, series in found.items():
                row[figure] = statistics.mean(series)
                row[f"{figure}_deviation"] = statistics.stdev(series)
            rows.append(row)
    return rows


def read_passages(data: Path) -> dict[str, list[str]]:
    """Passages of the sets whose files lie anywhere below a folder, in the files of their authors.

    RGB: ``en_fact.json`` and ``zh_refine.json``, every positive and negative. Natural Questions:
    ``nq-open-oracle.jsonl``, each question's passage. HotpotQA: ``hotpotqa_train_corpus.json``.

    Raises RequestError when there are none, or a file is not what its name says.
    """
    readers: dict[str, tuple[str, Callable[[str], Iterator[str]]]] = {
        "RGB en_fact": ("en_fact.json", _read_rgb),
        "RGB zh_refine": ("zh_refine.json", _read_rgb),
        "NQ": ("nq-open-oracle.jsonl", _read_nq),
        "HotpotQA": ("hotpotqa_train_corpus.json", _read_hotpotqa),
    }
    found = {path.name: path for path in sorted(data.rglob("*.json*"))}
    sets = {}
    for name, (file, read) in readers.items():
        if file in found:
            try:
                texts = read(found[file].read_text(encoding="utf-8"))
                sets[name] = list(dict.fromkeys(text for text in texts if text.strip()))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise RequestError(
                    f"{found[file]} is not the {name} file; get it from its authors again"
                ) from None
    if not sets:
        names = ", ".join(file for file, _ in readers.values())
        raise RequestError(f"data {data}: none of {names} was found below it")
    return sets


def _read_rgb(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.strip():
            row = json.loads(line)
            yield from (*row["positive"], *row["negative"])


def _read_nq(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.strip():
            yield from (passage["text"] for passage in json.loads(line)["ctxs"])


def _read_hotpotqa(text: str) -> Iterator[str]:
    for sentences in json.loads(text).values():
        yield "".join(sentences)
