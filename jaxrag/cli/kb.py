"""`jaxrag kb`: look into a knowledge base and keep it in order."""

import argparse
import dataclasses
import sys
import textwrap

from jaxrag.cli import export, gate
from jaxrag.cli.options import (
    add_command,
    add_json,
    add_model,
    add_where,
    counted,
    human_count,
    open_kb,
    parse_bytes,
    parse_seconds,
    print_json,
    shorten,
    table,
    where_of,
)
from jaxrag.text.printable import printable


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command and its actions."""
    parser = add_command(
        commands, "kb", "look into a knowledge base and keep it in order", "jaxrag kb stats kb"
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    stats = add_command(actions, "stats", "counts, sizes and settings", "jaxrag kb stats kb --json")
    _add_kb(stats)
    stats.set_defaults(run=run_stats)

    listing = add_command(actions, "list", "every document", "jaxrag kb list kb")
    _add_kb(listing)
    add_where(listing)
    listing.set_defaults(run=run_list)

    remove = add_command(
        actions,
        "remove",
        "remove documents; they cannot be found any more when this ends",
        "jaxrag kb remove kb notes.md old/report.txt && jaxrag kb gc kb",
    )
    _add_kb(remove)
    remove.add_argument("ids", nargs="+", metavar="ID", help="as `jaxrag kb list` shows them")
    remove.set_defaults(run=run_remove)

    gc = add_command(
        actions,
        "gc",
        "free what removed and changed documents and killed runs have left behind",
        "jaxrag kb gc kb --grace 1h --dry-run",
    )
    _add_kb(gc)
    gc.add_argument(
        "--grace",
        type=parse_seconds,
        default=3600.0,
        metavar="TIME",
        help="touch nothing younger, such as 90s, 30m, 1h, 7d (1h)",
    )
    gc.add_argument("--dry-run", action="store_true", help="only count")
    gc.add_argument(
        "--others",
        nargs="+",
        default=[],
        metavar="DIR",
        help="folders of knowledge bases in the same repository that have moved",
    )
    gc.add_argument(
        "--gone",
        nargs="+",
        default=[],
        metavar="ID",
        help="ids of knowledge bases in it that exist no more",
    )
    gc.set_defaults(run=run_gc)

    verify = add_command(
        actions,
        "verify",
        "read the KV of every chunk and check it",
        "jaxrag kb verify kb --repair --rate 200MB",
    )
    _add_kb(verify)
    verify.add_argument(
        "--repair",
        action="store_true",
        help="encode damaged and missing chunks again, and make vectors that are missing",
    )
    verify.add_argument(
        "--rate", type=parse_bytes, metavar="SIZE", help="read at most so much a second"
    )
    add_model(
        verify, required=False, text="for --repair (the one that the knowledge base remembers)"
    )
    verify.set_defaults(run=run_verify)

    gate.add_parser(actions)
    export.add_parser(actions)


_TITLE = 30  # columns of it, so that an id of forty has place beside it in 80
_GROUPS = ("stored", "attention_index", "vectors", "last_gc", "gates")  # a line for each number


def run_stats(args: argparse.Namespace) -> None:
    """Print what the knowledge base holds and how it was made."""
    from jaxrag.knowledge_base import KnowledgeBase

    with KnowledgeBase.open(args.kb) as kb:
        stats = kb.stats()
    if args.json:
        print_json(stats)
        return
    rows = []
    for name, value in stats.items():
        if name in _GROUPS and value is not None:
            prefix = name.replace("_", " ")
            rows += [[f"{prefix} {part}", _plain(number)] for part, number in value.items()]
        else:
            rows.append([name, _plain(value)])
    room = 80 - 2 - max(len(name) for name, _ in rows)
    wrapped = []
    for name, value in rows:
        lines = textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False)
        wrapped += [[name if i == 0 else "", line] for i, line in enumerate(lines or [""])]
    print(table(wrapped))


def run_list(args: argparse.Namespace) -> None:
    """Print one line a document, or a JSON object with all that is known of them."""
    from jaxrag.knowledge_base import KnowledgeBase

    with KnowledgeBase.open(args.kb) as kb:
        where = where_of(args)
        documents = kb.documents(where)
        for why in [] if documents or where is None else kb.why_nothing(where):
            print(f"note: --where: {printable(why)}", file=sys.stderr)
    if args.json:
        print_json({"documents": [dataclasses.asdict(document) for document in documents]})
        return
    rows = [["document", "chunks", "title"]]
    rows += [[d.id, str(d.num_chunks), shorten(d.title, _TITLE)] for d in documents]
    print(table(rows, right=(1,)))


def run_remove(args: argparse.Namespace) -> int:
    """Exit code 0 when every document was there, 3 when some were not."""
    from jaxrag.knowledge_base import KnowledgeBase

    with KnowledgeBase.open(args.kb, mode="rw") as kb:
        report = kb.remove(args.ids)
    if args.json:
        print_json(dataclasses.asdict(report))
    else:
        documents, chunks = counted(report.documents, "document"), counted(report.chunks, "chunk")
        print(f"removed {documents}, {chunks}")
        for name in report.unknown:
            print(f"no document {name!r}")
    return 3 if report.unknown else 0


def run_gc(args: argparse.Namespace) -> None:
    """Print what was freed, or with --dry-run would be."""
    from jaxrag.knowledge_base import KnowledgeBase

    with KnowledgeBase.open(args.kb, mode="rw") as kb:
        report = kb.gc(
            grace_seconds=args.grace, dry_run=args.dry_run, others=args.others, gone=args.gone
        )
    if args.json:
        print_json(dataclasses.asdict(report))
        return
    print(
        f"{'would free' if report.dry_run else 'freed'} {counted(report.chunks, 'chunk')}, "
        f"{human_count(report.nbytes)}B, {counted(report.attempts, 'unfinished write')}, "
        f"{counted(report.vectors, 'vector')}"
    )


def run_verify(args: argparse.Namespace) -> int:
    """Exit code 0 when every chunk is whole at the end and has its indexes, 3 when not."""
    from jaxrag.knowledge_base import KnowledgeBase

    kb = open_kb(args) if args.repair else KnowledgeBase.open(args.kb)
    with kb:
        report = kb.verify(
            repair=args.repair, max_bytes_per_second=args.rate, progress=not args.json
        )
        named = [
            f"{what}: {kb.chunk_of(key)} ({key})"
            for what, keys in (
                ("damaged", report.damaged),
                ("without its attention index", report.unindexed),
            )
            for key in keys
        ]
    if args.json:
        print_json(dataclasses.asdict(report))
    else:
        print(
            f"chunks: {report.ok} whole, {report.repaired} repaired, {len(report.damaged)} damaged"
        )
        if report.dropped:
            print(f"{report.dropped} not stored, under the size limit")
        print("".join(f"{printable(line)}\n" for line in named), end="")
    return 3 if report.damaged or report.unindexed else 0


def _add_kb(action: argparse.ArgumentParser) -> None:
    action.add_argument("kb", metavar="DIR", help="folder of the knowledge base")
    add_json(action)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return human_count(value) if isinstance(value, int) and value >= 10_000 else str(value)
