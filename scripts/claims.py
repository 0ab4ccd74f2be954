"""What the five papers claim, and what the committed results say of it.

A verdict is a judgement, made once and written down; the figures beside it are read from the files
that it names, so that they cannot grow old.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

Verdict = Literal["held", "held in part", "held in kind", "not held", "not testable here"]


@dataclasses.dataclass(frozen=True)
class Results:
    """The committed results, by the names of their files without .json."""

    folder: Path = RESULTS

    def of(self, name: str) -> Any:
        """What a file holds."""
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))

    def right(self, name: str, method: str, encoder: str | None, ratio: float | None) -> float:
        """% of answers that are right, of a cell of `jaxrag eval methods`."""
        return 100 * float(estimate_of(self.of(name), method, encoder, ratio)["value"])

    def read(self, name: str, model: str, read: str) -> float:
        """% of answers that are right, of a cell of `jaxrag eval synthetic`."""
        [cell] = [it for it in self.of(name)["cells"] if (it["model"], it["read"]) == (model, read)]
        return 100 * float(cell["accuracy"]["all"]["value"])

    def premise(self, name: str, retriever: str, measure: str) -> str:
        """% by number of neighbours, of a set."""
        rows = [
            row
            for row in self.of("premise")["rows"]
            if (row["set"], row["retriever"]) == (name, retriever)
        ]
        return " / ".join(f"{100 * row[measure]['value']:.0f}" for row in rows)

    def dataset(self, name: str, method: str) -> Mapping[str, Any]:
        """A method's row on the prompts of a data set."""
        rows = self.of("dataset-times")["sets"][name]["methods"]
        return next(row for row in rows if row["method"] == method)


def cell_of(
    found: Mapping[str, Any], method: str, encoder: str | None, ratio: float | None
) -> Mapping[str, Any]:
    """A cell of `jaxrag eval methods`."""
    wanted = (method, encoder, ratio)
    cells: list[Mapping[str, Any]] = found["cells"]
    return next(it for it in cells if (it["method"], it["encoder"], it["ratio"]) == wanted)


