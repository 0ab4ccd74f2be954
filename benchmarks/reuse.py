"""How much KV a chunk store saves over a standard prefix cache: FusionRAG section 5.3.3, simulated.

No model runs. A thousand queries ask for a few chunks each, real passages with their token counts.
Each chunk asked for is one of the knowledge base, one that several users upload, or one that nobody
else has, with probabilities of 60, 30 and 10 %. Within the first two kinds chunks are asked for by
a Zipf law: the passage of rank r in proportion to ``r ** -popularity``. Passages not needed as
unique ones are divided between these two kinds as the accesses are. Nothing is ever evicted.

Three ways to serve the same queries:

- *prefix cache*: the KV of a chunk is found behind the same chunks in the same order only. Every
  different prefix makes another copy, those of the knowledge base included.
- *two stages*: the KV of the knowledge base is made offline, one copy a chunk; what users upload
  goes through a prefix cache.
- *chunk store*: one copy a chunk, whatever stands before it (the alternative path of section 4.1);
  the KV of the whole knowledge base is made offline, asked for or not.

The figures, each over all queries:

- ``storage_reduction``: 1 - tokens of KV in the chunk store / in the other at the end.
  ``storage_reduction_used`` counts those of the knowledge base that were asked for at least once.
- ``hit_rate``: chunks whose KV was there when asked for / chunks asked for. ``token_hit_rate``: the
  same by tokens.
- ``prefills``: chunks computed online. ``redundant``: those of a chunk whose KV had been computed
  before, offline or online, and could not be found. In a chunk store there are none.
- ``avoided``: 1 - prefills with the chunk store / prefills with the other.

The paper gives 71.0 % less storage, a hit rate of 77.9 % and 82.3 % of redundant computations
avoided against a standard prefix cache, and does not say how many chunks a query asks for, how
popular chunks are, or how its figures are defined; ``sensitivity`` shows what these decide.

example: python benchmarks/reuse.py --data DIR --out benchmarks/results/reuse.json
"""

import argparse
import collections
import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxrag.bench.machine import describe
from jaxrag.cli import run_command
from jaxrag.cli.options import add_json, give_out, require_folder
from jaxrag.errors import RequestError
from jaxrag.text.tokenizer import Tokenizer
from jaxrag.types import HostArray

PAPER = {"storage_reduction": 0.710, "hit_rate": 0.779, "avoided": 0.823}
SEEDS = 5  # of the sensitivity table

_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")

