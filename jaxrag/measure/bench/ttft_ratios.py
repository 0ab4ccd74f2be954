"""What recomputing costs: the slope over the share of recomputed tokens, and lines of a table.

The slope is that of a least-squares line through the rows of one context, over the share of its
chunk tokens that was computed again (a chunk whose KV is exact never is). The selector runs at
ratios between 0 and 1 only; its passes are part of what those rows cost.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrag.reuse.encode import encoder_named


def slopes(row: dict[str, Any]) -> dict[str, Any] | None:
    """How the cost of a context's rows grows with the share of recomputed chunk tokens.

    For pool, disk and FLOPs: ``per_share`` (what a share of 1 adds, in seconds or FLOPs),
    ``at_zero``, ``over_full`` (per_share over the full prefill) and ``r_squared`` of the
    least-squares line. None with fewer than two different shares.
    """
    shares = [it["recomputed_share"] for it in row["ratios"]]
    if len(set(shares)) < 2:
        return None
    full = {
        "pool": row["seconds"]["full"],
        "disk": row["seconds"]["full"],
        "flops": row["flops"]["full"],
    }
    costs = {name: [it["seconds"][name] for it in row["ratios"]] for name in ("pool", "disk")}
    costs["flops"] = [it["flops"] for it in row["ratios"]]
    return {name: _line(shares, costs[name], full[name]) for name in costs}


def _line(x: Sequence[float], y: Sequence[float], full: float) -> dict[str, float]:
    """The least-squares line of y over x."""
    per_share, at_zero = statistics.linear_regression(x, y)
    r = statistics.correlation(x, y) if len(set(y)) > 1 else 1.0
    return {
        "per_share": per_share,
        "at_zero": at_zero,
        "over_full": per_share / full,
        "r_squared": r * r,
    }


def report_ratios(result: dict[str, Any]) -> Iterator[str]:
    """The rows of a time-to-first-token result that recompute, as lines of a table."""
    encoders = result["encoders"]
    seen = f"encoder {encoders['others']}"
    if encoder_named(encoders["others"]).sees_neighbours:
        seen += ", where a chunk's neighbours are the other chunks of its prompt"
    if encoders["first"] != encoders["others"]:
        seen += f"; {encoders['first']} for the first chunk"
    yield ""
    yield f"chunk tokens computed again, by ratio (none are above); {seen}"
    yield (
        f"{'context':>8} {'ratio':>6} {'tokens':>7} {'pool':>8} {'disk':>8} {'full/pool':>9} "
        f"{'full/disk':>9} {'GFLOP':>9} {'selecting':>9} {'of full':>8}"
    )
    for row in result["rows"]:
        for it in row["ratios"]:
            ratio = "own" if it["ratio"] is None else f"{it['ratio']:g}"
            yield (
                f"{row['context']:>8} {ratio:>6} {it['recomputed_tokens']:>7} "
                f"{1000 * it['seconds']['pool']:>8.1f} {1000 * it['seconds']['disk']:>8.1f} "
                f"{it['full_over_pool']:>9.1f} {it['full_over_disk']:>9.1f} "
                f"{it['flops'] / 1e9:>9.2f} {it['selection_flops'] / 1e9:>9.2f} "
                f"{100 * it['flops_over_full']:>7.1f}%"
            )
    for row in result["rows"]:
        if row["slope"] is not None:
            pool, flops = row["slope"]["pool"], row["slope"]["flops"]
            yield (
                f"slope at {row['context']}: recomputing all chunk tokens adds "
                f"{1000 * pool['per_share']:.1f} ms to {1000 * pool['at_zero']:.1f} ms (pool), "
                f"{pool['over_full']:.2f} of full prefill, R2 {pool['r_squared']:.3f}; FLOPs "
                f"{flops['over_full']:.2f}, R2 {flops['r_squared']:.3f}"
            )
