"""What `jaxrag ask` says beside the answer, in 80 columns: sources, reuse, times."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrag.cli.output import columns, human_count, shorten, table
from jaxrag.models.text.printable import printable

if TYPE_CHECKING:
    from jaxrag.engine.reuse import PartReuse
    from jaxrag.serve.answers import Result
    from jaxrag.serve.conversation import Source

COLUMNS = 80
_NAME = 30  # columns of a source's name
_LABEL = 10  # columns of what is in front of a line
_BLOCKS = {"reused": "█", "recomputed": "▒", "encoded": "░"}
_ASCII = {"reused": "#", "recomputed": "+", "encoded": "."}


def sources(result: "Result", given: bool) -> Iterator[str]:
    """One line a source, the best as [1]; ``given``: by the names of their files.

    Before them what the answer has from which.
    """
    for citation in result.citations:
        said = result.text[citation.start : citation.end]
        yield f"[{citation.source}] for {shorten(repr(printable(said)), COLUMNS - 12)}"
    rows = []
    best = sorted(result.sources, key=lambda source: source.number)
    for source in best:
        score = "" if source.score is None else f"{source.score:.2f}"
        rows.append([f"[{source.number}]", _named(source, given), score])
    if rows:
        room = COLUMNS - 2 - max(map(columns, table(rows, right=(2,)).split("\n")))
        for row, source in zip(rows, best, strict=True):
            row.append(shorten(printable(source.text, keep="\n\t"), room))
        yield from table(rows, right=(2,)).split("\n")


def _named(source: "Source", given: bool) -> str:
    name = Path(source.file).name if given and source.file is not None else source.document_id
    page = "" if source.page is None else f", p. {source.page}"
    place = f" #{source.chunk_index}{page}"
    return shorten(name, _NAME - len(place)) + place


def summary(result: "Result", max_new_tokens: int) -> str:
    """The account in short."""
    if result.finish_reason == "abstained":
        return "abstained: the model was not asked"
    total = sum(result.counts.values())
    line = f"{result.method}: {result.counts['reused']} of {total} chunk tokens reused"
    if result.counts["encoded"]:
        line += f", encoded {result.counts['encoded']} (--explain tells why)"
    line += f", first token in {_ms(result.timings['ttft'])}"
    if result.finish_reason == "length":
        line += f", cut off at {max_new_tokens} tokens"
    spent = result.timings
    others = sum(spent[name] for name in ("retrieve", "wait", "load", "prefill"))
    compiling = min(spent["compile"], max(spent["ttft"] - others, 0.0))
    programs = f"\n({_ms(compiling)} of it compiling)" * bool(compiling)
    return textwrap.fill(line, COLUMNS) + programs


def explained(result: "Result", encoding: str | None) -> Iterator[str]:
    """Where the KV of every part came from, and why not from the store; times; work."""
    signs = _signs(encoding)
    if sum(result.counts.values()):
        yield _labelled("chunks", bar(result.counts, COLUMNS - _LABEL, signs))
        shown = (f"{signs[name]} {name} {count}" for name, count in result.counts.items())
        yield _labelled("", "  ".join(shown))
    for row in result.reuse:
        yield from _wrapped(_part(row.part, result.sources), _became(row))
    if result.indexes:
        found = "  ".join(f"{name} {count}" for name, count in result.indexes.items())
        yield from _wrapped("indexes", found)
    spent = [name for name in result.timings if name not in ("compile", "ttft", "per_token")]
    parts = "  ".join(f"{name} {_ms(result.timings[name])}" for name in spent)
    yield from _wrapped("time", parts)
    if result.timings["compile"]:
        yield _labelled("", f"compile {_ms(result.timings['compile'])}, once")
    after = f", then {_ms(result.timings['per_token'])} a token" * bool(result.timings["per_token"])
    yield _labelled("", f"= {_ms(result.timings['ttft'])} to the first token{after}")
    yield _labelled("work", f"{human_count(result.flops)}FLOP to the first token")


def times_sooner(ours: float, full: float) -> str:
    """First tokens of a question that was asked before, in seconds."""
    times = f"{full / ours:.1f}x sooner" if full > ours else "not sooner"
    return (
        f"{times}: asked again, the first token comes after {_ms(ours)}, with full\n"
        f"attention after {_ms(full)}"
    )


def bar(counts: Mapping[str, int], width: int, signs: Mapping[str, str]) -> str:
    """Counts as parts of a line, in their order; what is not 0 has a column at least."""
    total = sum(counts.values())
    parts = {name: max(count > 0, width * count // total) for name, count in counts.items()}
    parts[max(counts, key=lambda name: counts[name])] += width - sum(parts.values())
    return "".join(signs[name] * parts[name] for name in counts)


def _signs(encoding: str | None) -> Mapping[str, str]:
    try:
        "".join(_BLOCKS.values()).encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return _ASCII
    return _BLOCKS


def _part(name: str, sources: "Sequence[Source]") -> str:
    """A chunk by the number of its source."""
    kind, _, place = name.partition(" ")
    return f"[{sources[int(place)].number}]" if kind == "chunk" else name


def _became(row: "PartReuse") -> str:
    text = f"{row.tokens} tokens, {row.how}"
    if row.where is not None:
        text += f" in the {row.where}"
    if row.recomputed:
        text += f", {row.recomputed} recomputed"
    return text + (f": {row.why}" if row.why else "")


def _wrapped(label: str, text: str) -> Iterator[str]:
    lines: Sequence[str] = textwrap.wrap(
        printable(text), COLUMNS - _LABEL, break_long_words=False, break_on_hyphens=False
    )
    for number, line in enumerate(lines):
        yield _labelled("" if number else label, line)


def _labelled(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