# One parameter is changed at a time.
_VARIED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("chunks_per_query", (3, 5, 10, 20)),
    ("popularity", (0.0, 0.5, 1.0, 1.5)),
    ("shuffle", (True, False)),
    ("queries", (250, 1000, 4000)),
    ("pool", (0.25, 0.5, 1.0)),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The workload.

    Attributes:
      data: folder with the passages; see ``read_passages``.
      queries: how many are asked.
      chunks_per_query: how many chunks each asks for.
      kb_share: of the chunks asked for, those of the knowledge base.
      shared_share: those that several users upload; the rest is unique.
      popularity: exponent of the Zipf law; 0 asks for all alike.
      shuffle: chunks stand in random order in a prompt; else the most popular first.
      pool: share of the passages that the knowledge base and shared chunks are taken from.
      tokenizer: directory of a tokenizer to count tokens with; None counts words, and characters
        of Chinese, Japanese and Korean.
      seed: of the workload.
      sensitivity: run the table of other settings too.
    """

    data: str
    queries: int = 1000
    chunks_per_query: int = 5
    kb_share: float = 0.6
    shared_share: float = 0.3
    popularity: float = 1.0
    shuffle: bool = True
    pool: float = 1.0
    tokenizer: str | None = None
    seed: int = 0
    sensitivity: bool = True

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
        if self.popularity < 0 or not 0 < self.pool <= 1:
            raise RequestError(
                f"popularity={self.popularity} pool={self.pool}: expected 0 or more, and a share "
                "above 0"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """What is asked for: chunks are numbers into ``tokens``."""

    tokens: HostArray  # [C] int64, of every chunk
    kb: frozenset[int]
    queries: tuple[tuple[int, ...], ...]


@dataclasses.dataclass
class Served:
    """What one way to serve the queries has come to."""

    stored: int = 0  # tokens of KV
    hits: int = 0
    hit_tokens: int = 0
    prefills: int = 0
    prefill_tokens: int = 0
    redundant: int = 0


def run(options: Options) -> dict[str, Any]:
    """Simulate; returns the figures, their sensitivity, the setting and the machine, JSON-able.

    Raises RequestError for data without passages, or with too few of them.
    """
    sets = read_passages(Path(options.data))
    count = _counter(options.tokenizer)
    texts = list(dict.fromkeys(text for passages in sets.values() for text in passages))
    lengths = np.array([count(text) for text in tqdm(texts, desc="count", disable=None)], np.int64)
    setting = dataclasses.asdict(options)
    del setting["data"]
    result = {
        "benchmark": "reuse",
        "passages": {name: len(passages) for name, passages in sets.items()},
        "distinct": len(texts),
        "tokens_of_a_passage": float(lengths.mean()),
        "setting": setting,
        **measure(options, lengths),
        "paper": PAPER,
        "machine": describe(),
    }
    if options.sensitivity:
        result["sensitivity"] = sensitivity(options, lengths)
    return result


def measure(options: Options, lengths: HostArray) -> dict[str, Any]:
    """The figures of one workload over passages of these lengths [C], in tokens."""
    work = make_workload(options, lengths)
    store = chunk_store(work)
    asked = sum(map(len, work.queries))
    used = {chunk for query in work.queries for chunk in query} & work.kb
    stored_used = store.stored - int(sum(work.tokens[list(work.kb - used)]))
    others = {"prefix_cache": prefix_cache(work), "two_stages": prefix_cache(work, offline=True)}
    return {
        "asked": asked,
        "asked_tokens": store.hit_tokens + store.prefill_tokens,
        "kb_chunks": len(work.kb),
        "kb_chunks_used": len(used),
        "chunk_store": _figures(store, asked),
        **{
            name: {
                **_figures(other, asked),
                "storage_reduction": 1 - store.stored / other.stored,
                "storage_reduction_used": 1 - stored_used / other.stored,
                "avoided": 1 - store.prefills / other.prefills,
            }
            for name, other in others.items()
        },
    }


def sensitivity(options: Options, lengths: HostArray) -> list[dict[str, Any]]:
    """The figures against a prefix cache with one parameter changed: mean and deviation of seeds.

    A setting for which there are too few passages is left out.
    """
    rows = []
    for name, values in tqdm(_VARIED, desc="sensitivity", disable=None):
        for value in values:
            found: dict[str, list[float]] = collections.defaultdict(list)
            try:
                for seed in range(SEEDS):
                    changed = dataclasses.replace(options, seed=seed, **{name: value})
                    figures = measure(changed, lengths)
                    for figure in ("storage_reduction", "storage_reduction_used", "avoided"):
                        found[figure].append(figures["prefix_cache"][figure])
                    found["hit_rate"].append(figures["chunk_store"]["hit_rate"])
            except TooFewPassages:
                continue
            row = {"parameter": name, "value": value, "seeds": SEEDS}
            for figure, series in found.items():
                row[figure] = statistics.mean(series)
                row[f"{figure}_deviation"] = statistics.stdev(series)
            rows.append(row)
    return rows


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
    rest = rest[: round(len(rest) * options.pool)]
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
    return Workload(lengths, frozenset(pools[0].tolist()), tuple(queries))


def chunk_store(work: Workload) -> Served:
    """Serve from one copy a chunk, the knowledge base's made offline."""
    served = Served(stored=int(work.tokens[list(work.kb)].sum()))
    held = set(work.kb)
    for query in work.queries:
        for chunk in query:
            _serve(served, int(work.tokens[chunk]), hit=chunk in held, known=chunk in held)
            held.add(chunk)
    return served


def prefix_cache(work: Workload, *, offline: bool = False) -> Served:
    """Serve from a prefix cache; with ``offline`` the knowledge base's chunks from a copy each."""
    served = Served(stored=int(work.tokens[list(work.kb)].sum()) if offline else 0)
    nodes: dict[tuple[int, int], int] = {}  # (node of what stands before, chunk) -> its node
    known = set(work.kb) if offline else set[int]()
    for query in work.queries:
        node = 0
        for chunk in query:
            step = (node, chunk)
            hit = step in nodes or (offline and chunk in work.kb)
            _serve(served, int(work.tokens[chunk]), hit=hit, known=chunk in known)
            node = nodes.setdefault(step, len(nodes) + 1)
            known.add(chunk)
    return served


