"""What the index benchmark says: break-even against exact search, and tables."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any


def break_even(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where an engine's cold search is cheaper than flat fp16's, and after how many its build is.

    ``from_context`` is the shortest measured context from which on it always is; None where never.
    ``searches`` is, at the longest context, how many searches of a query head pay for the build.
    """
    flat = {(r["head"], r["context"]): r for r in rows if r["engine"] == "flat fp16"}
    made = []
    for head, engine in dict.fromkeys((r["head"], r["engine"]) for r in rows):
        mine = [
            row for row in rows
            if (row["head"], row["engine"]) == (head, engine) and (head, row["context"]) in flat
        ]  # fmt: skip
        if not any(row["efforts"] for row in mine):
            continue
        first = None
        for row in sorted(mine, key=lambda row: -row["context"]):
            if row["cold_us"] >= flat[head, row["context"]]["cold_us"]:
                break
            first = row["context"]
        last = max(mine, key=lambda row: row["context"])
        saved = flat[head, last["context"]]["cold_us"] - last["cold_us"]
        heads = len(last["recall_of_heads"])
        searches = last["build_processor_seconds"] / heads / saved * 1e6 if saved > 0 else None
        made.append({"head": head, "engine": engine, "from_context": first, "searches": searches})
    return made


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of tables."""
    options = result["options"]
    yield (
        f"recall@{options['k']} of {options['ask']} queries behind the context, and of the worst "
        "32 in a row; processor seconds of a build, and microseconds of one query head's search, "
        "on one thread"
    )
    title = None
    for row in result["rows"]:
        if title != (row["head"], row["context"]):
            title = row["head"], row["context"]
            yield ""
            yield f"head {row['head']}, {row['context']} tokens, {row['keys']} keys"
            yield (
                f"{'':<26} {'effort':>6} {'recall':>6} {'worst':>6} {'scanned':>8} {'build s':>8} "
                f"{'B/key':>6} {'+index':>7} {'warm':>8} {'cold':>8} {'flat32/':>8}"
            )
        base = [
            other["cold_us"] for other in result["rows"]
            if (other["head"], other["context"]) == title and other["engine"] == "flat fp32"
        ]  # fmt: skip
        ratio = f"{base[0] / row['cold_us']:8.2f}" if base else f"{'':>8}"
        yield (
            f"{row['engine']:<26} {_mean(row['efforts']):>6} {row['recall']:6.3f} "
            f"{min(row['recall_of_blocks']):6.3f} {100 * row['scanned']:7.2f}% "
            f"{row['build_processor_seconds']:8.1f} {row['key_bytes']:6.0f} "
            f"{row['index_bytes']:7.1f} {row['warm_us']:8.0f} {row['cold_us']:8.0f} {ratio}"
        )
        if row["note"]:
            yield f"{'':<26} {row['note']}"
    if result["break_even"]:
        yield ""
        yield "break-even against flat fp16, cold: shortest context, searches that pay for a build"
    for row in result["break_even"]:
        first = row["from_context"] or "none of these"
        searches = f"{row['searches']:.0f}" if row["searches"] else "never"
        yield f"{row['head']} {row['engine']:<26} {first:>13} {searches:>10}"


def _mean(efforts: Sequence[int] | None) -> str:
    """The mean effort of the heads, for a table."""
    return f"{statistics.mean(efforts):.0f}" if efforts else ""
