"""A result of ``serve`` as lines, as tables of a page, and as a picture."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.measure.evals.plots import COLOURS, check_picture, figure_class
from jaxrag.measure.table import markdown_rows

_TIMES = (("first_token", "first token ms"), ("per_token", "per token ms"), ("end_to_end", "end s"))
_SCALE = {"first_token": 1000, "per_token": 1000, "end_to_end": 1}
_FOUND = ("pool", "host", "store", "encoded", "computed")
_PERCENTILES = ("p50", "p95", "p99")


def cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table, the first of them its heading."""
    tiers = [name for name in _FOUND if any(row["found"].get(name) for row in result["rows"])]
    head = ["arm", "rate", *[f"{name} p50/95/99" for _, name in _TIMES]]
    head += ["tok/s", "good %", "lost", "fair", "compiled", *tiers]
    table = [head]
    for row in result["rows"]:
        line = [row["arm"], "at once" if row["rate"] is None else f"{row['rate']:g}/s"]
        for name, _ in _TIMES:
            digits = 2 if name == "end_to_end" else 0
            line.append("-" if row[name] is None else " / ".join(
                f"{_SCALE[name] * row[name][p]:,.{digits}f}" for p in _PERCENTILES
            ))  # fmt: skip
        line += [f"{row['tokens_per_second']:.0f}", f"{100 * row['good']:.0f}", str(row["lost"])]
        line += [f"{row['fairness']:.2f}"]
        line += ["-" if row["compiled"] is None else str(len(row["compiled"]))]
        table.append(line + [str(row["found"].get(name, 0)) for name in tiers])
    return table


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines."""
    yield _setting(result)
    table = cells(result)
    widths = [max(len(line[at]) for line in table) for at in range(len(table[0]))]
    for line in table:
        padded = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        yield "  ".join([line[0].ljust(widths[0]), *padded])
    yield from _beside(result)


def markdown(result: dict[str, Any], *beside: str) -> str:
    """The result as a page; what else is said ``beside`` the table goes below."""
    lines = [_setting(result), "", markdown_rows(cells(result)), ""]
    return "\n".join([*lines, *(f"- {it}" for it in (*_beside(result), *beside))]) + "\n"


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a picture: share of the requests with their first token after so many seconds.

    Raises ConfigError when matplotlib is not installed, RequestError for a file it cannot write.
    """
    check_picture(path)
    rates = list(dict.fromkeys(row["rate"] for row in result["rows"]))
    arms = list(dict.fromkeys(row["arm"] for row in result["rows"]))
    size = (4.6 * len(rates), 3.8)
    figure = figure_class()(figsize=size, dpi=150, layout="constrained")
    several = figure.subplots(1, len(rates), squeeze=False, sharey=True, sharex=True)[0]
    for axes, rate in zip(several, rates, strict=True):
        for row in result["rows"]:
            if row["rate"] != rate or not row["first_tokens"]:
                continue
            at = arms.index(row["arm"])
            seconds = np.sort(row["first_tokens"])
            share = 100 * np.arange(1, len(seconds) + 1) / row["requests"]
            axes.step(
                np.maximum(seconds, 1e-3),
                share,
                where="post",
                color=COLOURS[at % len(COLOURS)],
                linestyle=("-", "--", ":")[at // len(COLOURS) % 3],
                label=row["arm"],
            )
        axes.axvline(result["slo"]["first"], color="0.4", ls=":", lw=1)
        axes.set_xscale("log")
        axes.set_ylim(0, 101)
        axes.set_xlabel("seconds to the first token")
        title = "all at once" if rate is None else f"{rate:g} requests a second"
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    several[0].set_ylabel("requests, %")
    handles = {  # an arm may lack a rate
        label: line
        for it in several
        for line, label in zip(*it.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, frameon=False, loc="outside right upper")
    figure.savefig(path)


def _setting(result: dict[str, Any]) -> str:
    model, traffic, link = result["model"], result["traffic"], result["link_bytes_per_second"]
    name = model["directory"] or f"random weights, {model['layers']} layers of {model['model_dim']}"
    store = "" if link is None else f", store of {link / 1e6:g} MB/s"
    return (
        f"{name}, {model['dtype']}; {traffic['requests']} requests of {traffic['chunks']} chunks "
        f"of {traffic['chunk_tokens']} tokens among {traffic['documents']}, Zipf "
        f"{traffic['zipf']:g}; {result['rows_that_decode']} rows, pool of "
        f"{result['pool_chunks']} chunks{store}; good: first token below "
        f"{result['slo']['first']:g} s, {1000 * result['slo']['per_token']:g} ms a token"
    )


def _beside(result: dict[str, Any]) -> Iterator[str]:
    """What follows the table, a line each."""
    for it in result["ratios"]:
        named = [name for name, _ in _TIMES if name in it]
        texts = [f"{name} p50 {it[name]['p50']:.2f}, p95 {it[name]['p95']:.2f}" for name in named]
        when = "at once" if it["rate"] is None else f"at {it['rate']:g}/s"
        yield f"{it['arm']} over {it['over']}, {when}: {'; '.join(texts)}"
    share = f"{100 * result['slo']['share']:g} %"
    for it in result["http"]:
        when = "at once" if it["rate"] is None else f"at {it['rate']:g}/s"
        first = it["first_token_seconds"]
        yield (
            f"http over in_process, {when}: first token p50 {1000 * first['p50']:+.1f} ms, p95 "
            f"{1000 * first['p95']:+.1f} ms; {it['events_per_second']:.0f} events a second of "
            f"{it['events_per_second_in_process']:.0f}"
        )
    for arm, it in result["highest_rate"].items():
        yield f"highest rate with {share} good: {arm} {it['rate']:.2f}/s"
    equal = result["equal"]
    if equal["arms"] is not None:
        yield f"answers equal under all arms of a method: {100 * equal['arms']:.0f} %"
    if equal["peer_as_full"] is not None:
        yield f"the peer's answers equal to full attention's: {100 * equal['peer_as_full']:.0f} %"
    if result["peer"]:
        yield "peer: " + ", ".join(f"{name} {value}" for name, value in result["peer"].items())