def _serve(served: Served, tokens: int, *, hit: bool, known: bool) -> None:
    """Count one chunk; what is not found is computed and stored."""
    if hit:
        served.hits += 1
        served.hit_tokens += tokens
        return
    served.prefills += 1
    served.prefill_tokens += tokens
    served.stored += tokens
    served.redundant += known


def _figures(served: Served, asked: int) -> dict[str, Any]:
    return {
        "stored_tokens": served.stored,
        "hit_rate": served.hits / asked,
        "token_hit_rate": served.hit_tokens / (served.hit_tokens + served.prefill_tokens),
        "prefills": served.prefills,
        "redundant": served.redundant,
    }


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


def _counter(tokenizer: str | None) -> Callable[[str], int]:
    if tokenizer is None:
        return lambda text: max(1, len(_WORD.findall(text)))
    encode = Tokenizer.load(tokenizer).encode
    return lambda text: len(encode(text))


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of tables."""
    setting = result["setting"]
    unit = "words" if setting["tokenizer"] is None else "tokens"
    yield (
        f"{setting['queries']} queries of {setting['chunks_per_query']} chunks over "
        f"{result['distinct']} passages ({', '.join(result['passages'])}; "
        f"{result['tokens_of_a_passage']:.0f} {unit} each), Zipf {setting['popularity']}, "
        f"seed {setting['seed']}"
    )
    yield f"{'':>13} {'stored':>10} {'hits':>7} {'prefills':>9} {'redundant':>10}"
    for name in ("prefix_cache", "two_stages", "chunk_store"):
        row = result[name]
        yield (
            f"{name.replace('_', ' '):>13} {row['stored_tokens']:>10,} {row['hit_rate']:>7.1%} "
            f"{row['prefills']:>9,} {row['redundant']:>10,}"
        )
    paper, ours = result["paper"], result["prefix_cache"]
    yield (
        f"chunk store over prefix cache: storage reduced by {ours['storage_reduction']:.1%} "
        f"({ours['storage_reduction_used']:.1%} without what nobody asked for; paper "
        f"{paper['storage_reduction']:.1%}), hit rate {result['chunk_store']['hit_rate']:.1%} "
        f"({paper['hit_rate']:.1%}), {ours['avoided']:.1%} of the prefills avoided "
        f"({paper['avoided']:.1%})"
    )
    yield (
        f"over two stages: storage reduced by {result['two_stages']['storage_reduction']:.1%}, "
        f"{result['two_stages']['avoided']:.1%} of the prefills avoided"
    )
    if "sensitivity" in result:
        yield f"{'parameter':>17} {'value':>6} {'reduction':>14} {'hit rate':>14} {'avoided':>14}"
        for row in result["sensitivity"]:
            cells = " ".join(
                f"{row[figure]:>7.1%} ± {row[f'{figure}_deviation']:>4.1%}"
                for figure in ("storage_reduction", "hit_rate", "avoided")
            )
            yield f"{row['parameter']:>17} {row['value']!s:>6} {cells}"


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print; returns the exit code."""
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
        "--pool", type=float, default=1.0, metavar="P", help="share of the passages in use (1)"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="to count tokens with (counts words)")
    parser.add_argument("--no-sensitivity", action="store_true", help="leave that table out")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(parser)
    return run_command(print_result, parser.parse_args(argv))


def print_result(args: argparse.Namespace) -> None:
    """Print tables, or one JSON object."""
    require_folder(args.out)
    options = Options(
        data=args.data,
        queries=args.queries,
        chunks_per_query=args.chunks_per_query,
        kb_share=args.kb_share,
        shared_share=args.shared_share,
        popularity=args.popularity,
        shuffle=not args.no_shuffle,
        pool=args.pool,
        tokenizer=args.tokenizer,
        seed=args.seed,
        sensitivity=not args.no_sensitivity,
    )
    result = run(options)
    give_out(args, result, report(result))


if __name__ == "__main__":
    sys.exit(main())
