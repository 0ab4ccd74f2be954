"""What content keys save over a prefix cache: FusionRAG sections 4.1 and 5.3.3, run and counted.

A thousand queries of five real passages go through ``jaxrag.generate``, one after the other, with a
small random Llama (weights decide nothing of what is counted) and a tokenizer trained on the
passages: 60 % of the chunks are in a knowledge base of 2/3 of all passages, 30 % are uploaded by
several users, 10 % by one (``reuse_workload``). Three ways to serve them:

- ``prefix_cache``: full attention. The pool keeps leading parts of prompts as they were computed;
  nothing is made offline.
- ``two_stages``: full reuse with ``misses="in_place"`` and a prefix cache. KV of the knowledge base
  is made offline, one copy a chunk; what users upload is computed where it stands and kept as a
  leading part, if everything before it is exact.
- ``alternative_path``: full reuse with ``misses="encode"`` and a prefix cache. What users upload is
  encoded when it is first seen, and stored under a key that says nothing of what precedes it.

Everything counted is what the program says: ``Result.reuse`` (how and where each chunk was found),
``Result.counts`` and ``Result.flops``, the pages of the pool and ``KnowledgeBase.stats``. The
figures of a way, over all queries:

- ``found``: by kind of chunk, chunks and tokens by ``PartReuse.how`` and ``where``.
- ``hit_rate``, ``token_hit_rate``: chunks (tokens) whose KV was found / asked for.
- ``computed``: chunks that were not found; ``redundant``: those of them whose KV had been computed
  before, offline or online.
- ``stored_tokens``: of KV that is kept at the end, the prefix once included: in the store, and in
  the pool under keys that the store has not. ``stored_bytes``: of these.
- against ``prefix_cache``: ``storage_reduction`` (of tokens; ``_used`` without those of the
  knowledge base that nobody asked for), ``avoided`` and ``avoided_tokens`` (of what is computed
  online), ``avoided_flops``.

``pools`` are sizes of the device pool: the first has room for everything, so that nothing is ever
evicted; there the counters of ``reuse_workload`` must say the same (``counters``), and only then
``sensitivity`` has their figures for other workloads.

example: python benchmarks/reuse.py --data DIR --out benchmarks/results/reuse.json
"""

import argparse
import collections
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from reuse_workload import (
    Options,
    Served,
    Workload,
    chunk_store,
    make_workload,
    prefix_cache,
    read_passages,
    sensitivity,
)
from tqdm import tqdm
from trained import trained_tokenizer

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import KnowledgeBaseError, RequestError
from jaxrag.cli import run_command
from jaxrag.cli.options import add_json
from jaxrag.cli.output import give_out, require_folder
from jaxrag.engine.engine import Engine, engine_of
from jaxrag.engine.runner import ModelRunner
from jaxrag.engine.state import EngineSettings
from jaxrag.kv.cache import PAGE, pages_for
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import llama
from jaxrag.models.model import Model, random_model
from jaxrag.models.text.prompts import TEMPLATES
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.serve.answers import Result
from jaxrag.serve.generate import generate

PAPER = {"storage_reduction": 0.710, "hit_rate": 0.779, "avoided": 0.823}
TEMPLATE = TEMPLATES["turborag"]
VOCAB = 4096
HITS = ("prefix hit", "chunk hit")  # of PartReuse.how

# Arguments of generate() of every way, in the order they are run: the last one stores.
WAYS: dict[str, dict[str, Any]] = {
    "prefix_cache": {"method": "full_attention", "prefix_cache": True},
    "two_stages": {"method": "full_reuse", "misses": "in_place", "prefix_cache": True},
    "alternative_path": {"method": "full_reuse", "misses": "encode", "prefix_cache": True},
}


