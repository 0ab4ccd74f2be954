"""A result of ``serve`` as lines."""

from collections.abc import Iterator
from typing import Any

_TIMES = (("first_token", "first token ms"), ("per_token", "per token ms"), ("end_to_end", "end s"))
_SCALE = {"first_token": 1000, "per_token": 1000, "end_to_end": 1}
_FOUND = ("pool", "host", "store", "encoded", "computed")
_PERCENTILES = ("p50", "p95", "p99")


def cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table, the first of them its heading."""
    tiers = [name for name in _FOUND if any(row["found"].get(name) for row in result["rows"])]
    head = ["arm", "rate", *[f"{name} p50/95/99" for _, name in _TIMES]]
    head += ["tok/s", "good %", "lost", "compiled", *tiers]
    table = [head]
    for row in result["rows"]:
        line = [row["arm"], "at once" if row["rate"] is None else f"{row['rate']:g}/s"]
        for name, _ in _TIMES:
            digits = 2 if name == "end_to_end" else 0
            line.append("-" if row[name] is None else " / ".join(
                f"{_SCALE[name] * row[name][p]:,.{digits}f}" for p in _PERCENTILES
            ))  # fmt: skip
        line += [f"{row['tokens_per_second']:.0f}", f"{100 * row['good']:.0f}", str(row["lost"])]
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
    equal = result["equal"]
    if equal["arms"] is not None:
        yield f"answers equal under all arms of a method: {100 * equal['arms']:.0f} %"
    if equal["peer_as_full"] is not None:
        yield f"the peer's answers equal to full attention's: {100 * equal['peer_as_full']:.0f} %"
    if result["peer"]:
        yield "peer: " + ", ".join(f"{name} {value}" for name, value in result["peer"].items())
