"""Attention indexes beside FAISS's exact scan, IVF and HNSW, on generated heads.

For every length: recall of the exact top k by queries asked behind the context, the share of keys
scanned, seconds to build, bytes, and processor time of a search. Each kind's search knob is, for
each query head, the smallest that reaches the target on validation queries; what is reported is
measured on other ones. Warm: one KV head again and again. Cold: more KV heads than the caches hold,
in turn, as decoding visits them. All kinds run in the same process on one thread.

The nearest keys of the training queries are found once for all kinds that learn from the same ones;
the seconds that took are part of each one's build.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from attention_heads import Heads, HeadSpec, draw
from index_knn import SharedNeighbours
from index_report import break_even
from tqdm import tqdm

from jaxrag.attention_index import (
    AttentionIndex,
    Exact,
    Hnsw,
    Ivf,
    ProjectedGraph,
    QueryLists,
    RoarGraph,
    Searcher,
    Spec,
    build,
    nearest,
    open_index,
    spread,
    table_of,
)
from jaxrag.attention_index.faiss_objects import faiss_module
from jaxrag.bench.machine import describe
from jaxrag.errors import RequestError
from jaxrag.types import HostArray

# Named by the share of 32,128 keys that FAISS's IVF scans for recall 0.95, mean of the four query
# heads; the paper reports some 30 %. Of "mild" the queries' and keys' channels are less opposed.
HEADS = {
    "ivf24": HeadSpec(seed=3),
    "ivf41": HeadSpec(seed=9),
    "mild": HeadSpec(
        seed=1, key_power=0.5, query_power=0.5, mismatch=0.5, agreement=0.3, key_bias=4.0,
        query_bias=1.0,
    ),
}  # fmt: skip

_WIDTHS = (100, 120, 140, 160, 180, 200, 240, 280, 320, 360, 400, 480, 560, 640, 800, 960, 1120,
           1280, 1600, 2000, 2400, 3200, 4800, 6400, 9600)  # fmt: skip
Efforts = list[int] | None  # one a query head; None for what has no knob
_PROBES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224,
           256, 320, 384, 448, 512, 640, 768, 1024, 1536)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Engine:
    """One row of the table: how it is built, which efforts are tried, which queries it learns."""

    spec: Spec
    efforts: tuple[int, ...] = ()
    own_positions: bool = False  # train as the paper does, not re-rotated


ENGINES: dict[str, Engine] = {
    "flat fp32": Engine(Exact("float32")),
    "flat fp16": Engine(Exact("float16")),
    "flat 8-bit": Engine(Exact("uint8")),
    "ivf fp32": Engine(Ivf(storage="float32", exact_below=0), _PROBES),
    "ivf fp16": Engine(Ivf(storage="float16", exact_below=0), _PROBES),
    "hnsw fp32": Engine(Hnsw(storage="float32", exact_below=0), _WIDTHS),
    "graph fp16": Engine(ProjectedGraph(exact_below=0, min_queries=1), _WIDTHS),
    "graph 8-bit": Engine(
        ProjectedGraph(storage="uint8", exact_below=0, min_queries=1), _WIDTHS
    ),
    "graph fp16, group": Engine(
        ProjectedGraph(share="group", exact_below=0, min_queries=1), _WIDTHS
    ),
    "graph fp16, own positions": Engine(
        ProjectedGraph(exact_below=0, min_queries=1), _WIDTHS, own_positions=True
    ),
    "roargraph projection fp16": Engine(RoarGraph(exact_below=0, min_queries=1), _WIDTHS),
    "lists fp32": Engine(QueryLists(exact_below=0, min_queries=1), _PROBES),
    "lists fp16": Engine(
        QueryLists(storage="float16", exact_below=0, min_queries=1), _PROBES
    ),
    "lists 1024 fp32": Engine(
        QueryLists(clusters=1024, cap=1024, exact_below=0, min_queries=1), _PROBES
    ),
    "lists fp32, own positions": Engine(
        QueryLists(exact_below=0, min_queries=1), _PROBES, own_positions=True
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure, and how long.

    Attributes:
      contexts: tokens of the contexts.
      heads: names in ``HEADS``.
      engines: names in ``ENGINES``.
      k: keys wanted.
      target: recall that the knob is set for, on validation queries.
      margin: added to the target there.
      sink: first tokens, whose keys are left out.
      recent: last tokens, likewise.
      train: training queries a head.
      ask: queries behind the context, half to validate with.
      cold_bytes: of the KV heads visited in turn; several times the last cache.
      searches: in a round.
      rounds: of which the best counts.
      slow_up_to: longest context for HNSW and for RoarGraph, whose builds are slow.
      seed: of the token streams.
    """

    contexts: tuple[int, ...] = (32_768, 131_072)
    heads: tuple[str, ...] = ("ivf24", "ivf41")
    engines: tuple[str, ...] = tuple(ENGINES)
    k: int = 100
    target: float = 0.95
    margin: float = 0.005
    sink: int = 128
    recent: int = 512
    train: int = 8192
    ask: int = 500
    cold_bytes: int = 1_200_000_000
    searches: int = 60
    rounds: int = 3
    slow_up_to: int = 131_072
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        for name, known in (("heads", HEADS), ("engines", ENGINES)):
            if odd := [one for one in getattr(self, name) if one not in known]:
                raise RequestError(f"{name} {odd[0]!r}: expected some of {', '.join(known)}")
        for name in ("contexts", "heads", "engines"):
            if not getattr(self, name):
                raise RequestError(f"no {name}: expected at least one")
        for name in ("k", "train", "ask", "searches", "rounds", "cold_bytes"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name}={getattr(self, name)}: expected a positive number")
        if self.ask < 2:
            raise RequestError(f"ask={self.ask}: expected 2 or more, to validate and to test")
        if not 0 < self.target <= 1:
            raise RequestError(f"target={self.target}: expected a recall above 0, up to 1")
        least = self.sink + self.recent + self.k
        if min(self.sink, self.recent) < 0 or min(self.contexts) < least:
            raise RequestError(
                f"contexts {min(self.contexts)}: expected {least} or more, for sink {self.sink}, "
                f"recent {self.recent} and {self.k} keys between them"
            )


