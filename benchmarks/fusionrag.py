"""FusionRAG's figures 11 and 15 in miniature, beside the ratios of the paper.

Options and result are those of `jaxrag bench serve`; the figures stand in the result beside them.

example: python benchmarks/fusionrag.py --link 40MB/s --requests 30 --arms asynchronous --rates 2
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxrag.cli import run_command
from jaxrag.cli.bench_serve import add_arguments, run_serve
from jaxrag.measure.bench.options import Traffic
from jaxrag.measure.bench.serve import Bench
from jaxrag.measure.bench.serve_arms import Arm, arms_of

BATCH, RATIO = 10, 0.15
_BATCHES = 4
_RATE = 2.0  # requests a second, so that a batch is answered before the next one comes

# FusionRAG section 5.3.3: first token at batch 10 with the asynchronous scheduler over without;
# section 5.2.3: throughput over that of the baselines, full attention among them.
PAPER_FIRST_TOKEN = 0.89
PAPER_THROUGHPUT = (1.2, 4.3)


def figures(
    traffic: Traffic,
    measure: Callable[[Arm, float, Traffic], dict[str, Any]],
    highest: Callable[[Arm], dict[str, Any]],
) -> dict[str, Any]:
    """Both figures, JSON-able; ``measure`` gives a row, ``highest`` the highest rate of an arm.

    ``figure_11``: batches of 10 requests at one moment, 15 % of the chunk tokens computed again,
    chunks from the store; the first token with asynchronous loads over that with inline ones.
    ``figure_15``: the highest rate at which 95 % are good, over that of full attention.
    """
    inline, beside, full = arms_of(
        f"fusionrag_inline:recompute_ratio={RATIO};fusionrag:recompute_ratio={RATIO};full"
    )
    batches = dataclasses.replace(traffic, requests=_BATCHES * BATCH, batch=BATCH)
    rows = [measure(arm, _RATE, batches) for arm in (inline, beside)]
    first = [row["first_token"] for row in rows]
    found = {name: highest(arm) for name, arm in (("reuse", beside), ("full", full))}
    rates = {name: it["rate"] for name, it in found.items()}
    return {
        "figure_11": {
            "batch": BATCH,
            "rows": rows,
            "ratio": None if None in first else first[1]["mean"] / first[0]["mean"],
            "paper": PAPER_FIRST_TOKEN,
        },
        "figure_15": {
            **found,
            "ratio": rates["reuse"] / rates["full"] if rates["full"] else None,
            "paper": list(PAPER_THROUGHPUT),
        },
    }


def measured(bench: Bench) -> dict[str, Any]:
    """What the result has beside that of `jaxrag bench serve`."""
    return {"fusionrag": figures(bench.options.traffic, bench.measure, bench.highest)}


def lines(result: dict[str, Any]) -> Iterator[str]:
    """The figures, one a line."""
    share = f"{100 * result['slo']['share']:g} %"
    one, two = result["fusionrag"]["figure_11"], result["fusionrag"]["figure_15"]
    yield (
        f"FusionRAG Fig. 11, batches of {one['batch']}: first token with asynchronous loads "
        f"{_ratio(one['ratio'])} of inline ones (paper {one['paper']})"
    )
    rates = " and ".join(f"{two[name]['rate']:.2f}/s {name}" for name in ("reuse", "full"))
    yield (
        f"FusionRAG Fig. 15, highest rate with {share} good: {rates}, {_ratio(two['ratio'])} "
        f"times (paper {two['paper'][0]} to {two['paper'][1]})"
    )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    command = functools.partial(run_serve, also=measured, beside=lines)
    return run_command(command, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
