"""What a change costs where chunks are encoded behind neighbours: how many chunks are searched.

Nothing is encoded: of every chunk its list is recorded as if it had been. Then ten documents come,
and a line of one is edited. After each, the neighbours of those chunks are searched that the change
can affect, and the lists are held against those of a search that compares every pair.

example: python benchmarks/neighbour_growth.py --texts TEXTS --folder /tmp/near --sizes 10000,30000
"""

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
from scale import CHUNKS, document, one_layer, opened, put_parts, put_without_kv
from scale_texts import Texts

from jaxrag.base.types import HostArray
from jaxrag.cli import run_command
from jaxrag.cli.options import add_json
from jaxrag.cli.output import give_out, require_folder
from jaxrag.library.catalog import Catalog
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.neighbours import Neighbours, NeighbourSearch
from jaxrag.measure.machine import describe
from jaxrag.models.text.prompts import template_named

ENCODER = "neighbours"
TOP_N = 4
ADDED = 10  # documents
HOW: dict[str, Any] = {"by": "vectors"}
BATCH = 64


def main() -> int:
    """Measure, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", required=True, metavar="DIR", help="files of real text")
    parser.add_argument("--folder", required=True, metavar="DIR", help="of knowledge bases")
    parser.add_argument("--sizes", default="10000,30000", metavar="N,N", help="(10000,30000)")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(parser)
    return run_command(measure, parser.parse_args())


def measure(args: argparse.Namespace) -> int:
    """All sizes."""
    require_folder(args.out)
    texts = Texts(Path(args.texts))
    points = []
    for size in map(int, args.sizes.split(",")):
        points.append(measure_size(args, texts, size))
        print(json.dumps(points[-1]), file=sys.stderr, flush=True)
    result = {"benchmark": "neighbour_growth", "top_n": TOP_N, "added_documents": ADDED,
              "chunks_of_document": CHUNKS, "points": points, "machine": describe()}  # fmt: skip
    give_out(args, result, [json.dumps(result, indent=1)])
    return 0


def measure_size(args: argparse.Namespace, texts: Texts, size: int) -> dict[str, Any]:
    """One size: the first search, ten documents more, one line edited."""
    folder = Path(args.folder) / str(size)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with opened(argparse.Namespace(folder=folder), texts) as kb:
        put_without_kv(kb, texts, 0, size)
        near = Neighbours(
            kb._catalog, kb._vectors, one_layer(texts), template_named("plain"), TOP_N, "vectors"
        )
        point: dict[str, Any] = {"chunks": size, "first": searched(near)}
        put_without_kv(kb, texts, size, size + ADDED * CHUNKS)
        point["ten documents more"] = compared(near, searched(near))
        edit(kb, texts, size // 2 // CHUNKS * CHUNKS)
        point["one line edited"] = compared(near, searched(near))
    return point


def searched(near: Neighbours) -> dict[str, Any]:
    """Search whom the last change can affect; how many that were, and whose lists changed."""
    start = time.perf_counter()
    search = NeighbourSearch.begin(near.catalog, HOW)
    outdated = search.outdated([ENCODER], TOP_N, near.index)
    found = time.perf_counter() - start
    changed = 0
    for some in batched(map(int, outdated), BATCH):
        placed = near.find(some)
        known = near.catalog.contexts(placed, ENCODER)
        rows = [
            (chunk_id, key_of(it.content_ids), it.content_ids)
            for chunk_id, it in placed.items()
            if known.get(chunk_id) != list(it.content_ids)
        ]
        near.catalog.put_contexts(ENCODER, rows)
        changed += len(rows)
    search.finish()
    return {"searched": len(outdated), "changed": changed, "finding_s": round(found, 3),
            "seconds": round(time.perf_counter() - start, 3)}  # fmt: skip


def key_of(content_ids: Iterable[str]) -> str:
    """A store key that stands for a list."""
    return f"{hash(tuple(content_ids)) & (1 << 160) - 1:040x}"


def compared(near: Neighbours, report: dict[str, Any]) -> dict[str, Any]:
    """The report, and how many of the exact neighbours of every chunk are in its list."""
    ids = near.catalog.chunk_ids()
    assert near.vectors is not None
    vectors = near.vectors.index.get(ids)
    recorded = contents(near.catalog, ids)
    own = {content: place for place, content in enumerate(content_ids(near.catalog, ids))}
    hits = wanted = exact_lists = 0
    for start in range(0, len(ids), 1024):
        scores = vectors[start : start + 1024] @ vectors.T
        for row, score in enumerate(scores):
            score[start + row] = -np.inf
            best = set(np.argpartition(score, -TOP_N)[-TOP_N:].tolist())
            held = {own[content] for content in recorded[int(ids[start + row])]}
            hits, wanted = hits + len(best & held), wanted + TOP_N
            exact_lists += best == held
    return {**report, "recall": round(hits / wanted, 5), "exact_lists": exact_lists,
            "of_chunks": len(ids)}  # fmt: skip


def contents(catalog: Catalog, ids: HostArray) -> Mapping[int, list[str]]:
    """The content ids of every chunk's neighbours."""
    found: dict[int, list[str]] = {}
    for some in batched(ids.tolist(), 2048):
        found |= catalog.contexts(some, ENCODER)
    return found


def content_ids(catalog: Catalog, ids: HostArray) -> list[str]:
    """The content id of every chunk."""
    found: list[str] = []
    for some in batched(ids.tolist(), 2048):
        tokens = catalog.tokens(some)
        found += [tokens[one].content_id for one in some]
    return found


def edit(kb: KnowledgeBase, texts: Texts, number: int) -> None:
    """Exchange the first chunk of a document; the others keep text and content id."""
    made = document(texts, number)
    parts = [texts.chunk(10**9), *made.text.split("\n\n")[1:]]
    put_parts(kb, [(dataclasses.replace(made, text="\n\n".join(parts)), number)])


if __name__ == "__main__":
    sys.exit(main())