def run(options: Options, given: Iterable[tuple[str, Heads]] | None = None) -> dict[str, Any]:
    """Measure generated heads, or the ``given`` ones by name; returns a JSON-able result."""
    rows: list[dict[str, Any]] = []
    with one_thread():
        for name, heads in generated(options) if given is None else given:
            rows += measure(heads, name, options)
    settings = dataclasses.asdict(options)
    return {
        "benchmark": "index",
        "options": settings | {"specs": {n: table_of(ENGINES[n].spec) for n in options.engines}},
        "rows": rows,
        "break_even": break_even(rows),
        "faiss": faiss_module().__version__,
        "machine": describe(),
    }


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """FAISS on one thread, as a head of a layer has in decoding."""
    faiss = faiss_module()
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


def generated(options: Options) -> Iterator[tuple[str, Heads]]:
    """Every head of the options at every length, with its name."""
    for name in options.heads:
        for context in options.contexts:
            yield (
                name,
                draw(
                    HEADS[name],
                    context,
                    train=options.train,
                    ask=options.ask,
                    sink=options.sink,
                    recent=options.recent,
                    stream=options.seed,
                ),
            )


def training_queries(heads: Heads, own_positions: bool, first: int, end: int) -> HostArray:
    """[G, m, H] at their own positions, or re-rotated over the positions first .. end - 1."""
    rope = heads.rope
    if own_positions:
        return heads.bank.own(rope)
    return heads.bank.at(rope, spread(len(heads.bank.positions), first, end))