def run(
    data: Path, options: Options, pool_tokens: Sequence[int] = (), varied: bool = True
) -> dict[str, Any]:
    """Serve the queries every way; the figures, the setting and the machine, JSON-able.

    Args:
      data: folder with the passages; see ``read_passages``.
      options: the workload.
      pool_tokens: also run everything with device pools of these sizes.
      varied: run the counters for other settings too.

    Raises RequestError for data without passages, with too few of them, or a pool that cannot hold
    one prompt.
    """
    sets = read_passages(data)
    texts = list(dict.fromkeys(text for passages in sets.values() for text in passages))
    tokenizer = make_tokenizer(texts)
    lengths = np.array(
        [len(TEMPLATE.chunk_ids(tokenizer, ids)) for ids in tokenizer.encode_batch(texts)], np.int64
    )
    work = make_workload(options, lengths)
    longest, everything = rooms(work, tokenizer)
    for size in pool_tokens:
        if size < longest:
            raise RequestError(
                f"pool_tokens={size}: expected room for the longest prompt, {longest} tokens"
            )
    pools: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="jaxrag-reuse-") as folder:
        path = Path(folder) / "kb"
        for size in (everything, *pool_tokens):
            model = random_model(small_config(), tokenizer=tokenizer, cache_tokens=size)
            model.engine = Engine(model, EngineSettings(arena_bytes=0))  # a pool and a store
            with open_kb(path, model, work) as kb:
                if not kb.stats()["documents"]:
                    fill(kb, work, texts)
                ways = {name: serve(name, kb, work, texts) for name in WAYS}
                collect(kb)
            compare(ways, work, whole=not pools)
            pools.append({"pool_tokens": pages_for(size) * PAGE, **ways})
    prefix_tokens = len(TEMPLATE.prefix_ids(tokenizer))
    counters = agreement(pools[0], work, prefix_tokens)
    equal = all(side["program"] == side["counted"] for side in counters.values())
    return {
        "benchmark": "reuse",
        "passages": {name: len(passages) for name, passages in sets.items()},
        "distinct": len(texts),
        "tokens_of_a_passage": float(lengths.mean()),
        "prefix_tokens": prefix_tokens,
        "setting": dataclasses.asdict(options),
        "asked": sum(map(len, work.queries)),
        "asked_tokens": int(sum(lengths[list(query)].sum() for query in work.queries)),
        "kb_chunks": len(work.kb),
        "kb_tokens": int(lengths[list(work.kb)].sum()),
        "kb_tokens_unused": work.kb_unused,
        "kv_bytes_per_token": small_config().kv_bytes_per_token,
        "pools": pools,
        "counters": {"equal": equal, **counters},
        "sensitivity": sensitivity(options, lengths) if equal and varied else None,
        "paper": PAPER,
        "machine": describe(),
    }


def make_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """A byte-level BPE tokenizer that was trained on the passages."""
    specials = ["<s>", "</s>", "<|doc_start|>", "<|doc_end|>"]
    texts = [*texts, TEMPLATE.prefix, TEMPLATE.final]
    return trained_tokenizer(texts, VOCAB, specials, bos_token="<s>", eos_token="</s>")


def small_config() -> ModelConfig:
    """A Llama of two layers, whose KV takes 256 bytes a token."""
    return llama(
        vocab_size=VOCAB, num_layers=2, model_dim=32, mlp_dim=64, num_heads=2, num_kv_heads=1,
        head_dim=16, max_positions=16_384, bos_id=0, eos_ids=(1,),
    )  # fmt: skip


def rooms(work: Workload, tokenizer: Tokenizer) -> tuple[int, int]:
    """Tokens of a pool for the longest prompt, and for all chunks of all of them to stay in."""
    questions = map(question, range(len(work.queries)))
    final = max(len(TEMPLATE.final_ids(tokenizer, text)) for text in questions)
    around = pages_for(len(TEMPLATE.prefix_ids(tokenizer))) + pages_for(final)
    chunks = [sum(pages_for(int(n)) for n in work.tokens[list(query)]) for query in work.queries]
    return (around + max(chunks)) * PAGE, (around + sum(chunks)) * PAGE


def question(number: int) -> str:
    """What a query asks; nothing depends on it."""
    return f"What is said in query {number:06}?"


def open_kb(path: Path, model: Model, work: Workload) -> KnowledgeBase:
    """A knowledge base in which every passage is one chunk."""
    longest = int(work.tokens.max())
    return KnowledgeBase.open(
        path, model, template=TEMPLATE, chunk_tokens=longest, overlap=0, encoders=["after_prefix"],
        chunk_by="tokens",
    )  # fmt: skip


def fill(kb: KnowledgeBase, work: Workload, texts: Sequence[str]) -> None:
    """Add the passages of the knowledge base."""
    report = kb.add([Document(f"{n:06}", texts[n]) for n in sorted(work.kb)], progress=True)
    if report.chunks != len(work.kb):
        raise KnowledgeBaseError(
            f"{len(work.kb)} passages became {report.chunks} chunks; expected one of each: "
            f"{report.skipped[:3]}"
        )


def collect(kb: KnowledgeBase) -> None:
    """Drop what users uploaded: no document claims it."""
    uploaded = kb.stats(walk=True)["stored"]["orphans"]
    freed = kb.gc(grace_seconds=0).chunks
    if freed != uploaded:
        raise KnowledgeBaseError(f"gc freed {freed} chunks: expected the {uploaded} uploaded ones")


