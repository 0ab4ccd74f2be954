"""Writes docs/leaderboard.md from the committed results: methods side by side, and the claims.

    python scripts/leaderboard.py

Nothing is measured here. Scores are those of trained weights; of random ones only times are shown.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from claims import CLAIMS, DUAL, FULL, Claim, Results, cell_of

from jaxrag.measure.table import markdown_rows, percent

PAGE = Path(__file__).parents[1] / "docs" / "leaderboard.md"
FILES = "../benchmarks/results"
# A method as its preset has it: the encoder of its chunks and its ratio, in `jaxrag eval methods`.
PRESETS: dict[str, tuple[str | None, float | None]] = {
    "full_attention": (None, None),
    "full_reuse": ("after_prefix", None),
    "turborag": ("isolated", None),
    "fusionrag": ("neighbours", 0.15),
    "cacheblend": ("after_prefix", 0.15),
    "cache_craft": ("after_prefix", None),
    "epic": ("isolated", None),
}
_SETS = {"rgb_zh": "RGB, Chinese", "cacheblend_musique": "MuSiQue"}

_HEAD = """\
# Leaderboard

Methods side by side on the shipped models, and what the papers claim. `python
scripts/leaderboard.py` writes this page from the [committed results]({files}/): every figure is
read from there, and the verdicts are ours. [Results](results.md) has commands and details.

## Methods

Right answers in %, of the same 500 questions over six documents, with 95 % intervals: `full`
weights were trained with full attention only, `dual` weights for blocks too. Every method is as its
preset has it; `fusionrag` and `cacheblend` compute 15 % again, `cache_craft` and `epic` a share of
their own, which is most of so short a prompt. Operations to the first token are those of these
prompts. Stored bytes are those of one chunk token, in every variant that the method needs.

"""
_TIMES = """
Median time to the first token, from the text, with chunks in memory, on a shared CPU, for
{questions} questions of each kind; `full / own` is the median ratio within a question. The short
prompts are like those above. There reuse saves little, because each step takes its time anyway.

"""
_REAL = """
The same over HTTP on prompts of data sets: the texts are real, the weights are random, so no answer
is scored.

"""
_CLAIMS = """
## Claims

*held*: as the paper says, at the sizes here. *held in kind*: the same direction, for another model
or machine. *held in part*: in some of the cases. *not held*: measured here, and different. Models
of 0.8M and 2.3M parameters cannot speak for large ones: *not held* means that a claim did not carry
over, not that it is wrong.
"""


def page(results: Results) -> str:
    """The whole page."""
    times = results.of("method-times")
    parts = [_HEAD.format(files=FILES), markdown_rows(list(_methods(results))), "\n"]
    parts += [_link(FULL, DUAL, "method-times")]
    parts += [_TIMES.format(questions=times["questions"]), markdown_rows(list(_times(times)))]
    parts += ["\n", _link("method-times"), _REAL]
    parts += [markdown_rows(list(_real(results)), names=2), "\n", _link("dataset-times")]
    parts.append(_CLAIMS)
    for paper, claims in CLAIMS.items():
        rows = [["claim", "", "here", "results"], *(_claim(claim, results) for claim in claims)]
        parts += [f"\n### {paper}\n\n", markdown_rows(rows, names=4), "\n"]
    return "".join(parts)


def _methods(results: Results) -> Iterator[list[str]]:
    yield ["method", "`full` weights", "`dual` weights", "MFLOP", "stored bytes"]
    of = {name: results.of(name) for name in (FULL, DUAL)}
    stored = {row["method"]: row for row in results.of("method-times")["prompts"]["short"]["rows"]}
    for method, (encoder, ratio) in PRESETS.items():
        cells = [cell_of(found, method, encoder, ratio) for found in of.values()]
        right = [percent(cell["exact_match"]["all"]) for cell in cells]
        yield [
            f"`{method}`",
            *right,
            f"{cells[0]['flops'] / 1e6:.0f}",
            f"{stored[method]['stored_bytes']:,}",
        ]


def _times(times: dict[str, Any]) -> Iterator[list[str]]:
    kinds = {name: times["prompts"][name] for name in ("short", "4k")}
    lengths = [f"{found['tokens']['value']:,.0f} tokens" for found in kinds.values()]
    head = ["method"]
    for length in lengths:
        head += [f"{length}, ms", "full / own", "GFLOP"]
    yield head
    for method in PRESETS:
        line = [f"`{method}`"]
        for found in kinds.values():
            row = next(it for it in found["rows"] if it["method"] == method)
            line += [
                f"{1000 * row['ttft']['value']:.0f}",
                _range(row["first_over_own"]),
                f"{row['flops'] / 1e9:.2f}",
            ]
        yield line


def _real(results: Results) -> Iterator[list[str]]:
    yield ["prompts", "method", "questions", "tokens", "ms", "full / own", "reused, %", "GFLOP"]
    for name, title in _SETS.items():
        found = results.of("dataset-times")["sets"][name]
        for row in found["methods"]:
            yield [
                title,
                f"`{row['method']}`",
                str(found["questions"]),
                f"{row['prompt_tokens']['value']:,.0f}",
                f"{1000 * row['ttft']['value']:.0f}",
                _range(row["first_over_own"]),
                f"{100 * row['reuse']:.1f}",
                f"{row['flops'] / 1e9:.2f}",
            ]


def _range(found: dict[str, Any]) -> str:
    value, low, high = (found[name] for name in ("value", "low", "high"))
    return f"{value:.2f}" if low is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _claim(claim: Claim, results: Results) -> list[str]:
    return [
        f"{claim.text} ({claim.where})",
        f"*{claim.verdict}*",
        claim.shown(results),
        ", ".join(f"[{name}]({FILES}/{name}.json)" for name in claim.files),
    ]


def _link(*names: str) -> str:
    files = ", ".join(f"[{name}]({FILES}/{name}.json)" for name in names)
    return f"\nFrom {files}.\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    PAGE.write_text(page(Results()), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