def measure(heads: Heads, name: str, options: Options) -> Iterator[dict[str, Any]]:
    """One row an engine."""
    keys, asked = heads.placed_keys(), heads.placed_queries()
    half = options.ask // 2
    validation, test = asked[:, :half], asked[:, half:]
    truth = [exact_rows(part, keys, options.k) for part in (validation, test)]
    chosen = [
        engine
        for engine in options.engines
        if heads.context <= options.slow_up_to
        or not isinstance(ENGINES[engine].spec, Hnsw | RoarGraph)
    ]
    longest = max((getattr(ENGINES[engine].spec, "knn", 1) for engine in chosen), default=1)
    knn = SharedNeighbours(min(longest, len(keys)))
    for engine in tqdm(chosen, desc=f"{name} {heads.context}", disable=None):
        kind = ENGINES[engine]
        start, used = time.perf_counter(), time.process_time()
        queries = training_queries(
            heads, kind.own_positions, heads.context, heads.context + options.ask
        )
        index = build(keys, queries, kind.spec, knn=knn)
        saved = knn.taken()
        seconds = time.perf_counter() - start + saved.wall
        processor = time.process_time() - used + saved.processor
        searcher = open_index(index)
        efforts = tune(searcher, validation, truth[0], kind.efforts, options)
        found, scanned = quality(searcher, test, truth[1], options.k, efforts)
        yield {
            "head": name,
            "context": heads.context,
            "keys": len(keys),
            "engine": engine,
            "efforts": efforts,
            "recall": float(found.mean()),
            "recall_of_heads": found.tolist(),
            "scanned": float(scanned.mean()) / len(keys),
            "scanned_of_heads": (scanned / len(keys)).tolist(),
            "build_seconds": seconds,
            "build_processor_seconds": processor,
            "key_bytes": index.keys.nbytes / len(keys),
            "index_bytes": index.nbytes / len(keys),
            **latency(index, searcher, test, efforts, options),
        }


def exact_rows(queries: HostArray, keys: HostArray, k: int) -> HostArray:
    """[G, n, k] rows of the best keys."""
    return np.stack([nearest(head, keys, k).ids for head in queries])


def quality(
    searcher: Searcher, queries: HostArray, truth: HostArray, k: int, efforts: Efforts
) -> tuple[HostArray, HostArray]:
    """Mean recall and mean keys scanned of each query head: [G] and [G]."""
    hits = np.zeros(queries.shape[:2])
    scanned = np.zeros(queries.shape[:2])
    for number in range(queries.shape[1]):
        found = searcher.search(queries[:, number], k, effort=efforts, count=True)
        scanned[:, number] = found.scanned
        for head, ids in enumerate(found.ids):
            hits[head, number] = np.isin(truth[head, number], ids).mean()
    return hits.mean(1), scanned.mean(1)


def tune(
    searcher: Searcher,
    queries: HostArray,
    truth: HostArray,
    efforts: Sequence[int],
    options: Options,
) -> Efforts:
    """Per query head the smallest effort whose recall on these queries reaches the target.

    The largest where none does, and None for what has no knob.
    """
    if not efforts:
        return None
    ladder, heads = np.array(efforts), len(queries)
    low, high = np.zeros(heads, int), np.full(heads, len(efforts) - 1)
    while (low < high).any():
        middle = (low + high) // 2
        found, _ = quality(searcher, queries, truth, options.k, ladder[middle].tolist())
        reached = found >= options.target + options.margin
        low = np.where((low < high) & ~reached, middle + 1, low)
        high = np.where((low <= high) & reached, middle, high)
    chosen: list[int] = ladder[high].tolist()
    return chosen


def latency(
    index: AttentionIndex,
    searcher: Searcher,
    queries: HostArray,
    efforts: Efforts,
    options: Options,
) -> dict[str, float]:
    """Microseconds of one query head's search: processor time of the best round, median wall."""
    warm = _rounds([searcher], queries, efforts, options)
    copies = max(4, math.ceil(options.cold_bytes / searcher.nbytes))
    cold = _rounds([_copy(index) for _ in range(copies)], queries, efforts, options)
    return {
        "warm_us": warm[0],
        "warm_wall_us": warm[1],
        "cold_us": cold[0],
        "cold_wall_us": cold[1],
        "cold_heads": copies,
    }


def _copy(index: AttentionIndex) -> Searcher:
    arrays = {name: array.copy() for name, array in index.to_arrays().items()}
    return open_index(AttentionIndex.from_arrays(arrays))


def _rounds(
    searchers: Sequence[Searcher], queries: HostArray, efforts: Efforts, options: Options
) -> tuple[float, float]:
    group, number = queries.shape[:2]
    processor, wall = [], []
    at = 0
    for _ in range(options.rounds + 1):
        start, used = time.perf_counter(), time.process_time()
        for _ in range(options.searches):
            searchers[at % len(searchers)].search(
                queries[:, at % number], options.k, effort=efforts
            )
            at += 1
        processor.append(time.process_time() - used)
        wall.append(time.perf_counter() - start)
    each = 1e6 / options.searches / group
    return min(processor[1:]) * each, statistics.median(wall[1:]) * each
