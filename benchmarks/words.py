"""Indexes of words beside each other: the catalog's postings, packed, and LanceDB's and Tantivy's.

Each gets the same terms of the same chunks, mixed of real text, and is asked the same questions one
after the other. Recall is of the 10 best by exact BM25, which the catalog's snapshot in memory
finds by adding everything up. Tantivy is measured where it is installed; nothing here needs it.

example: python benchmarks/words.py --texts TEXTS --chunks 100000 --out words.json
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import apsw
from scale_texts import Texts

from jaxrag.cli import run_command
from jaxrag.cli.options import add_json
from jaxrag.cli.output import give_out, require_folder
from jaxrag.library.retrieve.bm25 import BM25Index
from jaxrag.library.retrieve.terms import terms
from jaxrag.measure.machine import describe

BATCH = 4096  # chunks that are added at once
K = 10

Search = Callable[[str], list[int]]


def main() -> int:
    """Measure, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", required=True, metavar="DIR", help="files of real text")
    parser.add_argument("--chunks", type=int, default=100_000, metavar="N", help="(100000)")
    parser.add_argument("--questions", type=int, default=200, metavar="N", help="(200)")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(parser)
    return run_command(measure, parser.parse_args())


def measure(args: argparse.Namespace) -> int:
    """Build each index and ask it."""
    require_folder(args.out)
    texts = Texts(Path(args.texts))
    asked = texts.asked(args.questions)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        search, exact, rows["catalog"] = catalog(Path(name) / "words.sqlite", texts, args.chunks)
        best = [exact(question) for question in asked]
        rows["catalog"] |= ask(search, asked, best)
        kinds = {"lance": lance}
        if importlib.util.find_spec("tantivy") is not None:
            kinds["tantivy"] = tantivy
        for kind, build in kinds.items():
            search, rows[kind] = build(Path(name) / kind, texts, args.chunks)
            rows[kind] |= ask(search, asked, best)
    result = {
        "benchmark": "words",
        "chunks": args.chunks,
        "indexes": rows,
        "machine": describe(),
    }
    give_out(args, result, [json.dumps(result, indent=1)])
    return 0


def batches(texts: Texts, count: int) -> Iterator[dict[int, str]]:
    """Chunks by id."""
    for some in itertools.batched(range(1, count + 1), BATCH):
        yield {number: texts.chunk(number) for number in some}


def catalog(path: Path, texts: Texts, count: int) -> tuple[Search, Search, dict[str, Any]]:
    """The index of the catalog: its search, the exact one, and what it cost."""
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA journal_mode = WAL")
    index = BM25Index(connection)
    index.create()
    taken, done = 0.0, 0
    for batch in batches(texts, count):
        done += len(batch)
        start = time.process_time()
        with connection:
            index.add(batch, done - len(batch))
        taken += time.process_time() - start
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    snapshot = index.snapshot()
    sizes = index._sizes()

    def search(question: str) -> list[int]:
        return [found.chunk_id for found in index.search(question, K, sizes=sizes, version=1)]

    def exact(question: str) -> list[int]:
        return [found.chunk_id for found in snapshot.search(question, K)]

    return search, exact, {"build_processor_s": round(taken, 1), "mb": megabytes(path)}


def lance(folder: Path, texts: Texts, count: int) -> tuple[Search, dict[str, Any]]:
    """LanceDB's full-text index of terms that blanks part."""
    import lancedb
    import lancedb.index
    import pyarrow

    taken = 0.0
    schema = pyarrow.schema([("id", pyarrow.int64()), ("terms", pyarrow.string())])
    table = lancedb.connect(folder).create_table("chunks", schema=schema)
    for batch in batches(texts, count):
        start = time.process_time()
        joined = [" ".join(terms(text)) for text in batch.values()]
        table.add(pyarrow.table({"id": list(batch), "terms": joined}))
        taken += time.process_time() - start
    start = time.process_time()
    config = lancedb.index.FTS(
        base_tokenizer="whitespace", stem=False, remove_stop_words=False,
        ascii_folding=False, lower_case=False, with_position=False,
    )  # fmt: skip
    table.create_index("terms", config=config)
    taken += time.process_time() - start

    def search(question: str) -> list[int]:
        asked = " ".join(dict.fromkeys(terms(question)))
        found = table.search(asked, query_type="fts").select(["id"]).limit(K).to_arrow()
        return [int(i) for i in found["id"].to_pylist()]

    return search, {"build_processor_s": round(taken, 1), "mb": megabytes(folder)}


def tantivy(folder: Path, texts: Texts, count: int) -> tuple[Search, dict[str, Any]]:
    """Tantivy's index of the same."""
    import tantivy as library  # type: ignore[import-not-found, unused-ignore]

    folder.mkdir()
    builder = library.SchemaBuilder()
    builder.add_integer_field("id", stored=True, fast=True)
    builder.add_text_field("terms", tokenizer_name="whitespace", index_option="freq")
    schema = builder.build()
    index = library.Index(schema, path=str(folder))
    writer = index.writer(num_threads=1)
    taken = 0.0
    for batch in batches(texts, count):
        start = time.process_time()
        for number, text in batch.items():
            writer.add_document(library.Document(id=number, terms=" ".join(terms(text))))
        writer.commit()
        taken += time.process_time() - start
    writer.wait_merging_threads()
    index.reload()
    searcher = index.searcher()

    def search(question: str) -> list[int]:
        parts = [
            (library.Occur.Should, library.Query.term_query(schema, "terms", term))
            for term in dict.fromkeys(terms(question))
        ]
        found = searcher.search(library.Query.boolean_query(parts), K)
        return [searcher.doc(address)["id"][0] for _, address in found.hits]

    return search, {"build_processor_s": round(taken, 1), "mb": megabytes(folder)}


def ask(search: Search, asked: Sequence[str], best: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Each question once: milliseconds by the clock and of the processor, and recall."""
    clock, processor, shares = [], [], []
    search(asked[0])
    for question, expected in zip(asked, best, strict=True):
        start, used = time.perf_counter(), time.process_time()
        found = search(question)
        clock.append(1000 * (time.perf_counter() - start))
        processor.append(1000 * (time.process_time() - used))
        if expected:
            shares.append(len(set(found) & set(expected)) / len(expected))
    return {
        "clock_ms": spread(clock),
        "processor_ms": spread(processor),
        "recall_at_10": round(statistics.mean(shares), 4),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 2),
        "p95": round(ordered[-1 - len(ordered) // 20], 2),
    }


def megabytes(path: Path) -> float:
    """Of a file or folder."""
    files = [path] if path.is_file() else [it for it in path.rglob("*") if it.is_file()]
    return round(sum(it.stat().st_size for it in files) / 1e6, 1)


if __name__ == "__main__":
    sys.exit(main())
