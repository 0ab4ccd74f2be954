"""The pictures of ``explain``: FusionRAG Fig. 3 and Fig. 8, TurboRAG Fig. 2, for any prompt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.measure.evals.plots import COLOURS, figure_class

_GREY = "0.75"
_MANY_CHUNKS = 24  # more are not labelled one by one


def check_folder(folder: Path) -> None:
    """Refuse a folder that pictures cannot be written to, before the work; make a missing one.

    Raises RequestError, and ConfigError when matplotlib is not installed.
    """
    figure_class()
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise RequestError(f"--out {folder}: {error.strerror or error}; name a folder") from None


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write the three pictures of a result of ``explain``; returns their paths."""
    paths = []
    for name, make in PICTURES.items():
        paths.append(folder / f"{name}.png")
        make(result).savefig(paths[-1])
    return paths


def _kv_deviation(result: dict[str, Any]) -> Any:
    """Tokens by layers; one layer's tokens; how concentrated the deviation is; means."""
    k, v = (np.array(result["deviation"][part], np.float64) for part in ("k", "v"))
    both = k + v
    num_layers, num_tokens = both.shape
    figure = figure_class()(figsize=(10, 8.5), dpi=130, layout="constrained")
    upper, below = figure.subfigures(2, 1, height_ratios=(2.15, 1))
    axes, middle = upper.subplots(2, 1, sharex=True)
    low, high = _decades(both[1:])
    image = axes.imshow(
        np.log10(np.maximum(both, 10.0**low)),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap="viridis",
        extent=(0, num_tokens, -0.5, num_layers - 0.5),
        vmin=low,
        vmax=high,
    )
    _mark_chunks(axes, result, colour="white", labels=True)
    _whole_numbers(axes.yaxis)
    axes.set_ylabel("layer")
    beside = axes.inset_axes((1.01, 0, 0.012, 1))
    upper.colorbar(image, cax=beside, label="log10 of the deviation, K + V")
    axes.set_title(
        f"Stored KV ({result['method']}) against full attention, squared difference per token",
        loc="left",
        pad=18,
    )

    layer = min(1, num_layers - 1)
    for values, name, colour in ((k, "K", COLOURS[0]), (v, "V", COLOURS[1])):
        middle.plot(np.arange(num_tokens) + 0.5, values[layer], color=colour, lw=0.9, label=name)
    _mark_chunks(middle, result)
    middle.set_ylim(bottom=0)
    middle.set_ylabel(f"deviation, layer {layer}")
    middle.set_xlabel("chunk token, in prompt order")
    _plain(middle, legend=True)

    left, right = below.subplots(1, 2)
    share = np.arange(num_tokens + 1) / num_tokens
    layers = sorted({layer, (num_layers - 1 + layer) // 2, num_layers - 1})
    for at, colour in zip(layers, COLOURS, strict=False):
        falling = np.concatenate(([0], np.cumsum(np.sort(both[at])[::-1])))
        if falling[-1] > 0:
            left.plot(share, falling / falling[-1], color=colour, label=f"layer {at}")
    if not both[layers].any():
        left.annotate("nothing deviates", (0.5, 0.5), ha="center", color="0.4")
    ratio = result["selection"]["budget"] / num_tokens
    left.axvline(ratio, color="0.4", ls=":", lw=1)
    left.annotate(f" {100 * ratio:.0f} %", (ratio, 0.02), color="0.4")
    left.set_xlabel("share of the tokens, those that deviate most first")
    left.set_ylabel("share of the deviation")
    left.set_xlim(0, 1)
    left.set_ylim(0, 1.01)
    _plain(left, legend=True)
    for values, name, colour in ((k, "K", COLOURS[0]), (v, "V", COLOURS[1])):
        right.plot(values.mean(1), color=colour, marker="o", ms=3, label=name)
    _whole_numbers(right.xaxis)
    right.set_ylim(bottom=0)
    right.set_xlabel("layer")
    right.set_ylabel("mean deviation of a token")
    _plain(right, legend=True)
    return figure


def _critical_tokens(result: dict[str, Any]) -> Any:
    """A row for every selector: over the prompt, share of each chunk, place within the chunks."""
    chosen = result["selection"]["selectors"]
    rows = max(len(chosen), 1)
    figure = figure_class()(figsize=(11, 1.2 + 1.25 * rows), dpi=130, layout="constrained")
    grid = figure.subplots(rows, 3, squeeze=False, sharex="col", width_ratios=(5, 2, 2))
    figure.suptitle(
        f"Tokens each selector would compute again: {result['selection']['budget']} of "
        f"{result['prompt_tokens']['chunks']}, stored KV of {result['method']}",
        x=0.01,
        ha="left",
    )
    num_chunks = len(result["chunks"])
    most = max((max(it["share_of_chunk"]) for it in chosen), default=0.0)
    for row, it in enumerate(chosen):
        colour = COLOURS[row % len(COLOURS)]
        over, share, within = grid[row]
        over.vlines(np.array(it["tokens"]) + 0.5, 0, 1, color=colour, lw=0.8)
        _mark_chunks(over, result, labels=row == 0)
        over.set_ylim(0, 1)
        over.set_yticks([])
        over.set_ylabel(it["selector"].replace(", ", "\n"), rotation=0, ha="right", va="center")
        share.bar(range(num_chunks), 100 * np.array(it["share_of_chunk"]), color=colour)
        share.set_ylim(0, max(105 * most, 1))
        bins = len(it["within_chunk"])
        total = max(sum(it["within_chunk"]), 1)
        within.bar(
            (np.arange(bins) + 0.5) / bins,
            100 * np.array(it["within_chunk"]) / total,
            width=0.9 / bins,
            color=colour,
        )
        within.set_xlim(0, 1)
        for axes in (share, within):
            _plain(axes)
        _whole_numbers(share.xaxis)
    grid[0][1].set_title("% of the chunk chosen", fontsize=9)
    grid[0][2].set_title("% of the choice, by place", fontsize=9)
    grid[-1][0].set_xlabel("chunk token, in prompt order")
    grid[-1][1].set_xlabel("chunk")
    grid[-1][2].set_xlabel("start of a chunk to its end")
    return figure


def _question_attention(result: dict[str, Any]) -> Any:
    """Over the chunk tokens, full above independent; sums per chunk; layers by chunks."""
    attention = result["attention"]
    names = list(attention)
    colours = dict(zip(names, COLOURS, strict=False))
    figure = figure_class()(figsize=(10, 8.5), dpi=130, layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1.5, 1))
    for row, (name, axes) in enumerate(
        zip(names, upper.subplots(len(names), 1, sharex=True, sharey=True), strict=True)
    ):
        values = 100 * np.array(attention[name]["tokens"])
        axes.stairs(values, np.arange(len(values) + 1), color=colours[name], fill=True)
        _mark_chunks(axes, result, colour="0.3", labels=row == 0)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"{name}\nattention of the token, %")
        _plain(axes)
    axes.set_xlabel("chunk token, in prompt order")
    upper.suptitle("From the question to the chunks, mean of heads and layers", x=0.01, ha="left")

    bars, *maps = lower.subplots(1, 1 + len(names), width_ratios=(1.5, *[1] * len(names)))
    num_chunks = len(result["chunks"])
    gap = max(1.0, num_chunks / 8)  # the other two bars stand apart from many narrow ones
    at = np.array([*range(num_chunks), num_chunks - 1 + gap, num_chunks - 1 + 2 * gap])
    width = np.array([*[0.4] * num_chunks, 0.4 * gap, 0.4 * gap])
    for index, name in enumerate(names):
        it = attention[name]
        sums = [*np.mean(it["chunks"], 0), np.mean(it["prefix"]), np.mean(it["final"])]
        places = at + width * (index - 0.5)
        bars.bar(places, 100 * np.array(sums), width, color=colours[name], label=name)
    every = -(-num_chunks // 10)
    shown = [*range(0, num_chunks, every)]
    bars.set_xticks([*shown, *at[-2:]], [*map(str, shown), "prefix", "question"])
    for label in bars.get_xticklabels()[-2:]:
        label.set(rotation=45, ha="right", rotation_mode="anchor")
    bars.set_xlabel("chunk")
    bars.set_ylabel("attention, %")
    _plain(bars, legend=True)
    by_layer = {name: 100 * np.array(attention[name]["chunks"]) for name in names}
    high = max(values.max() for values in by_layer.values())
    for name, axes in zip(names, maps, strict=True):
        image = axes.imshow(
            by_layer[name], aspect="auto", origin="lower", cmap="magma", vmin=0, vmax=high
        )
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("chunk")
        _whole_numbers(axes.xaxis)
        _whole_numbers(axes.yaxis)
    maps[0].set_ylabel("layer")
    lower.colorbar(image, ax=maps, label="attention, %")
    return figure


PICTURES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "kv-deviation": _kv_deviation,
    "critical-tokens": _critical_tokens,
    "question-attention": _question_attention,
}


