"""Indexes built with a document: recall and keys scanned by the question's distance behind it.

A question may stand right behind a document or behind many others. Every engine is built with
training queries re-rotated to several spreads of distances and asked from each distance, with the
effort that its validation queries need there, and with the effort that they need at the first one.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attention_heads import Heads
from index_knn import SharedNeighbours
from index_measure import ENGINES, Options, exact_rows, generated, one_thread, quality, tune
from tqdm import tqdm

from jaxrag.attention_index import build, open_index, spread
from jaxrag.attention_index.faiss_objects import faiss_module
from jaxrag.bench.machine import describe
from jaxrag.errors import RequestError
from jaxrag.types import HostArray

DEFAULT_ENGINES = ("lists fp32", "graph fp16")
SPREADS = ("own", "near", "linear", "logarithmic")


def run(
    options: Options,
    engines: Sequence[str],
    distances: Sequence[int],
    given: Iterable[tuple[str, Heads]] | None = None,
) -> dict[str, Any]:
    """Measure generated heads, or the ``given`` ones by name; returns a JSON-able result.

    Raises RequestError for engines that learn nothing from queries, or no distances.
    """
    for engine in engines:
        if engine not in ENGINES or not hasattr(ENGINES[engine].spec, "knn"):
            trained = [name for name, kind in ENGINES.items() if hasattr(kind.spec, "knn")]
            raise RequestError(f"engine {engine!r}: expected some of {', '.join(trained)}")
    if not distances:
        raise RequestError("no distances: expected at least one, such as 0,1024,65536")
    rows: list[dict[str, Any]] = []
    with one_thread():
        for name, heads in generated(options) if given is None else given:
            rows += measure(heads, name, options, engines, distances)
    return {
        "benchmark": "index distance",
        "options": dataclasses.asdict(options) | {"engines": engines, "distances": distances},
        "rows": rows,
        "faiss": faiss_module().__version__,
        "machine": describe(),
    }


def trained_at(heads: Heads, name: str, ask: int, reach: int) -> HostArray:
    """Training queries [G, m, H] re-rotated to one of ``SPREADS``."""
    bank, rope, start = heads.bank, heads.rope, heads.context
    count = len(bank.positions)
    match name:
        case "own":
            return bank.own(rope)
        case "near":
            return bank.at(rope, spread(count, start, start + ask))
        case "linear":
            return bank.at(rope, spread(count, start, start + reach + ask))
        case _:
            return bank.at(rope, spread(count, start, start + reach + ask, logarithmic=True))


def measure(
    heads: Heads, name: str, options: Options, engines: Sequence[str], distances: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """One row an engine, spread and distance."""
    keys = heads.placed_keys()
    half = options.ask // 2
    asked = [heads.placed_queries(distance) for distance in distances]
    validation = [part[:, :half] for part in asked]
    test = [part[:, half:] for part in asked]
    known = [exact_rows(part, keys, options.k) for part in validation]
    truth = [exact_rows(part, keys, options.k) for part in test]
    cases = [(engine, kind) for engine in engines for kind in SPREADS]
    knn = SharedNeighbours(min(max(ENGINES[engine].spec.knn for engine in engines), len(keys)))  # type: ignore[union-attr]
    for engine, kind in tqdm(cases, desc=f"{name} {heads.context}", disable=None):
        queries = trained_at(heads, kind, options.ask, max(distances))
        searcher = open_index(build(keys, queries, ENGINES[engine].spec, knn=knn))
        efforts = ENGINES[engine].efforts
        first = tune(searcher, validation[0], known[0], efforts, options)
        for number, distance in enumerate(distances):
            chosen = first
            if number:
                chosen = tune(searcher, validation[number], known[number], efforts, options)
            found, scanned = quality(searcher, test[number], truth[number], options.k, chosen)
            same, cost = quality(searcher, test[number], truth[number], options.k, first)
            yield {
                "head": name,
                "context": heads.context,
                "engine": engine,
                "spread": kind,
                "distance": distance,
                "efforts": chosen,
                "recall": float(found.mean()),
                "scanned": float(scanned.mean()) / len(keys),
                "first_efforts": first,
                "recall_at_first_effort": float(same.mean()),
                "scanned_at_first_effort": float(cost.mean()) / len(keys),
            }


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of tables: recall and per cent scanned at every distance."""
    options = result["options"]
    yield (
        f"recall@{options['k']} / % of keys scanned, effort set for {options['target']} on other "
        "queries at the same distance; in brackets recall with the effort of the first distance"
    )
    rows = result["rows"]
    distances = options["distances"]
    for head, context, engine in dict.fromkeys(
        (row["head"], row["context"], row["engine"]) for row in rows
    ):
        yield ""
        yield f"head {head}, a document of {context} tokens, {engine}"
        yield f"{'trained at':<12}" + "".join(f"{distance:>22}" for distance in distances)
        for kind in SPREADS:
            cells = [
                f"{row['recall']:.3f}/{100 * row['scanned']:5.2f} "
                f"({row['recall_at_first_effort']:.3f})"
                for row in rows
                if (row["head"], row["context"], row["engine"], row["spread"])
                == (head, context, engine, kind)
            ]
            yield f"{kind:<12}" + "".join(f"{cell:>22}" for cell in cells)
