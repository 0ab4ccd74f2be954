"""The time to the first token of a plan, by method and tier, as a picture."""

from pathlib import Path
from typing import Any

from jaxrag.measure.evals.plots import COLOURS, check_picture, figure_class


def draw_plan(record: dict[str, Any], path: Path) -> None:
    """Write it: a row a method, a point a tier, and the expected time as a bar across.

    Raises ConfigError when matplotlib is not installed, RequestError for a file it cannot write.
    """
    check_picture(path)
    from matplotlib.ticker import LogLocator, NullLocator

    methods = record["methods"]
    figure = figure_class()(figsize=(7.2, 1.2 + 0.5 * len(methods)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    names = list(dict.fromkeys(tier["name"] for one in methods for tier in one["tiers"]))
    for row, one in enumerate(reversed(methods)):
        times = [1000 * tier["first_token"] for tier in one["tiers"]]
        axes.plot([min(times), max(times)], [row, row], color="0.85", zorder=1)
        axes.plot([1000 * one["first_token"]] * 2, [row - 0.3, row + 0.3], color="0.2", zorder=2)
        for tier in one["tiers"]:
            colour = COLOURS[names.index(tier["name"]) % len(COLOURS)]
            axes.plot(1000 * tier["first_token"], row, "o", color=colour, zorder=3)
    for number, name in enumerate(names):
        axes.plot([], [], "o", color=COLOURS[number % len(COLOURS)], label=name)
    axes.plot([], [], color="0.2", label="expected")
    axes.set_yticks(range(len(methods)), [one["method"] for one in reversed(methods)])
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("milliseconds to the first token")
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)