def estimate_of(
    found: Mapping[str, Any], method: str, encoder: str | None, ratio: float | None
) -> Mapping[str, Any]:
    """Its exact match over all questions."""
    return dict(cell_of(found, method, encoder, ratio)["exact_match"]["all"])


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
      where: in the paper.
      shown: what the files say; "" where nothing does.
      files: in benchmarks/results, without .json.
    """

    text: str
    where: str
    verdict: Verdict
    shown: Callable[[Results], str]
    files: tuple[str, ...] = ()


def _says(text: str) -> Callable[[Results], str]:
    return lambda results: text


FULL, DUAL, NEAR = "methods-full", "methods-dual", "neighbours"
DEEP = "deep-full-layers"
PREFIX = "after_prefix"

TURBORAG = (
    Claim(
        "time to first token 8.6 times shorter on average", "abstract, table 3", "held in kind",
        lambda r: (
            f"{r.of('ttft-batch')['rows'][3]['full_over_pool']:.0f} times at 4,096 tokens from the "
            "pool, over HTTP on MuSiQue's prompts "
            f"{_times(r, 'cacheblend_musique', 'turborag'):.1f} times; other models, on a CPU"
        ),
        ("ttft-batch", "dataset-times"),
    ),
    Claim(
        "98.5 % fewer operations online", "abstract", "held",
        lambda r: (
            f"{_fewer(r, 4):.1f} % fewer at 8,192 tokens, "
            f"{_fewer_on_musique(r):.1f} % on MuSiQue's prompts"
        ),
        ("ttft-batch", "dataset-times"),
    ),
    Claim(
        "without fine-tuning accuracy falls by up to 20 points", "table 1", "held",
        lambda r: (
            f"{r.right(FULL, 'full_attention', None, None):.1f} to "
            f"{r.right(FULL, 'turborag', 'isolated', None):.1f} %, on the synthetic task"
        ),
        (FULL,),
    ),
    Claim(
        "with it, accuracy is that of full attention", "table 1", "held in part",
        lambda r: (
            f"{r.read('deep-synthetic', 'dual', 'block'):.1f} against "
            f"{r.read('deep-synthetic', 'dual', 'full'):.1f} %, on the synthetic task"
        ),
        ("deep-synthetic",),
    ),
    Claim(
        "reordered positions are better than composite ones", "tables 1 and 2", "held in part",
        lambda r: "; ".join(
            f"`{name}` {r.read('deep-synthetic', name, 'block'):.1f} and "
            f"{r.read('deep-synthetic', name, 'composite'):.1f} %"
            for name in ("dual", "long-dual", "deep-dual")
        ),
        ("deep-synthetic",),
    ),
    Claim(
        "the gain grows with the batch", "table 4", "not held",
        lambda r: "full prefill over reuse by batch: " + ", ".join(
            f"{row['batch']}: {row['last']['full_over_pool']:.0f}"
            for row in r.of("ttft-batch")["batches"]["rows"]
        ),
        ("ttft-batch",),
    ),
    Claim(
        "accuracy on RGB and LongBench, and no loss on other tasks", "tables 1, 2, 5",
        "not testable here", _says("it takes a large model; the data sets can be read"),
    ),
)  # fmt: skip

BLOCK_ATTENTION = (
    Claim(
        "at 32k tokens time to first token falls by 98.7 %", "table 2", "held in kind",
        lambda r: (
            f"by {100 * (1 - 1 / r.of('ttft-batch')['rows'][-1]['full_over_pool']):.1f} %, another "
            "model, on a CPU"
        ),
        ("ttft-batch",),
    ),
    Claim(
        "and operations by 99.8 %", "table 2", "held",
        lambda r: (
            f"by {_fewer(r, -1):.2f} %"
        ),
        ("ttft-batch",),
    ),
    Claim(
        "without fine-tuning accuracy falls from 67.9 to 48.0 %", "table 1", "held in kind",
        lambda r: (
            f"{r.right(FULL, 'full_attention', None, None):.1f} to "
            f"{r.right(FULL, 'turborag', 'isolated', None):.1f} %, on the synthetic task"
        ),
        (FULL,),
    ),
    Claim(
        "one set of weights reads in full and block-wise alike", "section 3.5", "held in part",
        lambda r: "; ".join(
            f"`{name}` {r.read('deep-synthetic', name, 'full'):.1f} and "
            f"{r.read('deep-synthetic', name, 'block'):.1f} %"
            for name in ("dual", "long-dual", "deep-dual")
        ),
        ("deep-synthetic",),
    ),
    Claim(
        "68.4 % on four question sets, as full attention", "table 1", "not testable here",
        _says("it takes a large model; the prompt and the accuracy are those of `eval dataset`"),
    ),
)  # fmt: skip

FUSIONRAG = (
    Claim(
        "chunks of one question are each other's neighbours: 50 % with two, 80 % with ten",
        "Fig. 7a", "held in part",
        lambda r: (
            "of the best two passages, with 2 / 5 / 10 neighbours: HotpotQA "
            f"{r.premise('HotpotQA', 'bm25', 'best two')} % by words and "
            f"{r.premise('HotpotQA', 'lsa-256', 'best two')} by vectors, MuSiQue "
            f"{r.premise('MuSiQue', 'bm25', 'best two')} and "
            f"{r.premise('MuSiQue', 'lsa-256', 'best two')}; of pairs that a question needs, "
            "MuSiQue "
            f"{r.premise('MuSiQue', 'bm25', 'gold pairs')}"
        ),
        ("premise",),
    ),
    Claim(
        "better than CacheBlend and Cache-Craft at equal ratios", "Fig. 13", "held in part",
        lambda r: (
            "at 15 %, `full`: "
            f"{r.right(FULL, 'fusionrag', NEAR, 0.15):.1f}, "
            f"{r.right(FULL, 'cacheblend', PREFIX, 0.15):.1f}, "
            f"{r.right(FULL, 'cache_craft', PREFIX, 0.15):.1f} %; `dual`: "
            f"{r.right(DUAL, 'fusionrag', NEAR, 0.15):.1f}, "
            f"{r.right(DUAL, 'cacheblend', PREFIX, 0.15):.1f}, "
            f"{r.right(DUAL, 'cache_craft', PREFIX, 0.15):.1f} %; `deep-full`, all behind the "
            f"prefix, at 15 %: {_deep(r, 0.15)}; at 30 %: {_deep(r, 0.3)}, and "
            f"{r.right(DEEP, 'random', PREFIX, 0.3):.1f} for tokens drawn at random"
        ),
        (FULL, DUAL, DEEP),
    ),
    Claim(
        "80 % of the loss is back at 15 %", "Fig. 13", "held in part",
        lambda r: (
            f"behind the prefix {_back(r, PREFIX):.0f} %, behind ten neighbours "
            f"{_back(r, NEAR):.0f} %; twelve layers, behind the prefix, "
            f"{_back(r, PREFIX, DEEP):.0f} %, and {_back(r, PREFIX, DEEP, 0.3):.0f} at 30 %"
        ),
        (FULL, DEEP),
    ),
    Claim(
        "preprocessing alone helps", "Fig. 18", "held in part",
        lambda r: (
            "over retrieved chunks, points more than behind the prefix, paired: `full` "
            f"{_helped(r, NEAR, '2')} behind two neighbours and {_helped(r, NEAR, '10')} behind "
            f"ten, `deep-full` {_helped(r, 'deep-full-neighbours', '2')} and "
            f"{_helped(r, 'deep-full-neighbours', '10')}, `deep-dual` "
            f"{_helped(r, 'deep-neighbours', '2')} and {_helped(r, 'deep-neighbours', '10')}"
        ),
        (NEAR, "deep-full-neighbours", "deep-neighbours"),
    ),
    Claim(
        "preprocessing helps other selectors too", "Fig. 16", "not held",
        lambda r: (
            "`cacheblend` at 15 %, behind the prefix "
            f"{r.right(FULL, 'cacheblend', PREFIX, 0.15):.1f} % and behind ten neighbours "
            f"{r.right(FULL, 'cacheblend', NEAR, 0.15):.1f}"
        ),
        (FULL,),
    ),
    Claim(
        "time to first token 2.7 to 3.9 times shorter at 15 %", "Fig. 14a", "held in kind",
        lambda r: (
            f"over HTTP {_times(r, 'cacheblend_musique', 'fusionrag'):.1f} times on MuSiQue's "
            f"prompts, {_times(r, 'rgb_zh', 'fusionrag'):.1f} on RGB's; another model, on a CPU"
        ),
        ("dataset-times",),
    ),
    Claim(
        "asynchronous loads shorten the time to first token to 0.89 of inline ones", "Fig. 11",
        "held in kind",
        lambda r: f"{r.of('serve-fusionrag')['fusionrag']['figure_11']['ratio']:.2f}, on a CPU",
        ("serve-fusionrag",),
    ),
    Claim(
        "1.2 to 4.3 times the requests a second", "Fig. 15", "held in kind",
        lambda r: (
            f"{r.of('serve-fusionrag')['fusionrag']['figure_15']['ratio']:.2f} times, on a CPU"
        ),
        ("serve-fusionrag",),
    ),
    Claim(
        "71 % less storage at a hit rate of 78 %", "section 5.3.3", "held in part",
        lambda r: (
            f"hit rate {100 * _paths(r)['hit_rate']:.1f} %; "
            f"{100 * _paths(r)['storage_reduction_used']:.0f} % less of what is asked for, and "
            f"{-100 * _paths(r)['storage_reduction']:.0f} % more of all that is encoded ahead"
        ),
        ("reuse",),
    ),
    Claim(
        "the sparse kernel beside FlashAttention; faithfulness by a judge", "Fig. 14b, table 2",
        "not testable here", _says("they take a GPU, and a judge model"),
    ),
)  # fmt: skip

RETRIEVAL_ATTENTION = (
    Claim(
        "1 to 3 % of the keys are scanned", "section 4.3", "held in part",
        lambda r: (
            "generated heads, 131,072 tokens, an answer of 256: "
            f"{100 * _host(r)['scanned']:.1f} % for a recall of {_host(r)['recall']:.2f}, 3.9 of "
            "it by the scans of 10 tokens that check the index; over the first 36 tokens "
            f"{100 * _away(r, 'generated')['index']['scanned']:.0f} %; heads without structure, "
            "all of them"
        ),
        ("host-attention", "away"),
    ),
    Claim(
        "an index of the keys alone needs 30 %", "Fig. 3, section 4.3", "held",
        lambda r: (
            "generated heads, 36,864 tokens, recall 0.97: `ivf` "
            f"{100 * _engine(r, 'ivf24', 'ivf fp16'):.0f} and "
            f"{100 * _engine(r, 'ivf41', 'ivf fp16'):.0f} %, "
            f"the graph {100 * _engine(r, 'ivf24', 'graph fp16'):.1f} and "
            f"{100 * _engine(r, 'ivf41', 'graph fp16'):.1f}"
        ),
        ("index-answer",),
    ),
    Claim(
        "1.98 to 4.9 times faster a token than IVF and an exact search", "table 6",
        "held in part",
        lambda r: (
            "a search among 262,144 generated keys: lists, the default, "
            f"{_search(r, 'lists fp32'):.0f} us, graph {_search(r, 'graph fp16'):.0f}, IVF "
            f"{_search(r, 'ivf fp16'):.0f}, exact {_search(r, 'flat fp16'):.0f}; a step with the "
            f"default index in {_step(r):.2f} of the time of dense attention at 131,072 tokens"
        ),
        ("index-long", "away"),
    ),
    Claim(
        "accuracy is that of full attention", "tables 2 and 3", "not held",
        lambda r: (
            "multi-query needles of 4,096 tokens: dense "
            f"{_ruler(r, 'dense'):.0f} %, the default {_ruler(r, 'retrieval_default'):.0f}, 144 "
            f"tokens by exact search {_ruler(r, 'flat'):.0f}: these heads spread their attention"
        ),
        ("long-ruler",),
    ),
    Claim(
        "the same with models of 8B and contexts of 128k", "tables 2 and 3", "not testable here",
        _says("it takes large models"),
    ),
)  # fmt: skip

KCACHE = (
    Claim(
        "accuracy is kept with 64 to 128 rows of V", "table 2", "held",
        lambda r: (
            f"128 rows, one layer whole: majority {_kept(r, 'majority', 1, 128):.1f} % (dense "
            f"{_dense(r, 'majority'):.1f}), counted words {_kept(r, 'cwe', 1, 128):.1f} "
            f"({_dense(r, 'cwe'):.1f})"
        ),
        ("kcache-answers",),
    ),
    Claim(
        "the first layers need all of V", "table 2", "held in part",
        lambda r: (
            f"counted words at 32 rows: no layer whole {_kept(r, 'cwe', 0, 32):.1f} %, one "
            f"{_kept(r, 'cwe', 1, 32):.1f}; majority {_kept(r, 'majority', 0, 32):.1f} and "
            f"{_kept(r, 'majority', 1, 32):.1f}"
        ),
        ("kcache-answers",),
    ),
    Claim(
        "larger batches fit on the device", "table 3", "held",
        lambda r: (
            f"at 4,096 tokens {_rows(r, 'topn')} rows where dense attention has {_rows(r, 'dense')}"
        ),
        ("kcache",),
    ),
    Claim(
        "40 % more tokens a second", "table 3", "not held",
        lambda r: (
            f"at 4,096 tokens {_most(r, 4096, 'topn'):.0f} against {_most(r, 4096, 'dense'):.0f} a "
            f"second, at 16,384 {_most(r, 16384, 'topn'):.0f} against "
            f"{_most(r, 16384, 'dense'):.0f}: on a CPU host and device memory are one"
        ),
        ("kcache",),
    ),
)  # fmt: skip

CLAIMS: dict[str, tuple[Claim, ...]] = {
    "TurboRAG": TURBORAG,
    "Block-Attention": BLOCK_ATTENTION,
    "FusionRAG": FUSIONRAG,
    "RetrievalAttention": RETRIEVAL_ATTENTION,
    "KCache": KCACHE,
}


def _back(r: Results, encoder: str, name: str = FULL, ratio: float = 0.15) -> float:
    """% of what plain reuse behind the prefix loses that `fusionrag` brings back."""
    lost = r.right(name, "full_reuse", PREFIX, None)
    full = r.right(name, "full_attention", None, None)
    return 100 * (r.right(name, "fusionrag", encoder, ratio) - lost) / (full - lost)


def _deep(r: Results, ratio: float) -> str:
    """% right of `fusionrag`, `cacheblend`, `cache_craft`; twelve layers, behind the prefix."""
    methods = ("fusionrag", "check_layer_1", "cache_craft")
    return ", ".join(f"{r.right(DEEP, method, PREFIX, ratio):.1f}" for method in methods)


def _gain(r: Results, name: str, neighbours: str) -> Mapping[str, float]:
    """Exact match behind neighbours less that behind the prefix, paired, none recomputed."""
    pair = ("fusionrag, neighbours", "full_reuse, after_prefix", 0.0)
    rows = r.of(name)["runs"][neighbours]["differences"]
    [row] = [it for it in rows if (it["first"], it["second"], it["ratio"]) == pair]
    return dict(row["exact_match"]["all"])


def _helped(r: Results, name: str, neighbours: str) -> str:
    gain = _gain(r, name, neighbours)
    value, low, high = (100 * gain[it] for it in ("value", "low", "high"))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def _fewer(r: Results, row: int) -> float:
    """% of operations that reuse saves."""
    flops = r.of("ttft-batch")["rows"][row]["flops"]
    return 100 * float(1 - flops["reuse"] / flops["full"])


def _fewer_on_musique(r: Results) -> float:
    own, full = (r.dataset("cacheblend_musique", it) for it in ("turborag", "full_attention"))
    return 100 * float(1 - own["flops"] / full["flops"])


def _times(r: Results, name: str, method: str) -> float:
    return float(r.dataset(name, method)["first_over_own"]["value"])


def _paths(r: Results) -> Mapping[str, Any]:
    """The alternative path of FusionRAG, with room for all that is asked for."""
    return dict(r.of("reuse")["pools"][0]["alternative_path"])


def _search(r: Results, engine: str) -> float:
    """Microseconds of a search, among the most keys of one head."""
    rows = r.of("index-long")["rows"]
    wanted = ("ivf24", 262_144, engine)
    found = next(it for it in rows if (it["head"], it["context"], it["engine"]) == wanted)
    return float(found["warm_us"])


def _step(r: Results) -> float:
    """The best step over the best of dense attention."""
    [dense] = [it for it in r.of("away")["rows"] if it["rule"] == "dense"]
    return float(_away(r, "generated")["best_seconds"] / dense["best_seconds"])


def _away(r: Results, heads: str) -> Mapping[str, Any]:
    rows = r.of("away")["rows"]
    return next(it for it in rows if (it["rule"], it["heads"]) == ("retrieval", heads))


def _host(r: Results) -> Mapping[str, Any]:
    wanted = (131_072, "retrieval:index=lists,index.exact_below=0")
    rows = r.of("host-attention")["rows"]
    return next(it for it in rows if (it["context"], it["rule"]) == wanted)


def _engine(r: Results, head: str, engine: str) -> float:
    rows = r.of("index-answer")["rows"]
    return float(next(it["scanned"] for it in rows if (it["head"], it["engine"]) == (head, engine)))


def _ruler(r: Results, rule: str) -> float:
    wanted = (f"full_attention, {rule}", "niah_multiquery", 4096)
    cells = r.of("long-ruler")["cells"]
    found = next(it for it in cells if (it["method"], it["task"], it["length"]) == wanted)
    return 100 * float(found["score"]["value"])


def _kept(r: Results, task: str, layers: int, n: int) -> float:
    rows = r.of("kcache-answers")["quality"]["rows"]
    found = next(
        it for it in rows if (it["task"], it["device_layers"], it["n"]) == (task, layers, n)
    )
    return 100 * float(found["score"]["value"])


def _dense(r: Results, task: str) -> float:
    return 100 * float(r.of("kcache-answers")["quality"]["dense"][task]["value"])


def _served(r: Results, context: int, rule: str) -> list[Mapping[str, Any]]:
    rows = r.of("kcache")["throughput"]
    return [
        it
        for it in rows
        if (it["context"], it["rule"]) == (context, rule) and it.get("tokens_per_second")
    ]


def _rows(r: Results, rule: str) -> int:
    return max(int(it["batch"]) for it in _served(r, 4096, rule))


def _most(r: Results, context: int, rule: str) -> float:
    return max(float(it["tokens_per_second"]) for it in _served(r, context, rule))