def serve(name: str, kb: KnowledgeBase, work: Workload, texts: Sequence[str]) -> dict[str, Any]:
    """Ask all queries one way, beginning with an empty pool, and say what became of them."""
    model = kb.model
    assert model is not None
    engine_of(model).forget()
    offline = name != "prefix_cache"
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    tokens: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    known = set(work.kb) if offline else set[int]()
    redundant = flops = computed_tokens = 0
    for number, query in enumerate(tqdm(work.queries, desc=name, disable=None)):
        result: Result = generate(
            question(number),
            documents=[texts[chunk] for chunk in query],
            max_new_tokens=1,
            template=TEMPLATE,
            **({"kb": kb} if offline else {"model": model}),
            **WAYS[name],
        )
        flops += result.flops
        computed_tokens += result.counts["recomputed"] + result.counts["encoded"]
        rows = [row for row in result.reuse if row.part != "prefix"]
        for chunk, row in zip(query, rows, strict=True):
            where = f"{row.how}, {row.where}" if row.where else row.how
            found[work.kind(chunk)][where] += 1
            tokens[work.kind(chunk)][where] += row.tokens
            redundant += row.how not in HITS and chunk in known
            known.add(chunk)
    asked = sum(map(sum, (it.values() for it in found.values())))
    asked_tokens = sum(map(sum, (it.values() for it in tokens.values())))
    hits = sum(n for it in found.values() for where, n in it.items() if where.startswith(HITS))
    return {
        "found": {
            kind: {
                where: {"chunks": number, "tokens": tokens[kind][where]}
                for where, number in sorted(found[kind].items())
            }
            for kind in ("kb", "shared", "unique")
        },
        "hit_rate": hits / asked,
        "token_hit_rate": 1 - computed_tokens / asked_tokens,
        "hits": hits,
        "computed": asked - hits,
        "computed_tokens": computed_tokens,
        "redundant": redundant,
        "flops": flops,
        **kept(kb, model, offline=offline),
    }


def kept(kb: KnowledgeBase, model: Model, *, offline: bool) -> dict[str, int]:
    """What store and pool hold now; without ``offline`` the store is not asked."""

    def resident(runner: ModelRunner) -> dict[str, int]:
        return {key: chunk.tokens for key, chunk in runner.cache.allocator.chunks.items()}

    held = engine_of(model).call(resident)
    stored = kb.stats()["stored"] if offline else {"tokens": 0, "bytes": 0}
    in_store = set(kb.store.keys()) if offline else set[str]()
    pool_only = sum(tokens for key, tokens in held.items() if key not in in_store)
    per_token = model.config.kv_bytes_per_token
    return {
        "stored_tokens": stored["tokens"] + pool_only,
        "stored_bytes": stored["bytes"] + pool_only * per_token,
        "of_these_in_the_store": stored["tokens"],
        "pool_tokens_in_use": sum(held.values()),
    }


def compare(ways: Mapping[str, dict[str, Any]], work: Workload, *, whole: bool) -> None:
    """Add to the ways that reuse what they save over the prefix cache.

    Storage is compared where the cache keeps the ``whole`` of what it computed.
    """
    base = ways["prefix_cache"]
    for name, way in ways.items():
        if name == "prefix_cache":
            continue
        if whole:
            used = way["stored_tokens"] - work.kb_unused
            way |= {
                "storage_reduction": 1 - way["stored_tokens"] / base["stored_tokens"],
                "storage_reduction_used": 1 - used / base["stored_tokens"],
            }
        way |= {
            "avoided": 1 - way["computed"] / base["computed"],
            "avoided_tokens": 1 - way["computed_tokens"] / base["computed_tokens"],
            "avoided_flops": 1 - way["flops"] / base["flops"],
        }