def _decades(deviation: HostArray) -> tuple[float, float]:
    """Ends of a logarithmic scale for what deviates at all, six decades at most."""
    seen = deviation[deviation > 0]
    if not len(seen):
        return -6.0, 0.0
    high = float(np.log10(seen.max()))
    return min(max(float(np.log10(np.quantile(seen, 0.01))), high - 6), high - 1), high


def _starts(result: dict[str, Any]) -> HostArray:
    return np.cumsum([0, *[chunk["tokens"] for chunk in result["chunks"]]])


def _mark_chunks(
    axes: Any, result: dict[str, Any], colour: str = _GREY, labels: bool = False
) -> None:
    """Lines between chunks on an axis of chunk tokens; their numbers above it."""
    starts = _starts(result)
    axes.set_xlim(0, starts[-1])
    for start in starts[1:-1]:
        axes.axvline(start, color=colour, lw=0.7, zorder=0.5 if colour == _GREY else 3)
    if labels and len(starts) <= _MANY_CHUNKS + 1:
        for index, chunk in enumerate(result["chunks"]):
            text = f"{index}, exact" if chunk["exact"] else str(index)
            middle = (starts[index] + starts[index + 1]) / 2
            axes.annotate(
                text, (middle, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
                textcoords="offset points", ha="center", va="bottom", fontsize=8, color="0.3",
            )  # fmt: skip


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _plain(axes: Any, legend: bool = False) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if legend and axes.get_legend_handles_labels()[0]:
        where = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
        axes.legend(frameon=False, ncols=3, fontsize=9, **where)
