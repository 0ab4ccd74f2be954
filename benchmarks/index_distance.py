"""Indexes built with a document: recall and keys scanned by the question's distance behind it.

A question may stand right behind a document or behind many others. Every kind is built with queries
of the document, as ``jaxrag ingest --attention-index`` builds it, spread over several ranges of
distances, and asked from each distance with the effort that was chosen then.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attention_heads import Heads
from index_measure import Options, exact_rows, generated, of_blocks, quality
from tqdm import tqdm

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.measure.machine import describe
from jaxrag.reuse.attention_index import build, open_index
from jaxrag.reuse.attention_index.document import indexing_from
from jaxrag.reuse.attention_index.faiss_objects import faiss_module, one_thread

KINDS = ("lists:exact_below=0,min_queries=1", "graph:exact_below=0,min_queries=1")
SPREADS = ("own", "near", "linear", "logarithmic")


def run(
    options: Options,
    kinds: Sequence[str],
    distances: Sequence[int],
    given: Iterable[tuple[str, Heads]] | None = None,
) -> dict[str, Any]:
    """Measure generated heads, or the ``given`` ones by name; returns a JSON-able result.

    Raises ConfigError for kinds that learn nothing from queries, RequestError for no distances.
    """
    for kind in kinds:
        indexing_from(kind, "--kinds")
    if not distances:
        raise RequestError("no distances: expected at least one, such as 0,1024,65536")
    rows: list[dict[str, Any]] = []
    with one_thread():
        for name, heads in generated(options) if given is None else given:
            rows += measure(heads, name, options, kinds, distances)
    return {
        "benchmark": "index distance",
        "options": dataclasses.asdict(options) | {"engines": kinds, "distances": distances},
        "rows": rows,
        "faiss": faiss_module().__version__,
        "machine": describe(),
    }


def lessons(heads: Heads, name: str, ask: int, reach: int) -> tuple[HostArray, HostArray | None]:
    """Queries to train on, and to choose an effort by, over one of ``SPREADS``."""
    start, near, far = heads.context, heads.context + ask, heads.context + reach + ask
    match name:
        case "own":
            return heads.bank.lessons(heads.rope, start, far, own=True)
        case "near":
            return heads.bank.lessons(heads.rope, start, near)
        case "linear":
            return heads.bank.lessons(heads.rope, start, far)
        case _:
            return heads.bank.lessons(heads.rope, start, far, logarithmic=True)


def measure(
    heads: Heads, name: str, options: Options, kinds: Sequence[str], distances: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """One row a kind, spread and distance."""
    keys = heads.placed_keys()
    asked = [heads.placed_queries(distance) for distance in distances]
    truth = [exact_rows(part, keys, options.k) for part in asked]
    cases = [(kind, over) for kind in kinds for over in SPREADS]
    for kind, over in tqdm(cases, desc=f"{name} {heads.context}", disable=None):
        trained, held = lessons(heads, over, options.ask, max(distances))
        index = build(keys, trained, indexing_from(kind).spec, asked=held, k=options.k)
        searcher = open_index(index)
        for number, distance in enumerate(distances):
            found, scanned = quality(searcher, asked[number], truth[number], options.k)
            yield {
                "head": name,
                "context": heads.context,
                "engine": kind,
                "spread": over,
                "distance": distance,
                "efforts": list(index.efforts),
                "note": index.note,
                "recall": float(found.mean()),
                "recall_of_blocks": of_blocks(found),
                "scanned": float(scanned.mean()) / len(keys),
            }


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of tables: recall and per cent scanned at every distance."""
    options = result["options"]
    yield f"recall@{options['k']} / % of keys scanned, by distance behind the document"
    rows = result["rows"]
    for head, context, engine in dict.fromkeys(
        (row["head"], row["context"], row["engine"]) for row in rows
    ):
        yield ""
        yield f"head {head}, a document of {context} tokens, {engine}"
        yield f"{'trained at':<12}" + "".join(f"{at:>16}" for at in options["distances"])
        for over in SPREADS:
            mine = [
                row for row in rows
                if (row["head"], row["context"], row["engine"], row["spread"])
                == (head, context, engine, over)
            ]  # fmt: skip
            cells = [f"{row['recall']:.3f}/{100 * row['scanned']:6.2f}" for row in mine]
            yield f"{over:<12}" + "".join(f"{cell:>16}" for cell in cells)