def agreement(
    ways: Mapping[str, Any], work: Workload, prefix_tokens: int
) -> dict[str, dict[str, dict[str, int]]]:
    """What the program did beside what the counters say, where nothing is evicted."""
    counted = {"prefix_cache": prefix_cache(work), "alternative_path": chunk_store(work)}
    fields = [field.name for field in dataclasses.fields(Served)]
    sides = {}
    for name, served in counted.items():
        served.stored_tokens += prefix_tokens
        program = {field: ways[name][field] for field in fields}
        sides[name] = {"program": program, "counted": dataclasses.asdict(served)}
    return sides


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of tables."""
    setting = result["setting"]
    yield (
        f"{setting['queries']} queries of {setting['chunks_per_query']} chunks over "
        f"{result['distinct']} passages ({', '.join(result['passages'])}; "
        f"{result['tokens_of_a_passage']:.0f} tokens each), Zipf {setting['popularity']}, "
        f"seed {setting['seed']}"
    )
    for pool in result["pools"]:
        yield ""
        yield f"pool of {pool['pool_tokens']:,} tokens"
        yield (
            f"{'':>17} {'hits':>6} {'pool':>6} {'store':>6} {'computed':>8} {'redundant':>9} "
            f"{'tokens':>9} {'kept':>10}"
        )
        for name in WAYS:
            way = pool[name]
            where = collections.Counter[str]()
            for by_where in way["found"].values():
                for key, both in by_where.items():
                    where[key.rpartition(", ")[2]] += both["chunks"]
            yield (
                f"{name.replace('_', ' '):>17} {way['hit_rate']:>6.1%} {where['pool']:>6,} "
                f"{where['store']:>6,} {way['computed']:>8,} {way['redundant']:>9,} "
                f"{way['computed_tokens']:>9,} {way['stored_tokens']:>10,}"
            )
        ours, paper = pool["alternative_path"], result["paper"]
        if "storage_reduction" in ours:
            yield (
                f"alternative path: keeps {1 - ours['storage_reduction']:.2f} times what the "
                f"prefix cache keeps (paper {1 - paper['storage_reduction']:.2f}), "
                f"{1 - ours['storage_reduction_used']:.2f} without what nobody asked for"
            )
        yield (
            f"alternative path: hit rate {ours['hit_rate']:.1%} (paper {paper['hit_rate']:.1%}), "
            f"{ours['avoided']:.1%} of the prefix cache's prefills avoided "
            f"({paper['avoided']:.1%}), {ours['avoided_tokens']:.1%} of their tokens"
        )
    yield ""
    if not result["counters"]["equal"]:
        yield "the counters DIFFER from the program, and say nothing of other settings"
    if result["sensitivity"]:
        yield "counters, equal to the program above, for other settings"
        yield f"{'parameter':>17} {'value':>6} {'reduction':>14} {'hit rate':>14} {'avoided':>14}"
        for row in result["sensitivity"]:
            cells = " ".join(
                f"{row[figure]:>7.1%} ± {row[f'{figure}_deviation']:>4.1%}"
                for figure in ("storage_reduction", "hit_rate", "avoided")
            )
            yield f"{row['parameter']:>17} {row['value']!s:>6} {cells}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        required=True,
        metavar="DIR",
        help="folder with the authors' files, at any depth, of RGB (en_fact.json, zh_refine.json), "
        "Natural Questions (nq-open-oracle.jsonl) and HotpotQA (hotpotqa_train_corpus.json); those "
        "that are there are used",
    )
    parser.add_argument("--queries", type=int, default=1000, metavar="N", help="(1000)")
    parser.add_argument("--chunks-per-query", type=int, default=5, metavar="N", help="(5)")
    parser.add_argument(
        "--kb-share", type=float, default=0.6, metavar="P", help="of the knowledge base (0.6)"
    )
    parser.add_argument(
        "--shared-share", type=float, default=0.3, metavar="P", help="new, of many users (0.3)"
    )
    parser.add_argument(
        "--popularity", type=float, default=1.0, metavar="S", help="exponent of the Zipf law (1)"
    )
    parser.add_argument(
        "--no-shuffle", action="store_true", help="popular chunks first in every prompt"
    )
    parser.add_argument(
        "--passages", type=float, default=1.0, metavar="P", help="share of them in use (1)"
    )
    parser.add_argument(
        "--pool-tokens",
        default="65536",
        metavar="N,...",
        help="also with device pools of these sizes, '' for none (65536)",
    )
    parser.add_argument("--no-sensitivity", action="store_true", help="leave that table out")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(parser)
    return run_command(print_result, parser.parse_args(argv))


def print_result(args: argparse.Namespace) -> int:
    """Print tables, or one JSON object; exit code 1 where the counters say something else."""
    require_folder(args.out)
    sizes = [size for size in args.pool_tokens.split(",") if size]
    if not all(size.isdigit() for size in sizes):
        raise RequestError(f"--pool-tokens {args.pool_tokens!r}: expected integers such as 65536")
    options = Options(
        queries=args.queries,
        chunks_per_query=args.chunks_per_query,
        kb_share=args.kb_share,
        shared_share=args.shared_share,
        popularity=args.popularity,
        shuffle=not args.no_shuffle,
        passages=args.passages,
        seed=args.seed,
    )
    result = run(Path(args.data), options, [int(size) for size in sizes], not args.no_sensitivity)
    give_out(args, result, report(result))
    return 0 if result["counters"]["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
